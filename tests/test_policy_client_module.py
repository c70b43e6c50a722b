"""A remote policy in the place of a local one."""

from __future__ import annotations

import asyncio
import copy
import gc
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support import PRELOADED, wait_until
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    InteractionType,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
    set_interaction_type,
)
from tensordict.nn.probabilistic import interaction_type

from meshinfer import (
    ClosedError,
    DistributedTransport,
    InferenceServer,
    PolicyClientModule,
    ServerClosedError,
    make_inference_transport,
)

SECONDS = 20.0
NESTED = {"in_keys": [("agent", "obs"), "scale"], "out_keys": [("agent", "act")]}
REQUEST = TensorDict({"x": torch.zeros(2)})
RESPONSE = TensorDict({"y": torch.zeros(2)})
TRANSPORTS: dict[str, Callable[[], Any]] = {
    "distributed": lambda: DistributedTransport(REQUEST, RESPONSE),
    "queue": lambda: make_inference_transport("queue"),
}
EACH_KIND = pytest.mark.parametrize("kind", TRANSPORTS)


def double(batch: TensorDictBase) -> TensorDict:
    return TensorDict({"y": 2 * batch["x"]}, batch.batch_size)


def observation(value: float = 1.0) -> TensorDict:
    return TensorDict({"x": torch.full((2,), value), "other": torch.zeros(5)})


@contextmanager
def module_of(
    policy: Any = double, kind: str = "queue", server_options: Any = None, **options: Any
) -> Iterator[PolicyClientModule]:
    with (
        InferenceServer(policy, TRANSPORTS[kind](), **(server_options or {})) as server,
        PolicyClientModule(server, ["x"], ["y"], **options) as module,
    ):
        yield module


# --- As a TensorDictModule -----------------------------------------------------------------------


@EACH_KIND
@pytest.mark.parametrize("source", ["server", "transport", "client"])
def test_it_takes_whatever_leads_to_a_client(kind: str, source: str) -> None:
    with InferenceServer(double, TRANSPORTS[kind](), policy_version=4) as server:
        given = {"server": server, "transport": server.transport, "client": server.client()}
        with PolicyClientModule(given[source], ["x"], ["y"]) as module:
            assert isinstance(module, TensorDictModuleBase)
            assert (module.in_keys, module.out_keys) == (["x"], ["y"])
            assert not list(module.parameters())
            td = observation(3.0)
            assert module(td) is td
            assert set(td.keys()) == {"x", "other", "y", "policy_version"}
            assert td["y"].tolist() == [6.0, 6.0]
            assert int(td["policy_version"]) == 4
        given["client"].close()


def test_only_its_keys_are_sent_and_taken() -> None:
    sent: list[Any] = []

    def policy(batch: TensorDictBase) -> TensorDict:
        sent.append(set(batch.keys(True, True)))
        action = batch["agent", "obs"] * batch["scale"]
        return TensorDict({"agent": {"act": action, "obs": -action}, "more": action}, [len(batch)])

    td = TensorDict(
        {"agent": {"obs": torch.ones(3), "id": torch.zeros(1)}, "scale": torch.tensor(3.0)}
    )
    with (
        InferenceServer(policy, TRANSPORTS["queue"]()) as server,
        PolicyClientModule(server, **NESTED) as module,
    ):
        module(td)
    assert sent == [{("agent", "obs"), "scale"}]
    assert td["agent", "act"].tolist() == [3.0] * 3
    assert td["agent", "obs"].tolist() == [1.0] * 3
    assert "more" not in td.keys()  # noqa: SIM118


def test_other_ways_to_call_it() -> None:
    with module_of() as module:
        td, out = observation(), TensorDict({})
        assert module(td, tensordict_out=out) is out
        assert set(td.keys()) == {"x", "other"}
        assert out["y"].tolist() == [2.0, 2.0]
        assert module(x=torch.ones(2)).tolist() == [2.0, 2.0]
        after = TensorDictModule(lambda y: y + 1, ["y"], ["z"])
        chained = TensorDictSequential(module, after)
        assert (chained.in_keys, chained.out_keys) == (["x"], ["y", "z"])
        assert chained(observation())["z"].tolist() == [3.0, 3.0]


