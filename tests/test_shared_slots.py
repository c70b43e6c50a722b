"""Both transports through shared memory: what they offer by hand, and what they do where something runs out."""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import re
import resource
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from failure_roles import (
    SECONDS,
    SPOILED,
    Doubler,
    ask,
    check,
    crew,
    query,
    request,
    shut_down,
)
from shared_roles import (
    KINDS,
    answer,
    ended,
    forked,
    make,
    own,
    serve_slots,
    serving_slots,
    take,
)
from tensordict import TensorDict

from meshinfer import (
    ClosedError,
    InferenceServer,
    PeerLostError,
    RemoteError,
    ServerClosedError,
    TransportError,
)

BOTH = pytest.mark.parametrize("kind", list(KINDS))


def batch(*values: int, **more: torch.Tensor) -> TensorDict:
    """Replies to several requests."""
    y = torch.tensor([[2 * value] for value in values])
    return TensorDict({"y": y, **more}, [len(values)])


# The server's side, by hand.


@BOTH
def test_requests_are_drained_as_tensordicts_of_their_own_oldest_first(kind: str) -> None:
    with make(kind) as transport:
        clients = [transport.client() for _ in range(3)]
        began = time.perf_counter()
        futures = [clients[index].submit(request(index)) for index in (2, 0, 1)]
        ended = time.perf_counter()
        assert transport.wait_for_work(0.0)
        assert transport.num_waiting == 3
        payloads, callbacks = transport.drain(2)
        later, more, times = transport.drain_with_timing(9)
        assert [td["x"].item() for td in payloads + later] == [2, 0, 1]
        assert began < times[0] < ended
        assert transport.drain(9) == ([], [])
        payloads[0]["x"].fill_(99)
        payloads[0]["new"] = torch.zeros(2)
        for callback, value in zip(callbacks + more, (2, 0, 1), strict=True):
            transport.resolve(callback, answer(value))
        for future, value in zip(futures, (2, 0, 1), strict=True):
            check(future.result(SECONDS), value)


@BOTH
def test_a_batch_is_gathered_and_scattered(kind: str) -> None:
    with make(kind, 3) as transport:
        clients = [transport.client() for _ in range(3)]
        requests, replies = transport.request_batch(4), transport.response_batch(4)
        for size in (3, 1, 2):
            futures = [clients[n].submit(request(10 * size + n)) for n in range(size)]
            slots = transport.drain_slots(4)
            values = transport.gather_requests(slots, requests)["x"][:, 0].tolist()
            assert sorted(values) == [10 * size + n for n in range(size)]
            undeclared = {"logits": torch.zeros(size, 5)}
            transport.resolve_batch(slots, batch(*values, **undeclared), replies, policy_version=7)
            for n, future in enumerate(futures):
                found = future.result(SECONDS)
                check(found, 10 * size + n)
                assert set(found.keys()) == {"y", "policy_version"}
                assert found["policy_version"] == 7


@BOTH
def test_staging_is_no_larger_than_the_slots(kind: str) -> None:
    """The default of ``max_batch_size`` would cost gigabytes where rows are large."""
    with make(kind, 3) as transport:
        assert transport.request_batch(64).capacity == transport.response_batch(64).capacity == 3
        assert transport.request_batch(2).capacity == transport.response_batch(2).capacity == 2


@BOTH
@pytest.mark.parametrize("size", [1, 2])
def test_results_that_cannot_be_sent_leave_the_requests_unanswered(kind: str, size: int) -> None:
    with make(kind, 2) as transport:
        futures = [transport.client().submit(request(n)) for n in range(size)]
        slots = transport.drain_slots(4)
        wrong = [
            (KeyError, TensorDict({"z": torch.zeros(size, 1)}, [size])),
            (TypeError, TensorDict({"y": torch.zeros(size, 1)}, [size])),
            (ValueError, TensorDict({"y": torch.zeros(size, 2, dtype=torch.int64)}, [size])),
        ]
        for error, results in wrong:
            with pytest.raises(error, match="y"):
                transport.resolve_batch(slots, results)
            assert not any(future.done() for future in futures)
        transport.resolve_batch(slots, batch(*range(size)))
        for n, future in enumerate(futures):
            check(future.result(SECONDS), n)


