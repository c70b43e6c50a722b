"""Between threads of one process: payloads of any structure, any number of clients."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from tensordict import TensorDictBase

from meshinfer.inference.exchange import LocalRequest, Member
from meshinfer.inference.interaction import current_interaction
from meshinfer.inference.local import LocalClient, LocalTransport
from meshinfer.items import check_collection, copy_item, structure_of

__all__ = ["ThreadingClient", "ThreadingTransport"]


class _Request(LocalRequest):
    __slots__ = ("payload", "structure")

    def __init__(self, member: Member, interaction: int, payload: TensorDictBase) -> None:
        super().__init__(member, interaction)
        self.payload = payload
        self.structure: Hashable = structure_of(payload)


class ThreadingClient(LocalClient):
    """A client of a :class:`ThreadingTransport`. Threads may share it."""


class ThreadingTransport(LocalTransport):
    """Requests of any structure between threads of one process, for any number of clients.

    A payload is copied once, by the thread that sends it. Requests that are alike in keys, shapes, dtypes and
    interaction type are served together, others in forward passes of their own. What is no tensor travels too.
    Implements :class:`~meshinfer.inference.protocol.ServedTransport`.
    """

    transport_kind = "queue"
    keeps_devices = True
    """Tensors stay on their devices, so that a server may reply on another than the CPU."""
    client_class = ThreadingClient

    def __init__(self) -> None:
        super().__init__(_pack)

    def drain_with_timing(
        self, max_items: int
    ) -> tuple[list[TensorDictBase], list[Any], list[float]]:
        """See :meth:`~meshinfer.inference.draining.Draining.drain_with_timing`; arrived is when it was sent."""
        requests: list[_Request] = self._exchange.take(max_items)
        payloads = [request.payload for request in requests]
        return payloads, requests, [request.arrived for request in requests]

    def resolve(self, callback: _Request, result: TensorDictBase) -> None:
        """Hand ``result`` itself to the client behind ``callback``, whose own it is from now on."""
        callback.answer(result)


def _pack(member: Member, payload: TensorDictBase) -> _Request:
    check_collection(payload)
    return _Request(member, current_interaction(), copy_item(payload))