def test_environments_in_one_request() -> None:
    spec = [example.expand(3) for example in (REQUEST, RESPONSE)]
    with (
        InferenceServer(double, DistributedTransport(*spec)) as server,
        PolicyClientModule(server, ["x"], ["y"]) as module,
    ):
        td = module(TensorDict({"x": torch.ones(3, 2)}, [3]))
        assert td["y"].tolist() == [[2.0, 2.0]] * 3
        assert td["policy_version"].tolist() == [0] * 3


def test_exploration_modes_travel() -> None:
    modes: list[Any] = []

    def policy(batch: TensorDictBase) -> TensorDict:
        modes.append(interaction_type())
        return double(batch)

    with module_of(policy) as module:
        module(observation())
        with set_interaction_type(InteractionType.RANDOM):
            module(observation())
            module.submit(observation()).result(SECONDS)
    assert modes == [None, InteractionType.RANDOM, InteractionType.RANDOM]


@pytest.mark.parametrize("key", ["version", ("info", "version"), None])
@EACH_KIND
def test_where_the_version_goes(key: Any, kind: str) -> None:
    options = {"policy_version_key": key, "policy_version": 3}
    with module_of(kind=kind, server_options=options) as module:
        td = module(observation())
        keys = set(td.keys(True, True))
        assert keys == {"x", "other", "y"} | ({key} if key else set())
        assert key is None or int(td[key]) == 3


def test_a_client_does_not_tell_where_the_version_is_but_a_key_does() -> None:
    with InferenceServer(double, TRANSPORTS["queue"](), policy_version_key="v") as server:
        with PolicyClientModule(server.client(), ["x"], ["y"]) as module:
            assert set(module(observation()).keys()) == {"x", "other", "y"}
        with PolicyClientModule(server.client(), ["x"], ["y", "v"]) as module:
            assert int(module(observation())["v"]) == 0


# --- Errors and deadlines ------------------------------------------------------------------------


@EACH_KIND
def test_what_the_policy_raised(kind: str) -> None:
    def fail(_: TensorDictBase) -> TensorDict:
        raise ArithmeticError("not today")

    with module_of(fail, kind, max_inflight=1) as module:
        for _ in range(2):
            with pytest.raises(ArithmeticError, match="not today"):
                module(observation())
            with pytest.raises(ArithmeticError, match="not today"):
                module.submit(observation()).result(SECONDS)


def test_keys_that_are_missing() -> None:
    with module_of() as module, pytest.raises(KeyError, match="x"):
        module(TensorDict({"other": torch.zeros(2)}))
    with (
        InferenceServer(double, TRANSPORTS["queue"]()) as server,
        PolicyClientModule(server, ["x"], ["y", "z"]) as module,
    ):
        td = observation()
        with pytest.raises(KeyError, match="lacks 'z'; it has 'policy_version', 'y'"):
            module(td)
        assert set(td.keys()) == {"x", "other"}


@pytest.mark.parametrize("max_inflight", [None, 1])
@EACH_KIND
def test_a_reply_that_is_late(kind: str, max_inflight: int | None) -> None:
    opened = threading.Event()

    def slow(batch: TensorDictBase) -> TensorDict:
        assert opened.wait(SECONDS)
        return double(batch)

    with module_of(slow, kind, timeout=0.2, max_inflight=max_inflight) as module:
        for _ in range(2):
            with pytest.raises(TimeoutError, match=r"0\.2 s"):
                module(observation())
        opened.set()
        future = module.submit(observation())
        assert future.result(SECONDS)["y"].tolist() == [2.0, 2.0]