@BOTH
def test_an_exception_is_the_answer_to_one_request(kind: str) -> None:
    with make(kind, 2) as transport:
        spoiled, fine = (transport.client().submit(request(n)) for n in (1, 2))
        first, second = transport.drain_slots(2)
        transport.resolve_exception(first, KeyError("spoiled"))
        transport.resolve(second, answer(2))
        with pytest.raises(KeyError, match="spoiled") as caught:
            spoiled.result(SECONDS)
        assert isinstance(caught.value.__cause__, RemoteError)
        assert isinstance(spoiled.exception(), KeyError)
        check(fine.result(SECONDS), 2)


@BOTH
def test_several_threads_may_be_the_first_to_serve(kind: str) -> None:
    """A server that is shut down as soon as it has started is woken while its thread begins."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as pool:
            for _ in range(100):
                with make(kind) as transport:
                    together = threading.Barrier(2)
                    first = [pool.submit(wake_together, transport, together) for _ in range(2)]
                    for each in first:
                        each.result(SECONDS)
    finally:
        sys.setswitchinterval(before)


def wake_together(transport: Any, together: threading.Barrier) -> None:
    together.wait(SECONDS)
    transport.wake()


@BOTH
def test_waiting_for_work_ends_early_when_work_comes_or_somebody_wakes_it(kind: str) -> None:
    with make(kind) as transport, ThreadPoolExecutor(1) as thread:
        assert not transport.wait_for_work(0.0)
        began = time.monotonic()
        assert not transport.wait_for_work(0.2)
        assert time.monotonic() - began >= 0.2
        waiting = thread.submit(transport.wait_for_work, SECONDS)
        transport.wake()
        assert waiting.result(SECONDS) is False
        waiting = thread.submit(transport.wait_for_work)
        future = transport.client().submit(request(1))
        assert waiting.result(SECONDS) is True
        transport.resolve(take(transport, 1)[0], answer(1))
        check(future.result(SECONDS), 1)
        waiting = thread.submit(transport.wait_for_work)
        transport.close()
        assert waiting.result(SECONDS) is False


@BOTH
def test_closing_ends_it_for_everyone_at_once(kind: str) -> None:
    transport = make(kind, 2)
    client, idle = transport.client(), transport.client()
    assert not transport.wait_for_work(0.0)
    with ThreadPoolExecutor(2) as threads:
        future = client.submit(request(1))
        waiting = threads.submit(future.result)
        with pytest.raises(TimeoutError):
            future.result(0.1)
        transport.close()
        assert isinstance(waiting.exception(SECONDS), ServerClosedError)
    for _ in range(2):
        transport.close()
        assert future.done()
        with pytest.raises(ServerClosedError):
            future.result()
        for other in (client, idle):
            with pytest.raises(ServerClosedError):
                other(request(2), SECONDS)
        for call in (transport.client, transport.serve_elsewhere, transport.__enter__):
            with pytest.raises(ClosedError):
                call()


def test_the_slots_transport_has_no_client_of_its_own() -> None:
    with (
        make("process_slot") as transport,
        pytest.raises(TypeError, match=r"transport\.client\(\)"),
    ):
        transport.submit(request(1))
    with make("shared_memory") as transport:
        future = transport.submit(request(1))
        transport.resolve(take(transport, 1)[0], answer(1))
        check(future.result(SECONDS), 1)


@BOTH
@pytest.mark.parametrize(
    ("error", "match", "options"),
    [
        (ValueError, "num_slots=0", {"num_slots": 0}),
        (TypeError, "num_slots=True", {"num_slots": True}),
        (ValueError, "timeout=-1", {"timeout": -1.0}),
        (ValueError, "thread", {"ctx": "thread"}),
        (TypeError, "ctx", {"ctx": 3}),
    ],
)
def test_arguments_that_cannot_work_are_named(
    kind: str, error: type[Exception], match: str, options: dict[str, Any]
) -> None:
    with pytest.raises(error, match=match):
        make(kind, **options)


def test_a_borrowed_reply_is_a_view_until_the_next_submit_of_its_client() -> None:
    with make("process_slot", 2, copy_result=False) as transport:
        client, other = transport.client(), transport.client()

        def one(which: Any, value: int) -> Any:
            future = which.submit(request(value))
            transport.resolve(take(transport, 1)[0], answer(value))
            return future.result(SECONDS)

        assert not transport.copy_result
        borrowed = one(client, 1)
        own_memory = borrowed.clone()
        one(other, 2)
        check(borrowed, 1)
        assert one(client, 3)["y"].data_ptr() == borrowed["y"].data_ptr()
        check(borrowed, 3)
        check(own_memory, 1)
    with make("process_slot", 1) as transport:
        client = transport.client()
        kept = one(client, 1)
        one(client, 2)
        check(kept, 1)


def test_who_asks_all_the_time_does_not_starve_the_others() -> None:
    with make("process_slot", 3) as transport:
        clients = [transport.client() for _ in range(3)]
        futures = [client.submit(request(index)) for index, client in enumerate(clients)]
        served = []
        for _ in range(9):
            payloads, (callback,) = transport.drain(1)
            index = payloads[0]["x"].item()
            served.append(index)
            transport.resolve(callback, answer(index))
            check(futures[index].result(SECONDS), index)
            futures[index] = clients[index].submit(request(index))
        assert served == [0, 1, 2] * 3


# Where another process serves.


@BOTH
def test_one_server_at_a_time_which_may_leave_and_be_followed(kind: str) -> None:
    with make(kind) as transport, crew(2) as (first, second):
        client = transport.client()
        serve = transport.serve_elsewhere()
        waits = client.submit(request(1))  # nobody has come yet
        first.call(serve_slots, serve)
        check(waits.result(SECONDS), 1)
        serve()  # what never serves ends nothing
        second.call(be_refused_to_serve, serve, rf"process {first.pid} serves")
        with pytest.raises(TransportError, match="another process serves"):
            transport.drain(1)
        ask(client, 2, SECONDS)
        first.call(shut_down)
        with pytest.raises(ServerClosedError):
            client(request(3), SECONDS)
        second.call(serve_slots, transport.serve_elsewhere())
        ask(client, 4, SECONDS)
        second.call(shut_down)
        with serve() as here:
            assert not here.wait_for_work(0.0)
            be_refused_to_serve(None, serve, "serves")
            ask_and_answer(client, here, 6)
        transport.close()
        first.call(be_refused_to_serve, serve, "closed")
        with pytest.raises(ServerClosedError):
            client(request(5), SECONDS)


@BOTH
def test_a_new_server_holds_its_transport_or_says_who_does(kind: str) -> None:
    with make(kind) as transport, crew(1) as (first,):
        serve = transport.serve_elsewhere()
        server = InferenceServer(Doubler(), serve())
        first.call(be_refused_to_serve, serve, rf"process {os.getpid()} serves")
        server.shutdown()
        first.call(serve_slots, serve)
        with pytest.raises(TransportError, match=rf"process {first.pid} serves"):
            InferenceServer(Doubler(), serve())
        first.call(shut_down)


def ask_and_answer(client: Any, transport: Any, value: int) -> None:
    future = client.submit(request(value))
    transport.resolve(take(transport, 1)[0], answer(value))
    check(future.result(SECONDS), value)


def be_refused_to_serve(station: Any, serve: Any, match: str) -> None:
    with pytest.raises(TransportError, match=match), serve() as transport:
        transport.drain(1)


# Exceptions of any kind.


class TwoArgumentsError(Exception):
    """Pickles, and cannot be rebuilt."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class HoldsALockError(Exception):
    """Cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


RAISED = {
    "two arguments": (lambda: TwoArgumentsError("one", "two"), "TwoArgumentsError", "one and two"),
    "a lock": (lambda: HoldsALockError("locked"), "HoldsALockError", "locked"),
    "300 kB": (lambda: ValueError("v" * 300_000), None, "v" * 300_000),
    "20 MB": (lambda: ValueError("w" * 20_000_000), "ValueError", "w" * 1000),
}


@BOTH
def test_exceptions_of_any_size_and_any_kind_arrive(kind: str) -> None:
    policy = Doubler()
    with serving_slots(policy, kind, 2) as server, crew(1) as (worker,):
        worker.call(own, server.client())
        here = server.client()
        for make_error, class_name, text in RAISED.values():
            policy.to_raise = make_error
            with pytest.raises(ValueError if class_name is None else RemoteError) as local:
                here(request(SPOILED), SECONDS)
            worker.begin(describe_error)
            name, found, remote = worker.outcome().get()
            assert (name, found) == (type(local.value).__name__, str(local.value))
            assert text in found
            assert class_name is None or remote.endswith(class_name)
            worker.call(query, 5)
            ask(here, 6, SECONDS)


def describe_error(station: Any) -> tuple[str, str, str]:
    """Of what the policy raises for this client: type, text, and the type that it had at the server."""
    with pytest.raises(Exception) as caught:  # noqa: PT011
        station.client(request(SPOILED), SECONDS)
    error = caught.value
    remote = error if isinstance(error, RemoteError) else error.__cause__
    assert isinstance(remote, RemoteError)
    return type(error).__name__, str(error), remote.class_name


@BOTH
def test_a_large_exception_arrives_where_the_server_has_no_descriptor_left(kind: str) -> None:
    with make(kind, 2) as transport, crew(1) as (server,):
        server.call(serve_slots, transport.serve_elsewhere())
        client = transport.client()
        ask(client, 1, SECONDS)
        server.call(raise_large)
        server.call(leave_descriptors, 0)
        with pytest.raises(RemoteError) as caught:
            client(request(SPOILED), SECONDS)
        assert caught.value.class_name == "ValueError"
        assert "large" in caught.value.message
        ask(client, 2, SECONDS)
        server.call(give_descriptors_back)
        with pytest.raises(ValueError, match=r"^(large ){50000}$"):
            client(request(SPOILED), SECONDS)


def raise_large(station: Any) -> None:
    station.policy.to_raise = lambda: ValueError("large " * 50_000)


def leave_descriptors(station: Any, count: int) -> None:
    """Let this process open ``count`` files more."""
    station.limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, station.limit[1]))
    station.files = []
    try:
        while True:
            station.files.append(os.dup(0))
    except OSError:
        for _ in range(count):
            os.close(station.files.pop())


def give_descriptors_back(station: Any) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, station.limit)
    while station.files:
        os.close(station.files.pop())


# Descriptors and memory.


def use_all_slots(station: Any, kind: str, num_slots: int) -> int:
    """At once, with 64 descriptors; how many were in use."""
    leave_descriptors(station, 24)
    with make(kind, num_slots) as transport:
        client = None if kind == "process_slot" else transport.client()
        clients = [client or transport.client() for _ in range(num_slots)]
        futures = [each.submit(request(n)) for n, each in enumerate(clients)]
        slots = take(transport, num_slots)
        count = len(descriptors())
        for n, slot in enumerate(slots):
            transport.resolve(slot, answer(n))
        for n, future in enumerate(futures):
            check(future.result(SECONDS), n)
    give_descriptors_back(station)
    return count


def fail_in_a_hundred_slots(station: Any, kind: str) -> set[str]:
    """With 64 descriptors, each with a large exception: the classes. Files can be opened afterwards."""
    leave_descriptors(station, 24)
    with make(kind, 100) as transport:
        client = None if kind == "process_slot" else transport.client()
        clients = [client or transport.client() for _ in range(100)]
        futures = [each.submit(request(n)) for n, each in enumerate(clients)]
        for slot in take(transport, 100):
            transport.resolve_exception(slot, ValueError("large " * 50_000))
        errors = [future.exception(SECONDS) for future in futures]
        with open(__file__) as file:
            assert file.readline()
    give_descriptors_back(station)
    return {getattr(error, "class_name", type(error).__name__) for error in errors}


@BOTH
def test_descriptors_do_not_grow_with_the_slots(kind: str) -> None:
    with crew(1) as (worker,):
        assert worker.call(use_all_slots, kind, 10) == worker.call(use_all_slots, kind, 1000)
        assert worker.call(fail_in_a_hundred_slots, kind) == {"ValueError"}


def make_with_descriptors(station: Any, kind: str, count: int) -> str:
    """The error of a transport that is made where so many descriptors are left, or nothing."""
    leave_descriptors(station, count)
    try:
        make(kind).close()
    except OSError as error:
        return str(error)
    finally:
        give_descriptors_back(station)
    return ""


def make_with_memory(station: Any, kind: str, spare: int, needed: int) -> str:
    """The error of a transport of ``needed`` bytes where the process may map so many more."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + spare, limits[1]))
    try:
        with pytest.raises(OSError) as caught:  # noqa: PT011
            make(kind, 1000, width=needed // 16_000)  # small specs
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    return str(caught.value)


@BOTH
def test_what_is_missing_is_said_when_a_transport_is_made(kind: str) -> None:
    with pytest.raises(
        OSError, match=r"num_slots=10000000 needs 1\d{13} bytes .* \d+ bytes are available"
    ):
        make(kind, 10_000_000, width=1 << 16)
    with crew(1) as (worker,):
        errors = [worker.call(make_with_descriptors, kind, count) for count in range(6)]
        assert "ulimit -n" in errors[0]
        assert errors[-1] == ""
        assert all("ulimit -n" in error for error in errors if error)
        error = worker.call(make_with_memory, kind, 10 << 20, 100 << 20)
        assert "ulimit -v" in error
        assert re.search(r"\b10\d{7} bytes", error), error


def shrink_shared_memory(station: Any) -> str | None:
    """Give this process a /dev/shm of 1 MB; why not, if not."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, private, nothing = 0x20000, 0x44000, None
    for call in (
        lambda: libc.unshare(new_mounts),
        lambda: libc.mount(b"none", b"/", nothing, private, nothing),
        lambda: libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=1m"),
    ):
        if call() != 0:
            return os.strerror(ctypes.get_errno())
    free = os.statvfs("/dev/shm")
    assert free.f_bavail * free.f_frsize <= 1 << 20
    return None


def fill_all_slots(station: Any, kind: str, num_slots: int, width: int) -> None:
    """Every byte of every slot, from a process of its own."""
    with make(kind, num_slots, width=width) as transport:
        clients = [transport.client() for _ in range(num_slots)]
        child = forked(_fill, clients, width)
        for slot in take(transport, num_slots):
            value = transport.request_layout.unpack(slot.frame.views)["x"][-1].item()
            transport.resolve(slot, answer(value, width))
        assert ended(child) == 0


def _fill(clients: list[Any], width: int) -> None:
    futures = [client.submit(request(n, width)) for n, client in enumerate(clients)]
    for n, future in enumerate(futures):
        assert (future.result(SECONDS)["y"] == 2 * n).all()


@BOTH
def test_the_size_of_dev_shm_does_not_matter(kind: str) -> None:
    with crew(1) as (worker,):
        reason = worker.call(shrink_shared_memory)
        if reason is not None:
            pytest.skip(f"no mount namespace for a small /dev/shm: {reason}")
        worker.call(fill_all_slots, kind, 50, 1 << 16)


@BOTH
def test_a_client_that_comes_too_late_says_that_the_memory_is_gone(kind: str) -> None:
    """Whatever has the number of its descriptor now."""
    one, other = socket.socketpair()
    others = [*os.pipe(), os.open("/", os.O_RDONLY), one.detach(), other.detach()]
    gc.collect()  # what others have left
    before = descriptors()
    transport = make(kind)
    (number,) = descriptors() - before
    saved = pickle.dumps(transport.client())
    del transport
    gc.collect()
    assert number not in descriptors()
    for descriptor in others:
        assert os.dup2(descriptor, number) == number
        with pytest.raises(PeerLostError, match="gone"):
            pickle.loads(saved)(request(1), SECONDS)
        os.close(number)
        os.close(descriptor)
    with pytest.raises(PeerLostError, match="gone"):
        pickle.loads(saved)(request(1), SECONDS)


def descriptors() -> set[int]:
    """Open in this process, but for the one that lists them."""
    with os.scandir("/proc/self/fd") as listing:
        found = {int(entry.name) for entry in listing}
    return {number for number in found if os.path.exists(f"/proc/self/fd/{number}")}
