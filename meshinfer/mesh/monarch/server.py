"""A policy that is served on a rank group: its owner's handle, and what its clients get of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from meshinfer.arguments import as_count
from meshinfer.errors import ClosedError, MeshError
from meshinfer.inference.protocol import InferenceClient
from meshinfer.mesh.monarch.board import board_of
from meshinfer.mesh.monarch.wiring import ClientSide
from meshinfer.server.lifetime import ServerHealth
from meshinfer.server.stats import ServerStats
from meshinfer.weights.protocol import WeightTransport

if TYPE_CHECKING:
    from meshinfer.mesh.monarch.service import Service

__all__ = ["MonarchServer"]


class MonarchServer:
    """One policy, served by every rank of a group. Made by :meth:`MonarchMesh.serve`.

    May be given to the actors of the mesh as any argument: in their processes it makes clients (:meth:`client`) and
    nothing else. The rest is for the controller.

    Args:
        token: of the mesh.
        name: of the policy.
        sides: what clients need of each server's transport.
        assignment: for each rank of a client group, by group and rank, its number among all ranks and the server it
            talks to, as a position.
        service: what the owner has of it.
    """

    def __init__(
        self,
        token: str,
        name: str,
        sides: list[ClientSide],
        assignment: Mapping[tuple[str, int], tuple[int, int]],
        service: Service | None,
    ) -> None:
        self.name = name
        self._token = token
        self._sides = sides
        self._assignment = dict(assignment)
        self._service = service

    # For everybody.

    def client(self, group: str | None = None, rank: int | None = None) -> InferenceClient:
        """A new client: same host first, then evenly over the servers. Connects on first use; picklable.

        Without arguments: in a process of a client group that process's own, which replaces the client of an earlier
        process of the same rank; elsewhere one that belongs to no rank.

        Args:
            group, rank: whose client it is; for handing it over by hand.

        Raises:
            MeshError: that rank is in no client group of this policy.
        """
        self._check_open()
        if (group is None) != (rank is None):
            raise MeshError(f"group={group!r} and rank={rank!r}: give both, or neither")
        place = board_of(self._token).place
        if group is not None and rank is not None:
            key = (group, rank)
        elif place is not None:
            key = (place.group, place.rank)
        else:
            return self._sides[0].client(None)
        if key not in self._assignment:
            known = ", ".join(sorted({repr(name) for name, _ in self._assignment}))
            raise MeshError(
                f"rank {key[1]} of group {key[0]!r} is no client of {self.name!r}; the client groups are {known}"
            )
        number, server = self._assignment[key]
        return self._sides[server].client(number)

    def clients(self, group: str) -> list[InferenceClient]:
        """A client for each rank of a group, to hand over by hand."""
        return [self.client(*key) for key in sorted(self._assignment) if key[0] == group]

    @property
    def assignment(self) -> dict[tuple[str, int], int]:
        """For each client, by group and rank, its server's rank."""
        return {key: server for key, (_, server) in self._assignment.items()}

    # For the controller.

    @property
    def is_alive(self) -> bool:
        """Whether every server serves, as far as is known. Never waits."""
        return all(server.is_alive for server in self._owned().servers)

    @property
    def policy_version(self) -> int:
        """Of the weights that serve now; the lowest, where servers differ."""
        return min(server.policy_version for server in self._owned().servers)

    @property
    def weight_transport(self) -> WeightTransport | None:
        """Where the servers get new weights from: the trainer publishes by its ``publisher()``."""
        return self._owned().servers[0].weight_transport

    def start(self) -> MonarchServer:
        """Serve again where a server has died; returns the handle.

        A process that has died is replaced (:meth:`MonarchMesh.respawn`). The policy is the factory's again, and so is
        its version. Clients find the new server by themselves.

        Raises:
            Exception: what the factory raised, and whatever a start raises.
        """
        self._owned().revive()
        return self

    def update_policy_weights_(
        self, weights: Any, *, version: int | None = None, timeout: float = 60.0
    ) -> int:
        """Copy new weights into every server, each between two of its batches.

        Args:
            weights: a module, its state dict, or a TensorDict of parameters and buffers.
            version: of the weights; by default one more than any server has.
            timeout: seconds for each server.

        Returns:
            The new version.

        Raises:
            ValueError, TypeError: they do not fit; nothing has changed.
            TimeoutError: a server did not answer; the update may still happen there.
            PeerLostError: a server has died; the others have the new weights.
        """
        service = self._owned()
        if version is None:
            version = 1 + max(server.policy_version for server in service.servers)
        as_count("version", version, least=0)
        service.each(lambda server: server.update_model_weights(weights, version, timeout))
        return version

    def prepare(
        self,
        request_spec: TensorDictBase | None = None,
        *,
        interaction_type: InteractionType | None = None,
        timeout: float = 300.0,
    ) -> MonarchServer:
        """Let a compiled policy compile in every server; see :meth:`InferenceServer.prepare`."""
        self._owned().each(
            lambda server: server.prepare(
                request_spec, interaction_type=interaction_type, timeout=timeout
            )
        )
        return self

    def stats(self, reset: bool = False, timeout: float = 10.0) -> list[ServerStats]:
        """What each server has served; ``reset=True`` begins anew."""
        return self._owned().each(lambda server: server.stats(reset, timeout))

    def health(self, timeout: float = 5.0) -> list[ServerHealth]:
        """How each server is, whatever has happened to it."""
        return self._owned().each(lambda server: server.health(timeout))

    def shutdown(self, timeout: float = 5.0) -> None:
        """End every server: waiting requests and later ones raise :class:`ServerClosedError`. Idempotent.

        Args:
            timeout: seconds for the batches that are being computed.
        """
        if self._service is not None:
            self._service.shutdown(timeout)

    def __enter__(self) -> MonarchServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_service": None}

    def __repr__(self) -> str:
        where = "a client's handle" if self._service is None else str(self._service)
        return f"MonarchServer({self.name!r}, {len(self._sides)} servers, {where})"

    def _owned(self) -> Service:
        self._check_open()
        if self._service is None:
            raise MeshError(
                "servers are commanded by the controller that made the mesh; here the handle makes clients"
            )
        return self._service

    def _check_open(self) -> None:
        if self._service is not None and self._service.closed:
            raise ClosedError("this server was shut down; serve the policy again")
