"""Memory that the processes of one host share, without a name that anybody could leave behind.

A block is an anonymous file (``memfd``): it takes no room of ``/dev/shm``, and is gone with the last process that has
it. Other processes of the same user open it through the process that made it. All of it is allocated at once, since a
page that turns out to be missing later kills whoever touches it.

Locks on single bytes of that file tell who is alive: the kernel drops those of a process that ends, however it ends.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import secrets
import struct
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshinfer.errors import PeerLostError
from meshinfer.semaphore import SEMAPHORE_BYTES, Semaphore

__all__ = ["BlockHandle", "Cutter", "SharedBlock", "lined", "open_through"]

_TOKEN_BYTES = 16
_HEAD_BYTES = 64
_FLOCK = struct.Struct("@hhqqi4x")
_UNLIMITED = 1 << 60
_LINE = 64
_PAGE_BYTES = 4096
_POPULATE_READ = 22
"""``MADV_POPULATE_READ``: Linux 5.14."""
_FEWER_SLOTS = "use fewer slots or smaller specs"

_libc = ctypes.CDLL(None)  # lets go of the interpreter lock
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_opened: weakref.WeakValueDictionary[bytes, SharedBlock] = weakref.WeakValueDictionary()
_opening = threading.RLock()


@dataclass(frozen=True)
class BlockHandle:
    """What another process needs to map a block; valid while the process that made it lives."""

    pid: int
    descriptor: int
    token: bytes
    nbytes: int

    def open(self) -> SharedBlock:
        """The block, mapped once in each process.

        Raises:
            PeerLostError: the process that made it has ended, or belongs to another user or host.
        """
        with _opening:
            found = _opened.get(self.token)
            return SharedBlock._open(self) if found is None else found


class SharedBlock:
    """``nbytes`` of shared memory at :attr:`memory`, a uint8 tensor that starts at a page.

    Use :meth:`create`, or :meth:`BlockHandle.open`. Each process has one object for a block and one descriptor: closing
    a second one would drop the locks of the first.
    """

    def __init__(self, descriptor: int, handle: BlockHandle) -> None:
        self.handle = handle
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor).atexit = False  # others still use it then
        whole = _mapped(descriptor, _HEAD_BYTES + handle.nbytes)
        self.head = whole[:_TOKEN_BYTES]
        self.memory: Tensor = whole[_HEAD_BYTES:]
        self._held: tuple[int, dict[int, object]] = os.getpid(), {}

    @classmethod
    def create(cls, nbytes: int, purpose: str, remedy: str = _FEWER_SLOTS) -> SharedBlock:
        """A new block of zeros.

        Args:
            nbytes: its size.
            purpose: what it is for, for errors.
            remedy: what would make it smaller, for errors.

        Raises:
            OSError: there is not enough memory, or no descriptor; names what is needed and what is there.
        """
        total = _HEAD_BYTES + nbytes
        try:
            descriptor = os.memfd_create("meshinfer", os.MFD_CLOEXEC)
        except OSError as error:
            raise OSError(
                error.errno,
                f"no descriptor for {purpose}: {error.strerror}; raise the limit of open files (ulimit -n)",
            ) from error
        try:
            room = _room()
            if total > room:
                raise OSError(errno.ENOMEM, f"{room} bytes are available")
            os.posix_fallocate(descriptor, 0, total)
        except OSError as error:
            os.close(descriptor)
            raise OSError(
                error.errno, _too_large(total, purpose, error.strerror, remedy)
            ) from error
        token = secrets.token_bytes(_TOKEN_BYTES)
        block = cls(descriptor, BlockHandle(os.getpid(), descriptor, token, nbytes))
        block.head.copy_(torch.frombuffer(bytearray(token), dtype=torch.uint8))
        with _opening:
            _opened[token] = block
        return block

    @classmethod
    def _open(cls, handle: BlockHandle) -> SharedBlock:
        descriptor = open_through(handle.pid, handle.descriptor)
        if os.fstat(descriptor).st_size != _HEAD_BYTES + handle.nbytes:
            os.close(descriptor)
            raise _gone(handle.pid)  # another block has that number now
        block = cls(descriptor, handle)
        if bytes(block.head.numpy()) != handle.token:
            raise _gone(handle.pid)
        _opened[handle.token] = block
        return block

    @property
    def address(self) -> int:
        """Of the first byte of :attr:`memory` in this process."""
        return self.memory.data_ptr()

    def populate(self) -> None:
        """Enter every page into this process's page tables, so that whoever reads it later is not held up."""
        begin = self.head.data_ptr()
        nbytes = _HEAD_BYTES + self.handle.nbytes
        if _libc.madvise(begin, nbytes, _POPULATE_READ) != 0:  # an older kernel
            self.memory[::_PAGE_BYTES].sum()

    def hold(self, byte: int) -> bool:
        """Take the lock on ``byte`` for this process, until it releases it or ends; ``False`` if somebody has it."""
        held, mine = self._of_this_process(), object()
        # One step, so that no lock is needed, which a fork or the garbage collector might meet half-way.
        if held.setdefault(byte, mine) is not mine:
            return False
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        except OSError as error:
            del held[byte]
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    def release(self, byte: int) -> None:
        """Give the lock back; nothing happens where this process does not have it."""
        held = self._of_this_process()
        if byte in held:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, byte)
            held.pop(byte, None)

    def holds(self, byte: int) -> bool:
        """Whether this process has the lock."""
        return byte in self._of_this_process()

    def holder(self, byte: int) -> int | None:
        """Process id of who has the lock on ``byte``, ``None`` if nobody does."""
        if self.holds(byte):
            return os.getpid()
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
        kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(self._descriptor, fcntl.F_GETLK, asked))
        return None if kind == fcntl.F_UNLCK else pid

    def _of_this_process(self) -> dict[int, object]:
        pid, held = self._held
        if pid != os.getpid():  # forked: locks stay with the parent
            held = {}
            self._held = os.getpid(), held
        return held


