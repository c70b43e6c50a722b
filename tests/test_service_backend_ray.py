"""A server in a Ray actor does what it does elsewhere; see test_service_backend.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import service_table as table
from process_roles import Policy, reply, request
from service_roles import PLACES

from meshinfer import InferenceServer, make_inference_transport

PLACE = PLACES["ray"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ray")


@pytest.fixture(scope="module")
def server(ray_cluster: Any, folder: Path) -> Iterator[Any]:
    server = table.start_shared(PLACE, folder)
    yield server
    server.shutdown()


@pytest.mark.parametrize("behaviour", table.SHARED, ids=lambda behaviour: behaviour.__name__)
def test_a_server(behaviour: Any, server: Any, ray_cluster: Any, folder: Path) -> None:
    behaviour(server, PLACE, folder)


def test_a_whole_life(ray_cluster: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    table.live(PLACE, tmp_path, caplog)


def test_a_start_that_takes_too_long_leaves_nothing(ray_cluster: Any) -> None:
    options = {"num_cpus": 0, "resources": {"moon": 1.0}}
    with pytest.raises(TimeoutError, match=r"0\.3 s.*resources.*'moon': 1\.0.*ray status"):
        table.it_may_take_too_long_to_start(PLACE, remote_options=options)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"num_gpu": 1}, ValueError, "remote_options: .*num_gpu.*num_gpus"),
        ({"num_cpus": -1}, ValueError, "remote_options: .*num_cpus"),
        ({"lifetime": "detached"}, ValueError, "remote_options: 'lifetime' cannot be given"),
        ({"name": "mine"}, ValueError, "remote_options: 'name' cannot be given with RayTransport"),
        (["num_cpus"], TypeError, "remote_options: expected a mapping.*list"),
    ],
)
def test_options_of_the_actor_that_cannot_work(
    options: Any, error: type[Exception], text: str, ray_cluster: Any
) -> None:
    with pytest.raises(error, match=text):
        InferenceServer(
            Policy, service_backend="ray", service_backend_options={"remote_options": options}
        )


def test_a_distributed_server_listens_at_the_nodes_address(ray_cluster: Any) -> None:
    made: Any = make_inference_transport(
        "distributed", policy_backend="ray", request_spec=request(0), response_spec=reply()
    )
    with made:
        assert made.address.host == ray_cluster.util.get_node_ip_address()


def test_ray_must_be_initialised(ray_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "is_initialized", lambda: False)
    with pytest.raises(ValueError, match=r"service_backend='ray' needs Ray.*ray\.init\(\)"):
        InferenceServer(Policy, service_backend="ray")
