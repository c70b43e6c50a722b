"""Programs that are forked with everything imported live and end as those of a new interpreter."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from failure_scripts import Program, environment
from support import wait_until
from warm import VARIABLE, address, is_forked, python_command, stands_for

SECONDS = 60.0

IMPORT_TABULATE = "import contextlib\nwith contextlib.suppress(ImportError):\n    import tabulate"

ENDINGS = {
    "returns": ("print(__name__, os.path.basename(__file__), sys.argv[1:])", 0),
    "exits": ("sys.exit(3)", 3),
    "leaves": ("os._exit(7)", 7),
    "raises": ("raise KeyError('at top level')", 1),
    # torch imports tabulate at the exit where that is installed, and Python then forgets the interrupt
    "is interrupted": (f"{IMPORT_TABULATE}\nos.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT),
    "aborts": ("os.abort()", -signal.SIGABRT),
    "waits for a thread": ("threading.Timer(0.1, print, ['later']).start()", 0),
    "is finalized": ("atexit.register(print, 'at exit')\nkept = Noisy()", 0),
}
SAID = {
    "returns": ["__main__ program.py ['word']"],
    "waits for a thread": ["later"],
    "is finalized": ["at exit", "deleted"],
}
PRELUDE = """
import atexit, os, signal, sys, threading

class Noisy:
    def __del__(self):
        print("deleted")
"""


def write(folder: Path, source: str) -> str:
    path = folder / "program.py"
    path.write_text(f"{PRELUDE}\n{source}\n")
    return str(path)


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_program_ends_as_it_should(tmp_path: Path, ending: str) -> None:
    source, code = ENDINGS[ending]
    program = Program([write(tmp_path, source), "word"], environment())
    found = program.ending(SECONDS)
    program.close()
    assert found.code == code, found.stderr
    assert found.stdout.splitlines() == SAID.get(ending, [])
    assert ("KeyError: 'at top level'" in found.stderr) == (ending == "raises")


def test_a_program_has_an_environment_a_folder_and_a_session_of_its_own(tmp_path: Path) -> None:
    source = "print(os.environ['ONLY'], 'HOME' in os.environ, os.getpid() == os.getsid(0))"
    program = Program([write(tmp_path, source)], {"ONLY": "here"})
    found = program.ending(SECONDS)
    program.close()
    assert found.stdout.split() == ["here", "False", "True"], found.stderr


def test_warnings_may_be_errors_and_python_another_one(tmp_path: Path) -> None:
    path = write(
        tmp_path, "print(sys.executable, flush=True); import warnings; warnings.warn('no')"
    )
    program = Program(["-W", "error", path], {"PYTHON_EXEC": "/some/python"})
    found = program.ending(SECONDS)
    program.close()
    assert (found.code, found.stdout.split()) == (1, ["/some/python"])
    assert "UserWarning: no" in found.stderr


@pytest.mark.parametrize("code", [0, 5, -signal.SIGTERM])
def test_a_stand_in_ends_as_its_program(tmp_path: Path, code: int) -> None:
    source = f"sys.exit({code})" if code >= 0 else "os.write(1, b'here'); signal.pause()"
    with stand_in(tmp_path, source) as running:
        assert running.stdout is not None
        if code < 0:
            assert running.stdout.read(4) == b"here"
            running.send_signal(-code)
        assert running.wait(SECONDS) == code


def test_a_stand_in_without_arguments_is_what_a_host_of_monarch_starts(tmp_path: Path) -> None:
    variables = {**os.environ, VARIABLE: str(address()), "PAR_MAIN_OVERRIDE": "this"}
    command = [python_command(tmp_path)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=SECONDS)
    assert (done.returncode, "Beautiful is better than ugly." in done.stdout) == (0, True)


def test_a_stand_in_is_known_by_its_program(tmp_path: Path) -> None:
    with stand_in(tmp_path, "os.write(1, b'%7d' % os.getpid()); signal.pause()") as running:
        assert running.stdout is not None
        pid = int(running.stdout.read(7))
        assert is_forked(pid)
        assert not is_forked(running.pid)
        # It learns whom it has got at about the time when that one runs.
        assert wait_until(lambda: stands_for(psutil.Process(running.pid), pid), SECONDS)


def test_a_killed_stand_in_takes_its_program_along(tmp_path: Path) -> None:
    with stand_in(tmp_path, "os.write(1, b'%7d' % os.getpid()); signal.pause()") as running:
        assert running.stdout is not None
        pid = int(running.stdout.read(7))
        assert pid != running.pid
        running.kill()
        assert wait_until(lambda: not psutil.pid_exists(pid), SECONDS)


@contextmanager
def stand_in(folder: Path, source: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [python_command(folder), "-u", write(folder, source)]
    variables = {**os.environ, VARIABLE: str(address())}
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE) as running:
        try:
            yield running
        finally:
            running.kill()
