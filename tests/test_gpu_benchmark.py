"""The script for a machine with a GPU: its dry mode, wheels in pieces, what it makes of a profiler's trace."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import wait_until

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the benchmarks are not installed

from benchmarks.gpu_parts.conformance import counts  # noqa: E402
from benchmarks.gpu_parts.report import Outcome, goals, table  # noqa: E402
from benchmarks.gpu_parts.trace import objections, read_trace, trace_row  # noqa: E402
from benchmarks.gpu_parts.wheel import library_from_pieces  # noqa: E402

SECONDS = 200.0  # most of it imports, one after the other
PARTS = ("trace", "overhead", "nccl", "staging", "compiled", "conformance")
DRY = ("--dry", "--quick", "--transports", "shared_memory")
LIBRARY = bytes(range(256)) * 40
IN_WHEEL = "nvidia/nccl/lib/libnccl.so.2"


@contextmanager
def script(*options: str, module: str = "benchmarks.gpu") -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", *module.split(), *options]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def document_of(output: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(output.splitlines()[-1])
    return document


# --- The script ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_dry_run_tells_of_every_part(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    with script(*DRY, "--json", str(path)) as process:
        output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, output
    assert "numbers say nothing about a GPU" in output
    document = document_of(output)
    assert document == json.loads(path.read_text())
    assert document["dry"] is True
    assert document["versions"]["cores"] >= 1
    assert {goal["verdict"] for goal in document["goals"]} == {"not measured"}
    parts = document["parts"]
    assert tuple(parts) == PARTS
    for name in PARTS[:-1]:
        assert parts[name]["status"] == "ran", output
        assert parts[name]["rows"], output
        assert not parts[name]["wrong"], output
    assert parts["conformance"]["status"] in ("ran", "impossible"), output
    for row in (*parts["staging"]["rows"], *parts["overhead"]["rows"], *parts["compiled"]["rows"]):
        assert row["mean_rows"] == row["rows"]
        assert row["errors"] == 0
    assert {row["rows"] < row["size"] for row in parts["compiled"]["rows"]} == {False, True}
    both = [row for row in parts["nccl"]["rows"] if row["what"].startswith("both")]
    assert [row["mean_batch"] for row in both] == [2.0]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_its_parts_and_the_document_is_told(signum: signal.Signals) -> None:
    """Through ``python -m benchmarks gpu``, which is the same command."""
    with script(*DRY, "--only", "staging", module="benchmarks gpu") as process:
        ended = psutil.Process(process.pid)
        part = wait_until(lambda: descendants(ended, "staging"), SECONDS)
        assert part
        process.send_signal(signum)
        output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == (130 if signum == signal.SIGINT else 143), output
    assert document_of(output)["parts"]["staging"]["status"] == "interrupted"
    assert not [each for each in part if each.is_running() and each.status() != "zombie"]


def test_a_part_that_is_late_is_ended_and_says_so() -> None:
    with script(*DRY, "--only", "trace", "--only", "conformance", "--deadline", "0.5") as process:
        output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 1, output
    parts = document_of(output)["parts"]
    assert parts["trace"]["status"] == "deadline"
    assert parts["trace"]["reason"] == "it was not done after 0.5 s"
    assert "conformance" in parts


def descendants(process: psutil.Process, word: str) -> Sequence[psutil.Process]:
    """The part's process and those that it has started, once it has some."""
    found = []
    for child in process.children():
        with suppress(psutil.NoSuchProcess):  # the part before this one
            if word in child.cmdline():
                found = [child, *child.children(recursive=True)]
    return found if len(found) > 1 else []


# --- A wheel in pieces ---------------------------------------------------------------------------


def pieces(folder: Path, name: str = IN_WHEEL, size: int = 100) -> Path:
    """A wheel in the pieces that ``split -d -b`` would make."""
    wheel = folder / "nvidia_nccl_cu13-2.30.7-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("nvidia/nccl/include/nccl.h", "")
        archive.writestr(name, LIBRARY)
    whole = wheel.read_bytes()
    for number, begin in enumerate(range(0, len(whole), size)):
        (folder / f"part-{number:02}").write_bytes(whole[begin : begin + size])
    return folder


