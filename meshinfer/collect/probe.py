"""One pass of the policy, to see what it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from meshinfer.collect.keys import as_tuple, keys_of, leaves_by_key
from meshinfer.inference.interaction import encode_interaction
from meshinfer.inference.version import Key
from meshinfer.layout import PayloadLayout
from meshinfer.server.policy import ServedPolicy
from meshinfer.specs import short_key

__all__ = ["PolicyProbe", "probed_specs"]

_Key = tuple[str, ...]


@dataclass(frozen=True)
class PolicyProbe:
    """The policy, for one pass: what it returns is not known otherwise.

    Args:
        make: returns what :class:`~meshinfer.InferenceServer` would serve.
        in_keys, out_keys: as there.
        device: where it computes.
        interaction: the interaction type that clients will ask for.
    """

    make: Callable[[], Any]
    in_keys: Sequence[Key] | None
    out_keys: Sequence[Key] | None
    device: torch.device | None
    interaction: Any

    def declared(self, model: Any) -> tuple[list[_Key] | None, list[_Key] | None]:
        """Inputs and outputs by the model's own account."""
        found = []
        for given, name in ((self.in_keys, "in_keys"), (self.out_keys, "out_keys")):
            keys = getattr(model, name, None) if given is None else given
            found.append(None if keys is None else [as_tuple(key) for key in keys])
        return found[0], found[1]

    def reply(self, model: Any, batch: TensorDict) -> TensorDictBase:
        """What ``model`` returns for ``batch``; leaves the model and the generators as they were."""
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            policy = ServedPolicy(
                model,
                in_keys=self.in_keys,
                out_keys=self.out_keys,
                share_weights=False,
                device=self.device,
                version=0,
            )
            found = policy(batch, encode_interaction(self.interaction)).detach()
        reply: TensorDictBase = found.cpu()
        return reply


def probed_specs(
    probe: PolicyProbe, each: TensorDict, state: TensorDict, request_spec: Any, response_spec: Any
) -> tuple[Any, Any]:
    """What of the two was not given."""
    model = probe.make()
    inputs, outputs = probe.declared(model)
    if request_spec is None:
        request_spec = _selected("the policy's in_keys", each, inputs)
    if response_spec is not None:
        return request_spec, response_spec
    request = PayloadLayout.from_spec(request_spec, name="request")
    payload = request.unpack(request.views(request.new_rows()))
    for key, value in leaves_by_key(each).items():
        if key in keys_of(request):
            payload.set(key, value.clone())
    batch = payload if payload.batch_size else payload.unsqueeze(0)
    reply = probe.reply(model, batch.clone())
    reply = reply.reshape(payload.batch_size) if reply.batch_size != payload.batch_size else reply
    if outputs is None:
        known = set(keys_of(request)) - set(leaves_by_key(state))
        outputs = [key for key in leaves_by_key(reply) if key not in known]
    return request_spec, _selected("the policy's out_keys", reply, outputs)


def _selected(what: str, source: TensorDictBase, keys: Iterable[_Key] | None) -> TensorDictBase:
    if keys is None:
        return source
    present = leaves_by_key(source)
    chosen = []
    for key in keys:
        below = [name for name in present if name[: len(key)] == key]
        if not below and key[0] != "_":
            shown = ", ".join(sorted(repr(short_key(name)) for name in present)) or "none"
            raise ValueError(
                f"{what}: expected keys among {shown}, found {short_key(key)!r}; policy state goes into initial_state"
            )
        chosen += below
    return source.select(*map(short_key, chosen))
