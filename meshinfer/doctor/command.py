"""The command line of ``python -m meshinfer``."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from types import FrameType

import meshinfer
from meshinfer.arguments import as_seconds
from meshinfer.doctor.checks import CHECKS, run_check, unfinished
from meshinfer.doctor.context import Context
from meshinfer.doctor.report import as_json, as_text, exit_code, write_once
from meshinfer.doctor.roster import verdict
from meshinfer.errors import MeshInferError
from meshinfer.rendezvous import bounded

__all__ = ["main"]

_WAIT_SHARE = 0.95
"""Of the timeout: until then a rank waits for rank 0 to let it go."""
_CLOSE_SECONDS = 5.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class _Stopped(BaseException):
    """A signal asked for the end."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit code.

    Args:
        arguments: by default those of this process.
    """
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.command is None:
        parser.print_help(sys.stderr)
        return 2
    return _doctor(given.timeout, given.json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m meshinfer", description="Serve one policy to many environment ranks."
    )
    parser.add_argument("--version", action="version", version=f"meshinfer {meshinfer.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    doctor = commands.add_parser(
        "doctor",
        help="say whether a job would work here",
        description="Say whether a job would work here, what was found, and what to do about it. Start it as the job "
        "is started: alone, or `torchrun ... -m meshinfer doctor`, or `srun python -m meshinfer doctor`.",
        epilog="Exit code: 0 the job would work, 1 it would not, 2 wrong usage.",
    )
    doctor.add_argument("--json", action="store_true", help="one JSON object for each rank")
    doctor.add_argument(
        "--timeout",
        type=_seconds,
        default=60.0,
        metavar="SECONDS",
        help="for everything, also for ranks that start late (default: 60)",
    )
    return parser


def _seconds(text: str) -> float:
    try:
        return as_seconds("--timeout", float(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number of seconds") from None


def _doctor(timeout: float, json: bool) -> int:
    context = Context.here(timeout)
    abandoned = _examine(context)
    code = exit_code(context.findings)
    try:
        write_once((as_json if json else as_text)(context))
    except BrokenPipeError:  # who read it has seen enough
        abandoned = True
    except OSError as error:
        _complain(f"rank {context.rank}: the report cannot be written: {error.strerror}")
        code = 1
    if not _assemble(context) and code == 0:
        _complain(f"rank {context.rank}: rank 0 has not ended its check in time")
        code = 1
    # Threads that are still inside torch would be waited for by an orderly end.
    if abandoned or not _close(context):
        os._exit(code)
    return code


def _complain(text: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # nobody reads that either
        os.write(sys.stderr.fileno(), f"meshinfer doctor: {text}\n".encode())


def _close(context: Context) -> bool:
    """Whether everything has ended."""
    try:
        bounded(context.closing.close, _CLOSE_SECONDS)
    except (TimeoutError, MeshInferError, RuntimeError, OSError):
        return False
    return True


def _examine(context: Context) -> bool:
    """Run the checks: whether one was given up, and with it those after it."""
    check, abandoned = CHECKS[0], False
    try:
        with _signals():
            for check in CHECKS:
                found, abandoned = run_check(check, context)
                context.findings += found
                if abandoned:
                    break
    except _Stopped as stopped:
        context.findings += unfinished(check, context, f"ended by {stopped}")
        abandoned = True
    return abandoned


def _assemble(context: Context) -> bool:
    """Tell rank 0 and wait until all have written; rank 0 lets them go. Whether that went well."""
    roll = context.roll
    if roll is None or context.world_size == 1:
        return True
    if context.rank == 0:
        roll.finish()
        return True
    if not roll.report(context.rank, verdict(context)):
        return True  # the store has gone: the lines say so
    return roll.wait_until_finished(context.left(_WAIT_SHARE))


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """The first signal ends the checks but not the report; then each does what it did before."""

    def stop(number: int, _: FrameType | None) -> None:
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise _Stopped(signal.Signals(number).name)

    before = {number: signal.signal(number, stop) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
