"""A remote policy in the place of a local one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase, dispatch
from tensordict.utils import unravel_key

from meshinfer.arguments import as_count, as_seconds
from meshinfer.inference.protocol import InferenceClient, InferenceFuture
from meshinfer.inference.version import Key, as_key
from meshinfer.inflight import Room

__all__ = ["PolicyClientModule"]

_VERSION_KEY = "policy_version"


class PolicyClientModule(TensorDictModuleBase):
    """A policy that another thread or process computes, as a ``TensorDictModule``: it drops into any collector.

    Called with a TensorDict, it sends the ``in_keys``, waits, and writes the ``out_keys`` and the policy version into
    that TensorDict. The exploration mode that is set where it is called is the one that the policy uses. It has no
    parameters. Pickled, it holds its client and nothing of the server; a deep copy shares the client.

    Args:
        source: an :class:`~meshinfer.InferenceServer`, a :class:`~meshinfer.ProcessInferenceServer` or a transport,
            of which it makes a client, or a ready client. It closes the client in either case.
        in_keys: what a request has, of the shapes and dtypes that the transport expects.
        out_keys: what is taken from a reply. The version is, where the reply has it: under the ``policy_version_key``
            of ``source``, ``"policy_version"`` for a client.
        max_inflight: requests at once that have neither been answered, failed, been cancelled nor been forgotten.
            :meth:`submit` waits while there are so many. ``None`` leaves it to the transport.
        timeout: seconds to wait for a reply, or for room; ``None`` waits while the server is alive.

    Raises:
        TypeError, ValueError: an argument cannot work; says which.
    """

    def __init__(
        self,
        source: Any,
        in_keys: Sequence[Key],
        out_keys: Sequence[Key],
        *,
        max_inflight: int | None = None,
        timeout: float | None = None,
    ) -> None:
        super().__init__()
        self.in_keys = _keys("in_keys", in_keys)  # type: ignore[assignment]
        self.out_keys = _keys("out_keys", out_keys)  # type: ignore[assignment]
        if max_inflight is not None:
            as_count("max_inflight", max_inflight)
        self.max_inflight = max_inflight
        self.timeout = None if timeout is None else as_seconds("timeout", timeout)
        self._version_key = _version_key(source)
        self._room = None if max_inflight is None else Room(max_inflight)
        self.client: InferenceClient = _client(source)

    @dispatch(auto_batch_size=False)
    def forward(
        self, tensordict: TensorDictBase, *, tensordict_out: TensorDictBase | None = None
    ) -> TensorDictBase:
        """Write the policy's reply into ``tensordict``, or into ``tensordict_out``; returns it.

        Raises:
            KeyError: ``tensordict`` lacks an in_key, or the reply an out_key.
            TimeoutError: no reply within ``timeout``; the request is given up.
            Exception: what the client raises, which is also what the policy raised.
        """
        payload = tensordict.select(*self.in_keys)
        if self._room is None:
            reply = self.client(payload, timeout=self.timeout)
        else:
            reply = self._call_in_room(self._room, payload)
        target = tensordict if tensordict_out is None else tensordict_out
        self._write(reply, target)
        return target

    def submit(self, tensordict: TensorDictBase) -> InferenceFuture:
        """Send the ``in_keys`` and return a future, whose ``result()`` is the reply; ``tensordict`` stays as it is.

        Raises:
            TimeoutError: ``max_inflight`` requests were in flight for ``timeout`` seconds.
            KeyError: ``tensordict`` lacks an in_key.
            Exception: what the client raises.
        """
        payload = tensordict.select(*self.in_keys)
        room = self._room
        if room is None:
            return self.client.submit(payload)
        permit = room.enter(self.timeout)
        try:
            return room.bind(self.client.submit(payload), permit)
        except BaseException:
            permit.release()
            raise

    def close(self) -> None:
        """Leave: requests in flight are given up, and later ones raise :class:`~meshinfer.ClosedError`. Idempotent."""
        self.client.close()

    def __enter__(self) -> PolicyClientModule:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        state["_room"] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._room = None if self.max_inflight is None else Room(self.max_inflight)

    def __deepcopy__(self, memo: dict[int, Any]) -> PolicyClientModule:
        copied = PolicyClientModule(
            self.client,
            self.in_keys,
            self.out_keys,
            max_inflight=self.max_inflight,
            timeout=self.timeout,
        )
        copied._version_key = self._version_key
        memo[id(self)] = copied
        return copied

    def __repr__(self) -> str:
        return (
            f"PolicyClientModule({self.client!r}, in_keys={self.in_keys}, out_keys={self.out_keys})"
        )

    def _call_in_room(self, room: Room, payload: TensorDictBase) -> TensorDictBase:
        permit = room.enter(self.timeout)
        try:
            return self.client(payload, timeout=self.timeout)
        finally:
            permit.release()

    def _write(self, reply: TensorDictBase, target: TensorDictBase) -> None:
        found = [(key, reply.get(key, None)) for key in self.out_keys]
        missing = [key for key, value in found if value is None]
        if missing:
            present = ", ".join(sorted(map(repr, reply.keys(True, True))))
            raise KeyError(f"the reply lacks {', '.join(map(repr, missing))}; it has {present}")
        version = None if self._version_key is None else reply.get(self._version_key, None)
        if version is not None:
            found.append((self._version_key, version))
        for key, value in found:
            target.set(key, value)


def _keys(name: str, keys: Sequence[Key]) -> list[Key]:
    if isinstance(keys, str) or not isinstance(keys, Sequence):
        raise TypeError(f"{name}={keys!r}: expected a list of keys")
    if not keys:
        raise ValueError(f"{name} is empty; give at least one key")
    return [unravel_key(key) for key in keys]  # type: ignore[no-untyped-call]


def _version_key(source: Any) -> tuple[str, ...] | None:
    try:
        return as_key(getattr(source, "policy_version_key", _VERSION_KEY))
    except ValueError:  # a transport that only makes clients does not know
        return as_key(_VERSION_KEY)


def _client(source: Any) -> InferenceClient:
    make = getattr(source, "client", None)
    found = source if make is None else make()
    if isinstance(found, type) or not isinstance(found, InferenceClient):
        raise TypeError(
            f"source: expected a server, a transport or a client, found {type(source).__name__}"
        )
    return found
