"""The server that lives in a monarch actor."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from meshinfer.inference.protocol import InferenceTransport
from meshinfer.monarch_faults import Fault, watch_faults
from meshinfer.optional import load_monarch
from meshinfer.server.monarch_control import ServerActorLife
from meshinfer.server.pickled import Pickler
from meshinfer.server.remote import RemoteInferenceServer
from meshinfer.server.setup import ServerSetup
from meshinfer.transport import TransportConfig

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from meshinfer.server.signature import ServerArguments

__all__ = ["MonarchInferenceServer"]


class MonarchInferenceServer(RemoteInferenceServer):
    """Serves one policy from a monarch actor, which it starts, watches and ends.

    The actor ends with this server, and with the process that made it. When it dies, every client that waits raises
    :class:`~meshinfer.errors.PeerLostError`, and :meth:`start` starts another one, with the policy as the factory
    makes it, for the same clients. monarch is not told to end this program then, as it would by default.

    Args:
        policy_factory: called without arguments in the actor; returns what
            :class:`~meshinfer.server.thread.ThreadInferenceServer` serves. What monarch can send: a lambda or a
            function of ``__main__`` too.
        transport: ``"monarch"`` (which is ``"auto"``) or ``"distributed"``, a
            :class:`~meshinfer.transport.TransportConfig`, or a ready transport with ``serve_elsewhere()``. A
            ``"distributed"`` one listens where monarch does for other hosts, on the loopback interface while there
            are none, unless ``interface`` is among its options.
        proc_mesh: the actor's process: a mesh of one, as ``spawn_procs`` makes it. It stays when the server ends;
            when it dies, no other server can be started in it.
        host_mesh: the host, the first one of several, on which a process is started for each start of the server. By
            default ``this_host()``.
        startup_timeout: seconds for the process to start and the factory to return.
        arguments: see :class:`~meshinfer.server.remote.RemoteInferenceServer`, which has all of them.

    Raises:
        ValueError, TypeError: an argument cannot work; names it and what to give instead.
        ImportError: monarch is not installed; has the command to install it.
    """

    service_backend = "monarch"
    _place = "the server's monarch actor"

    def __init__(
        self,
        policy_factory: Callable[[], Any],
        transport: InferenceTransport | TransportConfig | str | None = "auto",
        *,
        proc_mesh: Any = None,
        host_mesh: Any = None,
        startup_timeout: float = 300.0,
        **arguments: Unpack[ServerArguments],
    ) -> None:
        self._monarch = load_monarch("service_backend='monarch'")
        self._procs = _checked_procs(self._monarch, proc_mesh)
        self._hosts = _checked_hosts(self._monarch, host_mesh)
        if proc_mesh is not None and host_mesh is not None:
            raise ValueError(
                "proc_mesh and host_mesh given: give the process, or the host to start it on"
            )
        super().__init__(policy_factory, transport, startup_timeout=startup_timeout, **arguments)

    def _pickler(self) -> Pickler:
        import cloudpickle  # type: ignore[import-untyped]  # monarch brings it

        pickler: Pickler = cloudpickle.dumps
        return pickler

    def _begin(self, setup: ServerSetup) -> ServerActorLife:
        from meshinfer.server.monarch_actor import ServerActor

        self._check_given_proc()
        name = f"meshinfer{secrets.token_hex(4)}"
        lives: list[ServerActorLife] = []

        def told(fault: Fault) -> None:
            for life in lives:
                life.bury_fault(fault)

        undo = watch_faults(name, told)
        try:
            procs = self._procs
            if procs is None:
                hosts = self._monarch.this_host() if self._hosts is None else self._hosts
                procs = hosts.spawn_procs(per_host={"procs": 1}, name=name)
            life = ServerActorLife(
                procs.spawn(name, ServerActor),
                setup,
                self._first_version,
                name=f"the monarch actor {name}",
                procs=procs if self._procs is None else None,
                at_end=undo,
            )
        except BaseException:
            undo()
            raise
        lives.append(life)
        return life

    def _check_given_proc(self) -> None:
        before = self._lives[-1] if self._lives else None
        if self._procs is not None and getattr(before, "process_died", False):
            raise RuntimeError(
                f"{before}, and with it the process of proc_mesh: make another server in another process,"
                " or give host_mesh, where each start has a process of its own"
            )


def _checked_procs(monarch: Any, procs: Any) -> Any:
    if procs is None:
        return None
    if not isinstance(procs, monarch.ProcMesh):
        raise TypeError(f"proc_mesh: expected a monarch ProcMesh, found {type(procs).__name__}")
    if procs.size() != 1:
        raise ValueError(
            f"proc_mesh has {procs.size()} processes ({procs.sizes}); a server lives in one: spawn_procs() one"
            " for it, since actors on a slice of other processes are not told apart when those die"
        )
    return procs


def _checked_hosts(monarch: Any, hosts: Any) -> Any:
    """The first host."""
    if hosts is None:
        return None
    if not isinstance(hosts, monarch.HostMesh):
        raise TypeError(f"host_mesh: expected a monarch HostMesh, found {type(hosts).__name__}")
    return hosts.slice(**dict.fromkeys(hosts.sizes, 0)) if hosts.size() > 1 else hosts
