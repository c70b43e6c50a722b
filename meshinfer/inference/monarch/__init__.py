"""Any payload between actors and controllers of monarch, on one host or several, over monarch's own messages."""

from __future__ import annotations

from meshinfer.inference.monarch.client import MonarchClient
from meshinfer.inference.monarch.locate import MonarchAddress, MonarchWhereabouts
from meshinfer.inference.monarch.transport import MonarchTransport

__all__ = ["MonarchAddress", "MonarchClient", "MonarchTransport", "MonarchWhereabouts"]
