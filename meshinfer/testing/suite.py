"""All promises, and running them without a test framework."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence

from meshinfer.testing.check import ConformanceCheck
from meshinfer.testing.checks import (
    closing,
    driving,
    errors,
    futures,
    load,
    loss,
    payloads,
    replies,
    versions,
)
from meshinfer.testing.harness import TransportHarness

__all__ = ["CONFORMANCE_CHECKS", "ConformanceError", "run_conformance"]

CONFORMANCE_CHECKS: tuple[ConformanceCheck, ...] = (
    *replies.CHECKS,
    *payloads.CHECKS,
    *futures.CHECKS,
    *versions.CHECKS,
    *errors.CHECKS,
    *driving.CHECKS,
    *closing.CHECKS,
    *load.CHECKS,
    *loss.CHECKS,
)
"""Every promise that an inference transport makes."""


class ConformanceError(AssertionError):
    """A transport broke promises.

    Args:
        failures: what each failed check raised, by the check's name.
        promises: what each of them promises.
    """

    def __init__(self, failures: Mapping[str, BaseException], promises: Mapping[str, str]) -> None:
        self.failures = dict(failures)
        parts = [f"{len(failures)} promises were broken: {', '.join(failures)}"]
        for name, error in failures.items():
            text = "".join(traceback.format_exception(error))
            parts.append(f"--- {name}: {promises[name]}\n{text}")
        super().__init__("\n".join(parts))


def run_conformance(
    harness: TransportHarness, checks: Sequence[ConformanceCheck] = CONFORMANCE_CHECKS
) -> list[str]:
    """Run every check that applies to the harness, also after one has failed.

    Returns:
        The names of those that ran.

    Raises:
        ConformanceError: some failed; has them by name.
        RuntimeError: Python runs with ``-O``, which removes what the checks check.
    """
    if not __debug__:
        raise RuntimeError("python -O removes assert statements: run the checks without it")
    applying = [check for check in checks if check.applies_to(harness)]
    failures: dict[str, BaseException] = {}
    for check in applying:
        try:
            check(harness)
        except Exception as error:  # whatever it is: the promise was not kept
            failures[check.name] = error
    if failures:
        raise ConformanceError(failures, {check.name: check.promise for check in applying})
    return [check.name for check in applying]
