"""Policies that raise, and requests that do not belong together: who sees it, and that nobody else does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import pytest
import torch
from failure_roles import (
    HELD,
    SECONDS,
    SPOILED,
    WHO,
    Doubler,
    Held,
    ask,
    check,
    connect,
    crew,
    keep_in_flight,
    port_of,
    query,
    query_again_and_again,
    request,
    serving,
)
from support import no_more, wait_until
from tensordict import TensorDict
from tensordict.nn import InteractionType, set_interaction_type
from tensordict.nn.probabilistic import interaction_type

from meshinfer import RemoteError


class TwoArguments(Exception):
    """Pickles, but cannot be rebuilt from its ``args``."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


class HoldsLock(Exception):
    """Cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class Explodes(Exception):
    """Raises whatever is done with it."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    def __reduce__(self) -> Any:
        raise MemoryError("no pickle")


def large() -> Exception:
    error = ValueError("with a large attribute")
    error.blob = bytes(50_000_000)  # type: ignore[attr-defined]
    return error


class Exits(SystemExit):
    """Not even an ``Exception``."""


ODD: dict[str, tuple[Callable[[], BaseException], str]] = {
    "two arguments": (lambda: TwoArguments(7, "seven"), "7: seven"),
    "unpicklable": (lambda: HoldsLock("locked"), "locked"),
    "50 MB": (large, "with a large attribute"),
    "a long message": (lambda: ValueError("x" * 3_000_000), "xxx"),
    "explodes": (Explodes, "__str__"),
    "SystemExit": (lambda: Exits("leave"), "leave"),
    "KeyboardInterrupt": (lambda: KeyboardInterrupt("stop"), "stop"),
}


@pytest.mark.parametrize("inline", [True, False])
def test_only_the_clients_of_the_spoiled_batch_see_its_exception(inline: bool) -> None:
    policy = Doubler()
    with serving(policy, inline=inline) as server, crew(3) as workers:
        for who, worker in enumerate(workers):
            worker.call(connect, port_of(server), who=who)
        *others, spoiler = workers
        for other in others:
            other.begin(query_again_and_again)
        for n in range(50):
            spoiler.begin(query, SPOILED)
            error = spoiler.outcome().error
            assert type(error) is ValueError
            assert str(error) == "spoiled"
            spoiler.call(query, 2 * WHO + n)
        for other in others:
            other.tell()
            outcome = other.outcome()
            # A batch that holds a spoiled row fails as a whole: its neighbours may see it, and nothing else.
            assert outcome.error is None or str(outcome.error) == "spoiled"
            other.call(query, 1)
        stats = server.stats()
        assert stats.errors >= 50


def test_each_row_of_a_spoiled_batch_gets_the_exception_and_the_next_batch_does_not() -> None:
    policy = Doubler()
    with serving(policy, inline=False) as server, crew(3) as workers, server.client() as holder:
        for worker in workers:
            worker.call(connect, port_of(server))
        held = holder.submit(request(HELD))
        assert policy.computing.wait(SECONDS)
        for worker, value in zip(workers, (1, SPOILED, 3), strict=True):
            worker.begin(query, value)
        assert wait_until(lambda: server.transport.num_waiting == 3, SECONDS)
        policy.go_on.set()
        check(held.result(SECONDS), HELD)
        for worker in workers:
            error = worker.outcome().error
            assert isinstance(error, ValueError)
            assert isinstance(error.__cause__, RemoteError) or error.__cause__ is None
            worker.call(query, 4)
        assert server.stats().errors == 3


@pytest.mark.parametrize("kind", ODD)
def test_an_exception_arrives_whatever_it_holds(kind: str) -> None:
    policy = Doubler()
    policy.to_raise, message = ODD[kind]
    with serving(policy) as server, server.client() as client:
        ask(client, 1)
        with pytest.raises(Exception, match=message) as caught:
            client(request(SPOILED), SECONDS)
        remote = caught.value if isinstance(caught.value, RemoteError) else caught.value.__cause__
        assert isinstance(remote, RemoteError)
        assert remote.class_name.rpartition(".")[2] == type(policy.to_raise()).__name__
        assert "failure_roles.py" in remote.traceback_text
        ask(client, 2, SECONDS)


def test_an_exception_class_of_the_servers_main_arrives_in_another_process() -> None:
    class Local(Exception):
        pass

    policy = Doubler()
    policy.to_raise = lambda: Local("only here")
    with serving(policy) as server, crew(1) as (worker,):
        worker.call(connect, port_of(server))
        worker.begin(query, SPOILED)
        error = worker.outcome().error
        assert isinstance(error, RemoteError)
        assert "Local" in error.class_name
        assert error.message == "only here"
        worker.call(query, 1)


def test_exceptions_leave_nothing_behind() -> None:
    policy = Doubler()
    with serving(policy) as server, server.client() as client:
        held = []
        for round_ in range(3):
            for _ in range(50):
                with pytest.raises(ValueError, match="spoiled"):
                    client(request(SPOILED), SECONDS)
            held.append(Held.by(server))
            ask(client, round_)
        assert wait_until(lambda: no_more(astuple(Held.by(server)), astuple(held[1])), SECONDS)
        assert held[2].store_keys == 0


@pytest.mark.parametrize(
    "bad",
    [
        TensorDict({"x": torch.zeros(2, dtype=torch.int64)}, []),
        TensorDict({"x": torch.zeros(1)}, []),
        TensorDict({"z": torch.zeros(1, dtype=torch.int64)}, []),
        TensorDict({"x": "text"}, []),
    ],
    ids=["shape", "dtype", "key", "no tensor"],
)
def test_a_poisoned_request_is_refused_before_it_meets_others(bad: TensorDict) -> None:
    policy = Doubler()
    with serving(policy) as server, server.client() as client, server.client() as other:
        ask(client, 1)
        in_flight = other.submit(request(HELD))
        with pytest.raises((ValueError, TypeError, KeyError), match="x"):
            client(bad)
        policy.go_on.set()
        check(in_flight.result(SECONDS), HELD)
        ask(client, 2)
        assert server.stats().errors == 0


