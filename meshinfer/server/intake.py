"""The thread that gets new weights for a server."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from meshinfer.errors import ClosedError, TransportError
from meshinfer.server.policy import ServedPolicy
from meshinfer.server.swap import ServedWeights
from meshinfer.streams import work_on
from meshinfer.weights.protocol import WeightSubscriber, WeightTransport, WeightUpdate

__all__ = ["WeightIntake"]

logger = logging.getLogger("meshinfer.server")

_LOOK_SECONDS = 0.1
"""How often an offer is made again to a policy that is used in another way than by computing batches."""
_PAUSE_SECONDS = 0.2
"""After an error, so that one that comes again and again does not keep a core busy."""


class WeightIntake:
    """Receives versions, prepares them beside the model that serves, and offers each to whoever computes next.

    A version is offered when the one before was taken: those that come meanwhile are skipped, and the last one is not.

    Args:
        transport: whose subscriber this is.
        weights: of the model.
        policy: takes what is offered.
        settle: lets an idle policy take it at once.
    """

    def __init__(
        self,
        transport: WeightTransport,
        weights: ServedWeights,
        policy: ServedPolicy,
        settle: Callable[[], None],
    ) -> None:
        self._transport = transport
        self._weights = weights
        self._policy = policy
        self._settle = settle
        self._subscriber: WeightSubscriber | None = None
        self._closing = threading.Event()
        self._told = ""
        self._thread = threading.Thread(target=self._run, name="meshinfer-weights", daemon=True)

    def start(self) -> None:
        """Subscribe; a version that is there already serves when this returns.

        Raises:
            TransportError: there is nothing to subscribe to.
        """
        self._subscriber = self._transport.subscriber()
        try:
            update = self._receive(0.0)
            if update is not None:
                self._serve(update)
        except BaseException:
            self._subscriber.close()
            raise
        self._thread.start()

    def close(self) -> None:
        """Nothing more comes. Does not wait."""
        self._closing.set()
        if self._subscriber is not None:
            self._subscriber.close()

    def join(self, timeout: float) -> bool:
        """After :meth:`close`, and after the last batch: wait for the thread, and give back what the model borrows.

        Args:
            timeout: seconds for each.

        Returns:
            Whether both was done.
        """
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout)
        if self._thread.is_alive() or not self._policy.turn.acquire(timeout=timeout):
            return False
        try:
            self._policy.own_weights()
        finally:
            self._policy.turn.release()
        return True

    def _run(self) -> None:
        try:
            work_on(self._policy.device)
            while not self._closing.is_set():
                update = self._receive(None)
                if update is not None:
                    self._serve(update)
        except ClosedError as error:
            logger.debug("no more weights: %s", str(error))
        except Exception:  # the server goes on with what it has
            logger.exception("new weights cannot be received any more")
        finally:
            self.close()

    def _receive(self, timeout: float | None) -> WeightUpdate | None:
        assert self._subscriber is not None
        try:
            update = self._subscriber.receive(timeout)
            self._told = ""
            return update
        except TimeoutError:
            return None
        except ClosedError:
            raise
        except (TransportError, OSError) as error:  # another try may succeed
            if str(error) != self._told:
                self._told = str(error)
                logger.warning(
                    "version %d of the weights goes on serving: %s",
                    self._policy.version,
                    self._told,
                )
            self._closing.wait(_PAUSE_SECONDS)
            return None

    def _serve(self, update: WeightUpdate) -> None:
        try:
            swap = self._weights.prepare(update)
        except Exception as error:
            update.release()
            return self._tell(update, error)
        self._policy.offer = swap
        self._settle()
        while not swap.settled.wait(_LOOK_SECONDS):
            self._settle()
        for each in swap.done_with:
            each.release()
        if swap.failure is not None:
            self._tell(update, swap.failure)
        elif self._subscriber is not None:
            self._subscriber.applied(update)

    def _tell(self, update: WeightUpdate, error: Exception) -> None:
        logger.error(
            "version %d of the weights cannot be used, version %d goes on serving",
            update.version,
            self._policy.version,
            exc_info=error,
        )
