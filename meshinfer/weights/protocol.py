"""What moves weights from a trainer to its servers: what is promised, for every kind alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

from torch import Tensor

from meshinfer.weights.layout import WeightLayout

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["WeightPublisher", "WeightSubscriber", "WeightTransport", "WeightUpdate"]

WAIT_SECONDS = 60.0
"""That :meth:`WeightPublisher.wait` waits by default."""


class WeightUpdate:
    """One published version, whole: every weight of the layout, under each of its names.

    Attributes:
        version: as the publisher returned it.
        weights: by dotted name, of the layout's shapes and dtypes, on any device. Read them only. Their memory is not
            written again before :meth:`release`, after which they must not be used.
        alias: they are the trainer's own tensors, which change under its optimizer.
    """

    def __init__(
        self,
        version: int,
        weights: Mapping[str, Tensor],
        release: Callable[[], object] | None = None,
        *,
        alias: bool = False,
    ) -> None:
        self.version = version
        self.weights = weights
        self.alias = alias
        self._release = [] if release is None else [release]

    def release(self) -> None:
        """Give the memory back, from any thread and without waiting. Idempotent."""
        try:
            release = self._release.pop()  # one step: whoever takes it is the only one
        except IndexError:
            return
        release()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(version={self.version}, {len(self.weights)} weights)"


@runtime_checkable
class WeightSubscriber(Protocol):
    """One server's end. ``receive`` is for one thread at a time; the rest may be called from any."""

    def receive(self, timeout: float | None = None) -> WeightUpdate:
        """The newest version that was not received yet; those between are skipped.

        The first call returns the newest version that has been published, however long ago. A new publisher's versions
        are new, whatever their numbers; of one publisher only greater ones come.

        Args:
            timeout: seconds to wait; ``None`` for no limit, 0 to look once.

        Raises:
            TimeoutError: there is no new version yet.
            PeerLostError: the publisher has died, and nothing new is there. Raised once for each publisher that is
                lost: the next call waits for another one.
            RefusedError: the publisher has other weights than the layout; names the first differences. Once, too.
            ClosedError: the subscriber or the transport was closed, also while this waited.
        """

    def applied(self, update: WeightUpdate) -> None:
        """Tell the publisher that ``update`` serves from now on. Does not wait; a lost publisher is no error."""

    def close(self) -> None:
        """Leave. Updates that were received stay valid until they are released. Idempotent."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


@runtime_checkable
class WeightPublisher(Protocol):
    """The trainer's end; for any thread. Publishes that overlap happen one after the other."""

    @property
    def version(self) -> int:
        """The last that was published; before that, the one given at construction."""

    @property
    def subscribers(self) -> int:
        """How many are there now."""

    def publish(self, weights: object = None, *, version: int | None = None) -> int:
        """Copy weights and make them the newest version. Never waits for a subscriber.

        What is done to the source afterwards changes nothing, until the next publish.

        Args:
            weights: a module, a state dict or a TensorDict; ``None`` for the source given at construction. Names that
                are left out keep the value of the last version; the first publish needs all, here or in the source.
            version: of the weights, greater than the last; ``None`` for one more.

        Returns:
            The version.

        Raises:
            ValueError: a name is unknown or missing, a shape differs, or ``version`` is not greater; nothing changes.
            TypeError: ``weights`` is something else, or a dtype differs and ``cast`` was not given.
            ClosedError: this, or the transport, was closed.
        """

    def wait(self, version: int | None = None, timeout: float = WAIT_SECONDS) -> None:
        """Wait until every subscriber that is there serves ``version`` (by default the newest), or a greater one.

        Raises:
            TimeoutError: some do not after ``timeout`` seconds; names them and what they serve.
            ValueError: ``version`` was not published yet.
            ClosedError: this, or the transport, was closed.
        """

    def close(self) -> None:
        """End it in good order; the newest version stays available to subscribers of this transport. Idempotent."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


@runtime_checkable
class WeightTransport(Protocol):
    """How weights get from one publisher to any number of subscribers.

    Where it crosses processes it can be pickled with :mod:`pickle`, and the copy subscribes; one that stays in its
    process raises :class:`TypeError` there.

    Attributes:
        transport_kind: a word of :data:`~meshinfer.weights.resolver.WEIGHT_KINDS`.
    """

    transport_kind: ClassVar[str]

    @property
    def layout(self) -> WeightLayout:
        """Of the weights."""

    def publisher(
        self, source: object = None, *, version: int = 0, cast: bool = False
    ) -> WeightPublisher:
        """The one publisher: a second one can be made when the first has been closed, or has died.

        Args:
            source: module, state dict or TensorDict that :meth:`WeightPublisher.publish` reads; it is read then, not
                now, and kept.
            version: the first publish has the next one.
            cast: convert dtypes to the layout's; otherwise they must be equal.

        Raises:
            ValueError, TypeError: ``source`` does not fit, as for :meth:`WeightPublisher.publish`.
            RuntimeError: there is one.
            ClosedError: the transport was closed.
        """

    def subscriber(self) -> WeightSubscriber:
        """A new subscriber; :class:`~meshinfer.errors.ClosedError` if the transport was closed."""

    def close(self) -> None:
        """End it for its publisher and all its subscribers. Idempotent."""
