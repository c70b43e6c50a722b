"""What every server has, and the choice of where it lives."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, overload

from meshinfer.arguments import as_count
from meshinfer.errors import ClosedError
from meshinfer.inference.protocol import InferenceClient, InferenceTransport
from meshinfer.inference.resolver import inference_transport_kind
from meshinfer.server.config import InferenceServerConfig
from meshinfer.transport import TransportConfig, listed
from meshinfer.weights.protocol import WeightTransport

if TYPE_CHECKING:
    from tensordict.nn import InteractionType
    from typing_extensions import Self, Unpack

    from meshinfer.server.backends import ServiceBackend
    from meshinfer.server.lifetime import ServerHealth
    from meshinfer.server.monarch import MonarchInferenceServer
    from meshinfer.server.process import ProcessInferenceServer
    from meshinfer.server.ray import RayInferenceServer
    from meshinfer.server.signature import ServerArguments, ThreadArguments
    from meshinfer.server.stats import ServerStats
    from meshinfer.server.thread import ThreadInferenceServer

__all__ = ["InferenceServer"]

_Transport = InferenceTransport | TransportConfig | str | None
_Transports = _Transport | Sequence[InferenceTransport | TransportConfig | str]


class _Placed(type):
    """Calling :class:`InferenceServer` makes the server of the backend that is asked for."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is not InferenceServer:
            _refuse_unknown(cls, kwargs)
            return super().__call__(*args, **kwargs)
        from meshinfer.server.backends import make_server

        return make_server(*args, **kwargs)


def _refuse_unknown(cls: type, given: Mapping[str, Any]) -> None:
    """:class:`TypeError` for an argument that no constructor of ``cls`` takes, in the words of who wrote it."""
    accepted: set[str] = set()
    for each in cls.__mro__:
        parameters = inspect.signature(each.__init__).parameters  # type: ignore[misc]
        accepted.update(parameters)
        if not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
            break
    if unknown := sorted(given.keys() - accepted):
        raise TypeError(
            f"{cls.__name__} has no argument {listed(unknown)}; options of its transport go into "
            "transport_options={...}"
        )


class InferenceServer(metaclass=_Placed):
    """Serves one policy: batches what has arrived, computes, answers each row.

    ``InferenceServer(model_or_factory, transport, ...)`` makes the server of one of the backends, with its arguments.
    Each is an ``InferenceServer``, and clients do not see which:

    - ``"thread"``: :class:`~meshinfer.server.thread.ThreadInferenceServer`, of a model, in this process.
    - ``"process"``: :class:`~meshinfer.server.process.ProcessInferenceServer`,
    - ``"ray"``: :class:`~meshinfer.server.ray.RayInferenceServer`,
    - ``"monarch"``: :class:`~meshinfer.server.monarch.MonarchInferenceServer`: of a function that returns the model,
      which they call where the server lives.

    Args:
        model_or_factory: the model for ``"thread"``, a function that returns it for the others.
        transport: how requests move, see the class of the backend. For ``"thread"`` also several at once, as a
            sequence: requests of all of them meet in one batch.
        service_backend: where the server lives.
        service_backend_options: for the backend: ``mp_context``, ``startup_timeout`` (``"process"``);
            ``remote_options``, ``startup_timeout`` (``"ray"``); ``proc_mesh``, ``host_mesh``, ``startup_timeout``
            (``"monarch"``); none for ``"thread"``.

    Raises:
        ValueError, TypeError: an argument cannot work; names it and what to give instead.
        ImportError: the backend needs a package that is missing; has the command to install it.
    """

    service_backend: ClassVar[str]
    config: InferenceServerConfig
    transport: InferenceTransport
    transport_config: TransportConfig | None
    weight_transport: WeightTransport | None
    _closed: bool

    if TYPE_CHECKING:  # for readers of types: mypy refuses calls of a class that is abstract

        @overload
        def __new__(
            cls,
            model: Callable[..., Any],
            transport: _Transports = ...,
            *,
            service_backend: Literal["thread"] = ...,
            service_backend_options: None = ...,
            **arguments: Unpack[ThreadArguments],
        ) -> ThreadInferenceServer: ...
        @overload
        def __new__(
            cls,
            policy_factory: Callable[[], Any],
            transport: _Transport = ...,
            *,
            service_backend: Literal["process"],
            service_backend_options: Mapping[str, Any] | None = ...,
            **arguments: Unpack[ServerArguments],
        ) -> ProcessInferenceServer: ...
        @overload
        def __new__(
            cls,
            policy_factory: Callable[[], Any],
            transport: _Transport = ...,
            *,
            service_backend: Literal["ray"],
            service_backend_options: Mapping[str, Any] | None = ...,
            **arguments: Unpack[ServerArguments],
        ) -> RayInferenceServer: ...
        @overload
        def __new__(
            cls,
            policy_factory: Callable[[], Any],
            transport: _Transport = ...,
            *,
            service_backend: Literal["monarch"],
            service_backend_options: Mapping[str, Any] | None = ...,
            **arguments: Unpack[ServerArguments],
        ) -> MonarchInferenceServer: ...
        @overload
        def __new__(
            cls,
            model_or_factory: Callable[..., Any],
            transport: _Transport = ...,
            *,
            service_backend: ServiceBackend,
            service_backend_options: Mapping[str, Any] | None = ...,
            **arguments: Unpack[ServerArguments],
        ) -> InferenceServer: ...
        def __new__(cls, *args: Any, **kwargs: Any) -> Any: ...  # noqa: D102

        @property
        def is_alive(self) -> bool:
            """Whether the server serves, as far as is known here."""

        @property
        def policy_version(self) -> int:
            """Of the weights that serve now."""

        @property
        def _was_started(self) -> bool: ...

        def start(self) -> Self:
            """Begin to serve; returns the server."""

        def shutdown(self, timeout: float = 5.0) -> None:
            """Stop; ``timeout`` seconds for the batch in hand. Idempotent."""

        def update_policy_weights_(self, weights: Any, *, version: int | None = None) -> int:
            """Replace parameters and buffers between two batches; returns their version."""

        def prepare(
            self, request_spec: Any = None, *, interaction_type: InteractionType | None = None
        ) -> Self:
            """Let a compiled policy compile before the first client asks; returns the server."""

        def stats(self, reset: bool = False) -> ServerStats:
            """What has been served; ``reset=True`` begins anew."""

        def health(self) -> ServerHealth:
            """How the server is, whatever has happened to it."""

    @property
    def transport_kind(self) -> str:
        """The kind of the transport, ``"custom"`` for a class that meshinfer does not know."""
        return inference_transport_kind(self.transport)

    def client(self) -> InferenceClient:
        """A new client of the transport, before or after the start."""
        self._check_open()
        return self.transport.client()

    def clients(self, count: int) -> list[InferenceClient]:
        """``count`` new clients."""
        as_count("count", count)
        return [self.client() for _ in range(count)]

    def update_model_weights(self, weights: Any, version: int | None = None) -> int:
        """As ``update_policy_weights_``, under another name."""
        return self.update_policy_weights_(weights, version=version)

    def __enter__(self) -> Self:
        if not self._was_started:
            try:
                self.start()
            except BaseException:
                self.shutdown()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __reduce__(self) -> Any:
        raise TypeError(
            f"a {type(self).__name__} stays in the process that made it; send its clients to others"
            " (server.client())"
        )

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this server was shut down; make a new one")
