"""What is in a message: a token that says for whom it is, and one frame."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import IntEnum
from typing import Any, Final

from meshinfer.inference.queues.codec import Message
from meshinfer.inference.queues.labels import Labeller
from meshinfer.inference.queues.wire import (
    HEADER_BYTES,
    BadFrameError,
    Frame,
    header_of,
    whole_frame,
)

__all__ = [
    "NOBODY",
    "TOKEN_BYTES",
    "Signal",
    "labelled",
    "open_message",
    "read_facts",
    "signal",
    "write_facts",
]

TOKEN_BYTES: Final = 16  # as the header, a multiple of 16: bodies stay aligned
NOBODY: Final = bytes(TOKEN_BYTES)
"""The token of who has none yet."""


class Signal(IntEnum):
    """Frames beside those of :class:`~meshinfer.inference.queues.wire.Kind`."""

    KNOCK = 32
    """Somebody wants to join: where to answer."""
    CHALLENGE = 33
    """The server's hello. Its token is the other side's from now on."""
    PROOF = 34
    """The reply to it, and who has joined if it is right."""
    VERDICT = 35
    REDIRECT = 36
    """Another process serves: its address."""
    PING = 37
    """To be answered by the thread that receives it: where to answer."""
    PONG = 38
    GONE = 39
    """Whoever has this token is not known any more: why."""


def signal(token: bytes, kind: Signal, body: bytes = b"") -> tuple[bytes, bytes, bytes]:
    """The parts of a message that carries ``body``."""
    return token, header_of(kind, length=len(body)), body


def write_facts(facts: Mapping[str, Any]) -> bytes:
    """``facts`` as JSON."""
    return json.dumps(facts).encode()


def read_facts(body: bytes | bytearray | memoryview) -> dict[str, Any]:
    """What :func:`write_facts` wrote; :class:`BadFrameError` if it was something else."""
    try:
        found = json.loads(bytes(body))
    except ValueError as error:
        raise BadFrameError(f"no facts: {error}") from error
    if not isinstance(found, dict):
        raise BadFrameError(f"a {type(found).__name__} instead of facts")
    return found


def labelled(
    labeller: Labeller, message: Message, kind: int, identifier: int, interaction: int = 0
) -> list[list[memoryview]]:
    """The frames to send for ``message``, each a message of its own: a new layout goes before."""
    buffers = labeller.label(message, kind, identifier, interaction)
    before = len(buffers) - len(message.buffers)
    return [buffers[:before], buffers[before:]] if before else [buffers]


def open_message(message: bytearray) -> tuple[bytes, Frame]:
    """The token, and the frame, which keeps the message's memory.

    Raises:
        BadFrameError: it is no message of ours.
    """
    if len(message) < TOKEN_BYTES + HEADER_BYTES:
        raise BadFrameError(f"a message of {len(message)} bytes")
    return bytes(message[:TOKEN_BYTES]), whole_frame(memoryview(message)[TOKEN_BYTES:])
