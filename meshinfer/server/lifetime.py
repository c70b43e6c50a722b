"""When a process ends, and how."""

from __future__ import annotations

import os
import signal

__all__ = ["describe_exit", "end_of_process"]

_SHELL_BASE = 128


def end_of_process(pid: int) -> int | None:
    """A descriptor that becomes readable when process ``pid`` ends; ``None`` where the system has no such thing.

    The pipes that multiprocessing watches are inherited by forked processes, and stay open in them when their owner
    has died.

    Raises:
        ProcessLookupError: it has ended, and nobody has to be told any more.
    """
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError:  # an old kernel, or a sandbox
        return None


def describe_exit(exitcode: int | None) -> str:
    """``"was killed by SIGKILL"``, ``"exited with code 3"``: an exit code of :mod:`multiprocessing` in words."""
    if exitcode is None:
        return "ended with an unknown exit code"
    if exitcode < 0:
        return f"was killed by {_signal_name(-exitcode)}"
    if exitcode > _SHELL_BASE:
        return f"exited with code {exitcode} ({_signal_name(exitcode - _SHELL_BASE)})"
    return f"exited with code {exitcode}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
