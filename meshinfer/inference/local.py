"""What the transports between threads of one process share: clients, and the server's side but for the payloads."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

from tensordict import TensorDictBase

from meshinfer.arguments import as_count, as_seconds
from meshinfer.errors import ClosedError
from meshinfer.inference.draining import Draining
from meshinfer.inference.exchange import Exchange, LocalRequest, Member
from meshinfer.inference.future import ReplyFuture, reply_by
from meshinfer.inference.remote_errors import copy_exception

__all__ = ["LocalClient", "LocalTransport"]


class LocalClient:
    """One environment thread's way to the policy. Threads may share it.

    Args:
        member: its membership in the exchange.
        pack: makes a request of a payload, which it copies.
    """

    def __init__(
        self, member: Member, pack: Callable[[Member, TensorDictBase], LocalRequest]
    ) -> None:
        self._member = member
        self._pack = pack
        self._finalizer = weakref.finalize(self, member.leave)
        self._finalizer.atexit = False

    def __call__(self, payload: TensorDictBase, timeout: float | None = None) -> TensorDictBase:
        """The policy's reply to ``payload``.

        Args:
            payload: stays unchanged.
            timeout: seconds; ``None`` waits for as long as the server is there.

        Returns:
            An independent TensorDict.

        Raises:
            ValueError, TypeError: the transport cannot take such a payload.
            TimeoutError: the request is given up.
            ServerClosedError, ClosedError: see :mod:`meshinfer.errors`.
            Exception: what the policy raised.
        """
        if timeout is None:
            return self.submit(payload).result()
        deadline = time.monotonic() + as_seconds("timeout", timeout, zero=True)
        return reply_by(deadline, self.submit(payload), timeout)

    def submit(self, payload: TensorDictBase) -> ReplyFuture:
        """Send ``payload``, which is copied, and return at once with a future; errors as in :meth:`__call__`."""
        member = self._member
        member.check_open()
        return member.send(self._pack(member, payload))

    @property
    def in_flight(self) -> int:
        """Requests of this client that have neither been answered nor given up."""
        return len(self._member.in_flight)

    def close(self) -> None:
        """Leave; requests in flight raise :class:`~meshinfer.errors.ClosedError`. Idempotent."""
        self._finalizer()

    def __enter__(self) -> LocalClient:
        self._member.check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} is for threads of one process and cannot be pickled; use "
            "policy_backend='multiprocessing' for clients in processes"
        )

    def __repr__(self) -> str:
        state = "closed" if self._member.closed else f"{self.in_flight} in flight"
        return f"{type(self).__name__}({state})"


class LocalTransport(Draining):
    """The server's side between threads, but for the payloads. See the protocol for what each method promises."""

    client_class: type[LocalClient] = LocalClient

    def __init__(
        self,
        pack: Callable[[Member, TensorDictBase], LocalRequest],
        *,
        num_slots: int | None = None,
    ) -> None:
        self.policy_version_key: tuple[str, ...] | None = ("policy_version",)
        self._pack = pack
        self._exchange = Exchange(num_slots)
        self._own_client = self.client_class(self._exchange.own, pack)
        self._finalizer = weakref.finalize(self, self._exchange.close)
        self._finalizer.atexit = False

    # For everybody.

    def client(self) -> Any:
        """A new client."""
        self._check_open()
        return self.client_class(self._exchange.join(), self._pack)

    def submit(self, payload: TensorDictBase) -> ReplyFuture:
        """Send a request through a client that the transport keeps for itself."""
        self._check_open()
        return self._own_client.submit(payload)

    def close(self) -> None:
        """End it: waiting clients raise :class:`~meshinfer.errors.ServerClosedError`. Idempotent."""
        self._finalizer()

    def __enter__(self) -> Any:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._exchange.closed else f"{self.num_clients} clients"
        return f"{type(self).__name__}({state})"

    # For the server.

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._exchange.closed

    @property
    def num_clients(self) -> int:
        """Clients that were made and have not left."""
        return self._exchange.num_members

    @property
    def num_waiting(self) -> int:
        """Requests that are ready now."""
        return len(self._exchange.requests)

    def set_ready_callback(self, callback: Callable[[], None] | None) -> None:
        """Ignored: the threads that bring requests are the users', with modes of their own, and do not compute."""

    def wake(self) -> None:
        """Make :meth:`wait_for_work` return."""
        self._exchange.wake()

    def wait_for_work(self, timeout: float | None = None) -> bool:
        """Wait until a request is ready: whether one is. Returns early when closed or woken."""
        return self._exchange.wait(timeout)

    def wait_until_left(self, num_clients: int | None = None, timeout: float | None = None) -> bool:
        """Wait until every client has come and left.

        Args:
            num_clients: how many must have been made; by default at least one.
            timeout: seconds; ``None`` for no limit.

        Returns:
            ``False`` when ``timeout`` ran out.
        """
        if num_clients is not None:
            as_count("num_clients", num_clients)
        return self._exchange.wait_until_left(num_clients, timeout)

    def resolve_exception(self, callback: LocalRequest, exc: BaseException) -> None:
        """Make the client behind ``callback`` raise a copy of ``exc``."""
        callback.fail(copy_exception(exc))

    def _check_open(self) -> None:
        if self._exchange.closed:
            raise ClosedError("this transport was closed; make a new one")
