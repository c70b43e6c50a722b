"""Whether a process lives, when it ends, and how."""

from __future__ import annotations

import os
import signal
import socket
import uuid
from dataclasses import dataclass

__all__ = ["NOT_STARTED", "ServerHealth", "describe_exit", "end_of_process", "this_machine"]

NOT_STARTED = "the server was not started"
_SHELL_BASE = 128


@dataclass(frozen=True)
class ServerHealth:
    """How a server process is, as its owner found it."""

    process_alive: bool
    pid: int | None
    """Of the process, also when it has ended; ``None`` before the first start."""
    exitcode: int | None
    """As :mod:`multiprocessing` has it: minus the signal's number for a process that was killed."""
    serving: bool
    """Whether the serving thread runs in that process, by its own account."""
    policy_version: int
    """The last that is known."""
    error: str | None
    """Why it does not serve."""


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


def this_machine() -> str:
    """Equal in processes that can name each other by their ids: the boot of a machine, and a namespace of ids in it."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # no /proc
        return f"{socket.gethostname()} {uuid.getnode()}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
