"""Numbers in place of layouts: a stream describes a layout once, and names its number from then on."""

from __future__ import annotations

from typing import Any

from meshinfer.inference.queues.codec import MAX_LAYOUTS, Message, Structure, structure_of
from meshinfer.inference.queues.pickling import load
from meshinfer.inference.queues.wire import (
    NO_LAYOUT,
    BadFrameError,
    Frame,
    Kind,
    header_of,
    write_header,
)

__all__ = ["Labeller", "Labels", "unpacked"]


class Labeller:
    """The sender's end. Messages must leave in the order in which they were labelled."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def label(
        self, message: Message, kind: int, identifier: int, interaction: int = 0
    ) -> list[memoryview]:
        """Write the header of ``message``: what to send for it, which begins with a new layout's description."""
        structure = message.structure
        number = NO_LAYOUT if structure is None else self._numbers.get(structure.key)
        before: list[memoryview] = []
        if number is None:
            assert structure is not None
            number, before = self._describe(structure)
        write_header(message.buffers[0], kind, identifier, message.length, number, interaction)
        return before + message.buffers if before else message.buffers

    def _describe(self, structure: Structure) -> tuple[int, list[memoryview]]:
        if len(self._numbers) >= MAX_LAYOUTS:
            self._numbers.clear()
        number = self._numbers[structure.key] = len(self._numbers)
        text = structure.description
        header = header_of(Kind.LAYOUT, length=len(text), layout=number)
        return number, [memoryview(header), memoryview(text)]


class Labels:
    """The receiver's end."""

    def __init__(self) -> None:
        self._structures: dict[int, Structure] = {}

    def learn(self, frame: Frame) -> None:
        """A layout is described. Only from a peer that has proved to hold the secret."""
        try:
            self._structures[frame.layout] = structure_of(bytes(frame.body))
        except Exception as error:  # another version of torch may lack anything
            raise BadFrameError(f"a layout that cannot be read: {error}") from error

    def structure(self, frame: Frame) -> Structure | None:
        """Of the payload in ``frame``, ``None`` for a pickled one.

        Raises:
            BadFrameError: the number was never described, or the row has another size.
        """
        if frame.layout == NO_LAYOUT:
            return None
        found = self._structures.get(frame.layout)
        if found is None or len(frame.body) != found.layout.row_bytes:
            raise BadFrameError(f"a body of {len(frame.body)} bytes of layout {frame.layout}")
        return found


def unpacked(structure: Structure | None, body: bytearray | memoryview) -> Any:
    """The payload; for a pickled one, raises whatever its classes raise."""
    return load(body) if structure is None else structure.unpack(body)
