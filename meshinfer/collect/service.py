"""The server of a collector's policy, in a thread or in a process, and the transport between both backends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from meshinfer.collect.processes import portable
from meshinfer.collect.specs import CollectionPlan
from meshinfer.inference.protocol import InferenceTransport
from meshinfer.inference.resolver import make_inference_transport
from meshinfer.server.process import ProcessInferenceServer
from meshinfer.server.server import InferenceServer
from meshinfer.server.thread import ThreadInferenceServer
from meshinfer.transport import TransportConfig, as_transport_config

__all__ = ["PolicySource", "make_server"]


class PolicySource:
    """The policy, as it was given: an object, or a function that makes it.

    Raises:
        TypeError: both were given, or neither, or what was given is not callable.
    """

    def __init__(self, policy: Any, policy_factory: Callable[[], Any] | None) -> None:
        if (policy is None) == (policy_factory is None):
            raise TypeError("give policy= or policy_factory=, one of the two")
        given = policy if policy_factory is None else policy_factory
        if not callable(given):
            name = "policy" if policy_factory is None else "policy_factory"
            raise TypeError(f"{name}: expected a callable, found {type(given).__name__}")
        self._policy = policy
        self._factory = policy_factory
        self._made: Any = None

    def here(self) -> Any:
        """The policy in this process; made once."""
        if self._factory is None:
            return self._policy
        if self._made is None:
            self._made = self._factory()
        return self._made

    def elsewhere(self) -> Callable[[], Any]:
        """A picklable function that makes it in another process."""
        self._made = None
        if self._factory is not None:
            return portable("policy_factory", self._factory)
        return portable("policy", partial(_same, self._policy))


def _same(policy: Any) -> Any:
    return policy


def make_server(
    source: PolicySource,
    plan: CollectionPlan,
    *,
    num_envs: int,
    transport: InferenceTransport | TransportConfig | str | None,
    transport_options: Mapping[str, Any] | None,
    env_backend: str,
    policy_backend: str,
    start_method: Any,
    arguments: Mapping[str, Any],
) -> tuple[InferenceServer, TransportConfig | None]:
    """The server, not started, and what was asked for as its transport; errors as those of both servers."""
    asked = isinstance(transport, str | TransportConfig | None)
    config = as_transport_config(transport).with_options(transport_options) if asked else None  # type: ignore[arg-type]
    facts: dict[str, Any] = {}
    if asked:
        facts = {
            "request_spec": plan.request,
            "response_spec": plan.response,
            "num_slots": num_envs * plan.requests_per_step,
        }
        facts = {name: value for name, value in facts.items() if name not in config.options}  # type: ignore[union-attr]
    elif transport_options:
        raise ValueError(
            "transport_options given beside a ready transport, which they cannot change"
        )
    chosen = config if asked else transport
    if policy_backend == "multiprocessing":
        server: InferenceServer = ProcessInferenceServer(
            source.elsewhere(), chosen, mp_context=start_method, **facts, **arguments
        )
        return server, config
    if asked and env_backend == "multiprocessing":
        chosen = make_inference_transport(chosen, policy_backend="multiprocessing", **facts)
        facts = {}
    return ThreadInferenceServer(source.here(), chosen, **facts, **arguments), config
