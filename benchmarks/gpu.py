"""What a GPU does here, as one prepared script: `python -m benchmarks.gpu [options]`, at most 8 minutes.

It prints versions first, then runs each part in a process of its own, with a deadline of its own. A part that fails, or
that this machine cannot do, says why, and the others run. Tables come first, one JSON document last. Without a GPU, or
with `--dry`, every part runs on the CPU in a small size: those numbers say nothing about a GPU.

Two ranks on one GPU need NCCL 2.30. Where the machine has an older one and reaches nothing, a wheel can come in pieces,
which `--nccl-wheel-parts` joins, unpacks and preloads:

    pip download --no-deps --only-binary=:all: --platform manylinux_2_18_x86_64 nvidia-nccl-cu13==2.30.7
    split -d -b 52M nvidia_nccl_cu13-*.whl part-
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from . import machine
from .contestant import REPOSITORY
from .gpu_parts.load import TRANSPORTS
from .gpu_parts.part import PARTS, STACKS_SIGNAL
from .gpu_parts.report import Outcome, goal_lines, goals, text
from .gpu_parts.wheel import library_from_pieces

DRY_WARNING = "DRY RUN, these numbers say nothing about a GPU"

_SECONDS = {
    "versions": 60.0,
    "trace": 60.0,
    "overhead": 60.0,
    "nccl": 110.0,
    "staging": 150.0,
    "compiled": 120.0,
    "conformance": 150.0,
}
_MINUTES = 8.0
_LEAST_SECONDS = 5.0  # with less than that left, a part is not begun
_STACKS_SECONDS = 1.0
_END_SECONDS = 10.0
_LINES = 40
_TERMINATED = 143
_LOOPBACK = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}


class Run:
    """The parts of one call, what they gave, and how much time is left."""

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        self.options = options
        self.dry = bool(options.dry)
        self.outcomes: dict[str, Outcome] = {}
        self.environment = _environment(scratch)
        self._scratch = scratch
        self._preloads = False
        self._end = time.monotonic() + 60 * options.minutes

    def preload(self) -> None:
        """Join the wheel that came in pieces; a wheel that cannot be is told and left out."""
        folder = self.options.nccl_wheel_parts
        if folder is None:
            return
        try:
            library = library_from_pieces(folder, self._scratch)
        except (OSError, ValueError) as error:
            print(f"NCCL of the machine: {error}", flush=True)
            return
        self.environment["LD_PRELOAD"] = str(library)
        self._preloads = True

    def versions(self) -> None:
        """The first part. Tells whether there is a GPU, and whether the NCCL that came along works."""
        outcome = self.part("versions")
        loaded = bool(outcome.rows) and outcome.rows[0]["nccl_preloaded"]
        if self._preloads and not loaded:
            print("the NCCL that came along does not load; the machine's is used", flush=True)
            del self.environment["LD_PRELOAD"]
            outcome = self.part("versions")
        if not self.dry and not (outcome.rows and outcome.rows[0].get("gpus")):
            print("there is no GPU here", flush=True)
            self.dry = True

    def part(self, name: str) -> Outcome:
        """Run one part in a process, print its table, and end whatever is left of it."""
        outcome = self.outcomes[name] = Outcome(name)
        began = time.monotonic()
        seconds = min(_SECONDS[name], self.options.deadline, self._end - began)
        try:
            if self._end - began < _LEAST_SECONDS:
                outcome.status, outcome.reason = "no time", "the others have taken it all"
            else:
                self._run(outcome, seconds)
        except (KeyboardInterrupt, SystemExit):
            outcome.status, outcome.reason = "interrupted", "a signal ended the run"
            raise
        finally:
            outcome.seconds = time.monotonic() - began
            print(text(outcome), end="\n\n", flush=True)
        return outcome

    def _run(self, outcome: Outcome, seconds: float) -> None:
        settings: dict[str, Any] = {
            "dry": self.dry,
            "quick": self.options.quick,
            "transports": self.options.transports,
        }
        deadline = time.monotonic() + seconds
        with tempfile.TemporaryFile() as output:
            with _process(outcome.name, settings, self.environment, output) as (process, reader):
                ended = _listen(outcome, reader, deadline, seconds)
                if not ended and outcome.status == "deadline":
                    process.send_signal(STACKS_SIGNAL)
                    time.sleep(_STACKS_SECONDS)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_END_SECONDS if ended else 0.0)
            if outcome.status == "ran" and not ended:
                outcome.status = "failed"
                outcome.reason = f"its process ended with {process.returncode}"
            if outcome.wrong and outcome.status == "ran":
                outcome.status = "failed"
            if outcome.status in ("failed", "deadline") or self.options.verbose:
                print(_words(output), flush=True)

    def document(self) -> dict[str, Any]:
        """Everything that was found, for the JSON."""
        versions = self.outcomes["versions"].rows if "versions" in self.outcomes else []
        return {
            "suite": "gpu",
            "dry": self.dry,
            **({"warning": DRY_WARNING} if self.dry else {}),
            "quick": self.options.quick,
            "machine": machine.describe(),
            "versions": versions[0] if versions else {},
            "parts": {n: o.record() for n, o in self.outcomes.items() if n != "versions"},
            "goals": [
                {
                    "goal": g.goal,
                    "at most": g.limit,
                    "reached": g.value,
                    "verdict": g.verdict(self.dry),
                }
                for g in goals(self.outcomes)
            ],
        }


def _listen(outcome: Outcome, reader: Any, deadline: float, seconds: float) -> bool:
    """Take what a part tells until it ends; whether it came to its end."""
    pending = b""
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not multiprocessing.connection.wait([reader], left):
            outcome.status, outcome.reason = "deadline", f"it was not done after {seconds:.3g} s"
            return False
        received = os.read(reader, 1 << 16)
        if not received:
            return False
        *lines, pending = (pending + received).split(b"\n")
        for line in lines:
            if _take(outcome, *json.loads(line)):
                return True


def _take(outcome: Outcome, kind: str, value: Any) -> bool:
    """Keep one finding; whether it was the last."""
    if kind == "impossible":
        outcome.status, outcome.reason = kind, value
    elif kind != "end":
        {"row": outcome.rows, "note": outcome.notes, "wrong": outcome.wrong}[kind].append(value)
    return kind in ("impossible", "end")


@contextmanager
def _process(
    name: str, settings: Mapping[str, Any], environment: Mapping[str, str], output: Any
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A part's process in a session of its own; nothing of that is left afterwards."""
    reader, writer = os.pipe()
    arguments = [name, json.dumps(settings), str(writer)]
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu_parts.part", *arguments],
        cwd=REPOSITORY,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=[writer],
        start_new_session=True,
    )
    os.close(writer)
    try:
        yield process, reader
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(reader)


