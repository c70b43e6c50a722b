"""NCCL and the few parts of CUDA that NcclRows uses, on a machine without a GPU: gloo moves CPU tensors instead.

A group here does what one of torch's does where it matters. Messages are moved on a stream of the group's own, in the
order of the calls; a call returns at once; a message whose other half does not come waits until the group is aborted,
and then ends without an error. The group checks how it is used, and can be told to fail, to hang, or to get stuck.
"""

from __future__ import annotations

import ctypes
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.distributed import FileStore, ProcessGroupGloo

from meshinfer.inference.distributed import nccl, nccl_channel

FOREVER = timedelta(days=1)
MOMENT = timedelta(milliseconds=1)
READ_WHERE_MADE = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_CUDA_EVENT_CACHE": "1"}


@dataclass
class Machine:
    """What the stand-in pretends, and what it has seen."""

    devices: int = 2
    version: tuple[int, ...] = (2, 30, 7)
    gpus: tuple[str, ...] = ("GPU-0", "GPU-1")
    current: int = 0
    no_constructor: str = ""
    """Why no group can be made."""
    no_connection: str = ""
    """Why ranks cannot connect."""
    never_connects: bool = False
    """``eager_connect_single_device`` returns only when :attr:`let_go` is set, even if the group is aborted."""
    damages: bool = False
    """Rows arrive with another content."""
    loses_after: int | None = None
    """So many messages of a group are moved; then they get stuck."""
    fails_after: int | None = None
    """So many calls of a group succeed; then they raise."""
    let_go: threading.Event = field(default_factory=threading.Event)
    groups: list[StandIn] = field(default_factory=list)
    mistakes: list[str] = field(default_factory=list)

    def blame(self, condition: bool, text: str) -> None:
        """A mistake of the code that is tested, unless ``condition`` holds."""
        if not condition:
            self.mistakes.append(text)


machine = Machine()
_thread = threading.local()


