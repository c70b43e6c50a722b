"""What lies on a stream: frames of a header and a body, and reading them in whatever pieces they come."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, Final, NamedTuple

import numpy as np

__all__ = [
    "HEADER_BYTES",
    "NO_LAYOUT",
    "STAGING_BYTES",
    "BadFrameError",
    "Frame",
    "FrameReader",
    "Kind",
    "header_of",
    "skip",
    "whole_frame",
    "write_header",
]

_HEADER: Final = struct.Struct(
    "=8q"
)  # as in Frame, with the body's length third; the rest is kept free
HEADER_BYTES: Final = _HEADER.size
NO_LAYOUT: Final = -1
"""In place of a layout's number: the body is pickled."""

STAGING_BYTES: Final = 1 << 16
"""Bodies that fit are received many at a time and copied; larger ones are received where they stay."""
_LONGEST_BODY: Final = 1 << 40
_KEPT_FREE: Final = (0, 0, 0)


class Kind(IntEnum):
    """What a frame is."""

    LAYOUT = 1
    """Its body describes the payloads that name its layout number from now on."""
    REQUEST = 2
    RESULT = 3
    ERROR = 4
    """An encoded exception."""
    BYE = 5


class Frame(NamedTuple):
    """A frame that has arrived. The body is the frame's own memory, at a multiple of 16 bytes."""

    kind: int
    identifier: int
    layout: int
    interaction: int
    body: bytearray | memoryview


class BadFrameError(Exception):
    """The bytes are no frame: the other end is broken, and so is the stream."""


def header_of(
    kind: int, identifier: int = 0, length: int = 0, layout: int = NO_LAYOUT, interaction: int = 0
) -> bytes:
    """The header of a frame whose body has ``length`` bytes."""
    return _HEADER.pack(kind, identifier, length, layout, interaction, *_KEPT_FREE)


def write_header(
    target: memoryview, kind: int, identifier: int, length: int, layout: int, interaction: int
) -> None:
    """Write a header to the beginning of ``target``."""
    _HEADER.pack_into(target, 0, kind, identifier, length, layout, interaction, *_KEPT_FREE)


def whole_frame(data: memoryview) -> Frame:
    """The frame that ``data`` consists of, whose memory it keeps; :class:`BadFrameError` if it does not."""
    header = _HEADER.unpack_from(data)
    if header[2] != len(data) - HEADER_BYTES:
        raise BadFrameError(f"a body of {header[2]} bytes in a message of {len(data)}")
    return _frame(header, data[HEADER_BYTES:])


def skip(buffers: Sequence[memoryview], count: int) -> list[memoryview]:
    """What is left of ``buffers`` without their first ``count`` bytes."""
    left = list(buffers)
    while left and count >= len(left[0]):
        count -= len(left.pop(0))
    if count:
        left[0] = left[0][count:]
    return left


class FrameReader:
    """The frames of one stream. Between two calls it keeps at most one that is not complete.

    Args:
        staging: uint8 ``[STAGING_BYTES]``; used during a call only, so that many readers of a thread can share it.
    """

    def __init__(self, staging: memoryview) -> None:
        self._staging = staging
        self._left = b""
        self._header: tuple[int, ...] | None = None
        self._body: bytearray | memoryview = bytearray()
        self._rest = memoryview(b"")

    @property
    def midway(self) -> bool:
        """Whether a frame has begun and is not complete."""
        return self._header is not None or bool(self._left)

    def read(self, receive_into: Callable[[memoryview], int]) -> list[Frame] | None:
        """Receive once; the frames that are complete now, ``None`` at the end of the stream.

        Raises:
            BadFrameError: the stream makes no sense.
            OSError: what ``receive_into`` raises.
        """
        if self._header is not None:
            return self._read_body(receive_into)
        count = receive_into(self._staging)
        if count == 0:
            return None
        data = self._staging[:count]
        if self._left:
            data = memoryview(self._left + bytes(data))
            self._left = b""
        return self._split(data)

    def _read_body(self, receive_into: Callable[[memoryview], int]) -> list[Frame] | None:
        count = receive_into(self._rest)
        if count == 0:
            return None
        self._rest = self._rest[count:]
        if self._rest:
            return []
        assert self._header is not None
        frame = _frame(self._header, self._body)
        self._header, self._body = None, bytearray()
        return [frame]

    def _split(self, data: memoryview) -> list[Frame]:
        frames: list[Frame] = []
        at, end = 0, len(data)
        while at + HEADER_BYTES <= end:
            header = _HEADER.unpack_from(data, at)
            at += HEADER_BYTES
            length = header[2]
            if length > end - at:
                self._begin_body(header, data[at:])
                return frames
            if length < 0:
                raise BadFrameError(f"a body of {length} bytes")
            frames.append(_frame(header, bytearray(data[at : at + length])))
            at += length
        self._left = bytes(data[at:])
        return frames

    def _begin_body(self, header: tuple[int, ...], begun: memoryview) -> None:
        self._body = _memory(header[2])
        self._rest = memoryview(self._body)
        self._rest[: len(begun)] = begun
        self._rest = self._rest[len(begun) :]
        self._header = header


def _frame(header: tuple[int, ...], body: bytearray | memoryview) -> Frame:
    kind, identifier, _, layout, interaction, *_ = header
    return Frame(kind, identifier, layout, interaction, body)


def _memory(length: int) -> bytearray | memoryview:
    """Memory for a body; not zeroed where that takes time."""
    if length <= STAGING_BYTES:
        return bytearray(length)
    if length > _LONGEST_BODY:
        raise BadFrameError(f"a body of {length} bytes")
    try:
        octets: Any = np.empty(length, dtype=np.uint8)
    except MemoryError as error:
        raise BadFrameError(f"no memory for a body of {length} bytes") from error
    return memoryview(octets)
