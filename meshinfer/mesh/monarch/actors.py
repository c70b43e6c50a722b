"""A user's actors on one rank group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["RankActors"]


class RankActors:
    """One actor for each rank of a group; a rank that was respawned has its new one here.

    Args:
        name: given to :meth:`MonarchMesh.spawn <meshinfer.mesh.monarch.mesh.MonarchMesh.spawn>`.
        actors: by rank, each an actor mesh of one.
    """

    def __init__(self, name: str, actors: list[Any]) -> None:
        self.name = name
        self._actors = actors

    def __getitem__(self, rank: int) -> Any:
        """The actor of one rank, for ``actors[rank].endpoint.call_one(...)``."""
        return self._actors[rank]

    def __len__(self) -> int:
        return len(self._actors)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._actors)

    def call(self, endpoint: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call an endpoint of every rank; a future for each, so that a rank that dies fails only its own."""
        return [getattr(actor, endpoint).call_one(*args, **kwargs) for actor in self._actors]

    def replace(self, rank: int, actor: Any) -> None:
        """``rank`` has been respawned."""
        self._actors[rank] = actor

    def __repr__(self) -> str:
        return f"RankActors({self.name!r}, {len(self)} ranks)"
