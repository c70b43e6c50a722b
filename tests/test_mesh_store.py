"""Where rank 0 hosts the job's store: addresses, names that lead nowhere, what listens, and for how long."""

from __future__ import annotations

import gc
import os
import pickle
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from mesh_ranks import REQUEST, RESPONSE, Plus, ask
from support import unused_port, wait_until
from test_launcher_slurm import HETEROGENEOUS, step
from test_rendezvous import listening, outer_address

import meshinfer
from meshinfer import MeshError, PeerLostError, init_mesh
from meshinfer.rendezvous import PrivateStore

LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "TORCHELASTIC_", "SLURM_", "OMPI_")
TWO_NODES = [[0], [1]]
SECONDS = 60.0


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith((*LAUNCHED, "PMI_", "MESHINFER_JOB", "MESHINFER_L", "GLOO_SOCKET")):
            monkeypatch.delenv(name)


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 of two, with an identity that no other test has."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", str(unused_port()))


def by_srun(patch: pytest.MonkeyPatch, rank: int, hosts: str, **more: str) -> None:
    more = {"SLURM_JOB_ID": f"{os.getpid()}", **more}
    for name, value in step(rank, TWO_NODES, hosts, **more).items():
        patch.setenv(name, value)


def tool(folder: Path, patch: pytest.MonkeyPatch, address: str) -> None:
    """A ``scontrol`` that knows one address."""
    path = folder / "scontrol"
    path.write_text(f'#!/bin/sh\ntest "$2" = node && echo "NodeName=$3 NodeAddr={address} "\n')
    path.chmod(0o700)
    patch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def outer() -> str:
    address = outer_address()
    if address is None:
        pytest.skip("this host has loopback only")
    return address


# --- What listens --------------------------------------------------------------------------------


@pytest.mark.usefixtures("by_hand")
def test_rank_zero_listens_on_one_address_until_the_mesh_is_closed() -> None:
    before = listening()
    mesh = init_mesh()
    opened = listening() - before
    assert {address for address, _ in opened} == {"127.0.0.1"}
    assert len(opened) == 2, "the store and the beacon"
    assert os.environ["MASTER_PORT"] not in {str(port) for _, port in opened}
    with socket.create_server(("127.0.0.1", int(os.environ["MASTER_PORT"]))):
        pass
    mesh.close()
    mesh.close()
    assert listening() <= before


@pytest.mark.usefixtures("by_hand")
def test_a_mesh_that_is_dropped_is_closed() -> None:
    before = listening()
    init_mesh()
    assert listening() <= before


@pytest.mark.usefixtures("by_hand")
def test_a_transport_keeps_the_store_of_a_mesh_that_was_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = listening()
    transport = init_mesh().transport(REQUEST, RESPONSE)
    monkeypatch.setenv("RANK", "1")
    with (
        meshinfer.InferenceServer(Plus(3.0), transport),
        init_mesh().transport(REQUEST, RESPONSE).client() as client,
    ):
        gc.collect()
        assert ask(client, 1) == [3.0] * 5
    del transport
    gc.collect()
    assert wait_until(lambda: listening() <= before, SECONDS)


@pytest.mark.usefixtures("by_hand")
def test_meshes_of_one_process_share_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    before = listening()
    meshes = [init_mesh() for _ in range(3)]
    assert len(listening() - before) == 2
    monkeypatch.setenv("RANK", "1")
    client_mesh = init_mesh()
    for mesh in meshes[:2]:
        mesh.close()
    transport = meshes[2].transport(REQUEST, RESPONSE)
    with (
        meshinfer.InferenceServer(Plus(3.0), transport),
        client_mesh.transport(REQUEST, RESPONSE).client() as client,
    ):
        assert ask(client, 1) == [3.0] * 5
    meshes[2].close()
    copied = pickle.loads(pickle.dumps(client_mesh.directory))
    assert copied == client_mesh.directory
    with pytest.raises(PeerLostError, match="rank 0, which hosted"):
        copied.connect(SECONDS)


@pytest.mark.usefixtures("by_hand")
def test_a_rank_that_waits_in_vain_says_for_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with (
        init_mesh().transport(REQUEST, RESPONSE).client() as client,
        pytest.raises(TimeoutError, match=r"0\.\d+ s for rank 0 of this env job at 127\.0\.0\.1"),
    ):
        client(REQUEST, timeout=0.3)


@pytest.mark.usefixtures("by_hand")
def test_a_rank_that_waits_for_a_server_learns_that_rank_zero_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mesh = init_mesh()
    monkeypatch.setenv("RANK", "1")
    transport = init_mesh().transport(REQUEST, RESPONSE)
    with transport.client() as client, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client, REQUEST)
        assert wait_until(lambda: connections_to(mesh) > 0, SECONDS)
        mesh.close()
        with pytest.raises(PeerLostError, match="rank 0, which hosted"):
            asked.result(SECONDS)


