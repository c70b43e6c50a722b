"""Several hosts, and a SLURM cluster of them, on this machine. The fixtures are ``hosts``, ``warm`` and ``slurm``."""

from cluster.hosts import Host
from cluster.pythons import cold_python
from cluster.slurm import Slurm, SlurmEnd, SlurmJob

__all__ = ["Host", "Slurm", "SlurmEnd", "SlurmJob", "cold_python"]
