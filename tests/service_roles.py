"""Policies and factories for servers in every kind of place, and what is known of the places."""

from __future__ import annotations

import functools
import multiprocessing as processes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import process_roles as roles
from process_roles import Policy, reply, request
from support import PRELOADED, is_gone, wait_until
from tensordict import TensorDict, TensorDictBase

from meshinfer import InferenceServer

REFUSED = -7.0
"""A request that the policy refuses."""
SECONDS_TO_LEARN = 60.0
"""Within which the death of a server must be known to everybody."""


class Refusal(LookupError):
    pass


class Touchy(Policy):
    def forward(self, batch: TensorDictBase) -> TensorDict:
        if REFUSED in batch["x"]:
            raise Refusal("not this one")
        return super().forward(batch)


@dataclass(frozen=True)
class Place:
    """Where a server lives.

    Args:
        backend: as ``service_backend`` names it.
        auto: the kind of transport that is chosen there where the specs are known.
        options: ``service_backend_options`` that make it fast in tests.
        named: how the server's process is called in errors.
    """

    backend: str
    auto: str
    options: dict[str, Any] | None
    named: str

    def server(self, factory: Callable[[], Any], transport: Any, **options: Any) -> Any:
        extra = options.pop("service_backend_options", None)
        return InferenceServer(
            factory() if self.backend == "thread" else factory,
            transport,
            **{"num_slots": 8, "request_spec": request(0), "response_spec": reply(), **options},
            service_backend=self.backend,  # type: ignore[call-overload]
            service_backend_options={**(self.options or {}), **(extra or {})} or None,
        )


processes.set_forkserver_preload(PRELOADED)

PLACES = {
    place.backend: place
    for place in (
        Place("thread", "slot", None, "thread"),
        Place("process", "shared_memory", {"mp_context": "forkserver"}, "server process"),
        Place("ray", "ray", {"remote_options": {"num_cpus": 0}}, "Ray actor"),
        Place("monarch", "monarch", None, "monarch actor"),
    )
}


@contextmanager
def modules_found() -> Iterator[None]:
    """Processes that start meanwhile find the modules of the tests."""
    tests = Path(__file__).parent
    saved = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(tests.parent), str(tests)])
    try:
        yield
    finally:
        if saved is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = saved


def ends(pid: int) -> bool:
    return wait_until(lambda: is_gone(pid), SECONDS_TO_LEARN)


def failing_once(place: Place, marker: Path) -> Callable[[], Any]:
    """What the place can send there: by value, or only from a module."""
    if place.backend == "process":
        return functools.partial(roles.failing_once, marker)

    def factory() -> Policy:
        return roles.failing_once(marker)

    return factory