def connections_to(mesh: meshinfer.Mesh) -> int:
    """How many connections there are from this process to the store that it hosts."""
    beacon = mesh.directory.search().run(SECONDS)  # type: ignore[union-attr]
    found = psutil.Process().net_connections("tcp")
    return sum(bool(each.raddr) and each.raddr.port == beacon["port"] for each in found)


def test_a_port_of_the_system_is_never_master_port(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    class Coincidence(socket.socket):
        """The first port that the system chooses is the one that the user has chosen."""

        def bind(self, address: tuple[str, int]) -> None:
            super().bind(address)
            if not taken:
                taken.append(self.getsockname()[1])
                monkeypatch.setenv("MASTER_PORT", str(taken[0]))

    monkeypatch.setattr("meshinfer.rendezvous.socket.socket", Coincidence)
    store = PrivateStore("127.0.0.1")
    assert taken
    assert store.port != taken[0]
    store.close()


# --- Where rank 0 is -----------------------------------------------------------------------------


@pytest.mark.usefixtures("by_hand")
def test_the_argument_wins_over_master_addr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "no-such-host.invalid")
    before = listening()
    mesh = init_mesh(host="127.0.0.7")
    assert mesh.directory is not None
    assert mesh.directory.host == "127.0.0.7"
    assert {address for address, _ in listening() - before} == {"127.0.0.7"}
    mesh.close()


@pytest.mark.usefixtures("by_hand")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no-such-host.invalid", r"'no-such-host\.invalid', cannot be found.*host="),
        ("192.0.2.1", r"cannot host the job's store at 192\.0\.2\.1: .*host="),
        ("", r"env does not say where rank 0 is: set MASTER_ADDR, or pass host="),
    ],
)
def test_an_address_that_leads_nowhere(
    monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    monkeypatch.setenv("MASTER_ADDR", name)
    before = listening()
    with pytest.raises(MeshError, match=message):
        init_mesh()
    assert listening() <= before


@pytest.mark.usefixtures("by_hand")
def test_a_port_alone_is_no_address() -> None:
    with pytest.raises(MeshError, match="give both"):
        init_mesh(port=unused_port())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_node_whose_name_is_loopback(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    by_srun(monkeypatch, rank, "localhost,other")
    with pytest.raises(MeshError, match=r"'localhost', has the loopback address 127.*interface=.*"):
        init_mesh()
    if rank == 0:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
        with pytest.raises(MeshError, match="GLOO_SOCKET_IFNAME"):
            init_mesh()


def test_the_interface_helps_where_the_name_is_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    address = outer()
    by_srun(monkeypatch, 0, "localhost,other")
    before = listening()
    mesh = init_mesh(interface=address)
    assert mesh.directory is not None
    assert mesh.directory.host == address
    assert {found for found, _ in listening() - before} == {address}
    mesh.close()


def test_slurm_is_asked_for_an_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    address = outer()
    tool(tmp_path, monkeypatch, address)
    by_srun(monkeypatch, 0, "n0.invalid,n1.invalid")
    mesh = init_mesh()
    assert mesh.directory is not None
    assert mesh.directory.host == address
    mesh.close()


def test_a_name_that_nobody_knows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool(tmp_path, monkeypatch, "n0.invalid")
    by_srun(monkeypatch, 1, "n0.invalid,n1.invalid")
    with pytest.raises(MeshError, match=r"node of rank 0, 'n0\.invalid', cannot be found.*host="):
        init_mesh()
    assert init_mesh(host="192.0.2.1").directory is not None


def test_ranks_that_differ_on_who_is_where(monkeypatch: pytest.MonkeyPatch) -> None:
    address = outer()
    monkeypatch.setenv("PATH", "")

    def mesh(rank: int) -> meshinfer.Mesh:
        more = {"SLURM_JOB_ID": f"{os.getpid()}", "SLURM_DISTRIBUTION": "cyclic"}
        for name, value in step(rank, [[0], [1, 3], [2]], **HETEROGENEOUS, **more).items():
            monkeypatch.setenv(name, value)
        return init_mesh(host=address)

    first = mesh(0)
    assert mesh(0).directory.connect(SECONDS)  # type: ignore[union-attr]
    with (
        mesh(1).transport(REQUEST, RESPONSE).client() as client,
        pytest.raises(MeshError, match=r"differ on which rank is on which node.*-m block"),
    ):
        client(REQUEST, timeout=SECONDS)
    first.close()


def test_ranks_in_an_order_that_slurm_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    by_srun(monkeypatch, 1, "n0,n1", SLURM_DISTRIBUTION="arbitrary")
    with pytest.raises(MeshError, match=r"which of the 2 nodes .* rank 0.*-m block, or pass host="):
        init_mesh()
    assert init_mesh(host="192.0.2.1").directory is not None
