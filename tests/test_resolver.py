"""The choice of an inference transport: over the real table, and over a table of the test."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import socket
import sys
import types
from typing import Any

import pytest
import torch
from support import unavailable
from tensordict import TensorDict

from meshinfer import (
    InferenceTransport,
    MeshError,
    TransportConfig,
    inference_transport_kind,
    make_inference_transport,
    resolve_transport,
)
from meshinfer.inference import nodes, resolver
from meshinfer.transport import (
    INFERENCE_TRANSPORTS,
    POLICY_BACKENDS,
    TRANSPORT_KINDS,
    AutoRule,
    TransportEntry,
)

BUILT = sorted({entry.kind for entry in INFERENCE_TRANSPORTS})
SPEC = TensorDict({"x": torch.zeros(4)})
SPECS = {"request_spec": SPEC, "response_spec": SPEC}


class Recorder:
    """A transport that remembers what it was made with."""

    transport_kind = "slot"

    def __init__(self, *, num_slots: int, depth: int = 1, name: str = "") -> None:
        self.made_with = {"num_slots": num_slots, "depth": depth, "name": name}

    def client(self) -> Any: ...
    def submit(self, payload: Any) -> Any: ...
    def drain(self, max_items: int) -> Any: ...
    def drain_with_timing(self, max_items: int) -> Any: ...
    def wait_for_work(self, timeout: float | None = None) -> Any: ...
    def resolve(self, callback: Any, result: Any) -> None: ...
    def resolve_exception(self, callback: Any, exc: BaseException) -> None: ...
    def close(self) -> None: ...


class SpecRecorder(Recorder):
    transport_kind = "shared_memory"

    def __init__(self, request_spec: Any, response_spec: Any, **options: Any) -> None:
        self.made_with = {"request_spec": request_spec, "response_spec": response_spec, **options}


class Stranger(Recorder):
    transport_kind = "pigeon"


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table with a slot transport for threads and a spec transport for processes."""
    rows = (
        TransportEntry("slot", "Recorder", __name__, ("threading",), "slots", needs_num_slots=True),
        TransportEntry(
            "shared_memory", "SpecRecorder", __name__, ("multiprocessing",), "", needs_specs=True
        ),
    )
    rules = (
        AutoRule("threading", "slot", "the slot count is known", given=("num_slots",)),
        AutoRule("multiprocessing", "shared_memory", "it is there"),
    )
    monkeypatch.setattr(resolver, "INFERENCE_TRANSPORTS", rows)
    monkeypatch.setattr(resolver, "AUTO_RULES", rules)


def made_with(*args: Any, **kwargs: Any) -> dict[str, Any]:
    return make_inference_transport(*args, **kwargs).made_with  # type: ignore[attr-defined]


# --- The choice, over the real table -------------------------------------------------------------

# Written by hand, so that a change of the table is noticed here: what serves each kind in each topology, and what it
# cannot do without.
SPEC_NAMES = ("request_spec", "response_spec")
CLASSES: dict[tuple[str, str], tuple[str, tuple[str, ...]]] = {
    ("queue", "threading"): ("ThreadingTransport", ()),
    ("queue", "multiprocessing"): ("MPTransport", ()),
    ("slot", "threading"): ("SlotTransport", ("num_slots",)),
    ("shared_memory", "threading"): ("SharedMemoryTransport", (*SPEC_NAMES, "num_slots")),
    ("shared_memory", "multiprocessing"): ("SharedMemoryTransport", (*SPEC_NAMES, "num_slots")),
    ("process_slot", "threading"): ("ProcessSlotTransport", (*SPEC_NAMES, "num_slots")),
    ("process_slot", "multiprocessing"): ("ProcessSlotTransport", (*SPEC_NAMES, "num_slots")),
    **{("distributed", b): ("DistributedTransport", SPEC_NAMES) for b in POLICY_BACKENDS},
    ("ray", "ray"): ("RayTransport", ()),
    ("monarch", "threading"): ("MonarchTransport", ()),
    ("monarch", "monarch"): ("MonarchTransport", ()),
}
FACTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "num_slots": {"num_slots": 2},
    "specs": SPECS,
    "all": {"num_slots": 2, **SPECS},
}
# What auto takes with nothing, num_slots, both specs, or all of them known; a phrase where it cannot.
AUTO: dict[str, tuple[str, str, str, str]] = {
    "threading": ("queue", "slot", "queue", "slot"),
    "multiprocessing": ("queue", "queue", "needs num_slots", "shared_memory"),
    "ray": ("ray", "ray", "ray", "ray"),
    "monarch": ("monarch", "monarch", "monarch", "monarch"),
    "spmd": ("needs request_spec", "needs request_spec", "distributed", "distributed"),
}


