"""The launcher's environment, named rank groups, and the mesh that joins both."""

from meshinfer.mesh.groups import PerNode, RankGroup
from meshinfer.mesh.launcher import LaunchEnvironment
from meshinfer.mesh.mesh import Mesh, init_mesh

__all__ = ["LaunchEnvironment", "Mesh", "PerNode", "RankGroup", "init_mesh"]
