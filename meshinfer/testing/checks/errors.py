"""Exceptions of the policy: whom they reach, and what is left of them there."""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from meshinfer.errors import RemoteError
from meshinfer.inference.protocol import InferenceClient
from meshinfer.testing.check import conformance_check
from meshinfer.testing.expect import describes, raises
from meshinfer.testing.harness import TransportHarness, within
from meshinfer.testing.serving import AddOne, check_reply, request, serving

__all__ = ["CHECKS"]

BAD = 500
MESSAGE = "what the policy says"
SECONDS = 30.0
"""Within which an exception arrives; who waits without an end is found by the harness."""


class TwoArguments(Exception):
    """Can be pickled, and not rebuilt: its own ``args`` are not those that it is made of."""

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(f"{detail} ({code})")


class HoldsLock(Exception):
    """Cannot be pickled."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


class Huge(Exception):
    """Drags 50 MB along."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.data = bytes(50 << 20)


class BrokenText(Exception):
    """Cannot even be printed."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class Raising(AddOne):
    """Raises one of its exceptions for each batch with a request of :data:`BAD` or more."""

    def __init__(self, *exceptions: BaseException) -> None:
        super().__init__()
        self._exceptions = exceptions

    def __call__(self, batch: TensorDictBase) -> TensorDict:
        """As :class:`AddOne`, or not."""
        result = super().__call__(batch)
        worst = max(self.batches[-1])
        return result if worst < BAD else self.fail_here(worst - BAD)

    def fail_here(self, index: int) -> TensorDict:
        """The function that every traceback must name."""
        raise self._exceptions[index]


@conformance_check()
def an_exception_keeps_its_type_and_traceback(harness: TransportHarness) -> None:
    """What the policy raises is raised at the client, of the same type, with the traceback of the policy."""
    policy = Raising(ValueError(MESSAGE), KeyError(MESSAGE), ZeroDivisionError(MESSAGE))
    with serving(harness, policy) as server:
        run = harness.run_client(_meet_known, server.client(), harness.crosses_processes)
        run.result(harness.patience)


def _meet_known(client: InferenceClient, crosses_processes: bool) -> None:
    for index, kind in enumerate((ValueError, KeyError, ZeroDivisionError)):
        future = client.submit(request(BAD + index))
        for _ in range(2):
            with raises(kind, MESSAGE) as caught:
                future.result()
            assert type(caught.error) is kind
            describes(caught.error, kind.__name__, MESSAGE, "fail_here")
            if crosses_processes:
                assert isinstance(caught.error.__cause__, RemoteError), caught.error.__cause__
        check_reply(client(request(index)), index)


@conformance_check()
def a_policy_may_raise_timeout_error(harness: TransportHarness) -> None:
    """A ``TimeoutError`` of the policy is not taken for the client's own, whether or not it has a deadline."""
    with serving(harness, Raising(TimeoutError(MESSAGE))) as server:
        harness.run_client(_ask_with_deadline, server.client()).result(harness.patience)


def _ask_with_deadline(client: InferenceClient) -> None:
    for timeout in (None, 60.0):
        with raises(TimeoutError, MESSAGE) as caught:
            client(request(BAD), timeout)
        describes(caught.error, "TimeoutError", MESSAGE, "fail_here")
    check_reply(client(request(1), 60.0), 1)


@conformance_check()
def awkward_exceptions_are_described(harness: TransportHarness) -> None:
    """Exceptions that cannot be moved arrive soon, with class, message and traceback; the server goes on."""
    awkward = (TwoArguments(3, MESSAGE), HoldsLock(MESSAGE), Huge(MESSAGE), BrokenText(MESSAGE))
    policy = Raising(*awkward, SystemExit(MESSAGE), KeyboardInterrupt(MESSAGE))
    with serving(harness, policy) as server:
        harness.run_client(_meet_awkward, server.client()).result(harness.patience)
        assert server.is_alive