def test_a_policy_that_returns_nonsense_is_reported_and_the_server_goes_on() -> None:
    answers: list[Any] = [
        None,
        TensorDict({"z": torch.zeros(1, 1)}, [1]),
        TensorDict({"y": torch.zeros(1, 1)}, [1]),
        TensorDict({"y": torch.zeros(1, 2, dtype=torch.int64)}, [1]),
        TensorDict({"y": torch.zeros(2, 1, dtype=torch.int64)}, [2]),
    ]
    good = Doubler()

    def policy(batch: Any) -> Any:
        value = int(batch["x"][0])
        return answers[value] if value < len(answers) else good(batch)

    with serving(policy) as server, server.client() as client:
        for value in range(len(answers)):
            with pytest.raises(Exception) as caught:  # noqa: PT011 - each answer is wrong in its own way
                client(request(value), SECONDS)
            assert not isinstance(caught.value, TimeoutError)
            ask(client, 100, SECONDS)


def test_requests_of_different_interaction_types_are_served_apart_and_as_asked() -> None:
    policy = Doubler()
    seen: list[tuple[int, Any]] = []

    def noting(batch: Any) -> Any:
        seen.extend((int(value), interaction_type()) for value in batch["x"][:, 0])
        return policy(batch)

    asked = [InteractionType.MODE, InteractionType.RANDOM, InteractionType.MEAN, None]
    with serving(noting, inline=False) as server, server.client() as holder:
        clients = [server.client() for _ in asked]
        for client in clients:
            ask(client, 0)
        held = holder.submit(request(HELD))
        assert policy.computing.wait(SECONDS)
        futures = []
        for value, (client, kind) in enumerate(zip(clients, asked, strict=True), start=1):
            with set_interaction_type(kind):
                futures.append(client.submit(request(value)))
        assert wait_until(lambda: server.transport.num_waiting == len(asked), SECONDS)
        policy.go_on.set()
        check(held.result(SECONDS), HELD)
        for value, future in enumerate(futures, start=1):
            check(future.result(SECONDS), value)
        for client in clients:
            client.close()
    found = dict(seen)
    assert [found[value] for value in range(1, 4)] == asked[:3]


def test_no_waiter_is_held_up_by_another() -> None:
    policy = Doubler()
    with serving(policy) as server, server.client() as client:
        ask(client, 0)
        answered = client.submit(request(1))
        check(answered.result(SECONDS), 1)
        second = client.submit(request(HELD))
        waiter = threading.Thread(target=second.result)
        waiter.start()
        assert policy.computing.wait(SECONDS)
        check(answered.result(0.0), 1)
        assert answered.done()
        assert not second.done()
        with pytest.raises(TimeoutError):
            second.result(0.05)
        policy.go_on.set()
        waiter.join(SECONDS)
        assert not waiter.is_alive()


def test_threads_that_share_a_client_get_their_own_replies() -> None:
    policy = Doubler()
    wrong: list[BaseException] = []
    with serving(policy) as server, server.client() as client:

        def use(who: int) -> None:
            try:
                for n in range(200):
                    ask(client, who * WHO + n, None if n % 2 else SECONDS)
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=use, args=(who,)) for who in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
        assert not any(thread.is_alive() for thread in threads)
        assert wrong == []


def test_a_client_with_many_requests_does_not_starve_another() -> None:
    """Its request comes after those that had come before it, however many the other one has left."""
    policy = Doubler()
    batches: list[list[int]] = []

    def noting(batch: Any) -> Any:
        batches.append(batch["x"][:, 0].tolist())
        return policy(batch)

    with (
        serving(
            noting, max_batch_size=2, inline=False
        ) as server,  # else who computes does not receive
        crew(1) as (greedy,),
        server.client() as modest,
        server.client() as holder,
    ):
        ask(modest, 0)
        greedy.call(connect, port_of(server), who=1)
        greedy.begin(keep_in_flight, 16)
        for n in range(2, 20):
            held = holder.submit(request(HELD))
            assert policy.computing.wait(SECONDS)
            policy.computing.clear()
            # A client has two requests at the server at a time. One of them may be in the batch that is held.
            first = 2 - batches[-1].count(WHO)
            assert wait_until(lambda first=first: server.transport.num_waiting == first, SECONDS)
            future = modest.submit(request(n))
            assert wait_until(
                lambda first=first: server.transport.num_waiting == first + 1, SECONDS
            )
            before = len(batches)
            policy.go_on.set()
            check(held.result(SECONDS), HELD)
            check(future.result(SECONDS), n)
            order = [value for batch in batches[before : before + 2] for value in batch]
            assert order[: first + 1] == [WHO] * first + [n]
        greedy.tell()
        greedy.outcome(SECONDS).get()


def test_replies_hold_the_version_of_the_weights_that_computed_them() -> None:
    class Constant(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.int64), requires_grad=False)

        def forward(self, batch: TensorDict) -> TensorDict:
            return TensorDict({"y": self.weight.expand(*batch.batch_size, 1)}, batch.batch_size)

    with serving(Constant()) as server, server.client() as client:
        last = -1
        for version in range(200):
            server.update_model(lambda model, new=version: model.weight.fill_(new), version=version)
            answer = client(request(0), SECONDS)
            assert answer["y"][0] == answer["policy_version"] == version > last
            last = version
