"""The report of one rank: as lines for people, or as one JSON object; written in one piece."""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from meshinfer._version import __version__
from meshinfer.doctor.context import Context
from meshinfer.doctor.findings import Finding, Status, worst

__all__ = ["as_json", "as_text", "exit_code", "write_once"]

_FORMAT = 1
"""Of the JSON object; a key that changes its meaning or goes makes it higher."""
_MARKS = {Status.INFO: "info", Status.OK: "OK", Status.WARN: "WARN", Status.FAIL: "FAIL"}
_LOCK_SECONDS = 2.0


def exit_code(findings: Sequence[Finding]) -> int:
    """0 where the job would work, else 1."""
    return 1 if worst(findings) is Status.FAIL else 0


def as_text(context: Context) -> str:
    """Lines; in a job each with its rank, since some launchers mix the lines of ranks."""
    findings = context.findings
    width = max(len(finding.check) for finding in findings)
    lines = [f"meshinfer doctor {__version__} on {context.hostname} (pid {os.getpid()})"]
    for finding in findings:
        lines.append(f"{_MARKS[finding.status]:4}  {finding.check:{width}}  {finding.found}")
        if finding.remedy:
            lines.append(f"{'':4}  {'':{width}}  -> {finding.remedy}")
    lines.append(_conclusion(context))
    prefix = f"rank {context.rank}: " if context.world_size > 1 else ""
    return "".join(f"{prefix}{' '.join(line.splitlines())}\n" for line in lines)


def _conclusion(context: Context) -> str:
    failed = context.failed
    warned = list(dict.fromkeys(f.check for f in context.findings if f.status is Status.WARN))
    parts = [f"{len(warned)} to look at ({', '.join(warned)})"] if warned else []
    if failed:
        parts.insert(0, f"{len(failed)} failed ({', '.join(failed)})")
    verdict = "the job would not work" if failed else "the job would work"
    return f"{_MARKS[worst(context.findings)]}: {'; '.join([verdict, *parts])}"


def as_json(context: Context) -> str:
    """One line with one object."""
    here = context.environment
    report: dict[str, Any] = {
        "format": _FORMAT,
        "status": worst(context.findings).value,
        "exit_code": exit_code(context.findings),
        "rank": None if here is None else here.rank,
        "world_size": None if here is None else here.world_size,
        "local_rank": None if here is None else here.local_rank,
        "node": None if here is None else here.node_rank,
        "launcher": None if here is None else here.launcher,
        "host": context.hostname,
        "pid": os.getpid(),
        "seconds": round(time.monotonic() - context.began, 3),
        "findings": [finding.to_json() for finding in context.findings],
    }
    return json.dumps(report) + "\n"


def write_once(text: str) -> None:
    """Write all of ``text`` to standard output, with other ranks of this host kept out meanwhile.

    A pipe takes 4096 bytes in one piece; ranks that share one lock it, each for at most two seconds.
    """
    data = text.encode("ascii", "backslashreplace")
    descriptor = 1 if sys.stdout is None else sys.stdout.fileno()
    locked = _lock(descriptor)
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    finally:
        if locked:
            fcntl.lockf(descriptor, fcntl.LOCK_UN)


def _lock(descriptor: int) -> bool:
    deadline = time.monotonic() + _LOCK_SECONDS
    while time.monotonic() < deadline:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.01)  # another rank writes
        except OSError:  # not a file that can be locked
            break
    return False
