"""One client: it connects, warms up, and runs a closed loop whenever it is told to."""

from __future__ import annotations

import time
import traceback
from array import array
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from .peers import Connector, Session
from .workload import Workload

WARMUP_SECONDS = 0.3
WARMUP_REQUESTS = 20
CONNECT = "connect"


class Client:
    """Client number `client`, wherever it runs: in a process, a thread or an actor."""

    def __init__(self, connector: Connector, workload: Workload, client: int) -> None:
        self._connector, self._workload, self._number = connector, workload, client
        self._session: Session | None = None

    def obey(self, command: Any) -> bytes | None:
        """Carry out `CONNECT`, or a burst `(start, stop)` for its latencies, or `None`: the end."""
        if command == CONNECT:
            self._connect()
        elif self._session is None:
            raise RuntimeError("the client was never told to connect")
        elif command is None:
            self._close(self._session)
        else:
            return closed_loop(self._session.request, *command).tobytes()
        return None

    def _connect(self) -> None:
        session = self._connector.connect(self._workload, self._number)
        _check_reply(session, self._workload, self._number)
        closed_loop(session.request, 0.0, time.monotonic() + WARMUP_SECONDS, WARMUP_REQUESTS)
        self._session = session

    def _close(self, session: Session) -> None:
        _check_reply(session, self._workload, self._number)
        session.close()


def client_main(connector: Connector, workload: Workload, client: int, pipe: Connection) -> None:
    """Serve the conductor's commands; the first failure is sent to it and ends the client."""
    try:
        body, command = Client(connector, workload, client), CONNECT
        while command is not None:
            command = pipe.recv()
            pipe.send(("done", body.obey(command)))
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))
        raise


def answer(pipe: Connection, who: str, body: object, seconds: float) -> Any:
    """The outcome of a command to `client_main`, or to what answers as it does.

    RuntimeError with that side's own traceback, or because `body`, which runs it, died or is late.
    """
    if not pipe.poll(seconds):
        raise RuntimeError(f"{who} gave no answer in {seconds:.0f} s")
    try:
        status, value = pipe.recv()
    except EOFError:
        raise RuntimeError(f"{who} died: {body!r}") from None
    if status == "failed":
        raise RuntimeError(f"{who} failed:\n{value}")
    return value


def closed_loop(
    request: Callable[[], Any], start: float, stop: float, at_least: int = 1
) -> array[float]:
    """Ask again as soon as the answer is there, from `start` to `stop` on `time.monotonic`.

    Returns the latencies in seconds; the request under way at `stop` is finished and counts.
    """
    latencies = array("d")
    time.sleep(max(0.0, start - time.monotonic()))
    began = time.monotonic()
    while began < stop or len(latencies) < at_least:
        request()
        ended = time.monotonic()
        latencies.append(ended - began)
        began = ended
    return latencies


def _check_reply(session: Session, workload: Workload, client: int) -> None:
    action = session.request()
    if action is None:
        return
    import torch

    from .policy import expected_action

    torch.testing.assert_close(action, expected_action(workload, client), check_device=False)
