"""What the checks share: the launcher's environment, the time that is left, and what earlier checks made."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any

from meshinfer.doctor.cgroups import ControlGroup
from meshinfer.doctor.findings import Finding, Status
from meshinfer.doctor.rollcall import RollCall
from meshinfer.errors import MeshError
from meshinfer.mesh import LaunchEnvironment, Mesh, handset, mpi, slurm, torchrun
from meshinfer.mesh.launcher import LAUNCHER_VARIABLE

__all__ = ["Context", "Roster", "marks_of_a_launcher"]

_PLACE = ("rank", "world_size", "local_rank", "local_world_size")
_LAUNCHED = (
    *torchrun.MARKERS,
    *(names[field] for names in (handset.NAMES, *mpi.NAMES) for field in _PLACE),
    LAUNCHER_VARIABLE,
)


@dataclass
class Roster:
    """What rank 0 knows of the others."""

    served: bool = False
    """Whether its server was open for them."""
    paired: set[int] = field(default_factory=set)
    verdicts: dict[int, dict[str, Any]] = field(default_factory=dict)


@dataclass
class Context:
    """Where and when the doctor runs.

    Args:
        environ: the variables of the process.
        timeout: seconds for everything.
        environment: what the launcher said; ``None`` for a process that nobody launched as a rank.
        problem: why it is ``None``.
        hostname: of this host.
        group: the control group that this process is in.
    """

    environ: Mapping[str, str]
    timeout: float = 60.0
    environment: LaunchEnvironment | None = None
    problem: str | None = None
    hostname: str = field(default_factory=socket.gethostname)
    group: ControlGroup = field(default_factory=ControlGroup.own)
    began: float = field(default_factory=time.monotonic)
    mesh: Mesh | None = None
    roll: RollCall | None = None
    findings: list[Finding] = field(default_factory=list)
    """Of the checks so far."""
    roster: Roster = field(default_factory=Roster)
    figures: dict[str, float] = field(default_factory=dict)
    """Seconds that this rank measured with rank 0, for rank 0's summary."""
    closing: ExitStack = field(default_factory=ExitStack)
    """What lives until the report has been written."""

    @classmethod
    def here(cls, timeout: float, environ: Mapping[str, str] | None = None) -> Context:
        """This process's."""
        environ = os.environ if environ is None else environ
        context = cls(environ, timeout)
        try:
            context.environment = LaunchEnvironment.from_environ(environ)
        except MeshError as error:
            context.problem = str(error)
        return context

    @property
    def failed(self) -> list[str]:
        """Names of the checks that have failed so far."""
        return [*dict.fromkeys(f.check for f in self.findings if f.status is Status.FAIL)]

    @property
    def rank(self) -> int:
        """Of this process in its job; 0 alone."""
        return 0 if self.environment is None else self.environment.rank

    @property
    def world_size(self) -> int:
        """Processes of the job; 1 alone."""
        return 1 if self.environment is None else self.environment.world_size

    @property
    def ranks_here(self) -> int:
        """Processes of the job on this host; 1 alone."""
        return 1 if self.environment is None else self.environment.local_world_size

    @property
    def spans_hosts(self) -> bool:
        """Whether the job has several nodes."""
        return self.environment is not None and self.environment.spans_hosts

    @property
    def num_clients(self) -> int:
        """Clients of the server that serves all other ranks; one alone."""
        return max(self.world_size - 1, 1)

    @property
    def clients_here(self) -> int:
        """Clients that this rank serves here; the others have one themselves."""
        return self.num_clients if self.rank == 0 else 1

    @property
    def groups(self) -> Mapping[str, int | EllipsisType]:
        """Rank groups as ``init_mesh`` makes them by default, also in a world of one."""
        return {"server": 1} if self.world_size == 1 else {"server": 1, "env": ...}

    def left(self, share: float = 1.0) -> float:
        """Seconds until ``share`` of the timeout has passed, in tenths, never quite zero."""
        return max(round(self.began + share * self.timeout - time.monotonic(), 1), 0.1)


def marks_of_a_launcher(environ: Mapping[str, str]) -> list[str]:
    """The variables by which a process looks launched as a rank; the bare script of a batch job has none."""
    found = [name for name in _LAUNCHED if name in environ]
    return found + (
        [slurm.NAMES["rank"], slurm.NAMES["world_size"]] if slurm.in_step(environ) else []
    )
