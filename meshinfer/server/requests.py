"""What the owner of a server that lives elsewhere may ask of it, and the answers in bytes.

A question is ``(function, arguments)``: one of the functions at the end of this file, called with the server there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from meshinfer.inference.remote_errors import decode_exception, encode_exception
from meshinfer.server.process_weights import PackedTensor, unpack_weights
from meshinfer.server.stats import ServerStats
from meshinfer.server.thread import ThreadInferenceServer

__all__ = [
    "decode_answer",
    "encode_answer",
    "encode_failure",
    "health",
    "needs_a_turn",
    "prepare",
    "stats",
    "update_weights",
]


def encode_answer(
    server: ThreadInferenceServer, call: Callable[..., Any], arguments: Any
) -> tuple[Any, bytes | None, int]:
    """What ``call(server, *arguments)`` returns, or the exception that it raises, and the policy's version then."""
    try:
        value, failure = call(server, *arguments), None
    except Exception as error:
        value, failure = None, encode_exception(error)
    return value, failure, server.policy_version


def encode_failure(error: BaseException) -> tuple[None, bytes, int]:
    """The answer of a server that could not be made."""
    return None, encode_exception(error), 0


def decode_answer(answer: tuple[Any, bytes | None, int]) -> Any:
    """The value, or the exception raised: of its own type where possible, its cause has the traceback."""
    value, failure, _ = answer
    if failure is not None:
        raise decode_exception(failure)
    return value


def needs_a_turn(call: Callable[..., Any]) -> bool:
    """Whether it waits for the batch that is being computed; whatever else is asked must not wait behind it."""
    return call in (update_weights, prepare)


# What may be asked.


def stats(server: ThreadInferenceServer, reset: bool) -> ServerStats:
    """What has been served."""
    return server.stats(reset)


def health(server: ThreadInferenceServer) -> bool:
    """Whether the serving thread runs."""
    return server.is_alive


def update_weights(
    server: ThreadInferenceServer, packed: Mapping[str, PackedTensor], version: int | None
) -> int:
    """New parameters and buffers, all or none, between two batches; the version that they have."""
    return server.update_policy_weights_(unpack_weights(packed), version=version)


def prepare(
    server: ThreadInferenceServer,
    request_spec: TensorDictBase | None,
    interaction_type: InteractionType | None,
) -> None:
    """Warm the policy up."""
    server.prepare(request_spec, interaction_type=interaction_type)
