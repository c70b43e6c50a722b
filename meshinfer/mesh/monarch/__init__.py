"""The rank groups of a monarch mesh, the policy served on one of them, and the clients on the others.

monarch itself is imported when the first :class:`MonarchMesh` is made.
"""

from meshinfer.mesh.monarch.actors import RankActors
from meshinfer.mesh.monarch.failures import RankFailure
from meshinfer.mesh.monarch.mesh import MonarchMesh
from meshinfer.mesh.monarch.server import MonarchServer

__all__ = ["MonarchMesh", "MonarchServer", "RankActors", "RankFailure"]
