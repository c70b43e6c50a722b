"""How the ranks of a job connect to the store that its rank 0 hosts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch.distributed import TCPStore

from meshinfer.errors import MeshError, PeerLostError
from meshinfer.mesh.beacon import Key
from meshinfer.mesh.knocking import Search
from meshinfer.rendezvous import Directory, connect_store

__all__ = ["BeaconDirectory"]

_ASK_AGAIN_SECONDS = 1.0


class Reached:
    """A flag that travels with what it belongs to."""

    def __init__(self) -> None:
        self._set = False

    def is_set(self) -> bool:
        """Whether it was set."""
        return self._set

    def set(self) -> None:
        """Set it for good."""
        self._set = True


@dataclass(frozen=True)
class BeaconDirectory(Directory):
    """The store that rank 0 hosts, where its beacon says: asked at every connect, so that a new rank 0 is found too.

    Args:
        host: numeric address of rank 0's host; ``port`` is 0.
        identity: of the job.
        secret: of the job, when it has one.
        ports: where the beacon may be.
        launcher: for errors.
        placement: a digest of which rank is on which node, as this rank supposes; empty where it does not know.
        reached: whether somebody has connected.
    """

    identity: str = ""
    secret: bytes | None = field(default=None, repr=False)
    ports: Sequence[int] = ()
    launcher: str = ""
    placement: str = ""
    reached: Reached = field(default_factory=Reached, repr=False, compare=False)

    def connect(self, timeout: float) -> TCPStore:
        """A connection of its own to the store.

        Raises:
            TimeoutError: no beacon answered within ``timeout`` seconds.
            PeerLostError: somebody has been connected before, and rank 0 has ended since.
        """
        deadline = time.monotonic() + timeout
        while True:
            host, port = self._find(deadline, timeout)
            self.reached.set()
            left = max(deadline - time.monotonic(), 0.01)
            try:
                return connect_store(
                    host, port, left, awaited="the job's store", patience=_ASK_AGAIN_SECONDS
                )
            except TimeoutError:  # rank 0 may have ended meanwhile
                if time.monotonic() + _ASK_AGAIN_SECONDS >= deadline:
                    raise

    def _find(self, deadline: float, timeout: float) -> tuple[str, int]:
        reached_before = self.reached.is_set()
        while True:
            search = self.search()
            left = max(deadline - time.monotonic(), 0.01)
            found = search.run(left, once=reached_before)
            if found is not None:
                self._check_placement(found["placement"])
                return found["host"], found["port"]
            if reached_before and search.deserted:
                raise PeerLostError(
                    f"rank 0, which hosted the job's store at {self.host}, has ended; where servers are now cannot be "
                    "known until it is started again"
                )
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"waited {timeout:.3g} s for rank 0 of this {self.launcher} job at {self.host} to offer the job's "
                    f"store ({search}); has rank 0 started and called init_mesh, is {self.host} its node, and do all "
                    "ranks have the same job variables?"
                )
            reached_before = False

    def _check_placement(self, theirs: str) -> None:
        if theirs and self.placement and theirs != self.placement:
            raise MeshError(
                "rank 0 and this rank differ on which rank is on which node, as SLURM tells each component of a "
                "heterogeneous job only how it deals ranks out itself; start with srun -m block"
            )

    @property
    def place(self) -> str:
        """Where the store is, for messages."""
        return f"{self.host}, which rank 0 hosts"

    def search(self) -> Search:
        """A new search for the beacon."""
        return Search(self.key, self.host, self.ports)

    @property
    def key(self) -> Key:
        """What the beacon proves."""
        return Key(self.identity, self.secret)
