"""The table of checks, and how one is run: never longer than there is time, and never with a traceback."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from meshinfer.doctor import launch, limits, network, software
from meshinfer.doctor.context import Context
from meshinfer.doctor.findings import Finding, blame, fail, info
from meshinfer.doctor.pair import pair, roll_call
from meshinfer.doctor.roster import summary
from meshinfer.errors import MeshError
from meshinfer.rendezvous import bounded

__all__ = ["CHECKS", "Check", "run_check"]

logger = logging.getLogger("meshinfer.doctor")


def _nothing(_: Context) -> list[Finding]:
    return []


@dataclass(frozen=True)
class Check:
    """One check.

    Args:
        name: as the report has it.
        run: may raise, and may take too long.
        needs: checks that must not have failed before it.
        unfinished: what can be said where there was no time to finish.
    """

    name: str
    run: Callable[[Context], Finding | list[Finding]]
    needs: tuple[str, ...] = ()
    unfinished: Callable[[Context], list[Finding]] = _nothing


CHECKS: tuple[Check, ...] = (
    Check("versions", software.versions),
    Check("packages", software.packages),
    Check("launcher", launch.launcher),
    Check("variables", launch.variables),
    Check("ranks", launch.ranks),
    Check("open files", limits.open_files),
    Check("processes", limits.processes),
    Check("memory", limits.memory),
    Check("shared memory", limits.shared_memory, needs=("open files",)),
    Check("processors", limits.processors),
    Check("gpus", software.gpus),
    Check("slurm", software.slurm_tools),
    Check("host name", network.host_name),
    Check("job store", network.job_store, needs=("open files", "processes")),
    Check("interface", network.interface),
    # torch ends a process that has too few descriptors left, so these are not tried then.
    Check("pair", pair, needs=("open files", "processes", "job store", "interface")),
    Check("job", roll_call, unfinished=summary),
)
"""In the order of the report. Cheap ones first: the last of them waits for other ranks."""


def run_check(check: Check, context: Context) -> tuple[list[Finding], bool]:
    """The findings of one check, and whether it still runs in a thread that was left behind."""
    missing = [name for name in check.needs if name in context.failed]
    if missing:
        return _named(check, info(f"not tried, see {', '.join(missing)}")), False
    try:
        return _named(check, bounded(lambda: _contained(check, context), context.left())), False
    except TimeoutError:
        reason = f"did not end within {context.timeout:g} s"
        return unfinished(check, context, reason), True


def unfinished(check: Check, context: Context, reason: str) -> list[Finding]:
    """What stands for a check that was given up."""
    line = fail(reason, "let it run to its end, or give it longer with --timeout")
    return _named(check, [line, *check.unfinished(context)])


def _contained(check: Check, context: Context) -> Finding | list[Finding]:
    try:
        return check.run(context)
    except MeshError as error:
        return blame(error)
    except Exception as error:
        logger.exception("the check %r failed", check.name)
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return fail(
            f"the check itself failed: {reason}", "report this line to meshinfer's developers"
        )


def _named(check: Check, found: Finding | list[Finding]) -> list[Finding]:
    findings = [found] if isinstance(found, Finding) else found
    return [replace(finding, check=finding.check or check.name) for finding in findings]
