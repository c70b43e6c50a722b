"""The envelope: kinds, configuration, registry and the compatibility table."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from hidden import hide

import meshinfer.transport
from meshinfer import (
    TransportConfig,
    TransportKind,
    as_transport_config,
    normalize_transport_kind,
    register_transport_resolver,
    resolve_transport,
)
from meshinfer.compatibility import auto_markdown, compatibility_markdown, service_markdown
from meshinfer.transport import (
    AUTO_RULES,
    INFERENCE_TRANSPORTS,
    POLICY_BACKENDS,
    TRANSPORT_KINDS,
    TransportEntry,
)

ROOT = Path(__file__).resolve().parents[1]
KINDS = (
    "auto",
    "queue",
    "slot",
    "shared_memory",
    "process_slot",
    "distributed",
    "ray",
    "monarch",
)


@pytest.fixture
def domain() -> Iterator[str]:
    """A domain of which the registry is rid afterwards."""
    yield "test-domain"
    meshinfer.transport._resolvers.pop("test-domain", None)


# --- Kinds and configuration ---------------------------------------------------------------------


def test_the_kinds_are_those_of_the_contract() -> None:
    assert get_args(TransportKind) == KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_read_in_any_case(kind: str) -> None:
    assert normalize_transport_kind(kind.upper()) == kind
    assert normalize_transport_kind(kind.title()) == kind


def test_none_means_auto() -> None:
    assert normalize_transport_kind(None) == "auto"


def test_an_unknown_kind_lists_all_kinds() -> None:
    with pytest.raises(ValueError, match="'carrier_pigeon'") as raised:
        normalize_transport_kind("carrier_pigeon")
    assert all(repr(kind) in str(raised.value) for kind in KINDS)


@pytest.mark.parametrize("value", [3, b"queue", ["queue"]])
def test_a_kind_that_is_no_string_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=type(value).__name__):
        normalize_transport_kind(value)


def test_config_defaults() -> None:
    config = TransportConfig()
    assert config.kind == "auto"
    assert dict(config.options) == {}


def test_config_normalizes_its_kind() -> None:
    assert TransportConfig("Distributed").kind == "distributed"  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="carrier_pigeon"):
        TransportConfig("carrier_pigeon")  # type: ignore[arg-type]


def test_config_is_frozen() -> None:
    config = TransportConfig("queue", {"depth": 3})
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.kind = "slot"  # type: ignore[misc]
    with pytest.raises(TypeError, match="item assignment"):
        config.options["depth"] = 4  # type: ignore[index]


def test_config_copies_its_options() -> None:
    options = {"depth": 3}
    config = TransportConfig("queue", options)
    options["depth"] = 4
    assert config.options["depth"] == 3


@pytest.mark.parametrize(
    "clone",
    [lambda c: pickle.loads(pickle.dumps(c)), copy.copy, copy.deepcopy, dataclasses.replace],
)
def test_config_survives_pickle_and_copies(
    clone: Callable[[TransportConfig], TransportConfig],
) -> None:
    config = TransportConfig("distributed", {"timeout": 3.0, "host": "127.0.0.1"})
    twin = clone(config)
    assert twin == config
    with pytest.raises(TypeError, match="item assignment"):
        twin.options["timeout"] = 4.0  # type: ignore[index]


def test_config_equality_is_of_kind_and_options() -> None:
    assert TransportConfig("queue", {"a": [1]}) == TransportConfig("queue", {"a": [1]})
    assert TransportConfig("queue", {"a": [1]}) != TransportConfig("queue", {"a": [2]})
    assert TransportConfig("queue") != TransportConfig("slot")


def test_config_is_explicitly_unhashable() -> None:
    assert TransportConfig.__hash__ is None
    with pytest.raises(TypeError, match="unhashable"):
        hash(TransportConfig())


@pytest.mark.parametrize(
    ("options", "found"), [({3: 4}, "int"), ([("a", 1)], "list"), (None, "NoneType")]
)
def test_config_refuses_options_that_are_no_keyword_arguments(options: Any, found: str) -> None:
    with pytest.raises(TypeError, match=found):
        TransportConfig("queue", options)


def test_as_transport_config() -> None:
    config = TransportConfig("slot", {"a": 1})
    assert as_transport_config(None) == TransportConfig("auto")
    assert as_transport_config("SLOT") == TransportConfig("slot")
    assert as_transport_config(config) is config


@pytest.mark.parametrize("value", [7, {"kind": "queue"}, TransportConfig, object()])
def test_as_transport_config_names_a_type_that_it_cannot_use(value: Any) -> None:
    with pytest.raises(TypeError, match=f"not {type(value).__name__}"):
        as_transport_config(value)


# --- The registry --------------------------------------------------------------------------------


def test_a_resolver_gets_the_choice_and_the_topology(domain: str) -> None:
    register_transport_resolver(domain, lambda choice, **topology: (choice, topology))
    assert resolve_transport(domain, "slot", ranks=3) == ("slot", {"ranks": 3})


def test_registering_twice_needs_override(domain: str) -> None:
    register_transport_resolver(domain, lambda choice: "first")
    with pytest.raises(ValueError, match=r"'test-domain'.*override=True"):
        register_transport_resolver(domain, lambda choice: "second")
    assert resolve_transport(domain, None) == "first"
    register_transport_resolver(domain, lambda choice: "second", override=True)
    assert resolve_transport(domain, None) == "second"


def test_an_unknown_domain_lists_those_known(domain: str) -> None:
    register_transport_resolver(domain, lambda choice: choice)
    with pytest.raises(ValueError, match=r"'weather'.*'inference', 'test-domain'"):
        resolve_transport("weather", "auto")


@pytest.mark.parametrize(
    ("name", "function", "error"),
    [("", print, ValueError), (3, print, TypeError), ("test-domain", "print", TypeError)],
)
def test_a_bad_registration_is_refused(name: Any, function: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="domain"):
        register_transport_resolver(name, function)


# --- The table -----------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", INFERENCE_TRANSPORTS, ids=lambda entry: entry.class_name)
def test_every_row_has_a_class_of_its_kind(entry: TransportEntry) -> None:
    transport_class = entry.load()
    assert transport_class.__name__ == entry.class_name
    assert transport_class.transport_kind == entry.kind  # type: ignore[attr-defined]
    assert entry.kind in TRANSPORT_KINDS
    assert entry.policy_backends
    assert set(entry.policy_backends) <= set(POLICY_BACKENDS)


def test_no_two_rows_serve_one_kind_in_one_topology() -> None:
    pairs = [(e.kind, backend) for e in INFERENCE_TRANSPORTS for backend in e.policy_backends]
    assert len(pairs) == len(set(pairs))


def test_every_auto_rule_has_a_row() -> None:
    pairs = {(e.kind, backend) for e in INFERENCE_TRANSPORTS for backend in e.policy_backends}
    assert {(rule.kind, rule.policy_backend) for rule in AUTO_RULES} <= pairs


def test_distributed_works_everywhere_and_is_picked_only_between_ranks() -> None:
    (entry,) = (e for e in INFERENCE_TRANSPORTS if e.kind == "distributed")
    assert entry.policy_backends == POLICY_BACKENDS
    assert [r.policy_backend for r in AUTO_RULES if r.kind == "distributed"] == ["spmd"]


@pytest.mark.parametrize(
    ("name", "render"),
    [
        ("compatibility", compatibility_markdown),
        ("auto", auto_markdown),
        ("service", service_markdown),
    ],
)
def test_the_documentation_has_the_table(name: str, render: Callable[[], str]) -> None:
    text = (ROOT / "docs" / "transports.md").read_text()
    begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
    assert text.split(begin)[1].split(end)[0] == render()


@pytest.mark.parametrize(
    ("package", "command"),
    [("ray", r"pip install 'meshinfer\[ray\]'"), ("monarch", "pip install torchmonarch")],
)
def test_a_missing_package_is_told_with_the_command(
    package: Any, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(package, monkeypatch)
    entry = TransportEntry(package, "X", f"{package}.something", (package,), "")
    with pytest.raises(ImportError, match=f"{package!r} needs {package}: {command}") as raised:
        entry.load()
    assert isinstance(raised.value.__cause__, ModuleNotFoundError)


def test_a_module_that_nothing_brings_is_told_as_it_is() -> None:
    entry = TransportEntry("ray", "X", "meshinfer_no_such_module", ("ray",), "", extra="ray")
    with pytest.raises(ModuleNotFoundError, match="meshinfer_no_such_module"):
        entry.load()
