"""A channel of NCCL's: a communicator of two ranks, and the thread that builds it.

Building one means much that cannot be undone from outside, so a thread of its own does it, and whoever asked for the
channel waits for that thread no longer than it said.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed import Store

from meshinfer.inference.distributed.pair import CLIENT, FOREVER, SERVER
from meshinfer.inference.distributed.watch import abort_all
from meshinfer.streams import Mark, StreamMark, mark, tolerate_captures

__all__ = ["NcclChannel", "built", "cuda_memory", "first_line"]

logger = logging.getLogger("meshinfer.distributed")

_WARM_UP_BYTES: Final = 256
_LEAVE_SECONDS: Final = 1.0
_HINT: Final = (
    "NCCL_DEBUG=INFO on both sides tells what NCCL tries, and NCCL_SOCKET_IFNAME where it listens"
)

_SETTINGS: Final = {
    # torch's watchdog thread would have the whole process end some minutes after one failed message, even if only the
    # user's own groups are set to do that. Without it no thread of torch's uses a group or its store once it is built.
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    # The flight recorder keeps pointers to events that only the watchdog takes back: these must not be freed.
    "TORCH_NCCL_CUDA_EVENT_CACHE": "1",
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
    "ENABLE_INTRA_NODE_COMM": "0",
}
_constructing = threading.Lock()


def built(
    index: int, ctas: int, store: Store, rank: int, *, sends: bool, timeout: float
) -> NcclChannel:
    """A channel that one row has passed, for the calling thread to use.

    Args:
        index: of the CUDA device of this side.
        ctas: see :class:`~meshinfer.inference.distributed.nccl.NcclRows`.
        store, rank, sends, timeout: see :meth:`~meshinfer.inference.distributed.plane.RowBackend.channel`, which tells
            of errors too.
    """
    _work_on_gpu(index)
    return _Construction(index, ctas, store, rank, sends).result(timeout)


def _work_on_gpu(index: int) -> None:
    """For a thread of ours, before it touches CUDA."""
    torch.cuda.set_device(index)
    tolerate_captures()


def cuda_memory(index: int) -> torch.device:
    """The device ``index``, as tensors name it."""
    return torch.device("cuda", index)


def first_line(error: BaseException) -> str:
    """Where C++ has written many lines, the first one."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class NcclChannel:
    """A :class:`~meshinfer.inference.distributed.plane.Channel`.

    NCCL works on a stream of the group's own. Ours begins with what a row waits for and ends with the row: nobody waits
    for more than that. Both come from torch's pool of high-priority streams, which a policy hardly uses.

    Args:
        group: a ``ProcessGroupNCCL`` of two ranks.
        index: of the CUDA device of this side.
        peer: rank of the other side.
    """

    def __init__(self, group: Any, index: int, peer: int) -> None:
        self._group = group
        self._index = index
        self._peer = peer
        self._stream = torch.cuda.Stream(index, priority=-1)  # type: ignore[no-untyped-call]
        self._calling = threading.Lock()
        self._ending = threading.Lock()
        self._aborted = False

    def connect(self) -> None:
        """Waits for the other side."""
        with self._calling:
            self.check()
            self._group.eager_connect_single_device(cuda_memory(self._index))

    def warm_up(self, *, sends: bool) -> None:
        """Let a row pass: only then are the GPUs connected. Waits for the other side.

        Raises:
            RuntimeError: it does not pass, or arrives damaged.
        """
        device = cuda_memory(self._index)
        with torch.inference_mode(False):  # in our stream, torch would set 2 MiB aside
            expected = torch.arange(_WARM_UP_BYTES, dtype=torch.uint8, device=device)
            row = expected if sends else torch.zeros_like(expected)
        self._begin("send" if sends else "recv", row, mark(device)).wait()
        with torch.cuda.stream(self._stream):
            if row.tolist() != list(range(_WARM_UP_BYTES)):
                raise RuntimeError("the first row arrived damaged")

    def send(self, row: Tensor, after: Mark) -> Mark:
        """See :class:`~meshinfer.inference.distributed.plane.Channel`."""
        return self._begin("send", row, after)

    def receive(self, row: Tensor, after: Mark) -> Mark:
        """See :class:`~meshinfer.inference.distributed.plane.Channel`."""
        return self._begin("recv", row, after)

    def _begin(self, call: str, row: Tensor, after: Mark) -> Mark:
        with self._calling:
            self.check()
            try:
                after.hold_up(self._stream)
                work = self._move(call, row)
                done = StreamMark(self._stream)
            except RuntimeError as error:
                self.check()  # being aborted is the reason for whatever NCCL says
                reason = f"NCCL could not begin to move a row: {first_line(error)}"
                raise RuntimeError(reason) from error
        return _RowMark(self, done, (row, work))

    def _move(self, call: str, row: Tensor) -> Any:
        """In our stream, as under ``torch.cuda.stream()``, which alone takes as long as the call."""
        before = torch.cuda.current_stream(self._index)
        torch.cuda.set_stream(self._stream)
        try:
            work = getattr(self._group, call)([row], self._peer, 0)
            work.block_current_stream()  # ours alone; wait() would keep the processor busy
        finally:
            torch.cuda.set_stream(before)
        return work

    def work_here(self) -> None:
        """Whatever the calling thread asks CUDA, it asks this channel's GPU.

        A thread begins with the first one, where the question alone would take some hundred megabytes.
        """
        _work_on_gpu(self._index)

    def check(self) -> None:
        """:class:`RuntimeError` once the channel was aborted."""
        if self._aborted:
            raise RuntimeError(
                "the channel was aborted: the other side has gone, or a row got stuck"
            )

    def abort(self) -> None:
        """See :class:`~meshinfer.inference.distributed.plane.Channel`."""
        self._aborted = True
        with self._ending:
            if self._group is None:
                return
            # A call that is about to enter NCCL would use a communicator that is freed meanwhile. One that is stuck in
            # there ends by this very call, or cannot be ended: then the communicator comes later, and is aborted again.
            left = self._calling.acquire(timeout=_LEAVE_SECONDS)
            try:
                self._group.abort()
            except RuntimeError as error:
                logger.warning("an NCCL communicator was not freed: %s", first_line(error))
            finally:
                if left:
                    self._group = None
                    self._calling.release()


