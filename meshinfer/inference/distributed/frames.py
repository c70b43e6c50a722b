"""Messages on a pair: one fixed-size frame each way for each request.

A frame is a header of :data:`HEADER_BYTES` and one row. Layouts are compared before a pair is built, so both sides
know both sizes: gloo ends a process that receives more than it has made room for. Less is well: what needs no row,
such as a goodbye, is an :func:`announcement`, a header alone, however large the rows are.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from meshinfer.layout import PayloadLayout
from meshinfer.rows import Row

__all__ = ["HEADER_BYTES", "TAG_ERROR", "TAG_FRAME", "Field", "Frame", "Kind", "announcement"]

HEADER_BYTES = 64
TAG_FRAME = 0
TAG_ERROR = 1
TAG_ABORT = 2
_PROOF = slice(32, 64)


class Kind(IntEnum):
    """What a frame says."""

    PROOF = 1
    """Either way, first on a new pair: I hold the job secret."""
    REQUEST = 2
    RESULT = 3
    ERROR = 4
    """A reply: an exception follows as a message of its own, :attr:`Field.LENGTH` bytes long."""
    BYE = 5
    """From a client: I leave. The server answers with BYE."""
    CLOSED = 6
    """From a server: I shut down. The client answers with BYE."""
    REPLACED = 7
    """From a server: a newer session of the same client has taken over."""
    FAILED = 8
    """From a client, instead of BYE: an exception ends its work, so that it may be started again."""


class Field(IntEnum):
    """Positions in the header, as int64."""

    KIND = 0
    ID = 1
    ACKNOWLEDGED = 2
    """Requests only: how many replies the client has received on this pair."""
    INTERACTION = 3
    """Requests only: code of the interaction type."""
    VERSION = 2
    """Results only: the policy version, :data:`NO_VERSION` for none."""
    LENGTH = 3
    """Errors only: bytes of the message that follows."""


NO_VERSION = -1


def announcement(kind: Kind, identifier: int = 0, length: int = 0) -> list[Tensor]:
    """A header without a row, as gloo sends it."""
    header = torch.zeros(HEADER_BYTES // 8, dtype=torch.int64, device="cpu")
    header[Field.KIND], header[Field.ID], header[Field.LENGTH] = kind, identifier, length
    return [header.view(torch.uint8)]


class Frame:
    """One message buffer: the tensor that gloo moves, and its header and row as they are used.

    Args:
        layout: of the row.
    """

    __slots__ = ("block", "block_views", "header", "message", "proof", "row", "version", "views")

    def __init__(self, layout: PayloadLayout) -> None:
        buffer = layout.new_rows(header_bytes=HEADER_BYTES)
        octets = memoryview(buffer[:HEADER_BYTES].numpy().data).cast("B")
        self.message: list[Tensor] = [buffer]
        self.header = octets.cast("q")
        self.proof = octets[_PROOF]
        self.row = Row(buffer[HEADER_BYTES:])
        self.views = layout.views(self.row.tensor)
        self.block = self.row.tensor.unsqueeze(0)  # the same row as a batch of one
        self.block_views = layout.views(self.block)
        octet = 8 * Field.VERSION
        self.version = (
            buffer[octet : octet + 8].view(torch.int64).squeeze(0).expand(layout.batch_size)
        )
