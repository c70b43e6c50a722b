"""Arguments that cannot work: an error that names the argument, before anything has started."""

from __future__ import annotations

import math
import threading
from typing import Any

import psutil
import pytest
from failure_roles import SECONDS, Doubler, ask, reply, request, serving
from support import no_more, wait_until
from tensordict import TensorDict

from meshinfer import DistributedTransport, InferenceServer, InferenceServerConfig

COUNTS = ("max_batch_size", "min_batch_size")


def held() -> tuple[int, int]:
    return threading.active_count(), psutil.Process().num_fds()


def refused(build: Any, kind: type[Exception] | tuple[type[Exception], ...], name: str) -> None:
    before = held()
    with pytest.raises(kind, match=name):
        build()
    assert wait_until(
        lambda: no_more(held(), before), SECONDS
    )  # an earlier test's store may still end


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (0, ValueError),
        (-1, ValueError),
        (True, TypeError),
        (False, TypeError),
        (1.0, TypeError),
        (1.5, TypeError),
        ("4", TypeError),
        (math.nan, TypeError),
        ([1], TypeError),
    ],
)
def test_a_batch_size_that_cannot_work_is_named(name: str, value: Any, kind: Any) -> None:
    specs = {"request_spec": request(0), "response_spec": reply()}
    refused(lambda: InferenceServer(Doubler(), "distributed", **specs, **{name: value}), kind, name)
    refused(lambda: InferenceServerConfig(**{name: value}), kind, name)


def test_a_minimum_above_the_maximum_is_refused() -> None:
    specs = {"request_spec": request(0), "response_spec": reply()}
    refused(
        lambda: InferenceServer(
            Doubler(), "distributed", **specs, max_batch_size=2, min_batch_size=3
        ),
        ValueError,
        "min_batch_size=3.*max_batch_size=2",
    )


@pytest.mark.parametrize("value", [-1, -0.001, math.nan, math.inf, -math.inf, "1", True, [1.0]])
def test_a_batching_timeout_that_cannot_work_is_named(value: Any) -> None:
    specs = {"request_spec": request(0), "response_spec": reply()}
    refused(
        lambda: InferenceServer(Doubler(), "distributed", **specs, timeout=value),
        (ValueError, TypeError),
        "timeout",
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("timeout", 0),
        ("timeout", -1),
        ("timeout", math.nan),
        ("timeout", math.inf),
        ("timeout", "1"),
        ("timeout", True),
        ("timeout", None),
        ("window", 0),
        ("window", -1),
        ("window", True),
        ("window", 1.5),
        ("port", -1),
        ("port", 65536),
        ("port", "80"),
        ("port", True),
        ("port", 1.5),
        ("backend", "mpi"),
        ("role", "servant"),
        ("secret", ""),
        ("secret", b""),
        ("secret", 5),
        ("interface", "no such interface"),
        ("host", "no.such.host.invalid"),
    ],
)
def test_a_transport_argument_that_cannot_work_is_named(name: str, value: Any) -> None:
    refused(
        lambda: DistributedTransport(request(0), reply(), **{name: value}),
        (ValueError, TypeError),
        name,
    )


def test_a_client_without_an_address_or_a_secret_is_told_what_it_needs() -> None:
    client = {"role": "client"}
    refused(lambda: DistributedTransport(request(0), reply(), **client), ValueError, "port")
    refused(
        lambda: DistributedTransport(request(0), reply(), port=1, **client), ValueError, "secret"
    )


@pytest.mark.parametrize(
    ("requests", "replies"),
    [
        (None, reply()),
        (TensorDict({}, []), reply()),
        (TensorDict({"x": "text"}, []), reply()),
        (request(0).expand(2), reply()),
    ],
    ids=["none", "empty", "text", "batch sizes"],
)
def test_specs_that_cannot_work_are_refused(requests: Any, replies: Any) -> None:
    refused(lambda: DistributedTransport(requests, replies), (ValueError, TypeError), "request")


@pytest.mark.parametrize("count", [0, -1, True, 1.0, "1"])
def test_a_number_of_clients_that_cannot_work_is_named(count: Any) -> None:
    with serving(Doubler()) as server, pytest.raises((ValueError, TypeError), match="count"):
        server.clients(count)


@pytest.mark.parametrize("timeout", [-1, -0.5])
def test_a_deadline_in_the_past_is_a_timeout_and_the_client_goes_on(timeout: float) -> None:
    with serving(Doubler()) as server, server.client() as client:
        ask(client, 1)
        with pytest.raises((TimeoutError, ValueError)):
            client(request(1), timeout)
        ask(client, 2)


@pytest.mark.parametrize("timeout", [math.nan, "1"])
def test_a_request_timeout_that_is_no_number_of_seconds_is_named(timeout: Any) -> None:
    with serving(Doubler()) as server, server.client() as client:
        ask(client, 1)
        with pytest.raises((ValueError, TypeError), match="timeout"):
            client(request(1), timeout)
        ask(client, 2)
