"""The actor that stands for meshinfer in every process of a mesh. Imports monarch."""

from __future__ import annotations

import os
import re
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

import torch
from monarch.actor import Actor, context, current_rank, endpoint

from meshinfer.mesh.monarch.board import Notice, Place, board_of
from meshinfer.server import lifetime

__all__ = ["Agent", "Introduction", "this_machine"]

_TCP = re.compile(r"tcp://\[?([^\]@\s]+?)\]?:\d+")


@dataclass(frozen=True)
class Introduction:
    """What a process says of itself.

    Args:
        rank: in its group.
        pid: of the process.
        host_name: as the host calls itself.
        host: tells hosts of monarch apart, also those that share a machine.
        machine: tells machines (and network namespaces) apart.
        process_space: where ``pid`` means this process, see :func:`~meshinfer.server.lifetime.this_machine`.
        address: where other hosts reach this one, as monarch itself does; ``None`` where monarch does not use TCP.
    """

    rank: int
    pid: int
    host_name: str
    host: str
    machine: str
    process_space: str
    address: str | None


class Agent(Actor):  # type: ignore[misc]  # monarch is not typed
    """Knows the place of its process, and puts up there what the controller tells.

    Only ``def`` endpoints: they run in a thread of their own, whatever the user's actors are doing.

    Args:
        mesh: token of the mesh.
        group: of this process.
        rank: in the group; ``None`` for the position in the actor mesh.
    """

    def __init__(self, mesh: str, group: str, rank: int | None) -> None:
        # Here and not in an endpoint, where it would be the rank of the message.
        self._rank = int(current_rank().rank) if rank is None else rank
        self._board = board_of(mesh)
        self._board.place = Place(group, self._rank)
        if "OMP_NUM_THREADS" not in os.environ:  # as torchrun does
            torch.set_num_threads(1)

    @endpoint  # type: ignore[untyped-decorator]
    def introduce(self) -> Introduction:
        """Who this is."""
        machine = this_machine()
        found = _TCP.findall(str(context().actor_instance.actor_id))
        return Introduction(
            rank=self._rank,
            pid=os.getpid(),
            host_name=socket.gethostname(),
            host=f"{machine} {os.getppid()}",
            machine=machine,
            process_space=lifetime.this_machine(),
            address=found[-1] if found else None,
        )

    @endpoint  # type: ignore[untyped-decorator]
    def tell(self, server: str, notice: Notice) -> None:
        """There is news of a server."""
        self._board.post(server, notice)

    @endpoint  # type: ignore[untyped-decorator]
    def leave(self) -> None:
        """End this process at once: its place is given to another one."""
        os.kill(os.getpid(), signal.SIGKILL)


def this_machine() -> str:
    """The same for two processes that reach each other through the loopback interface."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/net')}"
