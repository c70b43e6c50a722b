"""Exceptions that cross processes and threads: the original type where possible, its traceback always."""

from __future__ import annotations

import copy
import json
import pickle
import struct
import traceback

from meshinfer.errors import RemoteError

__all__ = [
    "MAX_PICKLED_BYTES",
    "copy_exception",
    "decode_exception",
    "encode_exception",
    "encode_summary",
]

MAX_PICKLED_BYTES = 1 << 20
"""A larger pickled exception is reported as :class:`~meshinfer.errors.RemoteError`: an error is no way to move data."""

_MAX_TEXT = 1 << 16
_PREFIX = struct.Struct("<q")


def encode_exception(exc: BaseException) -> bytes:
    """``exc`` as bytes; never raises, whatever the exception holds."""
    description = {
        "class_name": _class_name(type(exc)),
        "message": _shorten(_text(exc)),
        "traceback": _shorten(_formatted(exc)),
    }
    text = json.dumps(description).encode()
    return _PREFIX.pack(len(text)) + text + _pickled(exc)


def encode_summary(data: bytes, room: int, reason: str) -> bytes:
    """What of an encoded exception fits into ``room`` bytes: its class, its message as far as it goes, and ``reason``.

    Args:
        data: from :func:`encode_exception`.
        room: at least 1 KiB.
        reason: why the rest is missing.
    """
    (length,) = _PREFIX.unpack_from(data)
    described = json.loads(data[_PREFIX.size : _PREFIX.size + length])
    # JSON writes a character as six bytes at most, twelve beyond the basic plane.
    shown = {name: described[name][: room // 40] for name in ("class_name", "message")}
    text = json.dumps({**shown, "traceback": reason[: room // 40]}).encode()
    return _PREFIX.pack(len(text)) + text


def decode_exception(data: bytes) -> BaseException:
    """The exception to raise here: of its own type with a :class:`RemoteError` as its cause, else that error.

    Only for bytes from a peer that has proved to hold the job secret: they are unpickled.
    """
    (length,) = _PREFIX.unpack_from(data)
    described = json.loads(data[_PREFIX.size : _PREFIX.size + length])
    remote = RemoteError(described["class_name"], described["message"], described["traceback"])
    original = _unpickled(data[_PREFIX.size + length :])
    if original is None or _class_name(type(original)) != described["class_name"]:
        return remote
    original.__cause__ = remote
    return original


def copy_exception(exc: BaseException) -> BaseException:
    """As encoding and decoding, for another thread, which shares the data that ``exc`` holds but not ``exc`` itself.

    So nobody raises an exception that somebody else is raising, nor holds what its traceback holds.
    """
    remote = RemoteError(_class_name(type(exc)), _shorten(_text(exc)), _shorten(_formatted(exc)))
    try:
        found = copy.copy(exc)
    except Exception:  # any class may raise anything while it is copied
        return remote
    if found is exc or type(found) is not type(exc) or not isinstance(found, Exception):
        return remote
    found.__cause__ = remote
    return found


def _class_name(kind: type) -> str:
    return (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )


def _text(exc: BaseException) -> str:
    try:
        return str(exc)
    except Exception as error:  # a broken __str__ must not hide the exception itself
        return f"<its __str__ raised {type(error).__name__}>"


def _formatted(exc: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(type(exc), exc, exc.__traceback__))
    except Exception:
        return "".join(traceback.format_tb(exc.__traceback__))


def _shorten(text: str) -> str:
    return (
        text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}... ({len(text)} characters in all)"
    )


def _pickled(exc: BaseException) -> bytes:
    """The pickled exception, or nothing when it cannot be pickled or is too large."""
    try:
        data = pickle.dumps(exc)
    except Exception:  # any class may raise anything while it is pickled
        return b""
    return data if len(data) <= MAX_PICKLED_BYTES else b""


def _unpickled(data: bytes) -> Exception | None:
    """The exception, or ``None`` where its class is unknown here, cannot be rebuilt, or is no plain exception."""
    if not data:
        return None
    try:
        found = pickle.loads(data)
    except Exception:
        return None
    return found if isinstance(found, Exception) else None