def _meet_awkward(client: InferenceClient) -> None:
    names = "TwoArguments", "HoldsLock", "Huge", "BrokenText", "SystemExit", "KeyboardInterrupt"
    for index, name in enumerate(names):
        with within(SECONDS, name), raises(Exception) as caught:
            client(request(BAD + index))
        message = "" if name == "BrokenText" else MESSAGE
        describes(caught.error, name, message, "fail_here")
        check_reply(client(request(index)), index)


@conformance_check("crosses_processes")
def a_class_that_only_the_server_knows_is_described(harness: TransportHarness) -> None:
    """An exception whose class lives in the server's ``__main__`` arrives with class, message and traceback."""
    main = sys.modules["__main__"]
    kind: Any = type("OnlyHere", (Exception,), {"__module__": "__main__"})
    main.OnlyHere = kind  # type: ignore[attr-defined]
    try:
        with serving(harness, Raising(kind(MESSAGE))) as server:
            harness.run_client(_meet_unknown, server.client()).result(harness.patience)
    finally:
        del main.OnlyHere


def _meet_unknown(client: InferenceClient) -> None:
    with within(SECONDS, "an unknown exception"), raises(RemoteError) as caught:
        client(request(BAD))
    describes(caught.error, "OnlyHere", MESSAGE, "fail_here")
    check_reply(client(request(1)), 1)


@conformance_check()
def an_error_stays_in_its_batch(harness: TransportHarness) -> None:
    """An exception reaches exactly the requests of its batch; those before and after get their replies."""
    policy = Raising(ValueError(MESSAGE))
    with serving(harness, policy, batch=2) as server:
        harness.run_client(_in_pairs, server.clients(2)).result(harness.patience)
    assert [sorted(batch) for batch in policy.batches] == [[0, 1], [2, BAD], [4, 5]]


def _in_pairs(clients: list[InferenceClient]) -> None:
    for pair in ((0, 1), (2, BAD), (4, 5)):
        futures = [client.submit(request(x)) for client, x in zip(clients, pair, strict=True)]
        for value, future in zip(pair, futures, strict=True):
            if BAD in pair:
                with raises(ValueError, MESSAGE):
                    future.result()
            else:
                check_reply(future.result(), value)


class _WrongResults(AddOne):
    """What a policy may get wrong, by the value of the request."""

    def __call__(self, batch: TensorDictBase) -> Any:
        good = super().__call__(batch)
        size = batch.batch_size
        wrong: dict[int, Any] = {
            BAD: TensorDict({"z": good["y"]}, batch_size=size),
            BAD + 1: TensorDict({"y": good["y"].float()}, batch_size=size),
            BAD + 2: TensorDict({"y": good["y"][..., :3]}, batch_size=size),
            BAD + 3: good["y"],
            BAD + 4: None,
        }
        return wrong.get(self.batches[-1][0], good.set("extra", torch.ones(size)))


@conformance_check("fixed_layout")
def a_wrong_result_is_an_error_for_its_batch(harness: TransportHarness) -> None:
    """Results that lack a declared key, or have another shape or dtype, raise at the client; extra keys are dropped."""
    with serving(harness, _WrongResults()) as server:
        harness.run_client(_meet_wrong_results, server.client()).result(harness.patience)


def _meet_wrong_results(client: InferenceClient) -> None:
    expected = (KeyError, "y"), (TypeError, "y"), (ValueError, "y"), (TypeError, "Tensor")
    for index, (kind, word) in enumerate((*expected, (TypeError, "None"))):
        with raises(kind, word):
            client(request(BAD + index))
        reply = client(request(index))
        check_reply(reply, index)
        assert set(reply.keys()) == {"y", "policy_version"}, set(reply.keys())


CHECKS = (
    an_exception_keeps_its_type_and_traceback,
    a_policy_may_raise_timeout_error,
    awkward_exceptions_are_described,
    a_class_that_only_the_server_knows_is_described,
    an_error_stays_in_its_batch,
    a_wrong_result_is_an_error_for_its_batch,
)
