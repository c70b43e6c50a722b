"""Messages on a pair: one fixed-size frame each way for each request, or a header and a large row after it.

A frame is a header of :data:`HEADER_BYTES` and one row. Layouts are compared before a pair is built, so both sides
know both sizes: gloo ends a process that receives more than it has made room for. Less is well: what needs no row,
such as a goodbye, is an :func:`announcement`, a header alone, however large the rows are. Weights, too large for a
row of their own in every frame, follow an announcement, into memory that is chosen when it comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from meshinfer.layout import PayloadLayout
from meshinfer.rows import Row
from meshinfer.streams import PASSED, Mark, mark

__all__ = [
    "HEADERS",
    "HEADER_BYTES",
    "TAG_ERROR",
    "TAG_FRAME",
    "TAG_PROBE",
    "TAG_ROW",
    "Field",
    "Frame",
    "Kind",
    "announcement",
    "are_large",
    "proof_in",
    "proof_message",
]

HEADER_BYTES = 64
TAG_FRAME = 0
TAG_ERROR = 1
TAG_ABORT = 2
TAG_ROW = 3
TAG_PROBE = 4
TAG_END = 16
"""Added to the tag of a large message, for what follows it."""
_LARGE_BYTES = 1 << 15
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
    ROW = 9
    """A reply: a row follows as a message of its own, :attr:`Field.LENGTH` bytes long; none where that is 0."""


class Field(IntEnum):
    """Positions in the header, as int64."""

    KIND = 0
    ID = 1
    ACKNOWLEDGED = 2
    """Requests only: how many replies the client has received on this pair."""
    INTERACTION = 3
    """Requests only: code of the interaction type."""
    VERSION = 2
    """Results and rows: the version, :data:`NO_VERSION` for none."""
    LENGTH = 3
    """Errors and rows: bytes of the message that follows."""
    ORIGIN = 4
    """Rows only: the publisher whose version it is."""


NO_VERSION = -1

HEADERS = PayloadLayout.from_spec({"nothing": torch.zeros(0)}, name="header")
"""For frames that have room for a header and little else."""


def announcement(
    kind: Kind, identifier: int = 0, length: int = 0, *, version: int = 0, origin: int = 0
) -> list[Tensor]:
    """A header without a row, as gloo sends it."""
    with torch.inference_mode(False):
        header = torch.zeros(HEADER_BYTES, dtype=torch.uint8, device="cpu")
    words = memoryview(header.numpy().data).cast("B").cast("q")
    words[Field.KIND], words[Field.ID], words[Field.LENGTH] = kind, identifier, length
    words[Field.VERSION], words[Field.ORIGIN] = version, origin
    return [header]


def are_large(layouts: Sequence[PayloadLayout], *, announced: bool) -> tuple[bool, ...]:
    """Whether frames of each layout may take more than one read; both sides say the same.

    Args:
        layouts: of requests and replies.
        announced: whether frames are headers alone, and rows follow them.
    """
    return tuple(not announced and layout.row_bytes > _LARGE_BYTES for layout in layouts)


def proof_message(proof: bytes = bytes(32)) -> list[Tensor]:
    """What shows ``proof`` on a new pair, or has room for the other side's."""
    message = announcement(Kind.PROOF)
    message[0][_PROOF] = torch.frombuffer(bytearray(proof), dtype=torch.uint8)
    return message


def proof_in(message: list[Tensor]) -> bytes:
    """The proof that was received there."""
    return bytes(message[0][_PROOF].numpy())


class Frame:
    """One message buffer: the tensor that gloo moves, and its header and row as they are used.

    Args:
        layout: of the row.
        row: uint8 ``[row_bytes]``, for a row that does not travel in the message, which is a header alone then.
    """

    __slots__ = (
        "_version",
        "block",
        "block_views",
        "header",
        "message",
        "row",
        "touched",
        "version",
        "views",
    )

    def __init__(self, layout: PayloadLayout, row: Tensor | None = None) -> None:
        if row is None:
            buffer = layout.new_rows(header_bytes=HEADER_BYTES)
            row = buffer[HEADER_BYTES:]
        else:
            buffer = HEADERS.new_rows(header_bytes=HEADER_BYTES)[:HEADER_BYTES]
        octets = memoryview(buffer[:HEADER_BYTES].numpy().data).cast("B")
        self.message: list[Tensor] = [buffer]
        self.header = octets.cast("q")
        self.row = Row(row)
        self.views = layout.views(self.row.tensor)
        self.block = self.row.tensor.unsqueeze(0)  # the same row as a batch of one
        self.block_views = layout.views(self.block)
        octet = 8 * Field.VERSION
        word = buffer[octet : octet + 8].view(torch.int64).squeeze(0)
        with torch.inference_mode(False):  # a copy would wait for all that the device has to do
            self._version = word if self.row.on_host else torch.zeros_like(word, device=row.device)
        self.version = self._version.expand(layout.batch_size)
        self.touched: Mark = PASSED
        """When what this side has begun to do with the row is done: whoever moves the row waits for that."""
        self.touch()  # new memory may still have to be zeroed

    def touch(self) -> None:
        """The calling thread has begun to read or to write the row."""
        device = self.row.tensor.device
        if device.type != "cpu":
            self.touched = mark(device)

    def take_version(self) -> None:
        """Have the version that the header tells in :attr:`version`, where the row is."""
        if self._version.device.type != "cpu":
            self._version.fill_(self.header[Field.VERSION])
