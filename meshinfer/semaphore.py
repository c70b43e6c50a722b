"""Counting semaphores inside memory that several processes map, from the C library.

``multiprocessing`` has named ones, which a killed owner leaves behind, and whose ``Event`` waits for each sleeper to
confirm: one that was killed or stopped holds up whoever wakes it. These have no name, belong to nobody, and posting
never waits. They are only ever counted up and down as a doorbell, never held as a lock, so that nobody's death
matters.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import time
from collections.abc import Callable
from typing import Any, Final

__all__ = ["SEMAPHORE_BYTES", "Semaphore", "full_fence", "memory_fence"]

SEMAPHORE_BYTES: Final = 64
"""Room for one: ``sem_t`` has at most 32 bytes, and a cache line of its own saves a fight over it."""

_NANO = 1_000_000_000
_FOREVER_SECONDS = 3600.0


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_quick = ctypes.PyDLL(None)  # keeps the interpreter lock: for calls that never wait
_waiting = ctypes.CDLL(None, use_errno=True)  # lets go of it


def _function(library: ctypes.CDLL, name: str, *arguments: Any) -> Any:
    found = getattr(library, name)
    found.argtypes, found.restype = list(arguments), ctypes.c_int
    return found


_init = _function(_quick, "sem_init", ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
_post = _function(_quick, "sem_post", ctypes.c_void_p)
_trywait = _function(_quick, "sem_trywait", ctypes.c_void_p)
_getvalue = _function(_quick, "sem_getvalue", ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))


def _timed_wait() -> tuple[Callable[[int, Any], int], Callable[[], int]]:
    """How to wait until a time, and the clock that it is a time of."""
    if hasattr(_waiting, "sem_clockwait"):  # glibc 2.30: a clock that nobody sets
        wait = _function(
            _waiting, "sem_clockwait", ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(_Timespec)
        )
        return lambda address, until: wait(address, time.CLOCK_MONOTONIC, until), time.monotonic_ns
    wait = _function(_waiting, "sem_timedwait", ctypes.c_void_p, ctypes.POINTER(_Timespec))
    return wait, time.time_ns


_wait_until, _clock = _timed_wait()


class Semaphore:
    """One semaphore at ``address``, in memory that the caller keeps mapped.

    Args:
        address: of :data:`SEMAPHORE_BYTES` bytes.
        create: begin with a count of 0; otherwise another process has.
    """

    __slots__ = ("_address",)

    def __init__(self, address: int, *, create: bool = False) -> None:
        self._address = address
        if create and _init(address, 1, 0) != 0:
            raise OSError("the C library has no semaphores that processes can share")

    def post(self) -> None:
        """Count up, and wake one that waits. Never waits, whatever state that one is in."""
        _post(self._address)

    def try_wait(self) -> bool:
        """Count down if the count is not 0: whether it was not."""
        return bool(_trywait(self._address) == 0)

    def drain(self) -> None:
        """Count down to 0."""
        while _trywait(self._address) == 0:
            continue

    @property
    def value(self) -> int:
        """The count."""
        found = ctypes.c_int()
        _getvalue(self._address, found)
        return found.value

    def wait(self, timeout: float) -> bool:
        """Count down, waiting at most ``timeout`` seconds for the count to become positive: whether it did.

        Signal handlers run meanwhile, and may raise.
        """
        if _trywait(self._address) == 0:
            return True
        if timeout <= 0:
            return False
        nanoseconds = _clock() + int(min(timeout, _FOREVER_SECONDS) * _NANO)
        until = _Timespec(*divmod(nanoseconds, _NANO))
        while _wait_until(self._address, until) != 0:
            reason = ctypes.get_errno()
            if reason == errno.ETIMEDOUT:
                return False
            if reason != errno.EINTR:
                raise OSError(reason, os.strerror(reason))
        return True


def _make_fence() -> Callable[[], None]:
    memory = ctypes.create_string_buffer(SEMAPHORE_BYTES)
    semaphore = Semaphore(ctypes.addressof(memory), create=True)

    def fence() -> None:
        # A release and an acquire of the same word: nothing moves across both. `memory` lives as long as we do.
        _post(semaphore._address)
        _trywait(ctypes.addressof(memory))

    return fence


def _nothing() -> None:
    """Enough where stores are seen in the order in which they were made."""


full_fence: Callable[[], None] = _make_fence()
"""Between a store and a load of another word: of two processes that do both, one sees what the other has stored."""

memory_fence: Callable[[], None] = (
    _nothing if platform.machine() in ("x86_64", "AMD64", "i686") else full_fence
)
"""Between the bytes of a row and the word that announces them, on both sides."""