class Stream:
    """What has been asked for, in order."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        machine.blame(getattr(_thread, "device", None) == device, "a stream before set_device()")
        self.priority = priority
        self.pending: list[Work] = []

    def wait_event(self, event: Event) -> None:
        self.pending += event.pending


class Event:
    """A place in a stream."""

    def __init__(self, blocking: bool = False) -> None:
        machine.blame(blocking, "an event that keeps the processor busy")
        self.pending: list[Work] = []

    def record(self, stream: Stream) -> None:
        stream.pending = [work for work in stream.pending if not work.over.is_set()]
        self.pending = list(stream.pending)

    def synchronize(self) -> None:
        for work in self.pending:
            work.over.wait()

    def query(self) -> bool:
        return all(work.over.is_set() for work in self.pending)


def current_stream(device: Any = None) -> Stream:
    streams = getattr(_thread, "streams", None)
    if streams is None:
        streams = _thread.streams = [Stream(getattr(_thread, "device", None))]
    return streams[-1]


def set_stream(stream: Stream) -> None:
    current_stream()
    _thread.streams[-1] = stream


@contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    current_stream()
    _thread.streams.append(stream)
    try:
        yield
    finally:
        _thread.streams.pop()


def set_device(device: Any) -> None:
    machine.blame(device in range(machine.devices), f"set_device({device})")
    _thread.device = device


def properties(device: Any) -> SimpleNamespace:
    return SimpleNamespace(name="a stand-in", uuid=machine.gpus[device])


class Options:
    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self._timeout = timedelta(minutes=10)
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace(blocking=None, min_ctas=None, max_ctas=None)


class Work:
    """One message, until it has been moved or given up."""

    def __init__(self, call: str, row: torch.Tensor, before: list[Work]) -> None:
        self.call, self.row, self.before = call, row, before
        self.over = threading.Event()

    def block_current_stream(self) -> None:
        current_stream().pending.append(self)


class StandIn:
    """In place of ``torch.distributed.ProcessGroupNCCL``."""

    Options = Options

    @staticmethod
    def get_runtime_nccl_version() -> tuple[int, int, int]:
        return machine.version

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        if machine.no_constructor:
            raise RuntimeError(machine.no_constructor)
        getenv = ctypes.CDLL(None).getenv  # what C++ sees
        getenv.restype = ctypes.c_char_p
        for name, value in READ_WHERE_MADE.items():
            machine.blame(getenv(name.encode()) == value.encode(), f"{name} is not {value}")
        machine.blame(size == 2 and rank in (0, 1), "a group of two")
        machine.blame(options.config.blocking == 1, "an NCCL that does not wait")
        machine.blame(options._timeout >= timedelta(days=365), "idling is a timeout")
        self.store, self.rank, self.options = store, rank, options
        self.aborts = 0
        self.calls: list[tuple[str, int]] = []
        self._aborted = threading.Event()
        self._asked: SimpleQueue[Work | None] = SimpleQueue()
        self._gloo: Any = None
        machine.groups.append(self)

    def eager_connect_single_device(self, device: torch.device) -> None:
        machine.blame(hasattr(_thread, "device"), "a connection before set_device()")
        if self.rank == 0:
            with tempfile.NamedTemporaryFile(prefix="nccl-", delete=False) as file:
                where = file.name
            weakref.finalize(self, Path(where).unlink, missing_ok=True)
            self.store.set("0", where.encode())
        else:
            where = self.store.get("0").decode()
        if machine.no_connection:
            raise RuntimeError(machine.no_connection)
        if machine.never_connects:
            machine.let_go.wait()
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=20)
        options._threads = 1
        self._gloo = ProcessGroupGloo(FileStore(where, 2), self.rank, 2, options)
        threading.Thread(target=self._move_all, name="stand-in", daemon=True).start()

    def send(self, tensors: list[torch.Tensor], dstRank: int, tag: int) -> Work:
        return self._call("send", tensors, dstRank, tag)

    def recv(self, tensors: list[torch.Tensor], srcRank: int, tag: int) -> Work:
        return self._call("recv", tensors, srcRank, tag)

    def abort(self) -> None:
        self.aborts += 1
        self._aborted.set()
        self._asked.put(None)
        gloo = self._gloo
        if gloo is not None:
            try:
                gloo.recv([torch.zeros(1, dtype=torch.uint8)], 1 - self.rank, 9).wait(MOMENT)
            except RuntimeError:
                return

    def _call(self, call: str, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        if self._aborted.is_set():
            raise RuntimeError("NCCL communicator was aborted on rank\nand more")
        if machine.fails_after is not None and len(self.calls) >= machine.fails_after:
            raise RuntimeError("NCCL error: unhandled system error\nand more")
        (row,) = tensors
        machine.blame(row.dtype == torch.uint8 and row.is_contiguous(), "another dtype than uint8")
        machine.blame((peer, tag) == (1 - self.rank, 0), f"rank {peer}, tag {tag}")
        machine.blame(current_stream().priority < 0, "a call outside the channel's own stream")
        machine.blame(all(before == call for before, _ in self.calls), "both directions in one")
        self.calls.append((call, threading.get_ident()))
        work = Work(call, row, list(current_stream().pending))
        self._asked.put(work)
        return work

    def _move_all(self) -> None:
        """The stream of NCCL's own."""
        moved = 0
        while (work := self._asked.get()) is not None:
            for before in work.before:
                before.over.wait()
            if machine.loses_after is not None and moved >= machine.loses_after:
                self._aborted.wait()
            try:
                getattr(self._gloo, work.call)([work.row], 1 - self.rank, 0).wait(FOREVER)
            except RuntimeError:
                self._aborted.wait()  # as a kernel does whose peer is gone
            if machine.damages and work.call == "recv":
                work.row.zero_()
            moved += 1
            work.over.set()
            if self._aborted.is_set():
                break
        while not self._asked.empty():
            if (work := self._asked.get()) is not None:
                work.over.set()
        self._gloo = None


def parts() -> ExitStack:
    """The stand-in is in place until the stack is closed."""
    stack = ExitStack()
    for owner, name, value in (
        (torch.distributed, "ProcessGroupNCCL", StandIn),
        (torch.distributed, "is_nccl_available", lambda: True),
        (torch.cuda, "device_count", lambda: machine.devices),
        (torch.cuda, "current_device", lambda: getattr(_thread, "device", machine.current)),
        (torch.cuda, "set_device", set_device),
        (torch.cuda, "get_device_properties", properties),
        (torch.cuda, "Stream", Stream),
        (torch.cuda, "Event", Event),
        (torch.cuda, "stream", on_stream),
        (torch.cuda, "set_stream", set_stream),
        (torch.cuda, "current_stream", current_stream),
        (nccl, "cuda_memory", lambda _: torch.device("cpu")),
        (nccl_channel, "cuda_memory", lambda _: torch.device("cpu")),
    ):
        stack.enter_context(mock.patch.object(owner, name, value, create=True))
    return stack


def in_place(**pretended: Any) -> ExitStack:
    """A machine of its own for one test, or for one process."""
    global machine
    machine = Machine(**pretended)
    return parts()


@contextmanager
def without_mistakes() -> Iterator[Machine]:
    """A machine in place, which lets go of all at the end and has found nothing that CUDA or NCCL would not bear."""
    with in_place():
        here = machine
        yield here
        here.let_go.set()
        here.groups.clear()
    assert here.mistakes == []


def settle(groups: list[StandIn], seconds: float = 20.0) -> None:
    """Until each group has been aborted."""
    deadline = time.monotonic() + seconds
    while not all(group.aborts for group in groups) and time.monotonic() < deadline:
        time.sleep(0.01)
