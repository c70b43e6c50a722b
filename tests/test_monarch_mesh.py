"""Rank groups of monarch's processes, a policy served on one, clients on the others."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import psutil
import pytest
import torch
from support import wait_until

from meshinfer import ClosedError, MeshError, PerNode, TransportConfig
from meshinfer.mesh.monarch import MonarchMesh, MonarchServer

pytestmark = pytest.mark.slow

SECONDS = 60.0
SPECS = ("request_spec", "response_spec")


@pytest.fixture(scope="module")
def roles(monarch: None) -> ModuleType:
    import monarch_mesh_roles

    return monarch_mesh_roles


@pytest.fixture(scope="module")
def mesh(roles: ModuleType) -> Iterator[MonarchMesh]:
    with MonarchMesh(groups={"server": 2, "env": 2}) as made:
        yield made


@pytest.fixture(scope="module")
def gloo(mesh: MonarchMesh, roles: ModuleType) -> MonarchServer:
    specs = {"request_spec": roles.request(0.0), "response_spec": roles.response()}
    options = {"spec": roles.Scale(), "interface": "127.0.0.1"}
    weights = TransportConfig("distributed", options)
    return mesh.serve(roles.Scale, "distributed", name="gloo", weight_transport=weights, **specs)


@pytest.fixture(scope="module")
def messages(mesh: MonarchMesh, roles: ModuleType) -> MonarchServer:
    return mesh.serve(roles.Scale, "monarch", name="messages")


@pytest.fixture(scope="module")
def pids(mesh: MonarchMesh, roles: ModuleType) -> MonarchServer:
    return mesh.serve(roles.PidOf, name="pids")


@pytest.fixture(scope="module")
def envs(
    mesh: MonarchMesh,
    roles: ModuleType,
    gloo: MonarchServer,
    messages: MonarchServer,
    pids: MonarchServer,
) -> Any:
    return mesh.spawn("env", "envs", roles.Env, gloo, messages, pids)


def results(futures: list[Any]) -> list[Any]:
    return [future.get(timeout=SECONDS) for future in futures]


# --- Groups ---------------------------------------------------------------------------------------


def test_every_rank_has_a_process_of_its_own(mesh: MonarchMesh) -> None:
    server, env = mesh.groups
    assert (server.name, server.ranks) == ("server", (0, 1))
    assert (env.name, env.ranks) == ("env", (2, 3))
    pids = [*mesh.pids("server"), *mesh.pids("env")]
    assert len(set(pids)) == 4
    assert set(pids) <= {child.pid for child in psutil.Process().children(recursive=True)}
    assert len(set(mesh.hosts("env"))) == 1


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ({}, "at least one group"),
        ({"my-env": 1}, "not an identifier"),
        ({"env": 0}, "at least one"),
        ({"env": "two"}, "expected a number of processes"),
        ({"env": True}, "expected a number of processes"),
    ],
)
def test_groups_that_cannot_be(monarch: None, groups: dict[str, Any], words: str) -> None:
    with pytest.raises(MeshError, match=words):
        MonarchMesh(groups=groups)


@pytest.mark.parametrize(
    ("spec", "hosts", "per_host"),
    [(1, 1, 1), (4, 2, 2), (1, 2, None), (PerNode(3), 2, 3), (2, 3, None)],
)
def test_processes_are_spread_evenly(
    monarch: None, spec: Any, hosts: int, per_host: int | None
) -> None:
    from meshinfer.mesh.monarch.seats import count_procs

    assert count_procs("env", spec, hosts) == per_host


def test_an_uneven_number_says_what_would_do(monarch: None) -> None:
    from meshinfer.mesh.monarch.seats import count_procs

    with pytest.raises(MeshError, match=r"5 processes.*2 hosts.*multiple of 2, PerNode"):
        count_procs("env", 5, 2)


def test_what_the_mesh_does_not_have(mesh: MonarchMesh, roles: ModuleType, envs: Any) -> None:
    with pytest.raises(MeshError, match=r"no rank group 'learner'.*'server', 'env'"):
        mesh.pids("learner")
    with pytest.raises(MeshError, match=r"rank 2 is not in group 'env'.*0-1"):
        mesh.respawn("env", 2)
    with pytest.raises(MeshError, match="actors called 'envs' already"):
        mesh.spawn("env", "envs", roles.Env)
    with pytest.raises(MeshError, match="not an identifier"):
        mesh.spawn("env", "two words", roles.Env)


# --- Serving --------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", [0, 1], ids=["distributed", "monarch"])
def test_every_rank_gets_its_own_replies(envs: Any, which: int) -> None:
    asked = [env.ask.call_one(10.0 + rank, which) for rank, env in enumerate(envs)]
    assert [reply for reply, _ in results(asked)] == [20.0, 22.0]


def test_clients_are_spread_over_the_servers(
    mesh: MonarchMesh, pids: MonarchServer, envs: Any
) -> None:
    assert pids.assignment == {("env", 0): 0, ("env", 1): 1}
    assert results(envs.call("server_pid", 2)) == mesh.pids("server")


@pytest.mark.parametrize("which", [0, 1], ids=["distributed", "monarch"])
def test_new_weights_reach_every_server(
    request: pytest.FixtureRequest, roles: ModuleType, envs: Any, which: int
) -> None:
    server = request.getfixturevalue(["gloo", "messages"][which])
    before = server.policy_version
    weights = roles.Scale()
    with torch.no_grad():
        weights.factor.fill_(5.0)
    assert server.update_policy_weights_(weights) == before + 1
    assert results(envs.call("ask", 2.0, which)) == [(10.0, before + 1)] * 2
    assert server.policy_version == before + 1
    server.update_policy_weights_(roles.Scale(), version=before + 5)
    assert results(envs.call("ask", 2.0, which)) == [(4.0, before + 5)] * 2


def test_a_trainer_reaches_every_server(gloo: MonarchServer, roles: ModuleType, envs: Any) -> None:
    assert gloo.weight_transport is not None
    with gloo.weight_transport.publisher(version=70) as publisher:
        assert wait_until(lambda: publisher.subscribers == 2, SECONDS)
        for factor in (5.0, 2.0):
            version = publisher.publish({"factor": torch.full_like(roles.Scale().factor, factor)})
            publisher.wait(timeout=SECONDS)
            assert results(envs.call("ask", 2.0, 0)) == [(2 * factor, version)] * 2
    assert [each.policy_version for each in gloo.stats()] == [72, 72]


def test_weights_that_do_not_fit(gloo: MonarchServer) -> None:
    with pytest.raises(ValueError, match="unknown 'other'"):
        gloo.update_policy_weights_({"factor": torch.tensor(1.0), "other": torch.zeros(1)})


@pytest.mark.parametrize("which", [0, 1], ids=["distributed", "monarch"])
def test_clients_handed_over_by_hand(request: pytest.FixtureRequest, envs: Any, which: int) -> None:
    server = request.getfixturevalue(["gloo", "messages"][which])
    clients = server.clients("env")
    asked = [env.ask_with.call_one(client, 3.0) for env, client in zip(envs, clients, strict=True)]
    assert results(asked) == [6.0] * 2


@pytest.mark.parametrize("which", [0, 1], ids=["distributed", "monarch"])
def test_the_controller_may_ask_too(
    request: pytest.FixtureRequest, roles: ModuleType, which: int
) -> None:
    server = request.getfixturevalue(["gloo", "messages"][which])
    with server.client() as client:
        assert client(roles.request(4.0), timeout=SECONDS)["action"].item() == 8.0


def test_what_was_served_and_how_the_servers_are(
    mesh: MonarchMesh, messages: MonarchServer, envs: Any
) -> None:
    messages.stats(reset=True)
    results(envs.call("ask", 1.0, 1))
    assert [stats.requests for stats in messages.stats()] == [1, 1]
    health = messages.health()
    assert [each.pid for each in health] == mesh.pids("server")
    assert all(each.serving and each.error is None for each in health)
    assert messages.is_alive


def test_a_factory_that_raises(mesh: MonarchMesh, roles: ModuleType) -> None:
    with pytest.raises(LookupError, match="no policy today"):
        mesh.serve(roles.refuse, "monarch", name="refusing")
    with mesh.serve(roles.Scale, "monarch", name="refusing") as server, server.client() as client:
        assert client(roles.request(1.0), timeout=SECONDS)["action"].item() == 2.0
    with pytest.raises(ClosedError, match="shut down"):
        server.stats()


def test_what_cannot_be_served(mesh: MonarchMesh, roles: ModuleType, gloo: MonarchServer) -> None:
    with pytest.raises(MeshError, match="'gloo' is being served"):
        mesh.serve(roles.Scale, "monarch", name="gloo")
    with pytest.raises(MeshError, match="server and client"):
        mesh.serve(roles.Scale, "monarch", clients=["env", "server"], name="other")
    with pytest.raises(ValueError, match="needs request_spec and response_spec"):
        mesh.serve(roles.Scale, "distributed", name="other")
    with pytest.raises(ValueError, match=r"'process_slot'.*'monarch'"):
        mesh.serve(roles.Scale, "process_slot", name="other")
    config = TransportConfig("distributed", {"port": 1})
    specs = {"request_spec": roles.request(0.0), "response_spec": roles.response()}
    with pytest.raises(ValueError, match="'port' cannot be given"):
        mesh.serve(roles.Scale, config, name="other", **specs)


def test_a_rank_that_is_no_client(gloo: MonarchServer) -> None:
    with pytest.raises(MeshError, match=r"rank 0 of group 'server' is no client of 'gloo'.*'env'"):
        gloo.client("server", 0)


def test_the_mesh_stays_with_its_controller(mesh: MonarchMesh) -> None:
    import pickle

    with pytest.raises(TypeError, match="stays with its controller"):
        pickle.dumps(mesh)


# --- Proc meshes that are there already -----------------------------------------------------------


def test_groups_in_proc_meshes_of_the_users(monarch_workers: Any, roles: ModuleType) -> None:
    """They go on when the mesh is closed."""
    monarch_workers.replenish()
    server, env = (monarch_workers.procs(index) for index in (0, 1))
    with MonarchMesh(groups={"server": server, "env": env}) as mesh:
        served = mesh.serve(roles.Scale, "monarch")
        envs = mesh.spawn("env", "envs", roles.Env, served)
        assert results(envs.call("ask", 21.0)) == [(42.0, 0)]
        pids = mesh.pids("server") + mesh.pids("env")
    assert all(psutil.pid_exists(pid) for pid in pids)
    assert monarch_workers.run(float, 3).result(SECONDS) == 3.0
