"""From what a user asked for to a weight transport, or an error that says what is allowed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from meshinfer.inference.resolver import check_options, check_topology, placed, refuse_beside
from meshinfer.transport import (
    POLICY_BACKENDS,
    Entry,
    PolicyBackend,
    TransportConfig,
    listed,
    register_transport_resolver,
)
from meshinfer.weights.layout import WeightLayout
from meshinfer.weights.protocol import WeightTransport

__all__ = ["WEIGHT_KINDS", "WEIGHT_TRANSPORTS", "WeightEntry", "make_weight_transport"]

logger = logging.getLogger("meshinfer.weights")


@dataclass(frozen=True)
class WeightEntry(Entry):
    """One row of the table of weight transports.

    Args:
        auto_in: the topologies in which it is what ``auto`` means.
    """

    auto_in: tuple[PolicyBackend, ...]


WEIGHT_TRANSPORTS: tuple[WeightEntry, ...] = (
    WeightEntry(
        kind="direct",
        class_name="DirectWeights",
        module="meshinfer.weights.direct",
        policy_backends=("threading", "spmd"),
        auto_in=("threading",),
        description="a trainer and servers in one process; one copy of each version, or none",
    ),
    WeightEntry(
        kind="shared_memory",
        class_name="SharedMemoryWeights",
        module="meshinfer.weights.shared_memory",
        policy_backends=("threading", "multiprocessing"),
        auto_in=("multiprocessing",),
        description="processes on one host; one copy of each version for all of them",
    ),
    WeightEntry(
        kind="distributed",
        class_name="DistributedWeights",
        module="meshinfer.weights.distributed",
        policy_backends=POLICY_BACKENDS,  # type: ignore[arg-type]
        auto_in=("ray", "monarch", "spmd"),
        description="other processes and other nodes; each server asks for the next version",
    ),
)
"""Every weight transport of this version."""

WEIGHT_KINDS: tuple[str, ...] = ("auto", *(row.kind for row in WEIGHT_TRANSPORTS))


def make_weight_transport(
    transport: WeightTransport | TransportConfig | str | None = None,
    *,
    spec: object = None,
    policy_backend: PolicyBackend = "threading",
    transport_options: Mapping[str, Any] | None = None,
) -> WeightTransport:
    """The weight transport that ``transport`` asks for, checked against the topology.

    Args:
        transport: ``None`` or ``"auto"``, a kind, a :class:`~meshinfer.transport.TransportConfig` of a kind, or a
            ready transport, which is returned unchanged.
        spec: the weights: an ``nn.Module``, a state dict, a TensorDict or a
            :class:`~meshinfer.weights.layout.WeightLayout`. May stand among the options instead.
        policy_backend: how the servers run beside the trainer: ``"threading"``, ``"multiprocessing"``, ``"ray"``,
            ``"monarch"``, or ``"spmd"`` for ranks that share no parent process.
        transport_options: keyword arguments for the transport, beside those of a config.

    Raises:
        ValueError: an unknown kind or topology, a kind that does not work in it, no ``spec``, one that does not fit a
            ready transport, or something that is given twice.
        TypeError: ``transport`` is something else, or the kind has no such option; lists the options.
    """
    check_topology(policy_backend)
    if not isinstance(transport, str | TransportConfig | None):
        return _ready(transport, spec, transport_options)
    kind, options = _asked_for(transport, spec, transport_options)
    entry = _entry(kind, policy_backend)
    factory = entry.load()
    check_options(f"weight transport {entry.kind!r}", factory, options, ["spec"])
    logger.debug(
        "weight transport %r (%s) for policy_backend=%r, asked for as %r",
        entry.kind,
        entry.class_name,
        policy_backend,
        kind,
    )
    arguments = placed(entry.kind, policy_backend, options, listener="publisher")
    return cast(WeightTransport, factory(**arguments))


def _ready(transport: Any, spec: object, options: Mapping[str, Any] | None) -> WeightTransport:
    if isinstance(transport, type) or not isinstance(transport, WeightTransport):
        raise TypeError(
            f"weight_transport: expected None, one of {listed(WEIGHT_KINDS)}, a TransportConfig or a ready"
            f" WeightTransport, found {transport if isinstance(transport, type) else type(transport).__name__}"
        )
    refuse_beside(transport, [*options] if options else [])
    if spec is not None:
        layout = WeightLayout.from_spec(spec)
        if layout != transport.layout:
            difference = layout.difference(transport.layout.describe())
            raise ValueError(f"spec and the ready {type(transport).__name__} differ: {difference}")
    return transport


def _asked_for(
    transport: TransportConfig | str | None, spec: object, options: Mapping[str, Any] | None
) -> tuple[str, dict[str, Any]]:
    """The kind, and the keyword arguments with the spec among them."""
    if isinstance(transport, TransportConfig):
        kind, given = str(transport.kind), dict(transport.with_options(options).options)
    else:
        # by way of a config, which checks the options
        kind, given = transport or "auto", dict(TransportConfig("auto", options or {}).options)
    if kind.lower() not in WEIGHT_KINDS:
        raise ValueError(f"weight transport {kind!r}: expected one of {listed(WEIGHT_KINDS)}")
    if spec is not None and "spec" in given:
        raise ValueError("spec given both as an argument and as a transport option; give it once")
    given.setdefault("spec", spec)
    if given["spec"] is None:
        raise ValueError(
            f"weight transport {kind!r} has to know the weights: give spec= (a module, a state dict or a TensorDict),"
            f" here or as an option: TransportConfig('shared_memory', {{'spec': module}})"
        )
    return kind.lower(), given


def _entry(kind: str, policy_backend: str) -> WeightEntry:
    for entry in WEIGHT_TRANSPORTS:
        asked = entry.kind == kind and policy_backend in entry.policy_backends
        if asked or (kind == "auto" and policy_backend in entry.auto_in):
            return entry
    allowed = [row.kind for row in WEIGHT_TRANSPORTS if policy_backend in row.policy_backends]
    raise ValueError(
        f"weight transport {kind!r} does not work with policy_backend={policy_backend!r}, which allows"
        f" {listed(allowed)}"
    )


register_transport_resolver("weights", make_weight_transport)
