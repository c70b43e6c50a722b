"""What a check says: a status, what was found, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

__all__ = ["Finding", "Status", "blame", "fail", "info", "ok", "warn", "worst"]


class Status(str, Enum):
    """How bad it is; only :attr:`FAIL` means that the job would not work."""

    INFO = "info"
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


_BADNESS = {Status.INFO: 0, Status.OK: 0, Status.WARN: 1, Status.FAIL: 2}


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Args:
        status: how bad it is.
        found: what is the case here.
        remedy: what to do, where it is bad.
        values: the numbers behind ``found``, for ``--json``; seconds, bytes and counts.
        check: name of the check, filled in where it is run.
    """

    status: Status
    found: str
    remedy: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    check: str = ""

    def to_json(self) -> dict[str, Any]:
        """As it stands in the report of ``--json``."""
        return {
            "check": self.check,
            "status": self.status.value,
            "found": self.found,
            "remedy": self.remedy,
            "values": dict(self.values),
        }


def info(found: str, **values: Any) -> Finding:
    """Nothing to judge."""
    return Finding(Status.INFO, found, values=values)


def ok(found: str, **values: Any) -> Finding:
    """As it should be."""
    return Finding(Status.OK, found, values=values)


def warn(found: str, remedy: str, **values: Any) -> Finding:
    """The job would work, but not well, or not always."""
    return Finding(Status.WARN, found, remedy, values)


def fail(found: str, remedy: str, **values: Any) -> Finding:
    """The job would not work."""
    return Finding(Status.FAIL, found, remedy, values)


def blame(error: Exception, what: str = "") -> Finding:
    """A failure by an error of this library, which says what to do about it behind its last semicolon.

    Args:
        error: the error.
        what: was tried, put before its text.
    """
    found, _, remedy = str(error).rpartition("; ")
    return fail(f"{what}{found or remedy}", remedy if found else "see the README")


def worst(findings: Iterable[Finding]) -> Status:
    """The status of all of them: :attr:`Status.OK` where nothing is bad."""
    return max((Status.OK, *(f.status for f in findings)), key=_BADNESS.__getitem__)
