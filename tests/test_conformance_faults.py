"""The check of each promise notices a transport that breaks it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from tensordict.nn.probabilistic import InteractionType, set_interaction_type

from meshinfer import DistributedTransport, ServerClosedError
from meshinfer.testing import (
    CONFORMANCE_CHECKS,
    ConformanceError,
    ThreadHarness,
    run_conformance,
)
from meshinfer.testing.checks import driving

BY_NAME = {check.name: check for check in CONFORMANCE_CHECKS}

# What can be broken. Each is a whole transport with one fault.


class Client:
    """A client as it should be, to be broken by a subclass."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, payload: Any, timeout: float | None = None) -> Any:
        return self.inner(payload, timeout)

    def submit(self, payload: Any) -> Any:
        return self.inner.submit(payload)

    def close(self) -> None:
        self.inner.close()

    def __enter__(self) -> Any:
        self.inner.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Future:
    """Likewise."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def done(self) -> bool:
        return bool(self.inner.done())

    def result(self, timeout: float | None = None) -> Any:
        return self.inner.result(timeout)

    def cancel(self) -> bool:
        return bool(self.inner.cancel())


def with_client(kind: Callable[[Any], Any]) -> type[DistributedTransport]:
    class Broken(DistributedTransport):
        def client(self) -> Any:
            return kind(super().client())

    return Broken


def with_future(kind: Callable[[Any], Any]) -> type[DistributedTransport]:
    class Broken(Client):
        def submit(self, payload: Any) -> Any:
            return kind(self.inner.submit(payload))

    return with_client(Broken)


class SwapsTwoReplies(DistributedTransport):
    def resolve_batch(self, slots: Any, *args: Any, **options: Any) -> None:
        super().resolve_batch([*slots[1::-1], *slots[2:]], *args, **options)


class StampsAnOldVersion(DistributedTransport):
    def resolve_batch(self, *args: Any, policy_version: int | None = None) -> None:
        super().resolve_batch(*args, policy_version=7 if policy_version else policy_version)


class DropsExceptions(DistributedTransport):
    def resolve_exception(self, callback: Any, exc: BaseException) -> None:
        callback.release()


class TakesItForItsOwn(Client):
    """A client that says of every time-out that it was its own."""

    def __call__(self, payload: Any, timeout: float | None = None) -> Any:
        try:
            return self.inner(payload, timeout)
        except TimeoutError:
            raise TimeoutError("no reply in time") from None


class ForgetsTheType(DistributedTransport):
    def resolve_exception(self, callback: Any, exc: BaseException) -> None:
        super().resolve_exception(callback, RuntimeError(str(exc)))


class SpillsErrors(DistributedTransport):
    """After an error the next batch fails too."""

    failed: BaseException | None = None

    def resolve_exception(self, callback: Any, exc: BaseException) -> None:
        self.failed = exc
        super().resolve_exception(callback, exc)

    def resolve_batch(self, *args: Any, **options: Any) -> None:
        if self.failed is not None:
            raise self.failed
        super().resolve_batch(*args, **options)


class ClosesOnce(DistributedTransport):
    closed_before = False

    def close(self) -> None:
        super().close()
        if self.closed_before:
            raise RuntimeError("closed twice")
        self.closed_before = True


class DrainsTooMuch(DistributedTransport):
    def drain_slots(self, max_items: int) -> list[Any]:
        return super().drain_slots(max_items + 1)


class WaitsTooLong(DistributedTransport):
    def wait_for_work(self, timeout: float | None = None) -> bool:
        return super().wait_for_work(None if timeout is None else timeout + 1.2)


class Aliases(Client):
    buffer: Any = None

    def __call__(self, payload: Any, timeout: float | None = None) -> Any:
        reply = self.inner(payload, timeout)
        self.buffer = reply if self.buffer is None else self.buffer.update_(reply)
        return self.buffer


class LocksReplies(Client):
    def __call__(self, payload: Any, timeout: float | None = None) -> Any:
        return self.inner(payload, timeout).lock_()


class MarksRequests(Client):
    def submit(self, payload: Any) -> Any:
        return self.inner.submit(payload.set("seen", torch.ones(1)))


class SendsLater(Client):
    """Reads the request when the reply is wanted."""

    def submit(self, payload: Any) -> Any:
        submit = self.inner.submit

        class Late(Future):
            def result(self, timeout: float | None = None) -> Any:
                return submit(payload).result(timeout)

        return Late(None)


class Casts(Client):
    def submit(self, payload: Any) -> Any:
        return self.inner.submit(payload.long() if "x" in payload else payload)


class AsksForTheMode(Client):
    def submit(self, payload: Any) -> Any:
        with set_interaction_type(InteractionType.MODE):
            return self.inner.submit(payload)


class LosesRequests(Client):
    count = 0

    def submit(self, payload: Any) -> Any:
        future = self.inner.submit(payload)
        self.count += 1
        if self.count == 400:
            future.cancel()
        return future


class NeverCloses(Client):
    def close(self) -> None:
        return


class KeepsItself(Client):
    kept: ClassVar[list[Any]] = []

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.kept.append(self)


class KeepsFutures(Client):
    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.kept: list[Any] = []

    def submit(self, payload: Any) -> Any:
        self.kept.append(self.inner.submit(payload))
        return self.kept[-1]


class GivesUpAtOnce(Future):
    def result(self, timeout: float | None = None) -> Any:
        try:
            return self.inner.result(timeout)
        except TimeoutError:
            self.inner.cancel()
            raise


class WaitsInDone(Future):
    def done(self) -> bool:
        self.inner.result()
        return True


class CannotCancel(Future):
    def cancel(self) -> bool:
        return False


class HidesTheEnd(Future):
    def result(self, timeout: float | None = None) -> Any:
        try:
            return self.inner.result(timeout)
        except ServerClosedError as error:
            raise RuntimeError("something went wrong") from error


BROKEN: list[tuple[type[DistributedTransport], str]] = [
    (SwapsTwoReplies, "rows_of_a_batch_go_to_their_requests"),
    (SwapsTwoReplies, "vectorised_requests_keep_their_rows"),
    (StampsAnOldVersion, "the_version_is_that_of_the_weights"),
    (DropsExceptions, "an_exception_keeps_its_type_and_traceback"),
    (with_client(TakesItForItsOwn), "a_policy_may_raise_timeout_error"),
    (ForgetsTheType, "an_exception_keeps_its_type_and_traceback"),
    (ForgetsTheType, "awkward_exceptions_are_described"),
    (SpillsErrors, "an_error_stays_in_its_batch"),
    (ClosesOnce, "either_side_may_close_first_and_twice"),
    (DrainsTooMuch, "batches_move_as_rows"),
    (WaitsTooLong, "looking_for_work_never_waits_longer_than_told"),
    (with_client(Aliases), "a_reply_never_changes_later"),
    (with_client(LocksReplies), "a_reply_is_a_plain_tensordict"),
    (with_client(MarksRequests), "the_request_is_left_alone"),
    (with_client(SendsLater), "the_request_is_left_alone"),
    (with_client(Casts), "a_bad_request_is_refused_where_it_was_made"),
    (with_client(AsksForTheMode), "the_interaction_type_travels"),
    (with_client(LosesRequests), "a_flood_is_answered_in_full"),
    (with_client(NeverCloses), "use_after_close_raises_at_once"),
    (with_client(NeverCloses), "a_client_is_a_context_manager"),
    (with_client(KeepsItself), "what_is_dropped_ends_by_itself"),
    (with_client(KeepsFutures), "abandoned_futures_are_freed"),
    (with_future(GivesUpAtOnce), "a_timeout_leaves_the_request_in_flight"),
    (with_future(WaitsInDone), "done_turns_true_without_waiting"),
    (with_future(CannotCancel), "a_cancelled_request_is_over"),
    (with_future(HidesTheEnd), "waiting_clients_learn_that_the_server_closed"),
]
FAULTS = [name for _, name in BROKEN]


@pytest.mark.parametrize(("transport", "name"), BROKEN, ids=FAULTS)
def test_a_check_notices(
    transport: type[DistributedTransport], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driving, "AT_ONCE", 1.0)
    run_conformance(ThreadHarness(transport), [BY_NAME["strides_and_gradients_do_not_matter"]])
    harness = ThreadHarness(transport, patience=1.5)
    with pytest.raises(ConformanceError, match=name) as caught:
        run_conformance(harness, [BY_NAME[name]])
    KeepsItself.kept.clear()
    assert list(caught.value.failures) == [name]
    assert BY_NAME[name].promise in str(caught.value)


def test_later_checks_run_after_a_failure() -> None:
    names = ["rows_of_a_batch_go_to_their_requests", "a_client_is_a_context_manager"]
    harness = ThreadHarness(SwapsTwoReplies)
    with pytest.raises(ConformanceError) as caught:
        run_conformance(harness, [BY_NAME[name] for name in names])
    assert list(caught.value.failures) == names[:1]
