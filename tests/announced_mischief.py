"""What goes wrong with the channels of a test: late, broken, stuck, or stopped with their whole process."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass
from random import Random

HANG_SECONDS = 30.0

released = threading.Event()
"""What hangs in this process goes on when it is set."""


@dataclass(frozen=True)
class Mischief:
    """What goes wrong, besides nothing.

    Args:
        at: ``"building"``, ``"sending"`` (a header has left, its row has not), ``"posting"`` (a header has come, its
            row is not awaited), ``"waiting"`` (it is), ``"aborting"``.
        what: ``"stop"`` (SIGSTOP to this process), ``"raise"``, ``"hang"`` until :data:`released`, ``"dawdle"`` for
            ``delay``.
        skip: so many acts of that kind in this process are spared.
        once: only the one after those; else all that follow.
        delay: the longest that a channel dawdles at any act, in seconds.
        share: of the acts that are late.
        seed: of the delays.
        deaf: channels do not notice by themselves that the other end has gone, as those of NCCL do not.
    """

    at: str = ""
    what: str = ""
    skip: int = 0
    once: bool = True
    delay: float = 0.0
    share: float = 0.0
    seed: int = 0
    deaf: bool = False

    def happen(self, act: str, random: Random) -> None:
        """A channel is about to do this."""
        if self.share and random.random() < self.share:
            time.sleep(random.random() * self.delay)
        if act != self.at:
            return
        before = _acts.happened(act)
        if before == self.skip or (before > self.skip and not self.once):
            self._strike(act)

    def _strike(self, act: str) -> None:
        if self.what == "stop":
            # To this thread, which stops before it goes on; another one may take what is sent to the process.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        elif self.what == "dawdle":
            time.sleep(self.delay)
        elif self.what == "hang":
            released.wait(HANG_SECONDS)
            if act == "building":
                raise RuntimeError("nobody waits for this channel any more")
        else:
            raise RuntimeError(f"mischief while {act}")


DEAF = Mischief(deaf=True)


class _Acts:
    """How often each act has happened in this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count: Counter[str] = Counter()

    def happened(self, act: str) -> int:
        """Once more; how often before."""
        with self._lock:
            self._count[act] += 1
            return self._count[act] - 1

    def forget(self) -> None:
        with self._lock:
            self._count.clear()


_acts = _Acts()


def forget_acts() -> None:
    """Begin to count anew."""
    _acts.forget()
    released.clear()
