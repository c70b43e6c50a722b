"""The servers of this process, for clients elsewhere that ask its Ray actor where they listen."""

from __future__ import annotations

import threading
from typing import Any

import ray

from meshinfer.inference.queues.address import TcpAddress

__all__ = ["listening_here", "publish", "this_actor", "withdraw"]

_lock = threading.RLock()  # the garbage collector may withdraw anywhere
_open: dict[str, TcpAddress] = {}


def this_actor() -> Any:
    """Ray's handle of the actor that we are in, which does not keep it alive; ``None`` elsewhere."""
    try:
        return ray.get_runtime_context().current_actor
    except RuntimeError:
        return None


def publish(name: str, address: TcpAddress) -> None:
    """A server named ``name`` listens at ``address``.

    Raises:
        ValueError: this process has one of that name.
    """
    with _lock:
        if name in _open:
            raise ValueError(
                f"name={name!r}: this actor has an open RayTransport of that name, at {_open[name]}; close it, or give"
                " one of them another name="
            )
        _open[name] = address


def withdraw(name: str, address: TcpAddress) -> None:
    """The server at ``address`` has closed."""
    with _lock:
        if _open.get(name) == address:
            del _open[name]


def listening_here(actor: object, name: str) -> TcpAddress | None:
    """For Ray, which runs it in the actor: where the server ``name`` listens, and its secret."""
    return _open.get(name)