def _environment(scratch: Path) -> dict[str, str]:
    """What parts inherit: they find this package, stay on the loopback interface, and leave files in `scratch`."""
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "NCCL_DEBUG": "WARN",  # says why it refuses
        # torch looks up the name of every address that it connects to. Where no name server answers, each would take
        # seconds, and there are many clients.
        "RES_OPTIONS": "timeout:1 attempts:1",
        **os.environ,
        **_LOOPBACK,
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        "TMPDIR": str(scratch),
    }


def _words(output: Any) -> str:
    output.seek(0)
    lines = output.read().decode(errors="replace").splitlines()
    return "\n".join(lines[-_LINES:])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [name for name in PARTS if name != "versions"]
    add = parser.add_argument
    add("--dry", action="store_true", help="on the CPU, small; the default where there is no GPU")
    add("--quick", action="store_true", help="fewer sizes, shorter windows")
    add("--only", action="append", choices=names, help="this part; may be given several times")
    add(
        "--transports",
        type=lambda value: value.split(","),
        default=list(TRANSPORTS),
        help="for trace, overhead and staging, separated by commas",
    )
    add("--minutes", type=float, default=_MINUTES, help="for everything (default %(default)g)")
    add("--deadline", type=float, default=math.inf, help="seconds for each part, at most")
    add("--nccl-wheel-parts", type=Path, metavar="DIR", help="pieces of a newer NCCL's wheel")
    add("--json", type=Path, metavar="PATH", help="also write the JSON document there")
    add("--verbose", action="store_true", help="print what the parts' processes print")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts; 1 if one failed or was not done in time, 130 or 143 if a signal ended the run."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if unknown := set(options.transports) - set(TRANSPORTS):
        parser.error(f"--transports: unknown {sorted(unknown)}; known are {', '.join(TRANSPORTS)}")
    # As an exception, so that a terminated run still ends its parts and tells what they had.
    signal.signal(signal.SIGTERM, _terminated)
    with tempfile.TemporaryDirectory(prefix="bench", ignore_cleanup_errors=True) as scratch:
        run = Run(options, Path(scratch))
        status = _all_parts(run)
    reached = goals(run.outcomes)
    print(goal_lines(reached, run.dry), end="\n\n")
    document = run.document()
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document), flush=True)
    return status


def _all_parts(run: Run) -> int:
    try:
        run.preload()
        run.versions()
        if run.dry:
            print(f"{DRY_WARNING}\n", flush=True)
        for name in run.options.only or [name for name in PARTS if name != "versions"]:
            run.part(name)
    except KeyboardInterrupt:
        return 130
    except SystemExit:
        return _TERMINATED
    return int(any(o.status in ("failed", "deadline") for o in run.outcomes.values()))


def _terminated(*_: object) -> None:
    raise SystemExit(_TERMINATED)


if __name__ == "__main__":
    sys.exit(main())
