"""From what a user asked for to an inference transport, or an error that says what is allowed."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from tensordict import TensorDictBase

from meshinfer.arguments import keyword_names
from meshinfer.inference.nodes import node_address
from meshinfer.inference.protocol import InferenceTransport
from meshinfer.rendezvous import INTERFACE_VARIABLE
from meshinfer.transport import (
    AUTO_RULES,
    INFERENCE_TRANSPORTS,
    POLICY_BACKENDS,
    TRANSPORT_KINDS,
    PolicyBackend,
    TransportConfig,
    TransportEntry,
    as_transport_config,
    listed,
    register_transport_resolver,
)

__all__ = [
    "check_options",
    "check_topology",
    "inference_transport_kind",
    "kinds_for",
    "make_inference_transport",
    "placed",
    "refuse_beside",
]

logger = logging.getLogger("meshinfer.inference")


def make_inference_transport(
    transport: InferenceTransport
    | TransportConfig
    | str
    | Sequence[InferenceTransport | TransportConfig | str]
    | None = None,
    *,
    policy_backend: PolicyBackend = "threading",
    num_slots: int | None = None,
    request_spec: TensorDictBase | None = None,
    response_spec: TensorDictBase | None = None,
    transport_options: Mapping[str, Any] | None = None,
) -> InferenceTransport:
    """The transport that ``transport`` asks for, checked against the topology.

    ``auto`` is deterministic, and every choice is logged once at DEBUG with its reason. The specs
    and ``num_slots`` are facts: a transport takes those that it needs. They may stand among the
    options instead.

    Args:
        transport: ``None`` or ``"auto"``, a kind, a :class:`~meshinfer.transport.TransportConfig`,
            or a ready transport, which is returned unchanged; or a sequence of kinds, configs and ready transports
            with the same fixed layouts, which become one :class:`~meshinfer.inference.merged.MergedTransport`.
        policy_backend: how the clients run beside the policy: ``"threading"``,
            ``"multiprocessing"``, ``"ray"``, ``"monarch"``, or ``"spmd"`` for ranks that share no
            parent process.
        num_slots: number of environments, where it is known in advance; at least 1.
        request_spec: TensorDict with the keys, shapes and dtypes of one request. Goes with
            ``response_spec``.
        response_spec: the same of one reply.
        transport_options: keyword arguments for the transport, beside those of a config.

    Raises:
        ValueError: an unknown kind or topology; a kind that is not in this version or does not work
            in the topology; one spec without the other; something that the kind needs is missing;
            something is given twice, or beside a ready transport.
        TypeError: ``transport`` is something else, or the kind has no such option; the message
            lists the options.
    """
    check_topology(policy_backend)
    facts = {
        "request_spec": request_spec,
        "response_spec": response_spec,
        "num_slots": num_slots,
    }
    if isinstance(transport, Sequence) and not isinstance(transport, str):
        return _merged(transport, policy_backend, facts, transport_options)
    if not isinstance(transport, str | TransportConfig | None):
        return _ready_instance(transport, {**facts, "transport_options": transport_options or None})
    config = as_transport_config(transport).with_options(transport_options)
    options = config.options
    facts = _known_facts(facts, options)
    entry, reason = _choose(config.kind, policy_backend, facts)
    factory = entry.load()
    options = placed(entry.kind, policy_backend, options, listener="server")
    arguments = _arguments(entry, factory, facts, options, config.kind)
    logger.debug(
        "inference transport %r (%s) for policy_backend=%r: %s",
        entry.kind,
        entry.class_name,
        policy_backend,
        reason,
    )
    return cast(InferenceTransport, factory(**arguments))


def inference_transport_kind(transport: object) -> str:
    """The kind of any transport instance; ``"custom"`` for a class that meshinfer does not know."""
    kind = getattr(type(transport), "transport_kind", None)
    return kind if kind in TRANSPORT_KINDS and kind != "auto" else "custom"


def _ready_instance(transport: Any, beside: Mapping[str, Any]) -> InferenceTransport:
    # A class has every attribute that its instances have, and would pass the protocol's check.
    if isinstance(transport, type) or not isinstance(transport, InferenceTransport):
        raise TypeError(
            "transport must be None, a kind, a TransportConfig or a ready InferenceTransport,"
            f" not {_described(transport)}"
        )
    refuse_beside(transport, [name for name, value in beside.items() if value is not None])
    return transport


def _merged(
    transports: Sequence[Any],
    policy_backend: PolicyBackend,
    facts: Mapping[str, Any],
    transport_options: Mapping[str, Any] | None,
) -> InferenceTransport:
    """Each of a sequence, made where it is a kind, as one transport; the facts are for those that are made."""
    from meshinfer.inference.merged import MergedTransport

    if transport_options:
        raise ValueError(
            "transport_options given beside a sequence of transports; give each its own, as TransportConfig(kind,"
            " options)"
        )
    if not transports or None in transports:
        raise ValueError(f"transport={transports!r}: expected transports, kinds or configs")
    named = [isinstance(each, str | TransportConfig) for each in transports]
    found: list[InferenceTransport] = []
    try:
        for each, is_made in zip(transports, named, strict=True):
            known = facts if is_made or not any(named) else {}
            found.append(make_inference_transport(each, policy_backend=policy_backend, **known))
        return found[0] if len(found) == 1 else MergedTransport(found)
    except BaseException:
        for transport, is_made in zip(found, named, strict=False):
            if is_made:
                transport.close()
        raise


def _described(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}; pass an instance"
    return type(value).__name__


def _known_facts(facts: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The facts, completed by those that stand among the options, and checked."""
    twice = [name for name in facts if facts[name] is not None and name in options]
    if twice:
        raise ValueError(
            f"{listed(twice)} given both as an argument and as a transport option; give it once"
        )
    known = {name: options.get(name, value) for name, value in facts.items()}
    _check_num_slots(known["num_slots"])
    for given, missing in itertools.permutations(("request_spec", "response_spec")):
        if known[given] is not None and known[missing] is None:
            raise ValueError(f"{given} given without {missing}; give both, or neither")
    return known


