"""One life of a server in a Ray actor."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from meshinfer.errors import PeerLostError
from meshinfer.server.actor_host import ServerHost
from meshinfer.server.actor_life import ActorLife
from meshinfer.server.setup import ServerSetup

__all__ = ["InferenceServerActor", "RayServerLife", "actor_class"]

_GROUPS = {"turns": 1, "end": 1, "watch": 1}
"""Threads of the actor, beside the one for what is answered at once."""


_ADVICE = "Some common causes include"
"""From here on Ray tells what may have happened to any process."""


class InferenceServerActor(ServerHost):
    """The actor's class."""

    def last(self) -> None:
        """Never returns: whoever has called it learns when the actor ends."""
        threading.Event().wait()


def actor_class(ray: Any) -> Any:
    """For ``.options(...).remote()``."""
    return ray.remote(concurrency_groups=_GROUPS)(InferenceServerActor)


class RayServerLife(ActorLife):
    """Starts the actor.

    Args:
        ray: the module.
        setup: what it serves.
        version: of the policy at first.
        options: of the actor.
    """

    def __init__(
        self, ray: Any, setup: ServerSetup, version: int, options: Mapping[str, Any]
    ) -> None:
        self._ray = ray
        self._node = _node(ray)
        self._asked = {
            name: options[name] for name in ("num_cpus", "num_gpus", "resources") if name in options
        }
        self._speaking: set[int] = set()
        self._actor = actor_class(ray).options(**options).remote()
        super().__init__(version, f"the Ray actor {self._actor._actor_id.hex()}")
        self._post("where").future().add_done_callback(self._heard)
        self._post("last", group="watch").future().add_done_callback(self._noticed)
        self._started = self._post("start", setup, group="turns")

    @property
    def ended(self) -> bool:
        """Whether the actor has gone, or the Ray cluster in which it was."""
        if not super().ended and _node(self._ray) != self._node:
            self.bury("has ended with Ray, which was shut down in this process")
        return super().ended

    def kill(self) -> None:
        """End the actor's process, and free its name, which one that has died may still hold."""
        if _node(self._ray) == self._node:
            self._ray.kill(self._actor, no_restart=True)

    def _post(self, method: str, *arguments: Any, group: str | None = None) -> Any:
        call = getattr(self._actor, method)
        return (call if group is None else call.options(concurrency_group=group)).remote(*arguments)

    def _await_start(self, timeout: float) -> bytes:
        return self._get(self._started, timeout)

    def _exchange(self, method: str, argument: Any, timeout: float, turn: bool = False) -> bytes:
        group = "turns" if turn else "end" if method == "end" else None
        return self._get(self._post(method, argument, group=group), timeout)

    def _get(self, reference: Any, timeout: float) -> bytes:
        errors = self._ray.exceptions
        try:
            answer: bytes = self._ray.get(reference, timeout=timeout)
        except errors.RayActorError as error:
            self.bury(_cause(error))
            raise PeerLostError(str(self)) from error
        return answer

    def _may_wait(self) -> bool:
        return threading.get_ident() not in self._speaking

    def _heard(self, answer: Any) -> None:
        self._speaking.add(threading.get_ident())
        if answer.exception() is None:
            self._met(answer.result())

    def _noticed(self, end: Any) -> None:
        self._speaking.add(threading.get_ident())
        self.bury(_cause(end.exception()))

    def _hint(self) -> str:
        if self._where is not None:
            return super()._hint()
        asked = f" that remote_options ask for, {self._asked}" if self._asked else ""
        return f"Ray has not placed it: has the cluster the resources{asked} free? See `ray status`"


def _node(ray: Any) -> str | None:
    """Identifies the cluster to which this process is connected now."""
    return str(ray.get_runtime_context().get_node_id()) if ray.is_initialized() else None


def _cause(error: Any) -> str:
    """Ray's reason, without the lines that repeat which actor it is."""
    lines = str(error).splitlines()
    told = [line.strip() for line in lines[1:] if line.strip() and not line.startswith("\t")]
    return f"has died: {(' '.join(told) or str(error)).partition(_ADVICE)[0].strip()}"
