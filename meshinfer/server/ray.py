"""The server that lives in a Ray actor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from meshinfer.inference.protocol import InferenceTransport
from meshinfer.optional import load_ray
from meshinfer.server.pickled import Pickler
from meshinfer.server.ray_control import RayServerLife, actor_class
from meshinfer.server.remote import RemoteInferenceServer
from meshinfer.server.setup import ServerSetup
from meshinfer.transport import TransportConfig, listed

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from meshinfer.server.signature import ServerArguments

__all__ = ["RayInferenceServer"]

_OURS = ("concurrency_groups", "lifetime", "max_concurrency", "max_restarts", "get_if_exists")
_NAMES = ("name", "namespace")


class RayInferenceServer(RemoteInferenceServer):
    """Serves one policy from a Ray actor, which it starts, watches and ends.

    Ray must be initialised (``ray.init()``) in this process, which may be a driver, or run a task or an actor. The
    actor ends with this server, with the process that made it, or with the cluster. When it dies, every client that
    waits raises :class:`~meshinfer.errors.PeerLostError`, and :meth:`start` starts another one, with the policy as the
    factory makes it, for the same clients. meshinfer must be installed on the actor's node.

    Args:
        policy_factory: called without arguments in the actor; returns what
            :class:`~meshinfer.server.thread.ThreadInferenceServer` serves. What Ray can send: a lambda or a function
            of ``__main__`` too.
        transport: ``"ray"`` (which is ``"auto"``) or ``"distributed"``, a
            :class:`~meshinfer.transport.TransportConfig`, or a ready transport with ``serve_elsewhere()``. A
            ``"distributed"`` one listens at its node's address in the cluster unless ``interface`` is among its
            options.
        remote_options: of the actor, as for ``ray.remote``: ``num_cpus``, ``num_gpus``, ``resources``,
            ``scheduling_strategy``, ``runtime_env``, ``name``...
        startup_timeout: seconds for Ray to place the actor and the factory to return.
        arguments: see :class:`~meshinfer.server.remote.RemoteInferenceServer`, which has all of them.

    Raises:
        ValueError, TypeError: an argument cannot work, or Ray is not initialised in this process; says what to do.
        ImportError: Ray is not installed; has the command to install it.
    """

    service_backend = "ray"
    _place = "the server's Ray actor"

    def __init__(
        self,
        policy_factory: Callable[[], Any],
        transport: InferenceTransport | TransportConfig | str | None = "auto",
        *,
        remote_options: Mapping[str, Any] | None = None,
        startup_timeout: float = 300.0,
        **arguments: Unpack[ServerArguments],
    ) -> None:
        self._ray = load_ray("service_backend='ray'")
        options = _checked(self._ray, remote_options)
        super().__init__(policy_factory, transport, startup_timeout=startup_timeout, **arguments)
        given = getattr(self.transport, "actor_options", {})
        if taken := sorted(given.keys() & options.keys()):
            self.shutdown()
            raise ValueError(
                f"remote_options: {listed(taken)} cannot be given with {type(self.transport).__name__},"
                " whose clients find the actor by a name of its own"
            )
        self._options = {**options, **given}

    def _pickler(self) -> Pickler:
        pickler: Pickler = self._ray.cloudpickle.dumps
        return pickler

    def _begin(self, setup: ServerSetup) -> RayServerLife:
        if not self._ray.is_initialized():
            raise RuntimeError(
                "Ray was shut down in this process; call ray.init(), and make a new server"
            )
        return RayServerLife(self._ray, setup, self._first_version, self._options)


def _checked(ray: Any, options: Mapping[str, Any] | None) -> dict[str, Any]:
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise TypeError(
            f"remote_options: expected a mapping of options for ray.remote, found {type(options).__name__}"
        )
    if ours := sorted({*_OURS} & options.keys()):
        raise ValueError(
            f"remote_options: {listed(ours)} cannot be given: the server decides how its actor runs"
            " and when it ends, and start() makes another one"
        )
    try:
        actor_class(ray).options(**options)
    except (ValueError, TypeError) as error:
        raise type(error)(f"remote_options: {error}") from error
    return dict(options)
