"""The serving loop: wait, drain, gather, forward, scatter."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from meshinfer.errors import ServerClosedError
from meshinfer.inference.protocol import InferenceTransport, ServedTransport
from meshinfer.server.config import InferenceServerConfig
from meshinfer.server.policy import ServedPolicy
from meshinfer.server.sources import Source
from meshinfer.server.stats import StatsRecorder
from meshinfer.streams import work_on

__all__ = ["Batcher"]

logger = logging.getLogger("meshinfer.server")

_LOOK_SECONDS = 0.1
"""How often a transport that cannot be woken is asked again whether it has work, so that we notice our own end."""

_INLINE_BATCHES = 4
"""Batches that a receiving thread serves in a row before it goes back to its own client."""

_INLINE_CLIENTS = 4
"""With more clients the hand-over costs less than it gains: requests gather meanwhile, and batches are larger."""


class Batcher:
    """Serves a transport, from a thread of its own and, ``inline``, from the threads that receive requests.

    With few clients, a receiving thread that finds nobody serving leads: it serves what has arrived and returns to its
    client. Under load, when requests keep coming while it serves, it hands over to the batcher's own thread. Either way
    one batch is computed at a time, by whoever holds the policy's turn.
    """

    def __init__(
        self,
        transport: InferenceTransport,
        source: Source,
        policy: ServedPolicy,
        config: InferenceServerConfig,
        stats: StatsRecorder,
        *,
        stamp: bool,
        inline: bool,
    ) -> None:
        self._transport = transport
        self._source = source
        self._policy = policy
        self._config = config
        self._stats = stats
        self._stamp = stamp
        self._inline = inline
        self.failure: Exception | None = None
        self._stopping = False
        self._served = transport if isinstance(transport, ServedTransport) else None
        self._patience = None if self._served is not None else _LOOK_SECONDS
        self._thread = threading.Thread(target=self._run, name="meshinfer-server", daemon=True)

    @property
    def is_alive(self) -> bool:
        """Whether the batcher's own thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Begin to serve."""
        if self._inline and self._served is not None:
            self._served.set_ready_callback(self._lead)
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """Stop after the batch that is being computed; waiting requests get :class:`ServerClosedError`.

        Returns:
            ``False`` when that batch was not done after ``timeout`` seconds.
        """
        self._stopping = True
        if self._served is not None:
            self._served.wake()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """The right to use the model. Requests that arrive meanwhile are served afterwards."""
        try:
            with self._policy.turn:
                yield
        finally:
            self._hand_over()

    def settle(self) -> None:
        """Let an idle policy take the weights that are offered; one that computes takes them before its next batch."""
        while self._policy.offer is not None and self._policy.turn.acquire(blocking=False):
            try:
                self._policy.take_offer()
            finally:
                self._policy.turn.release()
        # Who has not got the turn now, lets go of it later, and looks then.

    def _run(self) -> None:
        try:
            work_on(self._policy.device)
            with self._policy.turn:
                self._policy.warm_up_here()
            while not self._stopping:
                if self._transport.wait_for_work(self._patience):
                    with self._policy.turn:
                        self._serve(self._collect())
                    if self._policy.offer is not None:
                        self.settle()
                elif self._is_closed():
                    break  # by somebody else
            with self._policy.turn:
                self._refuse_waiting()
        except Exception as error:  # the transport failed: nobody would be served any more
            logger.exception("the serving thread failed")
            self.failure = error
            self._transport.close()
        finally:
            self.settle()

    def _lead(self) -> None:
        """A request has arrived, in the thread that calls: serve it here, unless somebody is serving."""
        assert self._served is not None
        few = self._served.num_clients <= _INLINE_CLIENTS
        if few and self._policy.turn.acquire(blocking=False):
            try:
                served = 0
                while served < _INLINE_BATCHES and not self._stopping:
                    requests = self._source.drain(self._config.max_batch_size)
                    if not requests:
                        break
                    self._serve(requests)
                    served += 1
            finally:
                self._policy.turn.release()
        self._hand_over()

    def _collect(self) -> list[Any]:
        """The next batch: what has arrived, or more until ``min_batch_size`` or the oldest one's deadline."""
        config, drain = self._config, self._source.drain
        requests = drain(config.max_batch_size)
        while requests and len(requests) < config.min_batch_size and not self._stopping:
            left = requests[0].arrived + config.timeout - time.perf_counter()
            if left <= 0:
                break
            if not self._transport.wait_for_work(left) and self._is_closed():
                break  # else it was woken for another reason, or the deadline has passed
            requests += drain(config.max_batch_size - len(requests))
        return requests

    def _is_closed(self) -> bool:
        return self._served is not None and self._served.closed

    def _serve(self, requests: list[Any]) -> None:
        if self._policy.offer is not None:
            self._policy.take_offer()
        if not requests:
            return
        kinds = list(map(self._source.alike, requests))
        if kinds.count(kinds[0]) == len(kinds):
            return self._serve_alike(requests)
        for kind in dict.fromkeys(kinds):
            pairs = zip(requests, kinds, strict=True)
            self._serve_alike([request for request, each in pairs if each == kind])

    def _serve_alike(self, requests: list[Any]) -> None:
        """One forward pass. Whatever goes wrong reaches exactly these clients."""
        began = time.perf_counter()
        try:
            batch = self._source.gather(requests)
        except BaseException as exc:
            return self._serve_apart(requests, exc)
        ready = time.perf_counter()
        counted = False
        try:
            results = self._policy(batch, requests[0].interaction)
            forward = time.perf_counter() - ready
            self._stats.batch([request.arrived for request in requests], began, forward)
            counted = True
            self._source.scatter(requests, results, self._policy.version if self._stamp else None)
        except (
            BaseException
        ) as exc:  # a policy may raise anything, SystemExit included; the server goes on
            if counted:
                self._stats.unanswered(len(requests))
            self._fail(requests, exc)
            return
        self._stats.busy(began, time.perf_counter())

    def _serve_apart(self, requests: list[Any], exc: BaseException) -> None:
        """They could not be put together, which only one of them may be to blame for."""
        if len(requests) == 1:
            return self._fail(requests, exc)
        for request in requests:
            self._serve_alike([request])

    def _fail(self, requests: list[Any], exc: BaseException) -> None:
        logger.debug("a batch of %d failed", len(requests), exc_info=exc)
        self._stats.error(len(requests))
        for request in requests:
            self._source.fail(request, exc)

    def _refuse_waiting(self) -> None:
        while requests := self._source.drain(self._config.max_batch_size):
            for request in requests:
                self._source.fail(
                    request, ServerClosedError("the server shut down before it served this request")
                )

    def _hand_over(self) -> None:
        """Whoever let go of the turn, or did not get it, looks once more: no request may be left to nobody."""
        if self._policy.offer is not None:
            self.settle()
        if self._served is not None and self._served.num_waiting:
            self._served.wake()
