"""One part of `benchmarks.gpu` in a process of its own: `python -m benchmarks.gpu_parts.part PART SETTINGS DESCRIPTOR`.

What it finds goes over the inherited pipe as it comes, one JSON object a line, so that a part that is ended at its
deadline has told what it had. Its printed words go where its parent sent them.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from .load import warm_forkserver

if TYPE_CHECKING:
    import torch

PARTS = ("versions", "trace", "overhead", "nccl", "staging", "compiled", "conformance")
"""Each is a module that has `run(part)`; in the order in which they run."""

_WITHOUT_CLIENTS = ("versions", "conformance")

STACKS_SIGNAL = signal.SIGUSR1
"""Makes a part print where its threads are."""


class Impossible(RuntimeError):
    """This machine cannot do that; the message says why."""


class Part:
    """What a part is given, and where it puts what it finds.

    Args:
        settings: `dry` for a small run on the CPU, `quick` for a shorter one, `transports` to run over.
        pipe: the descriptor that findings go to.
    """

    def __init__(self, settings: Mapping[str, Any], pipe: int) -> None:
        self.dry = bool(settings["dry"])
        self.quick = bool(settings["quick"])
        self.transports: list[str] = list(settings["transports"])
        self._pipe = pipe

    @property
    def on_gpu(self) -> bool:
        """Whether numbers say something about a GPU."""
        return not self.dry

    @property
    def device(self) -> torch.device:
        """Where the policy computes."""
        import torch

        return torch.device("cpu" if self.dry else "cuda:0")

    def row(self, **values: Any) -> None:
        """One line of the part's table."""
        self.tell("row", {key: _rounded(value) for key, value in values.items()})

    def note(self, text: str) -> None:
        """Something to read beside the table."""
        self.tell("note", text)

    def wrong(self, text: str) -> None:
        """What should not be; the part goes on, and has failed. Of a traceback, what was raised is kept."""
        print(text, flush=True)
        first, *others = text.strip().splitlines() or [""]
        self.tell("wrong", f"{first} {others[-1]}" if others else first)

    def tell(self, kind: str, value: Any) -> None:
        """One line for the parent: `row`, `note`, `wrong`, or last `impossible` or `end`."""
        line = json.dumps([kind, value]) + "\n"
        os.write(self._pipe, line.encode())


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    return value


def main(name: str, settings: str, descriptor: str) -> int:
    """Run one part; its parent hears how it went. 1 if this machine cannot run it."""
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    _end_with_parent()
    part = Part(json.loads(settings), int(descriptor))
    try:
        if name not in _WITHOUT_CLIENTS:
            warm_forkserver()
        importlib.import_module(f"{__package__}.{name}").run(part)
    except Impossible as exc:
        part.tell("impossible", str(exc))
        return 1
    except Exception as exc:
        traceback.print_exc()
        part.wrong(f"{type(exc).__name__}: {exc}")
    # Before the interpreter ends, which a broken communicator may hold up.
    part.tell("end", None)
    return 0


def _end_with_parent() -> None:
    """Whatever ends the parent, also what it has no say in, ends us and so the processes that we have."""
    parent = os.getppid()
    ended = threading.Event()

    def watch() -> None:
        while os.getppid() == parent:
            ended.wait(1.0)
        with suppress(ProcessLookupError):
            os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


if __name__ == "__main__":
    # The module that the parts import, so that what they raise is what is caught.
    from benchmarks.gpu_parts.part import main as imported_main

    sys.exit(imported_main(*sys.argv[1:]))
