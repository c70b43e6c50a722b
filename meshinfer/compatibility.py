"""The compatibility tables and the rules of ``auto`` in Markdown, as they stand in ``docs/``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from meshinfer.transport import (
    AUTO_RULES,
    INFERENCE_TRANSPORTS,
    POLICY_BACKEND_OF,
    PolicyBackend,
    TransportEntry,
)
from meshinfer.weights.resolver import WEIGHT_TRANSPORTS

__all__ = ["auto_markdown", "compatibility_markdown", "service_markdown", "weights_markdown"]


def compatibility_markdown() -> str:
    """One line for each row of :data:`~meshinfer.transport.INFERENCE_TRANSPORTS`."""
    header = ("kind", "class", "`policy_backend`", "`auto` in", "needs", "extra", "for")
    return _markdown(header, map(_markdown_cells, INFERENCE_TRANSPORTS))


def auto_markdown() -> str:
    """One line for each of :data:`~meshinfer.transport.AUTO_RULES`."""
    cells = ((r.policy_backend, r.given, r.kind, r.reason) for r in AUTO_RULES)
    return _markdown(
        ("`policy_backend`", "known", "choice", "because"),
        ((f"`{where}`", _code_list(given), f"`{kind}`", why) for where, given, kind, why in cells),
    )


def service_markdown() -> str:
    """One line for each ``service_backend`` of a server."""
    cells = (
        (f"`{service}`", f"`{topology}`", _code_list(_auto(topology)), _code_list(_kinds(topology)))
        for service, topology in POLICY_BACKEND_OF.items()
    )
    return _markdown(("`service_backend`", "`policy_backend`", "`auto`", "`transport`"), cells)


def weights_markdown() -> str:
    """One line for each row of :data:`~meshinfer.weights.resolver.WEIGHT_TRANSPORTS`."""
    cells = (
        (
            f"`{row.kind}`",
            f"`{row.class_name}`",
            _code_list(row.policy_backends),
            _code_list(row.auto_in),
            row.description,
        )
        for row in WEIGHT_TRANSPORTS
    )
    return _markdown(("kind", "class", "`policy_backend`", "`auto` in", "for"), cells)


def _auto(topology: PolicyBackend) -> list[str]:
    return [rule.kind for rule in AUTO_RULES if rule.policy_backend == topology]


def _kinds(topology: PolicyBackend) -> list[str]:
    return [row.kind for row in INFERENCE_TRANSPORTS if topology in row.policy_backends]


def _markdown(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _markdown_cells(entry: TransportEntry) -> tuple[str, ...]:
    auto = [
        rule.policy_backend
        for rule in AUTO_RULES
        if rule.kind == entry.kind and rule.policy_backend in entry.policy_backends
    ]
    return (
        f"`{entry.kind}`",
        f"`{entry.class_name}`",
        _code_list(entry.policy_backends),
        _code_list(auto),
        _code_list(entry.needs),
        f"`{entry.extra}`" if entry.extra else "-",
        entry.description,
    )


def _code_list(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "-"