def test_after_its_end() -> None:
    with InferenceServer(double, TRANSPORTS["queue"]()) as server:
        module = PolicyClientModule(server, ["x"], ["y"], max_inflight=1)
        module.close()
        module.close()
        for _ in range(2):
            with pytest.raises(ClosedError):
                module(observation())
            with pytest.raises(ClosedError):
                module.submit(observation())
        other = PolicyClientModule(server, ["x"], ["y"])
    with pytest.raises(ServerClosedError):
        other(observation())


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((["x"], "y"), {}, TypeError, "out_keys='y': expected a list"),
        (("x", ["y"]), {}, TypeError, "in_keys='x': expected a list"),
        (([], ["y"]), {}, ValueError, "in_keys is empty"),
        ((["x"], ["y"]), {"max_inflight": 0}, ValueError, "max_inflight=0"),
        ((["x"], ["y"]), {"max_inflight": 1.0}, TypeError, "max_inflight=1.0"),
        ((["x"], ["y"]), {"timeout": 0}, ValueError, "timeout=0"),
    ],
)
def test_arguments_that_cannot_work(
    arguments: Any, options: Any, error: type[Exception], message: str
) -> None:
    with (
        InferenceServer(double, TRANSPORTS["queue"]()) as server,
        pytest.raises(error, match=message),
    ):
        PolicyClientModule(server, *arguments, **options)


@pytest.mark.parametrize("source", [None, double, 3, PlainSource := type("PlainSource", (), {})])
def test_sources_that_lead_nowhere(source: Any) -> None:
    with pytest.raises(TypeError, match="expected a server, a transport or a client, found"):
        PolicyClientModule(source, ["x"], ["y"])


# --- Requests in flight --------------------------------------------------------------------------


class HeldPolicy:
    """Answers once its gate is open, or fails."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.opened = threading.Event()
        self.fails = False

    def __call__(self, batch: TensorDictBase) -> TensorDict:
        self.asked.set()
        assert self.opened.wait(SECONDS)
        if self.fails:
            raise ArithmeticError("not today")
        return double(batch)


class PlainFuture:
    """What the protocol promises and no more: nobody is told when it is done."""

    def __init__(self, future: Any) -> None:
        self._future = future

    def done(self) -> bool:
        return bool(self._future.done())

    def result(self, timeout: float | None = None) -> Any:
        return self._future.result(timeout)

    def cancel(self) -> bool:
        return bool(self._future.cancel())


class PlainClient:
    """A client of another make."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __call__(self, payload: Any, timeout: float | None = None) -> Any:
        return self._client(payload, timeout)

    def submit(self, payload: Any) -> PlainFuture:
        return PlainFuture(self._client.submit(payload))

    def close(self) -> None:
        self._client.close()


class Holder:
    """A module with room for two requests, both taken and held by the policy; and the ways to end the second."""

    def __init__(self, module: PolicyClientModule, policy: HeldPolicy) -> None:
        self.module = module
        self.policy = policy
        self.futures = [module.submit(observation(value)) for value in (1.0, 2.0)]

    def answer(self) -> None:
        self.policy.opened.set()

    def fail(self) -> None:
        self.policy.fails = True
        self.policy.opened.set()

    def cancel(self) -> None:
        assert self.futures[1].cancel()

    def forget(self) -> None:
        del self.futures[1]
        gc.collect()


@contextmanager
def holding(kind: str, **options: Any) -> Iterator[Holder]:
    policy = HeldPolicy()
    transport = TRANSPORTS["queue" if kind == "plain" else kind]()
    with InferenceServer(policy, transport) as server:
        client = PlainClient(server.client()) if kind == "plain" else server.client()
        with PolicyClientModule(client, ["x"], ["y"], max_inflight=2, **options) as module:
            try:
                yield Holder(module, policy)
            finally:
                policy.opened.set()


EACH_FUTURE = pytest.mark.parametrize("kind", [*TRANSPORTS, "plain"])


@EACH_FUTURE
@pytest.mark.parametrize("end", ["answer", "fail", "cancel", "forget"])
def test_the_next_request_waits_for_room(kind: str, end: str) -> None:
    """Nobody asks for a result meanwhile."""
    with holding(kind) as it:
        sent = threading.Event()
        futures: list[Any] = []

        def submit() -> None:
            futures.append(it.module.submit(observation(3.0)))
            sent.set()

        thread = threading.Thread(target=submit)
        thread.start()
        assert not sent.wait(0.3)
        getattr(it, end)()
        assert sent.wait(SECONDS)
        thread.join()
        it.policy.fails = False
        it.policy.opened.set()
        if end != "fail":
            assert futures[0].result(SECONDS)["y"].tolist() == [6.0, 6.0]


