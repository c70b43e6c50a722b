"""What the suite must know of a transport, and where its clients run."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any

from meshinfer.inference.protocol import InferenceClient, InferenceTransport

__all__ = ["AT_ONCE", "ClientRun", "ThreadHarness", "TransportHarness", "report"]

AT_ONCE = 20.0
"""Seconds that what never waits may take on a busy machine; what does wait, waits for what comes later."""

_running = threading.local()


class ClientRun:
    """One function that runs with a client, somewhere else."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._reports: deque[Any] = deque()
        self._finished = False
        self._result: Any = None
        self._error: BaseException | None = None

    def result(self, timeout: float) -> Any:
        """What the function returned, or raised.

        Args:
            timeout: seconds.

        Raises:
            AssertionError: it has not returned.
            ChildProcessError: its process has died.
        """
        with self._changed:
            finished = self._changed.wait_for(lambda: self._finished, timeout)
        if not finished:
            raise AssertionError(
                f"a client was still running after {timeout:g} s; the threads here:\n{_stacks()}"
            )
        if self._error is not None:
            raise self._error
        return self._result

    def next_report(self, timeout: float) -> Any:
        """The next value that the function gave to :func:`report`; errors as in :meth:`result`."""
        with self._changed:
            self._changed.wait_for(lambda: self._reports or self._finished, timeout)
            if self._reports:
                return self._reports.popleft()
        self.result(0)
        raise AssertionError(f"a client reported nothing within {timeout:g} s")

    def kill(self) -> None:
        """SIGKILL its process; returns when that has gone. ``TypeError`` where it has none of its own."""
        raise TypeError(f"{type(self).__name__} does not run in a process of its own")

    def deliver(self, value: object) -> None:
        """For harnesses: the function has reported ``value``."""
        with self._changed:
            self._reports.append(value)
            self._changed.notify_all()

    def finish(self, result: object, error: BaseException | None = None) -> None:
        """For harnesses: the function has returned, or raised."""
        with self._changed:
            self._finished, self._result, self._error = True, result, error
            self._changed.notify_all()


def report(value: object = None) -> None:
    """Inside a function that ``run_client`` runs: tell the check how far it has come."""
    _running.deliver(value)


def run_reporting(
    deliver: Callable[[object], None], function: Callable[..., Any], *args: Any
) -> Any:
    """For harnesses: call ``function`` with :func:`report` bound to ``deliver``; close its client."""
    _running.deliver = deliver
    try:
        return function(*args)
    finally:
        for client in args[0] if isinstance(args[0], list) else args[:1]:
            if isinstance(client, InferenceClient):
                client.close()


def _stacks() -> str:
    """Where every thread of this process is, since what hangs once may not hang again."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"{names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )


class TransportHarness(ABC):
    """A transport under test, and what it is able to do.

    Args:
        factory: ``factory(request_spec, response_spec, **options)`` makes a transport for a server in this process.
            The only option that the suite gives is ``timeout``, in seconds: for connecting, and until a waiter
            without a deadline may ask after the server. Importable, where the suite crosses processes.
        fixed_layout: whether the specs are declarations, so that a request that differs from them is refused, and a
            batch moves as rows.
        many_in_flight: whether a client may have several requests in flight.
        shared_clients: whether threads may share one client.
        own_client: whether the transport's own ``submit`` works.
        patience: seconds after which a check gives a single wait up.
    """

    crosses_processes: bool = False
    """Whether clients run in processes of their own."""

    def __init__(
        self,
        factory: Callable[..., InferenceTransport],
        *,
        fixed_layout: bool = True,
        many_in_flight: bool = True,
        shared_clients: bool = True,
        own_client: bool = True,
        patience: float = 60.0,
    ) -> None:
        self.factory = factory
        self.fixed_layout = fixed_layout
        self.many_in_flight = many_in_flight
        self.shared_clients = shared_clients
        self.own_client = own_client
        self.patience = patience

    def make(self, request_spec: Any, response_spec: Any, **options: Any) -> InferenceTransport:
        """A new transport; the check closes it."""
        return self.factory(request_spec, response_spec, **options)

    @abstractmethod
    def run_client(self, function: Callable[..., Any], client: Any, *args: Any) -> ClientRun:
        """Start ``function(client, *args)`` where this harness has its clients.

        Args:
            function: of a module.
            client: one, or a list of them; the function's from now on, closed when it has returned.
            args: picklable where the harness crosses processes.
        """


class _ThreadRun(ClientRun):
    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        super().__init__()
        self._thread = threading.Thread(
            target=self._run, args=(function, *args), name="conformance-client", daemon=True
        )
        self._thread.start()

    def result(self, timeout: float) -> Any:
        try:
            return super().result(timeout)
        finally:
            if self._finished:
                self._thread.join()  # it still lets go of what the function held

    def _run(self, *call: Any) -> None:
        try:
            result = run_reporting(self.deliver, *call)
        except BaseException as error:  # whatever it is, the check raises it
            self.finish(None, error)
        else:
            self.finish(result)


class ThreadHarness(TransportHarness):
    """Clients in threads of this process."""

    def run_client(self, function: Callable[..., Any], client: Any, *args: Any) -> ClientRun:
        """Start a thread; see :meth:`TransportHarness.run_client`."""
        return _ThreadRun(function, client, *args)


class within:
    """``with within(seconds, what):`` fails when the block takes longer."""

    def __init__(self, seconds: float, what: str) -> None:
        self._seconds = seconds
        self._what = what

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, kind: object, *_: object) -> None:
        elapsed = time.monotonic() - self._began
        if kind is None:
            assert elapsed <= self._seconds, f"{self._what} took {elapsed:.2f} s"
