"""How payloads move: the kinds, their configuration, who resolves them, and which kind works where.

Nothing here knows a domain's protocol. A queue, shared memory, an object store and a collective
mean different things, so each domain ("inference", "weights", "replay") has a protocol of its own
and registers one resolver here.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, cast, get_args

from meshinfer.optional import explain_missing

__all__ = [
    "AUTO_RULES",
    "INFERENCE_TRANSPORTS",
    "POLICY_BACKENDS",
    "POLICY_BACKEND_OF",
    "TRANSPORT_KINDS",
    "AutoRule",
    "Entry",
    "PolicyBackend",
    "TransportConfig",
    "TransportEntry",
    "TransportKind",
    "as_transport_config",
    "normalize_transport_kind",
    "register_transport_resolver",
    "resolve_transport",
]

TransportKind: TypeAlias = Literal[
    "auto", "queue", "slot", "shared_memory", "process_slot", "distributed", "ray", "monarch"
]
TRANSPORT_KINDS: tuple[str, ...] = get_args(TransportKind)

PolicyBackend: TypeAlias = Literal["threading", "multiprocessing", "ray", "monarch", "spmd"]
POLICY_BACKENDS: tuple[str, ...] = get_args(PolicyBackend)

POLICY_BACKEND_OF: Mapping[str, PolicyBackend] = MappingProxyType(
    {
        "thread": "threading",
        "process": "multiprocessing",
        "ray": "ray",
        "monarch": "monarch",
    }
)
"""The topology of each ``service_backend`` of :class:`~meshinfer.server.server.InferenceServer`."""


@dataclass(frozen=True)
class TransportConfig:
    """A kind and the keyword arguments for the transport of that kind.

    Equal when kind and options are equal. Picklable when the options are. Not hashable, since
    options may hold anything.

    Args:
        kind: one of :data:`TRANSPORT_KINDS`, in any case, or ``None`` for ``"auto"``.
        options: keyword arguments by name; copied, and read-only afterwards.

    Raises:
        ValueError: the kind is unknown.
        TypeError: the kind or an option's name is no string, or ``options`` is no mapping.
    """

    kind: TransportKind = "auto"
    options: Mapping[str, Any] = field(default_factory=dict)

    __hash__ = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", normalize_transport_kind(self.kind))
        object.__setattr__(self, "options", MappingProxyType(_copy_options(self.options)))

    def with_options(self, extra: Mapping[str, Any] | None) -> TransportConfig:
        """The same kind with further options; :class:`ValueError` for one that it has already."""
        more = _copy_options(extra or {})
        twice = sorted(self.options.keys() & more.keys())
        if twice:
            raise ValueError(
                f"{listed(twice)} given both in the TransportConfig and in transport_options; give it"
                " once"
            )
        return TransportConfig(self.kind, {**self.options, **more})

    def __reduce__(self) -> tuple[Any, ...]:
        # A mapping proxy cannot be pickled; the constructor makes a new one of this dict.
        return type(self), (self.kind, dict(self.options))


def _copy_options(options: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(options, Mapping):
        raise TypeError(
            "transport options must be a mapping of keyword arguments,"
            f" not {type(options).__name__}"
        )
    for name in options:
        if not isinstance(name, str):
            raise TypeError(
                "transport options are keyword arguments:"
                f" {name!r} is {type(name).__name__}, not str"
            )
    return dict(options)


def normalize_transport_kind(value: str | None) -> TransportKind:
    """The kind that ``value`` names: ``None`` is ``"auto"``, and upper case is read as lower case.

    Raises:
        ValueError: no kind has this name; the message lists the kinds.
        TypeError: ``value`` is neither a string nor ``None``.
    """
    if value is None:
        return "auto"
    if not isinstance(value, str):
        raise TypeError(f"a transport kind is a str or None, not {type(value).__name__}")
    kind = value.lower()
    if kind not in TRANSPORT_KINDS:
        kinds = listed(TRANSPORT_KINDS)
        raise ValueError(f"unknown transport kind {value!r}; the kinds are {kinds}")
    return cast(TransportKind, kind)


def as_transport_config(value: TransportConfig | str | None) -> TransportConfig:
    """``value`` as a :class:`TransportConfig`; one that already is comes back unchanged.

    Raises:
        ValueError: the kind is unknown.
        TypeError: ``value`` is something else; the message names its type.
    """
    if isinstance(value, TransportConfig):
        return value
    if value is None or isinstance(value, str):
        return TransportConfig(normalize_transport_kind(value))
    raise TypeError(
        f"a transport choice is None, one of {listed(TRANSPORT_KINDS)}, or a TransportConfig,"
        f" not {type(value).__name__}"
    )


def listed(names: Sequence[str]) -> str:
    """``names`` quoted and separated by commas, for a message; ``"none"`` when there are none."""
    return ", ".join(repr(name) for name in names) or "none"


# --- One resolver per domain ---------------------------------------------------------------------

TransportResolver: TypeAlias = Callable[..., Any]

_resolvers: dict[str, TransportResolver] = {}
_resolvers_lock = threading.Lock()


def register_transport_resolver(
    domain: str, resolver: TransportResolver, *, override: bool = False
) -> None:
    """Let ``resolver(choice, **topology)`` make the transports of ``domain``.

    Args:
        domain: what is moved, for example ``"inference"``, ``"weights"`` or ``"replay"``.
        resolver: takes the choice as it was given (``None``, a kind, a config, or what else the
            domain allows) and the facts of the topology by keyword; returns a transport of its
            domain.
        override: replace the resolver that is registered.

    Raises:
        ValueError: the domain has a resolver and ``override`` is false, or its name is empty.
        TypeError: ``domain`` is no string, or ``resolver`` cannot be called.
    """
    if not isinstance(domain, str):
        raise TypeError(f"a transport domain is a str, not {type(domain).__name__}")
    if not domain:
        raise ValueError("a transport domain needs a name, found an empty string")
    if not callable(resolver):
        raise TypeError(f"the resolver of domain {domain!r} must be callable, found {resolver!r}")
    with _resolvers_lock:
        if domain in _resolvers and not override:
            raise ValueError(
                f"transport domain {domain!r} already has a resolver;"
                " pass override=True to replace it"
            )
        _resolvers[domain] = resolver


def resolve_transport(domain: str, choice: Any = None, **topology: Any) -> Any:
    """The transport that the resolver of ``domain`` makes of ``choice`` and the topology's facts.

    Raises:
        ValueError: no resolver is registered for ``domain``; the message lists the domains known.
        Exception: what the resolver raises about the choice.
    """
    with _resolvers_lock:
        resolver = _resolvers.get(domain)
        known = sorted(_resolvers)
    if resolver is None:
        raise ValueError(f"unknown transport domain {domain!r}; known are {listed(known)}")
    return resolver(choice, **topology)


# --- The compatibility table ---------------------------------------------------------------------

_SPECS = ("request_spec", "response_spec")


@dataclass(frozen=True)
class Entry:
    """One row of a domain's table: a class that serves one kind in some topologies.

    Args:
        kind: the word that users ask for.
        class_name: name of the class, whose attribute ``transport_kind`` is ``kind``.
        module: where the class is, imported when it is first asked for.
        policy_backends: topologies in which it works, from :data:`POLICY_BACKENDS`.
        description: one line for the documentation.
    """

    kind: str
    class_name: str
    module: str
    policy_backends: tuple[PolicyBackend, ...]
    description: str

    def load(self) -> Callable[..., Any]:
        """Import the class.

        Raises:
            ImportError: a package is missing; the message has the command to install it.
        """
        try:
            module = importlib.import_module(self.module)
        except ModuleNotFoundError as exc:
            explained = explain_missing(f"transport {self.kind!r}", exc)
            if explained is None:
                raise
            raise explained from exc
        return cast("Callable[..., Any]", getattr(module, self.class_name))


@dataclass(frozen=True)
class TransportEntry(Entry):
    """One row of the compatibility table of inference transports.

    Args:
        needs_specs: it takes ``request_spec`` and ``response_spec``, and works with neither
            missing.
        needs_num_slots: it takes ``num_slots``, and does not work without.
        takes_specs: it takes the specs where they are known, and works without.
        extra: the optional dependency that brings what it imports.
    """

    needs_specs: bool = False
    needs_num_slots: bool = False
    takes_specs: bool = False
    extra: str | None = None

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the arguments of ``make_inference_transport`` that it cannot do without."""
        specs = _SPECS if self.needs_specs else ()
        return (*specs, "num_slots") if self.needs_num_slots else specs

    @property
    def takes(self) -> tuple[str, ...]:
        """Names of those arguments that it is given where they are known."""
        return (*self.needs, *_SPECS) if self.takes_specs else self.needs


