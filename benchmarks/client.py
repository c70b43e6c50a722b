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


def client_main(connector: Connector, workload: Workload, client: int, pipe: Connection) -> None:
    """Serve the conductor's commands; the first failure is sent to it and ends the client."""
    try:
        _obey(connector, workload, client, pipe)
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))
        raise


def _obey(connector: Connector, workload: Workload, client: int, pipe: Connection) -> None:
    pipe.recv()
    session = connector.connect(workload, client)
    _check_reply(session, workload, client)
    closed_loop(session.request, 0.0, time.monotonic() + WARMUP_SECONDS, WARMUP_REQUESTS)
    pipe.send(("done", None))
    for start, stop in iter(pipe.recv, None):
        pipe.send(("done", closed_loop(session.request, start, stop).tobytes()))
    _check_reply(session, workload, client)
    session.close()
    pipe.send(("done", None))


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
