"""Which process is meant, and being told when it ends: at once, where it runs on this host."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshinfer.inference.queues.forks import let_go_in_forks
from meshinfer.server.lifetime import end_of_process

__all__ = ["ProcessName", "Watch"]

_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class ProcessName:
    """A process as other processes may know it; a number alone names another one elsewhere, or later.

    Attributes:
        boot: id of the machine's boot.
        namespace: of process ids.
        pid: there.
        started: clock ticks from the boot to its start.
    """

    boot: str
    namespace: int
    pid: int
    started: int

    @classmethod
    def own(cls) -> ProcessName:
        """Of this process; of an unknown host where there is no ``/proc``."""
        pid = os.getpid()
        try:
            namespace = os.stat("/proc/self/ns/pid").st_ino
            return cls(_BOOT.read_text().strip(), namespace, pid, _start_of(pid))
        except (OSError, ValueError):
            return cls("", 0, pid, 0)

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> ProcessName:
        """From :meth:`facts`; raises what a mapping without them gives rise to."""
        return cls(
            str(found["boot"]),
            int(found["namespace"]),
            int(found["pid"]),
            int(found["started"]),
        )

    @property
    def facts(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @property
    def is_near(self) -> bool:
        """Whether its number means the same here: it is on this host, in our namespace."""
        own = ProcessName.own()
        return bool(self.boot) and (own.boot, own.namespace) == (self.boot, self.namespace)

    @property
    def is_own(self) -> bool:
        """Whether it is this one."""
        return self.pid == os.getpid() and self.is_near

    @property
    def is_held_up(self) -> bool:
        """Whether somebody has stopped it, as far as can be seen from here."""
        try:
            return self.is_near and _stat(self.pid)[0] in ("T", "t")
        except (OSError, ValueError):
            return False

    @property
    def has_ended(self) -> bool:
        """Whether it is known to."""
        try:
            descriptor = None if self.is_own else self.end()
        except ProcessLookupError:
            return True
        if descriptor is not None:
            os.close(descriptor)
        return False

    def end(self) -> int | None:
        """A descriptor that becomes readable when it ends; ``None`` where that cannot be watched.

        Raises:
            ProcessLookupError: it has ended.
        """
        if not self.is_near:
            return None
        descriptor = end_of_process(self.pid)
        if descriptor is None:
            return None
        try:
            alive = _start_of(self.pid) == self.started
        except (OSError, ValueError):
            alive = False
        if not alive:
            os.close(descriptor)
            raise ProcessLookupError(f"process {self.pid} has ended")
        return descriptor

    def __str__(self) -> str:
        return f"process {self.pid}"


def _stat(pid: int) -> list[str]:
    """The fields of ``/proc/<pid>/stat`` from the third on; the second may hold blanks and brackets."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _start_of(pid: int) -> int:
    return int(_stat(pid)[19])


class Watch:
    """Calls ``callback``, from a thread for all watches of this process, when ``process`` ends.

    Args:
        process: to be watched.
        callback: must not wait for anything. It may be called right after :meth:`cancel`, too.

    Attributes:
        works: whether it can be told at all; otherwise it is for others to find out.
    """

    def __init__(self, process: ProcessName, callback: Callable[[], object]) -> None:
        self._callback = callback
        self._descriptor = -1
        self.works = True
        if process.is_own:
            return  # it ends with us
        try:
            descriptor = process.end()
        except ProcessLookupError:
            callback()
            return
        if descriptor is None:
            self.works = False
        else:
            self._descriptor = descriptor
            _watchman.add(descriptor, self)

    def cancel(self) -> None:
        """Watch no longer. Idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            _watchman.remove(descriptor)

    def fire(self) -> None:
        """For the thread: it has ended."""
        self._callback()


class _Watchman:
    """The thread that waits for the end of all processes that are watched, and runs while there are any."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the garbage collector may cancel a watch anywhere
        self._watches: dict[int, Watch] = {}
        self._epoll: select.epoll | None = None
        self._bell = -1

    def add(self, descriptor: int, watch: Watch) -> None:
        with self._lock:
            if self._epoll is None:
                self._start()
            assert self._epoll is not None
            self._watches[descriptor] = watch
            self._epoll.register(descriptor, select.EPOLLIN)

    def remove(self, descriptor: int) -> None:
        with self._lock:
            if self._watches.pop(descriptor, None) is None:
                return
            if self._epoll is not None:
                self._epoll.unregister(descriptor)
            os.close(descriptor)
            if not self._watches and self._bell >= 0:
                os.eventfd_write(self._bell, 1)

    def forked(self) -> None:
        """In a forked child: the watches are the parent's."""
        self._lock = threading.RLock()
        for descriptor in self._watches:
            os.close(descriptor)
        self._watches.clear()
        self._let_go()

    def _start(self) -> None:
        let_go_in_forks(self)
        self._epoll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._bell, select.EPOLLIN)
        threading.Thread(
            target=self._run, args=(self._epoll, self._bell), name="meshinfer-watch", daemon=True
        ).start()

    def _run(self, epoll: select.epoll, bell: int) -> None:
        needed = True
        while needed:
            ready = [descriptor for descriptor, _ in epoll.poll()]
            if bell in ready:
                os.eventfd_read(bell)
            with self._lock:
                ended = [self._watches[fd] for fd in ready if fd in self._watches]
                for watch in ended:
                    watch.cancel()
                needed = bool(self._watches)
                if not needed:
                    self._let_go()
            for watch in ended:
                watch.fire()

    def _let_go(self) -> None:
        if self._epoll is not None:
            self._epoll.close()
            os.close(self._bell)
        self._epoll, self._bell = None, -1


_watchman = _Watchman()
