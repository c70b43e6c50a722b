"""Noticing that the host at the other end of a TCP connection has vanished, however slow the process there is.

The kernel of a living host acknowledges what arrives, even while its process is stopped or computes. So an idle
connection is probed by the kernel (keep-alive), and one with data under way is looked at: nothing acknowledged for some
seconds, in spite of repeats, means that nobody is there. ``TCP_USER_TIMEOUT`` would not do: it also ends a connection
whose receiver lives and has no room, which is what a server does to a client that sends faster than it computes.
"""

from __future__ import annotations

import socket
import struct
from typing import Final

__all__ = ["LOOK_SECONDS", "is_silent", "watch_tcp"]

LOOK_SECONDS: Final = 2.5
"""Between two looks at a connection. Together with what follows, a host is missed within 14 s."""
_UNANSWERED_MS: Final = 11_500
_KEEP_ALIVE: Final = {
    socket.TCP_KEEPIDLE: 5,  # seconds
    socket.TCP_KEEPINTVL: 2,
    socket.TCP_KEEPCNT: 4,
}
_INFO: Final = struct.Struct("=8B13I")
"""The beginning of Linux's ``struct tcp_info``, up to the time of the last acknowledgement."""
_FIELDS: Final = (2, 12, 20)
"""Where there: timed repeats in a row, segments not acknowledged, milliseconds since the last acknowledgement."""


def watch_tcp(connection: socket.socket) -> None:
    """Have an idle connection probed, and a receiver that waits for ever return now and then to look.

    A receiver that blocks raises :class:`BlockingIOError` every :data:`LOOK_SECONDS`.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    pause = struct.pack("@ll", int(LOOK_SECONDS), int(LOOK_SECONDS % 1 * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, pause)


def is_silent(connection: socket.socket) -> bool:
    """Whether what was sent is repeated in vain; ``OSError`` for a socket that is closed."""
    info = _INFO.unpack(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size))
    repeats, unacknowledged, since = (info[index] for index in _FIELDS)
    return bool(unacknowledged and repeats > 1 and since > _UNANSWERED_MS)