@EACH_FUTURE
def test_room_that_does_not_come(kind: str) -> None:
    with holding(kind, timeout=0.3) as it:
        for call in (it.module.submit, it.module):
            began = time.monotonic()
            with pytest.raises(TimeoutError, match=r"max_inflight=2 requests were in flight for"):
                call(observation())
            assert time.monotonic() - began >= 0.3
        with pytest.raises(TimeoutError):
            it.futures[0].result(0.05)  # it keeps its place
        with pytest.raises(TimeoutError, match="max_inflight=2"):
            it.module.submit(observation())
        it.policy.opened.set()
        assert it.futures[0].result(SECONDS)["y"].tolist() == [2.0, 2.0]
        assert it.futures[1].result(SECONDS)["y"].tolist() == [4.0, 4.0]
        it.module.timeout = SECONDS
        assert it.module(observation(5.0))["y"].tolist() == [10.0, 10.0]


@EACH_FUTURE
def test_room_is_neither_lost_nor_gained(kind: str) -> None:
    """After hundreds of requests that ended in every way, there is room for two and not for a third."""
    with holding(kind, timeout=SECONDS) as it:
        it.policy.opened.set()
        for number in range(200):
            future = it.module.submit(observation(float(number)))
            if number % 4 == 0:
                future.cancel()
                future.cancel()
            elif number % 4 == 1:
                assert future.result(SECONDS)["y"].tolist() == [2.0 * number] * 2
                assert future.done()
                assert not future.cancel()
            elif number % 4 == 2:
                it.module(observation())
            del future
        assert all(future.result(SECONDS) is not None for future in it.futures)
        it.policy.opened.clear()
        it.module.timeout = 0.3
        held = [it.module.submit(observation()) for _ in range(2)]
        with pytest.raises(TimeoutError, match="max_inflight"):
            it.module.submit(observation())
        it.policy.opened.set()
        assert [future.result(SECONDS)["y"].tolist() for future in held] == [[2.0, 2.0]] * 2


