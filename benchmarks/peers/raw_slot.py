"""The floor of two processes on one host: shared memory, two semaphores, no policy behind them.

The request's bytes are copied once into shared memory and once out of it. Each process keeps to a core of its own, as
one with a policy to compute does: on the same core, where the scheduler puts two that only take turns, waking costs a
tenth and a copy finds everything in the cache.
"""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..workload import Workload
from . import Session
from .child import ChildService, HandleSource, ServerControl

NAME = "raw_slot"
PACKAGES = ()
MODULES = ()
_GOODBYE = 1


class _Lane:
    """What the two processes share."""

    def __init__(self, workload: Workload) -> None:
        context = multiprocessing.get_context("spawn")
        self.request = context.RawArray("B", workload.request_bytes)
        self.reply = context.RawArray("B", workload.reply_bytes)
        self.ending = context.RawValue("B", 0)
        self.asked: Any = context.Semaphore(0)
        self.answered: Any = context.Semaphore(0)


def open_service(workload: Workload, transport: str) -> ChildService:
    if workload.clients != 1:
        raise ValueError(f"{NAME} is a ping-pong of two, not of {workload.clients} clients")
    lane = _Lane(workload)
    return ChildService(workload, partial(_serve, lane), RawConnector, handles=[lane])


def _serve(lane: _Lane, workload: Workload, control: ServerControl) -> None:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    control.publish()
    slot, staging = _octets(lane.request), memoryview(bytearray(workload.request_bytes))
    while True:
        lane.asked.acquire()
        if lane.ending.value == _GOODBYE:
            break
        staging[:] = slot
        lane.answered.release()
    control.wait_for_stop()


def _octets(array: Any) -> memoryview:
    return memoryview(array).cast("B")


@dataclass
class RawConnector:
    source: HandleSource

    def connect(self, workload: Workload, client: int) -> Session:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        lane: _Lane = self.source.receive()
        slot, payload = _octets(lane.request), memoryview(bytes(workload.request_bytes))

        def ping() -> None:
            slot[:] = payload
            lane.asked.release()
            lane.answered.acquire()

        def close() -> None:
            lane.ending.value = _GOODBYE
            lane.asked.release()

        return Session(ping, close)