class Cutter:
    """Cuts consecutive pieces, each at a cache line, out of one memory."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._offset = 0

    def tensor(self, nbytes: int) -> Tensor:
        """The next ``nbytes``, as uint8."""
        begin, self._offset = self._offset, self._offset + lined(nbytes)
        return self._memory[begin : begin + nbytes]

    def __call__(self, nbytes: int) -> memoryview:
        """The next ``nbytes``."""
        return memoryview(self.tensor(nbytes).numpy().data).cast("B")

    def semaphores(self, count: int, create: bool) -> list[Semaphore]:
        """The next ``count`` semaphores, each in a line of its own."""
        address = self.tensor(count * SEMAPHORE_BYTES).data_ptr()
        places = range(address, address + count * SEMAPHORE_BYTES, SEMAPHORE_BYTES)
        return [Semaphore(place, create=create) for place in places]


def lined(nbytes: int) -> int:
    """What a :class:`Cutter` takes for ``nbytes``."""
    return -(-nbytes // _LINE) * _LINE


def _mapped(descriptor: int, nbytes: int) -> Tensor:
    try:
        return torch.from_file(
            f"/proc/self/fd/{descriptor}", shared=True, size=nbytes, dtype=torch.uint8
        )
    except RuntimeError as error:  # torch tells the reason in its text only
        raise OSError(
            errno.ENOMEM,
            f"cannot map {nbytes} bytes of shared memory: {str(error).splitlines()[0]}; raise the limits of this "
            "process (ulimit -n for open files, ulimit -v for memory), or use fewer slots or smaller specs",
        ) from error


def open_through(pid: int, descriptor: int) -> int:
    """A descriptor for the file that another process has open under ``descriptor``.

    Raises:
        PeerLostError: that process has ended, or may not be looked into.
    """
    path = f"/proc/{pid}/fd/{descriptor}"
    try:
        if os.readlink(path).startswith(
            "/memfd:meshinfer"
        ):  # else something else has that number now
            return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise OSError(
                error.errno, f"{error.strerror}; raise the limit of open files (ulimit -n)"
            ) from error
        raise _gone(pid) from error
    raise _gone(pid)


def _gone(pid: int) -> PeerLostError:
    return PeerLostError(
        f"the shared memory of process {pid} is gone: that process has ended, or runs on another host, in another "
        "container or as another user"
    )


def _too_large(total: int, purpose: str, reason: Any, remedy: str) -> str:
    return (
        f"{purpose} needs {total} bytes of shared memory: {reason}; {remedy}, or raise the memory limit of this "
        "machine or container"
    )


def _room() -> int:
    """Bytes that can still be allocated, as far as the kernel tells."""
    limits = [_group_room(Path("/sys/fs/cgroup"))]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # hidden, or no descriptor is left
        lines = []
    for line in lines:
        name, _, amount = line.partition(":")
        if name == "MemAvailable":
            limits.append(int(amount.split()[0]) * 1024)
    return min(limits)


def _group_room(group: Path) -> int:
    """What the control group leaves, in either version of its interface."""
    for limit, used in (
        (group / "memory.max", group / "memory.current"),
        (group / "memory/memory.limit_in_bytes", group / "memory/memory.usage_in_bytes"),
    ):
        try:
            allowed = limit.read_text().strip()
            if allowed.isdigit():
                return max(0, int(allowed) - int(used.read_text()))
        except OSError:  # not this version
            continue
    return _UNLIMITED