def test_threads_share_the_room() -> None:
    running, most, lock = [0], [0], threading.Lock()

    def count(change: int) -> None:
        with lock:
            running[0] += change
            most[0] = max(most[0], running[0])

    with module_of(timeout=SECONDS, max_inflight=3) as module:
        client: Any = module.client

        class Counting:
            def __call__(self, payload: Any, timeout: float | None = None) -> Any:
                count(1)
                try:
                    return client(payload, timeout)
                finally:
                    count(-1)

            submit = staticmethod(client.submit)
            close = staticmethod(client.close)

        module.client = Counting()

        def work(start: int) -> None:
            for number in range(start, start + 100):
                assert module(observation(float(number)))["y"].tolist() == [2.0 * number] * 2

        threads = [threading.Thread(target=work, args=(1000 * n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert 1 <= most[0] <= 3


def test_the_server_ends_while_a_request_waits_for_room() -> None:
    policy = HeldPolicy()
    server = InferenceServer(policy, TRANSPORTS["distributed"]()).start()
    module = PolicyClientModule(server, ["x"], ["y"], max_inflight=1)
    held = module.submit(observation())
    assert policy.asked.wait(SECONDS)
    errors: list[BaseException] = []

    def submit() -> None:
        try:
            module.submit(observation())
        except ServerClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=submit)
    thread.start()
    with pytest.raises(TimeoutError):
        server.shutdown(timeout=0.2)
    thread.join(SECONDS)
    assert len(errors) == 1
    with pytest.raises(ServerClosedError):
        held.result(SECONDS)
    policy.opened.set()
    assert wait_until(lambda: not server.is_alive, SECONDS)
    module.close()


class Frozen(PlainFuture):
    """Of a server that neither answers nor closes. Whoever asks after it learns that it is gone."""

    patience = 0.05

    def __init__(self, future: Any) -> None:
        super().__init__(future)
        self._callback: Any = None

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        self._callback = callback

    def check_alive(self) -> None:
        self._future.cancel()
        self._callback(self)


def test_whoever_waits_for_room_asks_after_the_server() -> None:
    with holding("plain") as it:
        client: Any = it.module.client
        it.module.client = type(
            "FrozenClient", (PlainClient,), {"submit": lambda self, td: Frozen(client.submit(td))}
        )(client)
        for future in it.futures:
            future.cancel()
        frozen = [it.module.submit(observation()) for _ in range(2)]
        later = it.module.submit(observation())
        assert [future.done() for future in (*frozen, later)] == [True, False, False]


def test_a_future_can_be_awaited() -> None:
    async def ask(module: PolicyClientModule) -> Any:
        futures: list[Any] = [module.submit(observation(float(n))) for n in range(2)]
        return [(await future)["y"].tolist() for future in futures]

    with module_of(max_inflight=2) as module:
        for _ in range(3):
            assert asyncio.run(ask(module)) == [[0.0, 0.0], [2.0, 2.0]]


# --- Copies --------------------------------------------------------------------------------------


def call_in_child(module: PolicyClientModule, results: Any) -> None:
    with module:
        td = module(observation(4.0))
        room = (module.max_inflight, module.timeout)
        results.put((td["y"].tolist(), int(td["v"]), room, module.in_keys, module.out_keys))


def test_it_goes_to_another_process() -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    results = context.SimpleQueue()
    with InferenceServer(
        double, TRANSPORTS["distributed"](), policy_version_key="v", policy_version=2
    ) as server:
        module = PolicyClientModule(server, ["x"], ["y"], max_inflight=3, timeout=SECONDS)
        child = context.Process(target=call_in_child, args=(module, results))
        child.start()
        child.join(60)
        assert child.exitcode == 0
        assert results.get() == ([8.0, 8.0], 2, (3, SECONDS), ["x"], ["y"])
        assert module(observation())["y"].tolist() == [2.0, 2.0]
        module.close()


def test_a_pickle_has_room_of_its_own() -> None:
    with holding("distributed", timeout=0.3) as it:
        with pytest.raises(TimeoutError, match="max_inflight"):
            it.module.submit(observation())
        with pickle.loads(pickle.dumps(it.module)) as other:
            futures = [other.submit(observation()) for _ in range(2)]
            with pytest.raises(TimeoutError, match="max_inflight"):
                other.submit(observation())
            it.policy.opened.set()
            for future in futures:
                future.result(SECONDS)


def test_a_deep_copy_shares_the_client() -> None:
    with module_of(max_inflight=2, server_options={"policy_version_key": "v"}) as module:
        other = copy.deepcopy(TensorDictSequential(module))[0]
        assert other is not module
        assert other.client is module.client
        assert (other.in_keys, other.out_keys, other.max_inflight) == (["x"], ["y"], 2)
        assert set(other(observation()).keys()) == {"x", "other", "y", "v"}


# --- TorchRL -------------------------------------------------------------------------------------

ROOT = Path(__file__).resolve().parents[1]
TORCHRL = ("torchrl==0.14.1", "tensordict>=0.14.3,<0.15", "pyvers>=0.2,<0.3")


@pytest.fixture(scope="module")
def torchrl_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter with TorchRL and its own TensorDict; everything else is that of this interpreter."""
    folder = tmp_path_factory.mktemp("torchrl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = str(folder / "bin" / "python")
    inherited = sysconfig.get_path("purelib")
    own = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    Path(own, "inherited.pth").write_text(f"{inherited}\n")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    skip_if_it_fails(*pip, "--no-deps", "--no-compile", *TORCHRL)
    return python


def skip_if_it_fails(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        why = (done.stderr.strip().splitlines() or ["no message"])[-1]
        pytest.skip(f"{', '.join(TORCHRL)} cannot be installed here: {why}")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_in_a_collector_of_torchrl(torchrl_python: str) -> None:
    done = subprocess.run(
        [torchrl_python, str(ROOT / "tests" / "torchrl_collector.py"), *TRANSPORTS],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    if done.returncode != 0:
        skip_if_it_fails(torchrl_python, "-c", "import torchrl.collectors")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    expected = {
        "batches": [50, 50, 50],
        "wrong_actions": 0,
        "versions": [[7], [8], [9]],
        "modes": ["RANDOM"],
        "errors": 0,
    }
    assert found == dict.fromkeys(TRANSPORTS, expected)
