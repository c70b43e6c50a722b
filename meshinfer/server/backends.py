"""Where a server can live, and which transports reach it there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from meshinfer.server.monarch import MonarchInferenceServer
from meshinfer.server.process import ProcessInferenceServer
from meshinfer.server.ray import RayInferenceServer
from meshinfer.server.thread import ThreadInferenceServer
from meshinfer.transport import POLICY_BACKEND_OF, listed

if TYPE_CHECKING:
    from meshinfer.server.server import InferenceServer

__all__ = ["SERVERS", "ServiceBackend", "make_server"]

ServiceBackend: TypeAlias = Literal["thread", "process", "ray", "monarch"]

SERVERS: Mapping[str, Callable[..., InferenceServer]] = {
    "thread": ThreadInferenceServer,
    "process": ProcessInferenceServer,
    "ray": RayInferenceServer,
    "monarch": MonarchInferenceServer,
}
"""By ``service_backend``."""

_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "thread": (),
    "process": ("mp_context", "startup_timeout"),
    "ray": ("remote_options", "startup_timeout"),
    "monarch": ("host_mesh", "proc_mesh", "startup_timeout"),
}
assert SERVERS.keys() == _OPTIONS.keys() == POLICY_BACKEND_OF.keys() == {*get_args(ServiceBackend)}


def make_server(
    *args: Any,
    service_backend: str = "thread",
    service_backend_options: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> InferenceServer:
    """The server of a backend; arguments and errors as for :class:`~meshinfer.server.server.InferenceServer`."""
    if not isinstance(service_backend, str) or service_backend not in SERVERS:
        raise ValueError(
            f"service_backend={service_backend!r}: expected one of {listed([*SERVERS])}"
        )
    options = _checked_options(service_backend, service_backend_options)
    if beside := sorted(arguments.keys() & {name for row in _OPTIONS.values() for name in row}):
        raise TypeError(
            f"{listed(beside)} given to InferenceServer; give it in service_backend_options"
        )
    return SERVERS[service_backend](*args, **arguments, **options)


def _checked_options(backend: str, options: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise TypeError(
            f"service_backend_options: expected a mapping of options, found {type(options).__name__}"
        )
    if unknown := sorted(map(str, options.keys() - {*_OPTIONS[backend]})):
        raise TypeError(
            f"service_backend {backend!r} has no option {listed(unknown)}; its options are"
            f" {listed(_OPTIONS[backend])}"
        )
    return options
