"""The main job under real torchrun and without a launcher: who finds whom, and whose process group is whose."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from mesh_jobs import Ended, plain, run, running, torchrun
from mesh_ranks import REQUEST, RESPONSE, Plus, ask
from support import unused_port

import meshinfer
from meshinfer import MeshError, init_mesh

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "job",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def succeeded(ended: Ended) -> dict[str, Any]:
    assert ended.code == 0, str(ended)
    assert "Traceback" not in ended.stderr, str(ended)
    return ended.results


# --- The user's own process group ----------------------------------------------------------------


@pytest.mark.slow
def test_own_group_made_before_and_destroyed_while_the_library_runs(tmp_path: Path) -> None:
    flags = (f"--master-port={unused_port()}",)
    results = succeeded(run(tmp_path, torchrun(3, "own_group_first", flags=flags)))
    for rank in range(3):
        seen = results[f"rank{rank}"]
        assert seen["before"] is True
        assert seen["sum"] == seen["sum_while_serving"] == 3.0
        assert seen["after_destroy"] is seen["at_end"] is False
    assert results["rank0"]["requests"] == 20
    for rank in (1, 2):
        assert results[f"rank{rank}"]["first"] == results[f"rank{rank}"]["second"] == [100.0] * 5


@pytest.mark.slow
def test_own_group_made_while_the_library_runs(tmp_path: Path) -> None:
    results = succeeded(run(tmp_path, torchrun(3, "own_group_last")))
    for rank in range(3):
        seen = results[f"rank{rank}"]
        assert seen["before"] is False
        assert seen["after"] is True
        assert seen["sum"] == seen["sum_after"] == 3.0
    for rank in (1, 2):
        assert results[f"rank{rank}"]["while_connected"] is False
        assert results[f"rank{rank}"]["first"] == results[f"rank{rank}"]["second"] == [100.0] * 5


# --- Several servers, policies, groups -----------------------------------------------------------


@pytest.mark.slow
def test_several_servers_and_policies_without_a_group_of_the_users(tmp_path: Path) -> None:
    results = succeeded(run(tmp_path, torchrun(6, "several")))
    assert set(results) == {f"rank{rank}" for rank in range(6)}
    assert not any(seen["initialized"] for seen in results.values())
    assert {seen["agent_store"] for seen in results.values()} == {"True"}
    assert all(
        seen["assignment"] == {"2": 0, "3": 1, "4": 0} for seen in results.values()
    )  # evenly, and every rank computes the same
    for rank, constant in ((2, 100.0), (3, 200.0), (4, 100.0)):
        assert results[f"rank{rank}"]["actor"] == [constant] * 5
        assert results[f"rank{rank}"]["critic"] == [constant + 7.0] * 5
        assert "request layouts differ" in results[f"rank{rank}"]["refusal"]
        assert "goal" in results[f"rank{rank}"]["refusal"]
    for rank, requests in ((0, 10), (1, 5)):
        assert results[f"rank{rank}"]["requests"] == requests
        assert results[f"rank{rank}"]["critic_requests"] == requests
    assert "rank 5 is in group 'learner'" in results["rank5"]["error"]
    assert re.fullmatch(
        r"Mesh\(rank 3 of 6 is 'env'; server\[0-1\], env\[2-4\], learner\[5\]; node 0 of 1; "
        r"torchrun job '.+', restart 0\)",
        results["rank3"]["text"],
    )


@pytest.mark.slow
def test_a_process_that_a_rank_spawns_is_a_client(tmp_path: Path) -> None:
    ended = run(tmp_path, torchrun(2, "spawner", str(unused_port())))
    results = succeeded(ended)
    assert results["child"]["given"] == results["child"]["own"] == [100.0] * 5
    assert results["child"]["initialized"] is False
    assert "rank 1 of 2 is 'env'" in results["child"]["text"]
    assert results["parent"]["exit_code"] == 0
    assert results["chosen"]["said"] == [200.0] * 5
    assert results["server"]["requests"] == [10, 5]


@pytest.mark.slow
def test_a_restarted_job_connects_afresh(tmp_path: Path) -> None:
    ended = run(tmp_path, torchrun(2, "restarting", flags=("--standalone", "--max-restarts=1")))
    assert ended.code == 0, str(ended)
    assert "this rank fails in its first attempt" in ended.stderr
    assert ended.results["rank1-0"]["said"] == [100.0] * 5
    assert ended.results["rank1-1"]["said"] == [200.0] * 5
    assert ended.results["server-1"]["requests"] == 5


@pytest.mark.slow
def test_two_jobs_on_one_host_do_not_mix(tmp_path: Path) -> None:
    commands = [torchrun(2, "constant", value) for value in ("1", "2")]
    with running(tmp_path, *commands) as jobs:
        for job, value in zip(jobs, (1.0, 2.0), strict=True):
            results = succeeded(job.end())
            assert results["rank1"]["said"] == [value] * 200
            assert results["server"]["requests"] == 200


def test_ranks_without_a_launcher_and_one_that_never_asks(tmp_path: Path) -> None:
    port = str(unused_port())
    with running(tmp_path, *(plain("explicit", str(rank), "3", port) for rank in range(3))) as jobs:
        results = [succeeded(job.end())[f"rank{rank}"] for rank, job in enumerate(jobs)]
    assert results[1]["said"] == [100.0] * 5
    assert results[0]["requests"] == 5
    assert results[2]["text"] == (
        "Mesh(rank 2 of 3 is 'env'; server[0], env[1-2]; node 0 of 1; explicit job '', restart 0)"
    )


# --- Meshes in this process ----------------------------------------------------------------------


def two_ranks(**arguments: Any) -> list[meshinfer.Mesh]:
    where = {"host": "127.0.0.1", "port": unused_port(), **arguments}
    return [init_mesh(rank=rank, world_size=2, **where) for rank in range(2)]


def test_serve_gives_up_at_its_timeout_and_goes_on_serving() -> None:
    server_mesh, client_mesh = two_ranks()
    transport = server_mesh.transport(REQUEST, RESPONSE)
    with meshinfer.InferenceServer(Plus(1.0), transport) as server:
        with pytest.raises(TimeoutError, match=r"0\.2 s"):
            server.serve(timeout=0.2)
        with client_mesh.transport(REQUEST, RESPONSE).client() as client:
            assert ask(client, 5) == [1.0] * 5
            with pytest.raises(TimeoutError, match="still connected"):
                server.serve(timeout=0.1)
        server.serve(timeout=60)
    server_mesh.close()


def test_serve_waits_for_as_many_clients_as_it_is_told() -> None:
    server_mesh, client_mesh = two_ranks()
    transport = server_mesh.transport(REQUEST, RESPONSE)
    clients = client_mesh.transport(REQUEST, RESPONSE)
    with meshinfer.InferenceServer(Plus(1.0), transport) as server:
        for number in (1, 2):
            with clients.client() as client:
                ask(client, 0)
            if number == 1:
                with pytest.raises(TimeoutError):
                    server.serve(num_clients=2, timeout=0.2)
        server.serve(num_clients=2, timeout=60)
    server_mesh.close()


def test_a_client_that_was_never_used_does_not_hold_the_server() -> None:
    server_mesh, client_mesh = two_ranks()
    transport = server_mesh.transport(REQUEST, RESPONSE)
    with meshinfer.InferenceServer(Plus(1.0), transport) as server:
        client_mesh.transport(REQUEST, RESPONSE).client().close()
        server.serve(timeout=60)
        assert server.stats().requests == 0
    server_mesh.close()


def test_a_client_waits_for_a_server_that_starts_later() -> None:
    server_mesh, client_mesh = two_ranks()
    with client_mesh.transport(REQUEST, RESPONSE).client() as client:
        with pytest.raises(TimeoutError, match=r"policy/0.*publish"):
            client(REQUEST, timeout=1.0)
        transport = server_mesh.transport(REQUEST, RESPONSE)
        with meshinfer.InferenceServer(Plus(1.0), transport):
            assert ask(client, 5) == [1.0] * 5
    server_mesh.close()


def test_a_job_with_a_secret_of_its_own_publishes_none() -> None:
    server_mesh, client_mesh = two_ranks(secret="a word of this job")
    where = {"host": client_mesh.directory.host, "port": client_mesh.directory.port}
    stranger = init_mesh(rank=1, world_size=2, **where)
    transport = server_mesh.transport(REQUEST, RESPONSE)
    with meshinfer.InferenceServer(Plus(1.0), transport):
        with client_mesh.transport(REQUEST, RESPONSE).client() as client:
            assert ask(client, 5) == [1.0] * 5
        with (
            stranger.transport(REQUEST, RESPONSE).client() as client,
            pytest.raises(MeshError, match="MESHINFER_SECRET"),
        ):
            ask(client, 5)
    server_mesh.close()


def test_the_secret_is_in_no_repr() -> None:
    mesh, _ = two_ranks(secret="hush-hush")
    transport = mesh.transport(REQUEST, RESPONSE)
    client = transport.client()
    for shown in (mesh, transport, transport.address, client):
        assert "hush" not in repr(shown) + str(shown)
    client.close()
    transport.close()
    mesh.close()


# --- Errors --------------------------------------------------------------------------------------


def test_a_learner_has_no_transport() -> None:
    mesh = init_mesh(
        {"server": 1, "env": 1, "learner": 1},
        rank=2,
        world_size=3,
        host="127.0.0.1",
        port=unused_port(),
    )
    with pytest.raises(MeshError, match=r"rank 2 is in group 'learner'.*servers= or clients="):
        mesh.transport(REQUEST, RESPONSE)


@pytest.mark.parametrize("groups", [{"server": 1, "env": ...}, None])
def test_ranks_that_cannot_find_each_other(groups: Any) -> None:
    for rank in range(2):
        mesh = init_mesh(groups, rank=rank, world_size=2)
        with pytest.raises(MeshError, match="needs host= and port="):
            mesh.transport(REQUEST, RESPONSE)


@pytest.mark.parametrize(
    "name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID"]
)
def test_a_missing_variable_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for variable, value in TORCHRUN.items():
        monkeypatch.setenv(variable, value)
    assert init_mesh().role == "env"
    monkeypatch.delenv(name)
    with pytest.raises(MeshError, match=rf"\b{name} is missing"):
        init_mesh()


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"server": 3, "env": ...}, "group 'server' asks for 3 ranks.*world of 2"),
        ({"server": [0], "env": [0, 1]}, "'server' and 'env' both claim rank 0"),
        ({"server": [0], "env": [7]}, "rank 7, outside the world of 2"),
        ({"server": 1}, "no group takes ranks 1"),
    ],
)
def test_groups_that_do_not_fit_the_world(groups: Any, message: str) -> None:
    with pytest.raises(MeshError, match=message):
        init_mesh(groups, rank=0, world_size=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 0}, "give both"),
        ({"world_size": 2}, "give both"),
        ({"rank": 0, "world_size": 2, "host": "127.0.0.1"}, "host=.*port=None: give both"),
        ({"rank": 0, "world_size": 2, "port": 5}, "give both"),
        ({"rank": 0, "world_size": 2, "host": "127.0.0.1", "port": 0}, "port=0: expected 1"),
        ({"rank": 0, "world_size": 2, "host": "127.0.0.1", "port": 70000}, "port=70000"),
        ({"rank": 2, "world_size": 2}, "rank=2"),
    ],
)
def test_arguments_that_cannot_work(arguments: Any, message: str) -> None:
    with pytest.raises(MeshError, match=message):
        init_mesh(**arguments)


def test_groups_that_do_not_exist() -> None:
    mesh = init_mesh(rank=0, world_size=2, host="127.0.0.1", port=unused_port())
    with pytest.raises(MeshError, match=r"no rank group 'learner'.*'server', 'env'"):
        mesh.group("learner")
    with pytest.raises(MeshError, match="no rank group 'learner'"):
        mesh.transport(REQUEST, RESPONSE, clients="learner")
    with pytest.raises(MeshError, match="server and client of the same"):
        mesh.transport(REQUEST, RESPONSE, clients=["server", "env"])
    mesh.close()
    mesh.close()


def test_the_port_of_rank_zero_is_taken() -> None:
    mesh = init_mesh(rank=0, world_size=2, host="127.0.0.1", port=(port := unused_port()))
    with pytest.raises(MeshError, match=f"cannot listen on 127.0.0.1:{port}"):
        init_mesh(rank=0, world_size=2, host="127.0.0.1", port=port)
    mesh.close()