def test_the_library_of_a_wheel_in_pieces(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    library = library_from_pieces(pieces(tmp_path), scratch)
    assert library.name == "libnccl.so.2"
    assert library.read_bytes() == LIBRARY
    assert [path.name for path in scratch.iterdir()] == [library.name]


def test_a_piece_that_is_missing_is_named(tmp_path: Path) -> None:
    (pieces(tmp_path) / "part-02").unlink()
    with pytest.raises(ValueError, match="lacks part-02"):
        library_from_pieces(tmp_path, tmp_path)


def test_pieces_without_the_last_are_no_wheel(tmp_path: Path) -> None:
    max(pieces(tmp_path).glob("part-*")).unlink()
    with pytest.raises(ValueError, match="no whole wheel"):
        library_from_pieces(tmp_path, tmp_path)


def test_another_wheel_and_no_pieces_at_all(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="part-00"):
        library_from_pieces(tmp_path, tmp_path)
    with pytest.raises(ValueError, match=r"no libnccl\.so\.2"):
        library_from_pieces(pieces(tmp_path, "nvidia/nccl/lib/other.so"), tmp_path)


# --- What a profiler writes ----------------------------------------------------------------------


def event(kind: str, name: str, begin: float, duration: float = 1.0) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "ts": begin, "dur": duration}


def one_pass(begin: float, memory: str = "Pinned") -> list[dict[str, Any]]:
    return [
        event("cuda_runtime", "cudaMemcpyAsync", begin),
        event("gpu_memcpy", f"Memcpy HtoD ({memory} -> Device)", begin + 1, 2.0),
        event("kernel", "gemm", begin + 3, 5.0),
        event("gpu_memcpy", f"Memcpy DtoH (Device -> {memory})", begin + 8, 3.0),
        event("cuda_runtime", "cudaEventRecordWithFlags", begin + 4),
        event("cuda_runtime", "cudaEventSynchronize", begin + 5, 6.0),
    ]


def waiting(begin: float) -> dict[str, Any]:
    return event("cuda_runtime", "cudaDeviceSynchronize", begin)


def test_a_trace_of_clean_passes() -> None:
    """The profiler's own waits, before the first pass and after the last, are none of the server's."""
    passes = [each for begin in (100.0, 200.0) for each in one_pass(begin)]
    began = {"ph": "M", "name": "process_name"}
    seen = read_trace([began, waiting(1.0), *passes, waiting(900.0)])
    row = trace_row("process_slot", seen, 2)
    assert objections(row) == []
    assert seen.copy_us == {"HtoD": 4.0, "DtoH": 6.0}
    assert seen.kernel_us == 10.0
    assert row["event_waits_per_pass"] == row["event_records_per_pass"] == 1


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ([waiting(150.0)], "cudaDeviceSynchronize"),
        ([event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 150.0)], "1.50 copies to the"),
        ([event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 150.0)], "1.50 copies back"),
    ],
)
def test_a_trace_of_what_must_not_be(more: list[dict[str, Any]], what: str) -> None:
    seen = read_trace([*one_pass(100.0), *more, *one_pass(200.0)])
    (found,) = objections(trace_row("process_slot", seen, 2))
    assert what in found


def test_a_trace_of_copies_that_are_not_pinned() -> None:
    (found,) = objections(trace_row("process_slot", read_trace(one_pass(1.0, "Pageable")), 1))
    assert found == "2 copies from or to memory that is not pinned"


# --- What it prints ------------------------------------------------------------------------------


def test_goals_of_a_gpu_are_judged_and_others_are_not() -> None:
    row = {"transport": "process_slot", "overhead": 0.2}
    reached = goals({"overhead": Outcome("overhead", rows=[row])})
    (found,) = [goal for goal in reached if goal.value is not None]
    assert (found.verdict(dry=False), found.verdict(dry=True)) == ("NOT MET", "not measured")
    assert {goal.verdict(dry=False) for goal in reached if goal is not found} == {"not measured"}


@pytest.mark.parametrize(
    ("copies", "verdict"), [({}, "not measured"), ({"Memcpy HtoD (Pinned -> Device)": 1}, "met")]
)
def test_a_trace_that_saw_nothing_meets_no_goal(copies: dict[str, int], verdict: str) -> None:
    row = {"transport": "process_slot", "device_syncs": 0, "copies": copies}
    found = goals({"trace": Outcome("trace", rows=[row])})[0]
    assert found.verdict(dry=False) == verdict


def test_a_table_has_columns_of_one_width() -> None:
    lines = table([{"transport": "slot", "us": 1234.5}, {"transport": "distributed", "us": 0.25}])
    assert lines == ["transport      us", "slot         1234", "distributed  0.25"]


def test_numbers_in_what_others_print() -> None:
    assert counts(["3 passed, 2 skipped, 1 error in 4.05s"]) == {
        "passed": 3,
        "skipped": 2,
        "error": 1,
    }