class _RowMark:
    """When a row has been moved, or never will be."""

    __slots__ = ("_channel", "_done", "_kept")

    def __init__(self, channel: NcclChannel, done: Mark, kept: object) -> None:
        self._channel = channel
        self._done = done
        self._kept = kept

    def wait(self) -> None:
        """See :class:`~meshinfer.streams.Mark`; :class:`RuntimeError` if it was not moved."""
        tolerate_captures()
        try:
            self._done.wait()
        except RuntimeError as error:
            self._channel.check()
            reason = f"the GPU failed while a row was under way: {first_line(error)}"
            raise RuntimeError(reason) from error
        self._channel.check()  # aborting lets the stream go on

    def passed(self) -> bool:
        """See :class:`~meshinfer.streams.Mark`."""
        self._channel.work_here()  # the watch asks too
        return self._done.passed()

    def hold_up(self, stream: torch.cuda.Stream) -> None:
        """See :class:`~meshinfer.streams.Mark`."""
        self._done.hold_up(stream)


class _Construction:
    """A channel that a thread of its own builds."""

    def __init__(self, index: int, ctas: int, store: Store, rank: int, sends: bool) -> None:
        self._index = index
        self._ctas = ctas
        self._meeting = _Meeting(store)
        self._rank = rank
        self._sends = sends
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._abandoned = False
        self._channel: NcclChannel | None = None
        self._error: Exception | None = None

    def result(self, timeout: float) -> NcclChannel:
        """See :func:`built`; ``timeout`` in seconds."""
        threading.Thread(target=self._run, name="meshinfer-nccl", daemon=True).start()
        try:
            over = self._over.wait(timeout)
        except BaseException:
            self._abandon()
            raise
        if not over:
            self._abandon()
        elif self._channel is not None and self._error is None:
            return self._channel
        raise self._failure(timeout)

    def _failure(self, timeout: float) -> Exception:
        error = self._meeting.error or self._error
        if error is None or isinstance(error, TimeoutError):
            text = f"the other side did not build its half of a channel for rows within {timeout:g} s; {_HINT}"
            failure: Exception = TimeoutError(text)
        else:
            failure = RuntimeError(f"no channel for rows: {first_line(error)}; {_HINT}")
        failure.__cause__ = error
        return failure

    def _run(self) -> None:
        try:
            _work_on_gpu(self._index)
            group = _new_group(self._meeting, self._rank, self._ctas)
            channel = NcclChannel(group, self._index, CLIENT if self._rank == SERVER else SERVER)
            with self._lock:
                self._channel = channel
                if self._abandoned:
                    channel.abort()
            channel.connect()
            channel.warm_up(sends=self._sends)
        except Exception as error:
            self._error = error
        finally:
            self._over.set()
            self._abort_if_useless()

    def _abandon(self) -> None:
        with self._lock:
            self._abandoned = True
            channel = self._channel
        if channel is not None:
            abort_all([channel])

    def _abort_if_useless(self) -> None:
        with self._lock:
            channel = self._channel if self._abandoned or self._error is not None else None
        if channel is not None:
            channel.abort()


class _Meeting(Store):
    """The store that a group sees: the server's half goes on only when the client's is about to begin.

    NCCL at the server waits for the client to connect, come what may, and cannot be stopped. So it is not called before
    a client has all that it needs.
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self.error: Exception | None = None

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        with self._noted():
            self._store.set(key, value)  # type: ignore[arg-type]
            self._store.get(f"{key}/seen")

    def get(self, key: str) -> bytes:
        with self._noted():
            value = self._store.get(key)
            self._store.set(f"{key}/seen", b"1")  # type: ignore[arg-type]
        return value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """``get`` does."""

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """torch passes on no more than the text of an exception."""
        try:
            yield
        except Exception as error:
            self.error = error
            raise


def _new_group(store: Store, rank: int, ctas: int) -> Any:
    from torch.distributed import ProcessGroupNCCL

    options: Any = ProcessGroupNCCL.Options()
    options._timeout = FOREVER  # a row that gets stuck is aborted from outside
    options.is_high_priority_stream = True
    options.config.blocking = 1
    options.config.min_ctas, options.config.max_ctas = 1, ctas
    with _constructing, _environment(_SETTINGS):
        return ProcessGroupNCCL(store, rank, 2, options)


@contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """torch reads these where a group is made, and offers no other way. ``os.environ`` does not show them."""
    for name, value in settings.items():
        os.putenv(name, value)
    try:
        yield
    finally:
        for name in settings:
            before = os.environ.get(name)
            if before is None:
                os.unsetenv(name)
            else:
                os.putenv(name, before)
