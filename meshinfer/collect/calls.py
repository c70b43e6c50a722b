"""A worker's requests, packed into rows that stay where they are."""

from __future__ import annotations

from typing import Any

import torch

from meshinfer.inference.protocol import InferenceClient, InferenceFuture
from meshinfer.inference.rowcall import NO_VERSION, RowCall, RowCalling
from meshinfer.inference.version import as_key
from meshinfer.layout import PayloadLayout

__all__ = ["make_call"]


class _ClientCall:
    """Through any client, as TensorDicts.

    Args:
        client: of the transport.
        request, response: layouts.
        version_key: where a reply has the version.
    """

    def __init__(
        self,
        client: InferenceClient,
        request: PayloadLayout,
        response: PayloadLayout,
        version_key: tuple[str, ...] | None,
    ) -> None:
        self._client = client
        self._response = response
        self._version_key = as_key(version_key)
        self.request = request.views(request.new_rows())
        self.reply = response.views(response.new_rows())
        self._payload = request.unpack(self.request, copy=False)
        self._future: InferenceFuture | None = None

    def send(self) -> None:
        """As :meth:`~meshinfer.inference.rowcall.RowCall.send`."""
        self._future = self._client.submit(self._payload)

    def receive(self) -> int:
        """As :meth:`~meshinfer.inference.rowcall.RowCall.receive`."""
        future, self._future = self._future, None
        assert future is not None
        reply = future.result()
        self._response.pack(reply, self.reply)
        key = self._version_key
        stamp = None if key is None else reply.get(key, None)
        return int(stamp.reshape(-1)[0]) if isinstance(stamp, torch.Tensor) else NO_VERSION


def make_call(
    client: Any,
    request: PayloadLayout,
    response: PayloadLayout,
    version_key: tuple[str, ...] | None,
) -> RowCall:
    """The shortest way that ``client`` has."""
    found = client.row_call(request, response) if isinstance(client, RowCalling) else None
    return _ClientCall(client, request, response, version_key) if found is None else found
