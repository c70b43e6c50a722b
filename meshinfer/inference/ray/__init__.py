"""Any payload between Ray's drivers, actors and tasks, on any nodes: over TCP, where Ray says who and where."""

from __future__ import annotations

from meshinfer.inference.ray.transport import RayClient, RayTransport

__all__ = ["RayClient", "RayTransport"]