@dataclass(frozen=True)
class AutoRule:
    """What ``auto`` picks in one topology: the first rule whose ``given`` are all known wins.

    Args:
        policy_backend: the topology.
        kind: the choice; the table has a row for it in this topology.
        reason: completes "chosen because ...".
        given: names of arguments of ``make_inference_transport`` that must be known for this rule
            to hold.
    """

    policy_backend: PolicyBackend
    kind: TransportKind
    reason: str
    given: tuple[str, ...] = ()


_SAME_HOST: tuple[PolicyBackend, ...] = ("threading", "multiprocessing")

INFERENCE_TRANSPORTS: tuple[TransportEntry, ...] = (
    TransportEntry(
        kind="queue",
        class_name="ThreadingTransport",
        module="meshinfer.inference.threads",
        policy_backends=("threading",),
        description="threads; any payload, any number of clients",
    ),
    TransportEntry(
        kind="queue",
        class_name="MPTransport",
        module="meshinfer.inference.queues",
        policy_backends=("multiprocessing",),
        description="processes on one host; any payload, any number of clients",
    ),
    TransportEntry(
        kind="slot",
        class_name="SlotTransport",
        module="meshinfer.inference.slot",
        policy_backends=("threading",),
        description="threads, one slot for each environment; rows without a lock",
        needs_num_slots=True,
        takes_specs=True,
    ),
    TransportEntry(
        kind="shared_memory",
        class_name="SharedMemoryTransport",
        module="meshinfer.inference.shared",
        policy_backends=_SAME_HOST,
        description="processes on one host; a pool of slots, several requests in flight per client",
        needs_specs=True,
        needs_num_slots=True,
    ),
    TransportEntry(
        kind="process_slot",
        class_name="ProcessSlotTransport",
        module="meshinfer.inference.shared",
        policy_backends=_SAME_HOST,
        description="processes on one host, one slot and one request in flight per client; the fastest",
        needs_specs=True,
        needs_num_slots=True,
    ),
    TransportEntry(
        kind="distributed",
        class_name="DistributedTransport",
        module="meshinfer.inference.distributed",
        policy_backends=("threading", "multiprocessing", "ray", "monarch", "spmd"),
        description="other processes and other nodes, over private gloo pair groups, and NCCL between GPUs",
        needs_specs=True,
    ),
    TransportEntry(
        kind="ray",
        class_name="RayTransport",
        module="meshinfer.inference.ray",
        policy_backends=("ray",),
        description="Ray tasks and actors, on any node; any payload, any number of clients",
        extra="ray",
    ),
    TransportEntry(
        kind="monarch",
        class_name="MonarchTransport",
        module="meshinfer.inference.monarch",
        policy_backends=("threading", "monarch"),
        description="monarch actors, on any host; any payload, any number of clients",
    ),
)
"""Every inference transport of this version. A kind without a row is not offered."""

AUTO_RULES: tuple[AutoRule, ...] = (
    AutoRule("threading", "slot", "the number of environments is known", given=("num_slots",)),
    AutoRule("threading", "queue", "the number of environments is not known"),
    AutoRule("multiprocessing", "shared_memory", "both specs are known", given=_SPECS),
    AutoRule("multiprocessing", "queue", "the specs are not known"),
    AutoRule("ray", "ray", "it reaches Ray's actors, whatever they send"),
    AutoRule("monarch", "monarch", "it reaches monarch's actors, whatever they send"),
    AutoRule("spmd", "distributed", "it reaches ranks that share no parent process"),
)
"""What ``auto`` means, per topology. A topology without a rule has no ``auto`` in this version."""
