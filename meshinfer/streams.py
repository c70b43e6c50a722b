"""Work that a GPU does later, as the threads here wait for it: marks in a stream, none on a CPU."""

from __future__ import annotations

import ctypes
import logging
import threading
from typing import Final, Protocol

import torch

__all__ = [
    "PASSED",
    "Mark",
    "Passed",
    "StreamMark",
    "mark",
    "refuse_captures",
    "tolerate_captures",
    "work_on",
]


class Mark(Protocol):
    """A place in a stream of work."""

    def wait(self) -> None:
        """Until the work before it is done. Holds neither the interpreter nor the processor meanwhile."""

    def passed(self) -> bool:
        """Whether it is done. Never waits."""

    def hold_up(self, stream: torch.cuda.Stream) -> None:
        """Let ``stream`` begin what it gets from now on after the work before this mark. Never waits."""


class Passed:
    """Nothing is left to do, as after any work of a CPU."""

    def wait(self) -> None:
        """See :class:`Mark`."""

    def passed(self) -> bool:
        """See :class:`Mark`."""
        return True

    def hold_up(self, stream: torch.cuda.Stream) -> None:
        """See :class:`Mark`."""


PASSED: Final = Passed()
_THREAD_LOCAL_CAPTURES: Final = 1
_thread = threading.local()
logger = logging.getLogger("meshinfer.streams")


class StreamMark:
    """What a CUDA stream has got so far."""

    __slots__ = ("_event",)

    def __init__(self, stream: torch.cuda.Stream) -> None:
        # Blocking: who waits sleeps, instead of keeping a core busy that an environment could use.
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def wait(self) -> None:
        """See :class:`Mark`."""
        self._event.synchronize()

    def passed(self) -> bool:
        """See :class:`Mark`."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def hold_up(self, stream: torch.cuda.Stream) -> None:
        """See :class:`Mark`."""
        stream.wait_event(self._event)


def mark(device: torch.device) -> Mark:
    """Marks what the calling thread's current stream of ``device`` has got so far."""
    if device.type != "cuda":
        return PASSED
    return StreamMark(torch.cuda.current_stream(device.index))


def work_on(device: torch.device | None) -> None:
    """For a thread of ours, first of all: what it does on a GPU, it does on ``device``.

    A thread begins on the first GPU, and would take memory there for no more than an event or page-locked memory.
    """
    if device is not None and device.type == "cuda":
        torch.cuda.set_device(device)
        tolerate_captures()


def refuse_captures(device: torch.device) -> None:
    """:class:`ValueError` while the calling thread captures a CUDA graph, where ``device`` is a GPU.

    What is begun then does not happen before the graph is replayed, and who waits for its result waits for ever.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "this thread is capturing a CUDA graph, from inside of which no request can be made; make it outside of "
            "torch.cuda.graph()"
        )


def tolerate_captures() -> None:
    """Lets other threads capture CUDA graphs while this one waits for the GPU, unless they forbid it to themselves.

    By default CUDA fails both, the waiting and the capture. Cheap after a thread's first call.
    """
    if getattr(_thread, "tolerates", False):
        return
    _thread.tolerates = True
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        logger.debug("no CUDA driver to speak to: %s", error)
        return
    driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_THREAD_LOCAL_CAPTURES)))
