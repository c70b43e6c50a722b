"""What a server that lives elsewhere is made of, as it is sent there."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from meshinfer.inference.protocol import InferenceTransport
from meshinfer.server.thread import ThreadInferenceServer

__all__ = ["ServerSetup"]


@dataclass(frozen=True)
class ServerSetup:
    """What a server is made of. Picklable.

    Args:
        policy_factory: pickled; called without arguments where the server lives.
        open_transport: makes the server's side of the transport there.
        arguments: further ones of :class:`~meshinfer.server.thread.ThreadInferenceServer`, by name.
        forked: whether the process shares the memory of its parent, and with it the remains of its threads.
        collate_fn: pickled, if there is one.
        weight_transport: pickled, if there is one.
    """

    policy_factory: bytes
    open_transport: Callable[[], InferenceTransport]
    arguments: Mapping[str, Any]
    forked: bool = False
    collate_fn: bytes | None = None
    weight_transport: bytes | None = None

    def build(self) -> ThreadInferenceServer:
        """The policy first: no client finds a server that has none."""
        if self.forked:
            # the parent's pool of threads is not here, and would be waited for
            torch.set_num_threads(1)
        collate = None if self.collate_fn is None else _unpickled("collate_fn", self.collate_fn)
        policy = _unpickled("policy_factory", self.policy_factory)()
        weights = self.weight_transport
        transport = self.open_transport()
        try:
            server = ThreadInferenceServer(
                policy,
                transport,
                share_weights=True,
                collate_fn=collate,
                weight_transport=None if weights is None else pickle.loads(weights),
                **self.arguments,
            )
            return server.own_model()
        except BaseException:
            transport.close()
            raise


def _unpickled(name: str, data: bytes) -> Callable[..., Any]:
    try:
        function: Callable[..., Any] = pickle.loads(data)
    except (ImportError, AttributeError) as error:
        raise TypeError(
            f"{name} cannot be imported in the server's process ({error}); define it at"
            " the top level of a module that can be imported there"
        ) from error
    return function
