"""The server's half of one pair: a thread that receives, rows of its own, replies that nobody waits for."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meshinfer.inference.distributed.announced import plane_over
from meshinfer.inference.distributed.frames import (
    NO_VERSION,
    TAG_ERROR,
    TAG_ROW,
    Field,
    Frame,
    Kind,
    announcement,
    are_large,
    proof_in,
    proof_message,
)
from meshinfer.inference.distributed.join import Hello, Joining
from meshinfer.inference.distributed.pair import CLIENT, FOREVER, SERVER, Pair, Receiving, plain
from meshinfer.inference.distributed.plane import DataPlane, FramedRows

if TYPE_CHECKING:
    from meshinfer.inference.distributed.reception import Reception

__all__ = ["ENDED_BY_EXCEPTION", "Request", "Session"]

logger = logging.getLogger("meshinfer.distributed")

_KIND, _ID, _ACKNOWLEDGED, _INTERACTION = (
    Field.KIND,
    Field.ID,
    Field.ACKNOWLEDGED,
    Field.INTERACTION,
)
_VERSION = Field.VERSION
_REQUEST, _RESULT = int(Kind.REQUEST), int(Kind.RESULT)
ENDED_BY_EXCEPTION = "an exception ended its work"


class Request:
    """One request at the server: whose it is, and its row until that is gathered."""

    __slots__ = ("arrived", "held", "identifier", "interaction", "receiver", "session")

    def __init__(self, session: Session, receiver: _Receiver, arrived: float) -> None:
        header = receiver.frame.header
        self.session = session
        self.receiver = receiver
        self.identifier: int = header[_ID]
        self.interaction: int = header[_INTERACTION]
        self.arrived = arrived
        self.held = True

    @property
    def frame(self) -> Frame:
        """With the packed request; another request's after :meth:`release`."""
        return self.receiver.frame

    def release(self) -> None:
        """The row has been copied, or will never be: the next request may use it."""
        if self.held:
            self.held = False
            self.receiver.frame.touch()
            self.session.take_back(self.receiver)

    @property
    def given_up(self) -> bool:
        """Nobody writes over a row before it is released."""
        return False

    def reply_frame(self) -> Frame:
        """A frame to write the result into."""
        return self.session.reply_frame()

    def reply(self, frame: Frame, policy_version: int | None) -> None:
        """Send the result. Never waits."""
        self.session.reply(self.identifier, frame, policy_version)

    def reply_error(self, data: bytes) -> None:
        """Send an encoded exception. Never waits."""
        self.session.reply_error(self.identifier, data)


class _Receiver:
    """A request frame and the receive that is posted for it."""

    __slots__ = ("frame", "work")

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.work: Receiving | None = None


