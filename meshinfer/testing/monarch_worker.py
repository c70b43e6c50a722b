"""The actor that runs clients for :mod:`meshinfer.testing.monarch_actors`. Imports monarch."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import Any

from monarch.actor import Actor, Port, endpoint

from meshinfer.testing.harness import run_reporting
from meshinfer.testing.processes import pickled_error

__all__ = ["ClientActor"]


class ClientActor(Actor):  # type: ignore[misc]
    """Runs one function after the other.

    Args:
        port: to whom it says what the functions report, and what they return or raise.
    """

    def __init__(self, port: Port[Any]) -> None:
        port.return_undeliverable = False  # the suite may have ended
        self._port = port

    @endpoint  # type: ignore[untyped-decorator]
    def pid(self) -> int:
        """Of its process."""
        return os.getpid()

    @endpoint  # type: ignore[untyped-decorator]
    def perform(self, function: Callable[..., Any], *args: Any) -> None:
        """Call it, and tell."""

        def deliver(value: object) -> None:
            self._port.send(("report", value))

        try:
            found = run_reporting(deliver, function, *args)
        except BaseException as error:  # whatever it is, the check raises it
            text = "".join(traceback.format_exception(error))
            self._port.send(("raised", (pickled_error(error), text)))
        else:
            self._port.send(("returned", found))
