"""What publishers of every kind have in common: versions, checks, and one publish after the other."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from meshinfer.arguments import as_count, as_seconds
from meshinfer.errors import ClosedError
from meshinfer.weights.layout import WeightLayout
from meshinfer.weights.names import check_names
from meshinfer.weights.protocol import WAIT_SECONDS

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["PublisherBase"]


class PublisherBase(ABC):
    """A :class:`~meshinfer.weights.protocol.WeightPublisher`; a kind says how a version is stored and waited for.

    Args:
        layout: of the weights.
        source, version, cast: as :meth:`WeightTransport.publisher
            <meshinfer.weights.protocol.WeightTransport.publisher>` has them.
    """

    def __init__(self, layout: WeightLayout, source: object, version: int, cast: bool) -> None:
        self.layout = layout
        self._version = as_count("version", version, least=0)
        self._cast = cast
        self._source = source
        self._publishing = threading.Lock()
        self._complete = False
        self._closed = False
        if source is not None:
            layout.select(source, cast=cast)

    @property
    def version(self) -> int:
        """The last that was published."""
        return self._version

    def publish(self, weights: object = None, *, version: int | None = None) -> int:
        """Copy weights and make them the newest version; see :class:`~meshinfer.weights.protocol.WeightPublisher`."""
        with self._publishing:
            self._check_open()
            number = self._next(version)
            given = self._given(weights)
            self._store(number, given)
            self._complete, self._version = True, number
        return number

    def wait(self, version: int | None = None, timeout: float = WAIT_SECONDS) -> None:
        """Wait until every subscriber serves it; see :class:`~meshinfer.weights.protocol.WeightPublisher`."""
        self._check_open()
        as_seconds("timeout", timeout, zero=True)
        wanted = self._version if version is None else as_count("version", version, least=0)
        if wanted > self._version:
            raise ValueError(
                f"version={version} was not published yet; the newest is {self._version}"
            )
        self._wait(wanted, timeout)

    def close(self) -> None:
        """End it in good order, after a publish that is under way. Idempotent."""
        with self._publishing:
            if not self._closed:
                self._closed = True
                self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    @abstractmethod
    def subscribers(self) -> int:
        """How many are there now."""

    @abstractmethod
    def _store(self, version: int, given: Mapping[str, Tensor]) -> None:
        """Make a version available: a copy of ``given`` over the last one. One call at a time.

        Args:
            version: greater than the last.
            given: as :meth:`WeightLayout.select` returns it; the first time it has every weight.
        """

    @abstractmethod
    def _wait(self, version: int, timeout: float) -> None:
        """Wait until every subscriber serves ``version``, which was published, or a greater one."""

    @abstractmethod
    def _close(self) -> None:
        """Let go of what it has. Called once."""

    def _next(self, version: int | None) -> int:
        if version is None:
            return self._version + 1
        if as_count("version", version) <= self._version:
            raise ValueError(f"version={version}: expected more than the last, {self._version}")
        return version

    def _given(self, weights: object) -> dict[str, Tensor]:
        given = {} if weights is None else self.layout.select(weights, cast=self._cast)
        if self._source is not None and (weights is None or not self._complete):
            given = {**self.layout.select(self._source, cast=self._cast), **given}
        elif weights is None:
            raise ValueError("weights: give them here, or a source to publisher()")
        if not self._complete:
            check_names("the first publish has no", self.layout.missing(given))
        return given

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this publisher was closed; make a new one")
