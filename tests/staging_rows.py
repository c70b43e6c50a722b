"""Rows of clients that are made by hand, in CPU memory or on a device, for the tests of staging."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from meshinfer.inference.rowwise import RowwiseTransport
from meshinfer.layout import PayloadLayout
from meshinfer.rows import Row
from meshinfer.server.sources import RowSource

CPU = torch.device("cpu")


class Transport(RowwiseTransport):
    """The server's side alone: requests are made by hand."""

    def __init__(
        self, request: Any, response: Any, *, version_key: tuple[str, ...] | None = None
    ) -> None:
        super().__init__(request, response)
        self.policy_version_key = version_key
        self._closed = False


class AwayRow(Row):
    """A row as on a device: nobody can read its bytes but with torch."""

    __slots__ = ()

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor)
        self.on_host, self.octets = False, None


class Frame:
    def __init__(self, layout: PayloadLayout, away: bool, device: torch.device = CPU) -> None:
        tensor = layout.new_rows().to(device)
        self.row = AwayRow(tensor) if away and device == CPU else Row(tensor)
        self.views = layout.views(tensor)
        self.block = tensor.unsqueeze(0)
        self.block_views = layout.views(self.block)


class Request:
    """A request of one client, and what the server does to it."""

    arrived, interaction = 0.0, 0

    def __init__(
        self,
        transport: Transport,
        payload: TensorDict,
        away: bool = False,
        device: torch.device = CPU,
    ) -> None:
        self._layout = transport.response_layout
        self.frame = Frame(transport.request_layout, away, device)
        self._reply = Frame(transport.response_layout, away, device)
        transport.request_layout.pack(payload.to(device), self.frame.views)
        self.given_up = False
        self.released = 0
        self.replies: list[tuple[TensorDict, int | None]] = []
        self.error: bytes | None = None

    def release(self) -> None:
        self.released += 1

    def reply_frame(self) -> Frame:
        return self._reply

    def reply(self, frame: Frame, version: int | None) -> None:
        self.replies.append((self._layout.unpack(frame.views), version))

    def reply_error(self, data: bytes) -> None:
        self.error = data

    @property
    def answer(self) -> TensorDict:
        ((reply, _),) = self.replies
        return reply


def x_of(value: float, each: int = 0, width: int = 3) -> TensorDict:
    x = torch.full((width,), float(value))
    return TensorDict({"x": x.expand(each, width) if each else x}, [each] if each else [])


def y_of(value: float, each: int = 0, width: int = 3) -> TensorDict:
    return x_of(value, each, width).rename_key_("x", "y")


def double(batch: TensorDictBase) -> TensorDict:
    return TensorDict({"y": 2 * batch["x"], "undeclared": batch["x"]}, batch.batch_size)


def transport(each: int = 0, width: int = 3, **options: Any) -> Transport:
    return Transport(x_of(0, each, width), y_of(0, each, width), **options)


def served(source: RowSource, requests: Sequence[Request], version: int | None = None) -> Any:
    """One pass; the batch that the policy saw."""
    batch = source.gather(requests)
    seen = batch.clone()
    source.scatter(requests, double(batch), version)
    return seen
