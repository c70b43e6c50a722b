"""Expecting an exception, without a test framework."""

from __future__ import annotations

import traceback
from types import TracebackType
from typing import Generic, TypeVar

from meshinfer.errors import RemoteError

__all__ = ["describes", "raises"]

E = TypeVar("E", bound=BaseException)


class raises(Generic[E]):
    """``with raises(ValueError, "obs", "float32") as caught:`` fails unless the block raises such an error.

    Args:
        kind: class of the exception, or several.
        words: each must occur in its text.
    """

    error: E
    """The exception, after the block."""

    def __init__(self, kind: type[E] | tuple[type[E], ...], *words: str) -> None:
        self._kind = kind
        self._words = words

    def __enter__(self) -> raises[E]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> bool:
        if error is None:
            raise AssertionError(f"nothing was raised, expected {self._kind}")
        if not isinstance(error, self._kind):
            return False
        missing = [word for word in self._words if word not in str(error)]
        assert not missing, f"{missing} not in the text of {error!r}"
        self.error = error
        return True


def describes(error: BaseException, class_name: str, message: str, function: str) -> None:
    """Fail unless ``error`` tells what was raised, and that ``function`` of the policy raised it."""
    name = error.class_name if isinstance(error, RemoteError) else type(error).__qualname__
    assert name.split(".")[-1] == class_name, f"{name} instead of {class_name}"
    text = "".join(traceback.format_exception(error))
    for word in (message, function):
        assert word in text, f"{word!r} is not in the text of the error: {text[-2000:]}"