def _check_num_slots(num_slots: Any) -> None:
    if num_slots is None:
        return
    if isinstance(num_slots, bool) or not isinstance(num_slots, int):
        raise TypeError(f"num_slots must be an int or None, not {type(num_slots).__name__}")
    if num_slots < 1:
        raise ValueError(f"num_slots must be at least 1, found {num_slots}")


def _choose(kind: str, policy_backend: str, facts: Mapping[str, Any]) -> tuple[TransportEntry, str]:
    reason = "asked for by name"
    if kind == "auto":
        kind, reason = _auto_kind(policy_backend, facts)
    entry = _entry(kind, policy_backend)
    missing = [name for name in entry.needs if facts[name] is None]
    if missing:
        raise ValueError(f"transport {kind!r} needs {' and '.join(missing)}")
    return entry, reason


def _auto_kind(policy_backend: str, facts: Mapping[str, Any]) -> tuple[str, str]:
    for rule in AUTO_RULES:
        if rule.policy_backend == policy_backend and all(
            facts[name] is not None for name in rule.given
        ):
            return rule.kind, f"auto, because {rule.reason}"
    raise ValueError(
        f"transport 'auto' has no choice for policy_backend={policy_backend!r} in this version;"
        f" ask by name for one of: {listed(kinds_for(policy_backend))}"
    )


def _entry(kind: str, policy_backend: str) -> TransportEntry:
    rows = [entry for entry in INFERENCE_TRANSPORTS if entry.kind == kind]
    if not rows:
        built = sorted({entry.kind for entry in INFERENCE_TRANSPORTS})
        raise ValueError(
            f"transport {kind!r} is not available in this version; available: {listed(built)}"
        )
    for entry in rows:
        if policy_backend in entry.policy_backends:
            return entry
    allowed = sorted({name for entry in rows for name in entry.policy_backends})
    raise ValueError(
        f"transport {kind!r} does not work with policy_backend={policy_backend!r}: it works with"
        f" {listed(allowed)}, and {policy_backend!r} allows {listed(kinds_for(policy_backend))}"
    )


def kinds_for(policy_backend: str) -> list[str]:
    """The kinds that work in a topology."""
    return sorted(e.kind for e in INFERENCE_TRANSPORTS if policy_backend in e.policy_backends)


def _arguments(
    entry: TransportEntry,
    factory: Callable[..., Any],
    facts: Mapping[str, Any],
    options: Mapping[str, Any],
    asked: str,
) -> dict[str, Any]:
    """Keyword arguments for ``factory``: the facts that it takes and the options it accepts."""
    known = {name: facts[name] for name in entry.takes if facts[name] is not None}
    others = {name: value for name, value in options.items() if name not in known}
    what = f"transport {entry.kind!r}"
    if asked == "auto":
        what = f"transport 'auto' chose {entry.kind!r}, which"
    check_options(what, factory, others, entry.takes)
    return {**known, **others}


# --- For the weights' resolver too ---------------------------------------------------------------


def check_topology(policy_backend: str) -> None:
    """:class:`ValueError` for an unknown one."""
    if policy_backend not in POLICY_BACKENDS:
        raise ValueError(
            f"unknown policy_backend {policy_backend!r}; it is one of {listed(POLICY_BACKENDS)}"
        )


def refuse_beside(transport: object, given: Sequence[str]) -> None:
    """:class:`ValueError` if arguments of these names were given with ``transport``, which is ready."""
    if given:
        raise ValueError(
            f"{listed(given)} given beside a ready {type(transport).__name__}, which they cannot"
            " change; pass them to its constructor"
        )


def check_options(
    what: str, factory: Callable[..., Any], given: Mapping[str, Any], facts: Iterable[str]
) -> None:
    """:class:`TypeError` if ``factory`` takes no argument of a name in ``given``; lists all but the ``facts``."""
    accepted = keyword_names(factory)
    if accepted is not None and (unknown := sorted(given.keys() - accepted)):
        raise TypeError(
            f"{what} has no option {listed(unknown)}; its options are"
            f" {listed(sorted(accepted - {*facts}))}"
        )


def placed(
    kind: str, policy_backend: PolicyBackend, options: Mapping[str, Any], *, listener: str
) -> Mapping[str, Any]:
    """The options; a ``listener`` that other nodes are to reach listens where its runtime says that they do.

    Args:
        listener: the role of the side that listens, and the default one.
    """
    given = any(options.get(name) is not None for name in ("interface", "host", "directory"))
    if kind != "distributed" or given or options.get("role", listener) != listener:
        return options
    address = None if os.environ.get(INTERFACE_VARIABLE) else node_address(policy_backend)
    return options if address is None else {**options, "interface": address}


register_transport_resolver("inference", make_inference_transport)
