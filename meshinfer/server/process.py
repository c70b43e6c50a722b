"""The server that lives in a process of its own."""

from __future__ import annotations

import dataclasses
import multiprocessing
import pickle
from collections.abc import Callable
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any

import torch

from meshinfer.arguments import as_context
from meshinfer.inference.protocol import InferenceTransport
from meshinfer.server.pickled import Pickler
from meshinfer.server.process_control import ServerProcess
from meshinfer.server.remote import RemoteInferenceServer
from meshinfer.server.setup import ServerSetup
from meshinfer.transport import TransportConfig

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from meshinfer.server.signature import ServerArguments

__all__ = ["ProcessInferenceServer", "check_may_start"]


class ProcessInferenceServer(RemoteInferenceServer):
    """Serves one policy from a process of its own, which it starts, watches and ends.

    When the server's process dies, every client that waits raises :class:`~meshinfer.errors.PeerLostError`, and
    :meth:`start` starts another one, with the policy as the factory makes it, for the same clients. When this process
    ends, however it does, the server's ends too. Ctrl-C in a terminal does not reach it.

    Args:
        policy_factory: called without arguments in the server's process; returns what
            :class:`~meshinfer.server.thread.ThreadInferenceServer` serves. Picklable: a function of a module, a class,
            or a ``functools.partial`` of one.
        transport: a kind that crosses processes, a :class:`~meshinfer.transport.TransportConfig`, ``None``/``"auto"``,
            or a ready transport with ``serve_elsewhere()``. A ``"distributed"`` one listens on the loopback interface
            unless ``interface`` or ``host`` is among its options.
        mp_context: ``"spawn"``, ``"forkserver"``, or ``"fork"``: only before CUDA is used here, and the policy
            computes with one thread unless its factory sets another number. Or a context of :mod:`multiprocessing`.
            By default the transport's ``ctx``, and ``"spawn"`` where it has none.
        startup_timeout: seconds for the process to start and the factory to return.
        arguments: see :class:`~meshinfer.server.remote.RemoteInferenceServer`, which has all of them.

    Raises:
        ValueError, TypeError: an argument cannot work; names it and what to give instead.
    """

    service_backend = "process"
    _place = "the server's process"

    def __init__(
        self,
        policy_factory: Callable[[], Any],
        transport: InferenceTransport | TransportConfig | str | None = "auto",
        *,
        mp_context: BaseContext | str | None = None,
        startup_timeout: float = 300.0,
        **arguments: Unpack[ServerArguments],
    ) -> None:
        context = None if mp_context is None else as_context("mp_context", mp_context)
        super().__init__(policy_factory, transport, startup_timeout=startup_timeout, **arguments)
        self._context: Any = context or as_context("ctx", getattr(self.transport, "ctx", None))

    def _pickler(self) -> Pickler:
        return pickle.dumps

    def _begin(self, setup: ServerSetup) -> ServerProcess:
        check_may_start(self._context)
        forked = self._context.get_start_method() == "fork"
        return ServerProcess(
            self._context, dataclasses.replace(setup, forked=forked), self._first_version
        )


def check_may_start(context: Any) -> None:
    """Raises :class:`RuntimeError` where a process of this context could not work, or not be started."""
    if context.get_start_method() == "fork" and _cuda_in_use():
        raise RuntimeError(
            "mp_context='fork' cannot be used once CUDA has been initialised in this process; use"
            " 'spawn' or 'forkserver'"
        )
    if multiprocessing.current_process().daemon:
        raise RuntimeError(
            "a daemonic process may not start others: start the server elsewhere, or make this"
            " process with daemon=False"
        )


def _cuda_in_use() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