class Session:
    """One admitted client.

    Its thread builds the pair, checks the client's proof, then receives until the client leaves or is lost.

    Two request rows take turns; a row that has been gathered is posted again just before a reply is sent, when its
    client is surely waiting and not itself writing to that connection, see :class:`Pair`.

    A reply is sent and left alone: its frame is used again once the client has acknowledged it in a later request.
    """

    def __init__(self, host: Reception, joining: Joining, hello: Hello, number: int) -> None:
        self.hello = hello
        self.identity = hello.identity
        self.number = number
        self._host = host
        self._joining: Joining | None = joining
        self._pair: Pair | None = None
        self._plane: DataPlane = FramedRows()
        self._free: list[Frame] = []
        self._sent: deque[tuple[Frame | None, list[Any]]] = deque()
        self._acknowledged = 0
        self._freed: deque[_Receiver] = deque()
        self._posted: SimpleQueue[_Receiver | None] = SimpleQueue()
        self._posting = threading.Lock()  # receives are posted and queued in the same order
        self._sending = threading.Lock()  # and rows leave in the order of their headers
        self._closing = threading.Lock()
        self._said_goodbye = False
        self.thread = threading.Thread(
            target=self._run, name=f"meshinfer-session-{number}", daemon=True
        )

    def reply_frame(self) -> Frame:
        """A frame to write a result into, for :meth:`reply`."""
        return self._free.pop() if self._free else self._plane.frame(self._host.response_layout)

    def reply(self, identifier: int, frame: Frame, policy_version: int | None) -> None:
        """Send a result. Never waits; a client that has gone is not an error."""
        header = frame.header
        header[_KIND], header[_ID] = _RESULT, identifier
        header[_VERSION] = NO_VERSION if policy_version is None else policy_version
        frame.touch()
        self._send(frame.message, reusable=frame)

    def reply_error(self, identifier: int, data: bytes) -> None:
        """Send an encoded exception: what announces it, then itself."""
        content = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._send(announcement(Kind.ERROR, identifier, len(data)), (content, TAG_ERROR))

    def reply_row(
        self,
        identifier: int,
        row: Tensor | None,
        version: int = 0,
        origin: int = 0,
        owner: object = None,
    ) -> None:
        """Send a row that is not copied: what announces it, then itself. Never waits.

        Args:
            identifier: of the request.
            row: stays as it is until ``owner`` is let go; ``None`` says that there is none.
            version, origin: see :class:`~meshinfer.inference.distributed.frames.Field`.
            owner: kept until the client has received the row, or has gone.
        """
        length = 0 if row is None else row.numel()
        message = announcement(Kind.ROW, identifier, length, version=version, origin=origin)
        self._send(message, None if row is None else (row, TAG_ROW), owner)

    def take_back(self, receiver: _Receiver) -> None:
        """A request's row may be used again."""
        self._freed.append(receiver)

    def receive_on(self) -> None:
        """Post what was taken back, where no reply will do it: the client's goodbye needs a place too."""
        pair = self._pair
        if pair is not None:
            try:
                self._post_freed(pair)
            except RuntimeError as error:
                logger.debug("nothing more from %s: %s", self.hello, str(error))

    def say(self, kind: Kind) -> None:
        """Send what answers no request."""
        self._send(announcement(kind))

    def close(self) -> None:
        """Tell the client that the server shuts down; its thread ends when the client has answered."""
        with self._closing:
            if self._pair is None or self._said_goodbye:
                return  # without a pair it is not admitted yet: the reception calls again then
            self._said_goodbye = True
        self.say(Kind.CLOSED)

    def abort(self, kind: Kind | None = None) -> None:
        """Cut the pair now, whatever the client does."""
        pair = self._pair
        if pair is not None:
            if kind is not None:
                self.say(kind)
            self._plane.close()
            pair.abort()
        self._posted.put(None)

    def _send(
        self,
        message: list[Tensor],
        following: tuple[Tensor, int] | None = None,
        owner: object = None,
        *,
        reusable: Frame | None = None,
    ) -> None:
        """Send a message, and one that follows it with a tag of its own; ``owner`` is kept as long as they are."""
        pair = self._pair
        if pair is None:
            return
        held: list[Any] = [message, following, owner]
        self._sent.append((reusable, held))  # first: the acknowledgement may overtake us
        try:
            self._post_freed(pair)
            if (
                following is not None
            ):  # first: there is no room for it yet, so none of it is sent by this thread
                content, tag = following
                held.append(pair.send([content], tag))
            with self._sending:
                held.append(pair.send(message))
                if reusable is not None:
                    self._plane.send(reusable)
        except RuntimeError as error:  # the session's own thread notices too, and ends it
            logger.debug("no reply to %s: %s", self.hello, str(error))
        if (
            self._pair is None
        ):  # its thread has ended meanwhile, and nobody would clear this any more
            self._let_go()

    def _run(self) -> None:
        try:
            self._build()
        except Exception as error:
            reason, pair = self._plane.reason or plain(error), self._pair
            self._let_go()
            if pair is not None:
                pair.abort()  # the client may be building still
            self._host.join_failed(self, reason)
            return
        self._joining = None  # and with it a way into the store that no other join has taken over
        lost: str | None = None
        try:
            lost = self._receive()
        except Exception as error:
            # Its text: a log that keeps the error would keep our sockets.
            lost = self._plane.reason or plain(error)
        self._let_go()
        self._host.leave(self, lost)

    def _let_go(self) -> None:
        """Drop all that gloo holds for us, and with it the sockets."""
        self._joining = self._pair = None
        plane, self._plane = self._plane, FramedRows()
        plane.close()
        self._sent.clear()
        self._freed.clear()
        self._posted = SimpleQueue()

    def _build(self) -> None:
        joining = self._joining
        assert joining is not None
        server_nonce = secrets.token_hex(16)
        joining.answer({"nonce": server_nonce, "policy_version_key": self._host.policy_version_key})
        device = self._host.device
        if device is None:
            raise ConnectionError("the server is shutting down")
        rows = None if self.hello.rows is None else self._host.rows
        layouts = self._host.request_layout, self._host.response_layout
        pair = joining.build_pair(device, are_large(layouts, announced=rows is not None))
        shown = proof_message()
        mine = proof_message(joining.proof(SERVER, server_nonce))
        expected = joining.proof(CLIENT, server_nonce)
        pair.receive(shown).wait(joining.left())
        if proof_in(shown) != expected:
            raise ConnectionError("the proof on the new pair is wrong")
        self._plane = plane = plane_over(rows, pair, joining, self._host.row_timeout)
        for _ in range(2):
            self.take_back(_Receiver(plane.frame(layouts[0])))
        self._post_freed(pair)
        self._pair = pair
        self._send(mine)
        plane.begin_receiving()
        plane.begin_sending()
        self._host.admit(self, joining)

    def _receive(self) -> str | None:
        """Until the client leaves; why that counts as a loss, if it does."""
        while True:
            receiver = self._posted.get()
            if receiver is None or receiver.work is None:
                raise RuntimeError("the pair was cut")
            receiver.work.wait(FOREVER)
            receiver.work = None
            header = receiver.frame.header
            if (kind := header[_KIND]) != _REQUEST:
                break
            self._plane.receive(receiver.frame)
            self._acknowledge(header[_ACKNOWLEDGED])
            self._host.ready(Request(self, receiver, time.perf_counter()))
        if not self._said_goodbye:
            self.say(Kind.BYE)
        return ENDED_BY_EXCEPTION if kind == Kind.FAILED else None

    def _post_freed(self, pair: Pair) -> None:
        with self._posting:
            while True:
                try:
                    receiver = self._freed.popleft()
                except IndexError:  # the session's thread may clear it at any time
                    return
                receiver.work = None
                try:
                    receiver.work = pair.receive(receiver.frame.message)
                finally:
                    self._posted.put(receiver)

    def _acknowledge(self, count: int) -> None:
        while self._acknowledged < count and self._sent:
            frame, _ = self._sent.popleft()
            if frame is not None:
                self._free.append(frame)
            self._acknowledged += 1