class RayRecorder(Recorder):
    """Instead of a transport that needs a cluster."""

    transport_kind = "ray"

    def __init__(self) -> None:
        super().__init__(num_slots=0)

    def __enter__(self) -> RayRecorder:
        return self

    def __exit__(self, *_: object) -> None:
        return None


RayRecorder.__name__ = "RayTransport"


@pytest.fixture
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of Ray is answered without a cluster; tests/test_service_backend.py has one."""
    rows = [
        dataclasses.replace(row, module=__name__, class_name="RayRecorder")
        if row.kind == "ray"
        else row
        for row in INFERENCE_TRANSPORTS
    ]
    monkeypatch.setattr(resolver, "INFERENCE_TRANSPORTS", rows)
    monkeypatch.setattr(resolver, "node_address", lambda backend: "127.0.0.1")


@pytest.mark.usefixtures("no_cluster")
@pytest.mark.parametrize("known", FACTS)
@pytest.mark.parametrize("backend", POLICY_BACKENDS)
@pytest.mark.parametrize("kind", TRANSPORT_KINDS[1:])
def test_a_kind_by_name(kind: str, backend: Any, known: str) -> None:
    """Each kind in each topology: the class, or an error that says what is wrong."""
    facts = FACTS[known]
    name, needs = CLASSES.get((kind, backend), (None, ()))
    missing = [need for need in needs if need not in facts]
    if name is not None and not missing:
        with make_inference_transport(kind.upper(), policy_backend=backend, **facts) as made:  # type: ignore[attr-defined]
            assert type(made).__name__ == name
            assert inference_transport_kind(made) == kind
        return
    with pytest.raises(ValueError, match=f"'{kind}'") as raised:
        make_inference_transport(kind, policy_backend=backend, **facts)
    if name is not None:
        assert str(raised.value).endswith(f"needs {' and '.join(missing)}")
    elif kind in BUILT:
        allowed = {c for c, b in CLASSES if b == backend} | {b for c, b in CLASSES if c == kind}
        assert [word for word in allowed if repr(word) not in str(raised.value)] == []


@pytest.mark.usefixtures("no_cluster")
@pytest.mark.parametrize("known", FACTS)
@pytest.mark.parametrize("backend", POLICY_BACKENDS)
@pytest.mark.parametrize("choice", [None, "auto", TransportConfig()])
def test_auto(choice: Any, backend: Any, known: str, caplog: pytest.LogCaptureFixture) -> None:
    expected = AUTO[backend][list(FACTS).index(known)]
    caplog.set_level(logging.DEBUG, logger="meshinfer.inference")
    if " " in expected:
        with pytest.raises(ValueError, match=expected):
            make_inference_transport(choice, policy_backend=backend, **FACTS[known])
        return
    made: Any = make_inference_transport(choice, policy_backend=backend, **FACTS[known])
    with made:
        assert inference_transport_kind(made) == expected
        assert type(made).__name__ == CLASSES[expected, backend][0]
    (record,) = [each for each in caplog.records if "policy_backend" in each.getMessage()]
    assert "auto, because" in record.getMessage()


def test_the_facts_reach_the_transport() -> None:
    slot: Any = make_inference_transport(num_slots=3, **SPECS)
    assert slot.num_slots == 3
    assert [leaf.key for leaf in slot.request_layout.leaves] == [("x",)]
    slot = make_inference_transport("slot", transport_options={"num_slots": 3})
    assert slot.request_layout is None
    config = TransportConfig("auto", {"num_slots": 2, **SPECS})
    slot = make_inference_transport(config)
    assert slot.request_layout is not None


def test_every_kind_is_built() -> None:
    assert set(BUILT) == set(TRANSPORT_KINDS) - {"auto"}


def test_a_distributed_server_listens_where_its_runtime_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(resolver, "node_address", lambda backend: "127.0.0.9")

    def listens(**options: Any) -> str:
        made: Any = make_inference_transport(
            "distributed", policy_backend="ray", transport_options=options, **SPECS
        )
        with made:
            return str(made.address.host)

    assert listens() == "127.0.0.9"
    assert listens(host="127.0.0.2") == "127.0.0.2"
    assert listens(interface="lo") == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert listens() == "127.0.0.1"


@pytest.mark.parametrize(
    ("transport", "address"),
    [
        ("unix", "127.0.0.1"),
        ("tcp:127.0.0.3:0", "127.0.0.3"),
        ("tcp:[::1]:0", "::1"),
        ("tcp(Hostname)", "this host's name 'here' resolves to the loopback address 127.0.0.1"),
        ("tcp:0.0.0.0:0", "this host's name 'here' resolves to the loopback address 127.0.0.1"),
    ],
)
def test_monarch_tells_where_a_node_listens(
    transport: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = types.ModuleType("monarch.config")
    config.get_global_config = lambda: {"default_transport": transport}  # type: ignore[attr-defined]
    for name in ("monarch", "monarch.actor"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "monarch.config", config)
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    monkeypatch.setattr(nodes, "resolve", lambda host: "127.0.0.1" if host == "here" else host)
    if " " not in address:
        assert nodes.node_address("monarch") == address
    else:
        with pytest.raises(MeshError, match=f"{address}.*interface="):
            nodes.node_address("monarch")


@pytest.mark.parametrize("kind", ["auto", "distributed"])
def test_ray_must_be_initialised(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("ray") is None:
        unavailable("Ray is not installed")
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ValueError, match=r"Ray, which is not initialised.*ray\.init\(\)"):
        make_inference_transport(kind, policy_backend="ray", **SPECS)


@pytest.mark.parametrize("kind", ["slot", "queue", "distributed"])
@pytest.mark.parametrize("given", SPEC_NAMES)
def test_half_of_the_specs_is_refused(kind: str, given: str) -> None:
    facts: dict[str, Any] = {given: SPEC}
    with pytest.raises(ValueError, match=f"{given} given without"):
        make_inference_transport(kind, num_slots=2, **facts)


def test_an_unknown_option_lists_those_of_the_kind() -> None:
    with pytest.raises(TypeError, match=r"'distributed' has no option 'colour'.*'timeout'"):
        make_inference_transport("distributed", transport_options={"colour": "red"}, **SPECS)
    with pytest.raises(TypeError, match="'queue' has no option 'colour'; its options are none"):
        make_inference_transport("queue", transport_options={"colour": "red"})
    with pytest.raises(TypeError, match="'slot' has no option 'colour'; its options are none"):
        make_inference_transport("slot", num_slots=1, transport_options={"colour": "red"})


# --- The choice, over a table of the test --------------------------------------------------------


@pytest.mark.usefixtures("table")
def test_auto_follows_the_rules_and_says_why_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="meshinfer")
    assert made_with("auto", num_slots=3)["num_slots"] == 3
    (record,) = caplog.records
    assert record.levelno == logging.DEBUG
    assert record.name.startswith("meshinfer")
    message = record.getMessage()
    assert all(word in message for word in ("slot", "Recorder", "threading", "count is known"))


@pytest.mark.usefixtures("table")
def test_auto_is_deterministic() -> None:
    kinds = {inference_transport_kind(make_inference_transport(num_slots=2)) for _ in range(5)}
    assert kinds == {"slot"}


@pytest.mark.usefixtures("table")
def test_auto_does_not_fall_back_when_a_fact_is_missing() -> None:
    with pytest.raises(ValueError, match=r"'auto'.*'threading'.*'slot'"):
        make_inference_transport("auto")


@pytest.mark.usefixtures("table")
def test_a_choice_by_name_is_logged_as_such(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="meshinfer")
    make_inference_transport("Slot", num_slots=1)
    (record,) = caplog.records
    assert "asked for by name" in record.getMessage()


@pytest.mark.usefixtures("table")
def test_a_kind_that_does_not_fit_the_topology_names_what_does() -> None:
    with pytest.raises(ValueError, match=r"'slot' does not work.*'threading'.*'shared_memory'"):
        make_inference_transport("slot", policy_backend="multiprocessing", num_slots=2)


@pytest.mark.usefixtures("table")
def test_a_missing_slot_count_is_named() -> None:
    with pytest.raises(ValueError, match="'slot' needs num_slots"):
        make_inference_transport("slot")


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("choice", ["slot", "auto"])
@pytest.mark.parametrize("given", ["request_spec", "response_spec"])
def test_one_spec_without_the_other_is_refused(choice: str, given: str) -> None:
    (missing,) = SPECS.keys() - {given}
    facts: dict[str, Any] = {given: SPEC}
    with pytest.raises(ValueError, match=f"{given} given without {missing}"):
        make_inference_transport(choice, num_slots=2, **facts)


@pytest.mark.usefixtures("table")
def test_options_of_config_and_argument_are_merged() -> None:
    config = TransportConfig("slot", {"depth": 3})
    made = made_with(config, num_slots=2, transport_options={"name": "x"})
    assert made == {"num_slots": 2, "depth": 3, "name": "x"}


@pytest.mark.usefixtures("table")
def test_an_option_given_twice_is_refused() -> None:
    config = TransportConfig("slot", {"depth": 3})
    with pytest.raises(ValueError, match="'depth' given both"):
        make_inference_transport(config, num_slots=2, transport_options={"depth": 3})


@pytest.mark.usefixtures("table")
def test_facts_may_stand_among_the_options() -> None:
    config = TransportConfig("auto", {"num_slots": 4})
    assert made_with(config)["num_slots"] == 4
    with pytest.raises(ValueError, match="'num_slots' given both"):
        make_inference_transport(config, num_slots=4)


@pytest.mark.usefixtures("table")
def test_a_fact_that_the_kind_does_not_take_is_no_option_of_it() -> None:
    with pytest.raises(TypeError, match="'slot' has no option 'request_spec', 'response_spec'"):
        make_inference_transport("slot", num_slots=1, transport_options=SPECS)


@pytest.mark.usefixtures("table")
def test_unknown_options_are_named_with_the_accepted_ones() -> None:
    with pytest.raises(TypeError, match=r"no option 'height'; its options are 'depth', 'name'$"):
        make_inference_transport("slot", num_slots=1, transport_options={"height": 3})


@pytest.mark.usefixtures("table")
def test_a_class_that_takes_any_option_gets_them() -> None:
    made = made_with(
        "auto", policy_backend="multiprocessing", transport_options={"height": 3}, **SPECS
    )
    assert made == {**SPECS, "height": 3}


@pytest.mark.parametrize(
    ("num_slots", "error"), [(0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError)]
)
def test_a_slot_count_must_be_a_positive_int(num_slots: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="num_slots must be"):
        make_inference_transport("distributed", num_slots=num_slots, **SPECS)


def test_an_unknown_topology_lists_those_known() -> None:
    with pytest.raises(ValueError, match="'carrier'") as raised:
        make_inference_transport("distributed", policy_backend="carrier")  # type: ignore[arg-type]
    assert all(repr(backend) in str(raised.value) for backend in POLICY_BACKENDS)


# --- Ready instances -----------------------------------------------------------------------------


@pytest.mark.parametrize("backend", POLICY_BACKENDS)
def test_a_ready_instance_comes_back_unchanged(backend: Any) -> None:
    ready = Recorder(num_slots=1)
    assert isinstance(ready, InferenceTransport)
    assert make_inference_transport(ready, policy_backend=backend) is ready
    assert make_inference_transport(ready, transport_options={}) is ready


@pytest.mark.parametrize(
    "beside",
    [{"transport_options": {"depth": 1}}, {"num_slots": 2}, SPECS],
    ids=lambda b: next(iter(b)),
)
def test_what_is_given_beside_a_ready_instance_is_refused(beside: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"'{next(iter(beside))}'.*beside a ready Recorder"):
        make_inference_transport(Recorder(num_slots=1), **beside)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (3, "int"),
        ({"kind": "queue"}, "dict"),
        (object(), "object"),
        (Recorder, "the class Recorder; pass an instance"),
    ],
)
def test_what_is_no_transport_is_refused(value: Any, found: str) -> None:
    with pytest.raises(TypeError, match=f"a ready InferenceTransport, not {found}"):
        make_inference_transport(value)


def test_the_kind_of_any_instance() -> None:
    class Derived(Recorder):
        pass

    assert inference_transport_kind(Recorder(num_slots=1)) == "slot"
    assert inference_transport_kind(Derived(num_slots=1)) == "slot"
    assert inference_transport_kind(Stranger(num_slots=1)) == "custom"
    assert inference_transport_kind(object()) == "custom"


def test_the_inference_domain_is_registered() -> None:
    ready = Recorder(num_slots=1)
    assert resolve_transport("inference", ready, policy_backend="spmd") is ready
