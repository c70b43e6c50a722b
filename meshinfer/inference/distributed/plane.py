"""The data plane of a pair: how rows travel, inside the frames that gloo moves or beside them.

With :class:`FramedRows` a row is part of its frame, one gloo message. With
:class:`~meshinfer.inference.distributed.announced.AnnouncedRows` the frame is a header, and the row follows over a
channel: one direction of one pair, used by one thread. A receive is posted only after the header that announces the row
has come, so no channel ever waits for an idle client, and rows keep the order of their headers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import Store

from meshinfer.inference.distributed.frames import Frame
from meshinfer.layout import PayloadLayout
from meshinfer.streams import Mark

__all__ = ["Channel", "DataPlane", "FramedRows", "RowBackend"]


class DataPlane(Protocol):
    """How the rows of one pair travel, at one of its sides."""

    @property
    def reason(self) -> str | None:
        """Why rows were given up, if they were: then whatever gloo says is but a consequence."""

    def frames(self, layout: PayloadLayout, count: int) -> list[Frame]:
        """Frames for messages that are received one after the other, each used before the next one is received."""

    def frame(self, layout: PayloadLayout) -> Frame:
        """A frame with a row of its own."""

    def begin_receiving(self) -> None:
        """First call of the thread that receives. Raises as :meth:`RowBackend.channel` does."""

    def await_receiving(self) -> None:
        """Until another thread has done that; errors likewise."""

    def begin_sending(self) -> None:
        """Until rows can be sent; likewise."""

    def send(self, frame: Frame) -> None:
        """The frame's message has been sent: now its row. Never waits; one thread at a time.

        The row stays as it is until the other side has it. :class:`RuntimeError` if it cannot be sent.
        """

    def receive(self, frame: Frame) -> None:
        """The receiving thread: the frame's message has come; until its row is here too.

        Raises:
            RuntimeError: it will not come; says why.
        """

    def has_read(self, frame: Frame) -> None:
        """The receiving thread: until what it has begun to read out of the row has been read."""

    def close(self) -> None:
        """Give up what is under way: who waits for it raises. Never waits. Idempotent."""


class FramedRows:
    """Rows are part of their frames: nothing is left to do."""

    reason: str | None = None

    def frames(self, layout: PayloadLayout, count: int) -> list[Frame]:
        """See :class:`DataPlane`."""
        return [Frame(layout) for _ in range(count)]

    def frame(self, layout: PayloadLayout) -> Frame:
        """See :class:`DataPlane`."""
        return Frame(layout)

    def begin_receiving(self) -> None:
        """See :class:`DataPlane`."""

    def await_receiving(self) -> None:
        """See :class:`DataPlane`."""

    def begin_sending(self) -> None:
        """See :class:`DataPlane`."""

    def send(self, frame: Frame) -> None:
        """See :class:`DataPlane`."""

    def receive(self, frame: Frame) -> None:
        """See :class:`DataPlane`."""

    def has_read(self, frame: Frame) -> None:
        """See :class:`DataPlane`."""

    def close(self) -> None:
        """See :class:`DataPlane`."""


class Channel(Protocol):
    """One direction of one pair: a communicator of two ranks.

    Used by one thread, which has got it from :meth:`RowBackend.channel`; only :meth:`abort` may come from another one,
    at any time.
    """

    def send(self, row: Tensor, after: Mark) -> Mark:
        """Begin to send ``row``; never waits for the other side.

        Args:
            row: uint8 ``[row_bytes]`` on the backend's device; stays as it is until the returned mark has passed.
            after: when the row has been written.

        Returns:
            A mark that passes by itself, also when nobody waits for it.

        Raises:
            RuntimeError: the channel is broken or was aborted. Likewise for what the mark's ``wait`` raises.
        """

    def receive(self, row: Tensor, after: Mark) -> Mark:
        """Post the receive for the row that a header has announced; errors as for :meth:`send`.

        Args:
            row: uint8 ``[row_bytes]`` on the backend's device.
            after: when its last content has been read.

        Returns:
            A mark that passes when the row is here. ``wait`` on it raises :class:`RuntimeError` when the channel was
            aborted or broke first.
        """

    def abort(self) -> None:
        """Give up whatever is under way, so that who waits for it raises, and free the communicator. Idempotent.

        May block for a while: never called by a thread that serves.
        """


class RowBackend(Protocol):
    """What makes the channels of one side, and the memory that they move. Picklable; the same in every process.

    Errors are raised in the words of the user's arguments.
    """

    name: str
    """As in ``DistributedTransport(backend=...)``; both sides of a pair have the same."""

    @property
    def device(self) -> torch.device:
        """Where rows lie in this process, with its index. :class:`ValueError` if this process does not have it."""

    def describe(self) -> dict[str, Any]:
        """What the other side must know before channels are built, in JSON values; in the process that uses it."""

    def objection(self, theirs: Mapping[str, Any]) -> str | None:
        """Server: why no channel to a client that says ``theirs`` can work, and the remedy; ``None`` if it can."""

    def new_row(self, nbytes: int) -> Tensor:
        """Memory for a row on :attr:`device`, uint8 ``[nbytes]``, no inference tensor. It is zeroed when the device has
        done what the calling thread's current stream has got: a :class:`Frame` over it is marked so.
        """

    def channel(self, store: Store, rank: int, *, sends: bool, timeout: float) -> Channel:
        """Build one direction for the calling thread, and let one small row pass, so that nothing is left to the first
        message.

        Args:
            store: a new one for each channel, where both sides meet; it answers until this returns.
            rank: 0 at the server, 1 at the client.
            sends: whether rows leave here; the other side says the opposite.
            timeout: seconds for the other side to come.

        Raises:
            TimeoutError: it has not.
            RuntimeError: the channel cannot be built; says why.
        """
