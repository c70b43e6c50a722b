"""Where threads of one process leave requests and a serving thread finds them, without a lock on the way."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from tensordict import TensorDictBase

from meshinfer.errors import (
    ClosedError,
    PeerLostError,
    RefusedError,
    ServerClosedError,
    TransportError,
)
from meshinfer.inference.doorbell import Doorbell, popped
from meshinfer.inference.future import ReplyFuture

__all__ = ["Exchange", "LocalRequest", "Member"]


class LocalRequest:
    """One request between threads.

    Args:
        member: whose it is.
        interaction: code of the interaction type.
    """

    __slots__ = ("arrived", "future", "interaction", "member")

    def __init__(self, member: Member, interaction: int) -> None:
        self.member = member
        self.interaction = interaction
        self.future = ReplyFuture(member)
        self.arrived = 0.0

    def answer(self, reply: TensorDictBase) -> None:
        """Give the client its reply, if it still wants one."""
        self.member.in_flight.pop(self.future, None)
        self.future.fulfil(reply)

    def fail(self, error: BaseException) -> None:
        """Make the client raise ``error``."""
        self.member.in_flight.pop(self.future, None)
        self.future.fail(error)

    def withdrawn(self) -> None:
        """It was cancelled before the server took it."""


class Member:
    """What remains of a client without the client: its requests in flight. Owner of their futures."""

    patience: float = threading.TIMEOUT_MAX
    """A waiter has nothing to ask: a serving thread that ends closes the exchange."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.in_flight: dict[Any, LocalRequest] = {}
        self.closed = False

    def check_open(self) -> None:
        """Raise when this client, or the server, was closed."""
        if self.closed:
            raise ClosedError("this client was closed; make a new one with transport.client()")
        if self.exchange.closed:
            raise ServerClosedError("the server has shut down")
        if self.exchange.pid != os.getpid():
            raise PeerLostError(
                f"the serving thread is in process {self.exchange.pid}, which was forked without it; "
                "use policy_backend='multiprocessing' for clients in processes"
            )

    def send(self, request: LocalRequest) -> ReplyFuture:
        """Leave ``request`` for the server."""
        future = request.future
        self.in_flight[future] = request
        request.arrived = time.perf_counter()
        self.exchange.put(request)
        self.look_again()
        return future

    def look_again(self) -> None:
        """After a request was left: whoever closed one of us meanwhile may not have seen it."""
        if self.closed or self.exchange.closed:
            self._give_up_all()

    def leave(self) -> None:
        """The client was closed, or collected: its requests are given up. Idempotent."""
        self.closed = True
        if self.exchange.pid != os.getpid():
            return  # a copy that a fork made, perhaps of locks that were held
        self._give_up_all()
        self.exchange.remove(self)

    def abandon(self, error: Callable[[], TransportError]) -> None:
        """Fail what is in flight."""
        for future in list(self.in_flight):
            request = self.in_flight.pop(
                future, None
            )  # one by one: others may add and answer meanwhile
            if request is not None:
                self.exchange.withdraw(request)
                future.fail(error())

    def check_alive(self) -> None:
        """Part of a future's owner: there is nobody to lose."""

    def forget(self, future: ReplyFuture) -> None:
        """The future was cancelled: drop its request if the server has not taken it yet."""
        request = self.in_flight.pop(future, None)
        if request is not None:
            self.exchange.withdraw(request)

    def _give_up_all(self) -> None:
        if self.closed:
            self.abandon(lambda: ClosedError("this client was closed before the reply came"))
        else:
            self.abandon(_server_closed)


def _server_closed() -> ServerClosedError:
    return ServerClosedError("the server shut down before it answered this request")


class Exchange:
    """The requests that wait, the server that waits for them, and who is there.

    A request is appended to a deque, which is atomic; the server is woken only when it sleeps.

    Args:
        seats: clients at once, at most; ``None`` for any number.
    """

    def __init__(self, seats: int | None = None) -> None:
        self.requests: deque[Any] = deque()
        self.closed = False
        self.pid = os.getpid()
        self._seats = seats
        self._doorbell = Doorbell(lambda: self.requests or self.closed)
        self._changed = threading.Condition()
        self._members: set[Member] = set()
        self._own = Member(self)  # of the transport itself: takes no seat, and nobody waits for it
        self._joins = 0

    # For clients.

    @property
    def own(self) -> Member:
        """The transport's own membership, which takes no seat."""
        return self._own

    def join(self) -> Member:
        """A new client's membership.

        Raises:
            RefusedError: all seats are taken.
        """
        member = Member(self)
        with self._changed:
            if self._seats is not None and len(self._members) >= self._seats:
                raise RefusedError(
                    f"all {self._seats} slots have a client: close one, make the transport with a larger "
                    "num_slots, or use transport='queue', which takes any number of clients"
                )
            self._members.add(member)
            self._joins += 1
        return member

    def remove(self, member: Member) -> None:
        """The client has left; its seat is free."""
        with self._changed:
            self._members.discard(member)
            self._changed.notify_all()

    def put(self, request: LocalRequest) -> None:
        """Leave a request; wakes the server if it sleeps."""
        self.requests.append(request)
        self._doorbell.ring()

    def withdraw(self, request: LocalRequest) -> None:
        """Take a request back, unless the server has taken it."""
        try:
            self.requests.remove(request)
        except ValueError:
            return  # it is the server's
        request.withdrawn()

    # For the server.

    @property
    def num_members(self) -> int:
        """Clients that are there."""
        return len(self._members)

    def take(self, max_items: int) -> list[Any]:
        """At most ``max_items`` waiting requests, oldest first."""
        return popped(self.requests, max_items)

    def wait(self, timeout: float | None) -> bool:
        """Until a request waits: whether one does. Ends early when woken or closed."""
        self._doorbell.wait(timeout)
        return bool(self.requests)

    def wake(self) -> None:
        """Make :meth:`wait` return."""
        self._doorbell.wake()

    def wait_until_left(self, num_clients: int | None, timeout: float | None) -> bool:
        """Until ``num_clients`` (one by default) have come and all have left, or it closes; ``False`` on time-out."""
        expected = 1 if num_clients is None else num_clients
        with self._changed:
            return self._changed.wait_for(
                lambda: self.closed or (not self._members and self._joins >= expected), timeout
            )

    def close(self) -> None:
        """All that is in flight fails, and so does what comes later. Idempotent."""
        self.closed = True
        if self.pid != os.getpid():
            return
        self.wake()
        with self._changed:
            members = [self._own, *self._members]
            self._changed.notify_all()
        for member in members:
            member.abandon(_server_closed)
