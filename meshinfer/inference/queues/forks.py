"""Sockets that a fork copied: the child closes them, or the other end would not notice that this process has died."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol

__all__ = ["let_go_in_forks"]


class _Forkable(Protocol):
    def forked(self) -> None:
        """In a child that was forked, before anything else runs there: close what belongs to the parent."""


_kept: weakref.WeakSet[_Forkable] = weakref.WeakSet()
_lock = threading.Lock()
_registered = False


def let_go_in_forks(owner: _Forkable) -> None:
    """Call ``owner.forked()`` in every child that is forked from now on, for as long as ``owner`` lives."""
    global _registered
    with _lock:
        if not _registered:
            os.register_at_fork(after_in_child=_let_go)
            _registered = True
        _kept.add(owner)


def _let_go() -> None:
    global _lock
    _lock = threading.Lock()  # another thread may have held it
    for owner in list(_kept):
        owner.forked()
    _kept.clear()
