"""What environments, policy and transitions look like, derived from the environments and one pass of the policy."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from meshinfer.collect.keys import keys_of, leaves_by_key, next_key
from meshinfer.collect.probe import PolicyProbe, probed_specs
from meshinfer.inference.version import Key, as_key
from meshinfer.layout import PayloadLayout
from meshinfer.specs import short_key

__all__ = [
    "EPISODE",
    "STEP",
    "STEPPED",
    "VERSION",
    "CollectionPlan",
    "EnvSpecs",
    "make_plan",
]

_Key = tuple[str, ...]

EPISODE: Final[_Key] = ("episode_id",)
STEP: Final[_Key] = ("step_index",)
STEPPED: Final[_Key] = ("_collector", "stepped")
VERSION: Final[_Key] = ("_collector", "version")
_NEXT = "next"
_OUTCOME = ("reward", "terminated", "truncated", "done")
_RESERVED = frozenset({"env_index", "episode_id", "step_index", "_collector", _NEXT})


@dataclass(frozen=True)
class EnvSpecs:
    """What one environment said of itself."""

    observation: TensorDict
    action: TensorDict
    num_envs: int
    is_batched: bool

    def difference(self, other: EnvSpecs) -> str:
        """The first difference from ``other``; empty without any."""
        if (self.num_envs, self.is_batched) != (other.num_envs, other.is_batched):
            return f"{_rows(other)} here, {_rows(self)} there"
        for name, mine, its in (
            ("observation_spec", self.observation, other.observation),
            ("action_spec", self.action, other.action),
        ):
            layout, found = (PayloadLayout.from_spec(x, name=name) for x in (mine, its))
            if layout != found:
                return f"{name}: {found.difference(layout.describe())}"
        return ""


def _rows(specs: EnvSpecs) -> str:
    return f"a vector of {specs.num_envs}" if specs.is_batched else "a single environment"


@dataclass(frozen=True)
class CollectionPlan:
    """What a worker needs to know: layouts, and which leaf goes where. Picklable.

    Attributes:
        observation: zeros, as the environment declares them.
        num_envs, is_batched: of each environment.
        requests_per_step: in how many requests a vector is sent.
        request, response: of one request.
        transition: of one step: batch size ``[]``, or ``[num_envs]``.
        carried: for each key of policy state, where the reply has its next value.
        initial: policy state at the beginning of an episode, for all rows of the environment.
        version_key: where replies have the version of the policy.
    """

    observation: TensorDict
    num_envs: int
    is_batched: bool
    requests_per_step: int
    request: PayloadLayout
    response: PayloadLayout
    transition: PayloadLayout
    carried: Mapping[_Key, _Key]
    initial: TensorDict
    version_key: _Key | None

    @property
    def stamps(self) -> bool:
        """Whether the version is a leaf of transitions beside those of the reply."""
        return self.version_key is not None and self.version_key not in keys_of(self.response)


def make_plan(
    envs: EnvSpecs,
    probe: PolicyProbe,
    *,
    request_spec: Any,
    response_spec: Any,
    initial_state: TensorDictBase | None,
    version_key: Key | None,
    requests_per_step: int,
) -> CollectionPlan:
    """Everything that follows from the environment and the policy.

    Raises:
        ValueError: keys, shapes or dtypes that do not fit together; names them.
        TypeError: a spec that is none, or an action of another dtype.
    """
    if envs.num_envs % requests_per_step or (requests_per_step > 1 and not envs.is_batched):
        raise ValueError(
            f"max_inflight_per_env={requests_per_step}: {_rows(envs)} cannot be sent in so many requests of equal size"
        )
    state = TensorDict({}, []) if initial_state is None else _state(initial_state, envs)
    available = envs.observation.clone().update(state.expand(envs.observation.batch_size))
    each = available[: envs.num_envs // requests_per_step] if envs.is_batched else available
    if request_spec is None or response_spec is None:
        request_spec, response_spec = probed_specs(probe, each, state, request_spec, response_spec)
    request = PayloadLayout.from_spec(request_spec, name="request")
    response = PayloadLayout.from_spec(response_spec, name="response")
    _check_request(request, each)
    _check_actions(response, envs, each.batch_size)
    carried = _carried(response, state)
    key = as_key(version_key)
    transition = _transition(envs, available, response, carried, key, requests_per_step)
    return CollectionPlan(
        observation=envs.observation,
        num_envs=envs.num_envs,
        is_batched=envs.is_batched,
        requests_per_step=requests_per_step,
        request=request,
        response=response,
        transition=transition,
        carried=carried,
        initial=state.expand(envs.observation.batch_size).clone(),
        version_key=key,
    )


def _state(initial_state: Any, envs: EnvSpecs) -> TensorDict:
    if not isinstance(initial_state, TensorDictBase):
        found = type(initial_state).__qualname__
        raise TypeError(f"initial_state: expected a TensorDict of policy state, found {found}")
    if initial_state.batch_size:
        raise ValueError(
            "initial_state: expected that of one environment, batch_size [], found "
            f"{list(initial_state.batch_size)}"
        )
    if taken := leaves_by_key(initial_state).keys() & leaves_by_key(envs.observation).keys():
        names = ", ".join(sorted(repr(short_key(key)) for key in taken))
        raise ValueError(f"initial_state: {names} is the environment's own")
    found_state: TensorDict = initial_state.detach().cpu().clone().to_tensordict()
    return found_state


def _check_request(request: PayloadLayout, each: TensorDict) -> None:
    known = leaves_by_key(each)
    if request.batch_size != each.batch_size:
        expected, found = list(each.batch_size), list(request.batch_size)
        raise ValueError(f"request_spec: expected batch_size {expected}, found {found}")
    for leaf in request.leaves:
        name, value = short_key(leaf.key), known.get(leaf.key)
        if value is None:
            shown = ", ".join(sorted(repr(short_key(key)) for key in known))
            raise ValueError(
                f"request_spec {name!r}: the environment has {shown}; policy state goes into initial_state"
            )
        _check_leaf(f"request_spec {name!r}", value, request.batch_size + leaf.shape, leaf.dtype)


def _check_leaf(label: str, expected: Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
    if expected.shape != shape or expected.dtype != dtype:
        here, there = f"{expected.dtype}{list(expected.shape)}", f"{dtype}{list(shape)}"
        raise ValueError(f"{label}: expected {here}, found {there}".replace("torch.", ""))


def _check_actions(response: PayloadLayout, envs: EnvSpecs, size: torch.Size) -> None:
    found = {leaf.key: leaf for leaf in response.leaves}
    lead = envs.action.batch_dims
    for key, value in leaves_by_key(envs.action).items():
        leaf = found.get(key)
        if leaf is None:
            shown = ", ".join(repr(short_key(name)) for name in found)
            raise ValueError(
                f"the environment takes {short_key(key)!r} from the policy's reply, which has {shown}"
            )
        if leaf.shape != value.shape[lead:]:
            raise ValueError(
                f"action {short_key(key)!r}: the environment expects {list(value.shape[lead:])}, "
                f"the policy's reply has {list(leaf.shape)}"
            )
    if response.batch_size != size:
        raise ValueError(
            f"response_spec: expected batch_size {list(size)}, found {list(response.batch_size)}"
        )


def _carried(response: PayloadLayout, state: TensorDict) -> dict[_Key, _Key]:
    replies = {leaf.key: leaf for leaf in response.leaves}
    found = {}
    for key, value in leaves_by_key(state).items():
        source = next((name for name in (next_key(key), key) if name in replies), None)
        if source is None:
            raise ValueError(
                f"initial_state {short_key(key)!r}: the policy must return its next value, under "
                f"{next_key(key)!r} or {short_key(key)!r}; it returns {[short_key(name) for name in replies]}"
            )
        leaf = replies[source]
        _check_leaf(f"policy state {short_key(key)!r} in the reply", value, leaf.shape, leaf.dtype)
        found[key] = source
    return found


def _transition(
    envs: EnvSpecs,
    available: TensorDict,
    response: PayloadLayout,
    carried: Mapping[_Key, _Key],
    version_key: _Key | None,
    requests_per_step: int,
) -> PayloadLayout:
    size = envs.observation.batch_size
    leaves = dict(leaves_by_key(available))
    for key, value in leaves.copy().items():
        leaves[next_key(key)] = value
    for leaf in response.leaves:
        if leaf.key in carried.values():
            continue
        if leaf.key in leaves or leaf.key[0] in _RESERVED - {_NEXT}:
            raise ValueError(
                f"the policy's reply has {short_key(leaf.key)!r}, which a transition has from elsewhere; leave it out "
                "of its out_keys or of response_spec"
            )
        leaves[leaf.key] = torch.zeros(size + leaf.shape, dtype=leaf.dtype)
    kinds = (torch.float32, torch.bool, torch.bool, torch.bool)
    for name, dtype in zip(_OUTCOME, kinds, strict=True):
        if leaves.setdefault((_NEXT, name), torch.zeros((*size, 1), dtype=dtype)).dtype != dtype:
            raise ValueError(
                f"{(_NEXT, name)!r} is the environment's own; the policy's reply has it"
            )
    for key in (EPISODE, STEP):
        leaves[key] = torch.zeros(size, dtype=torch.int64)
    leaves[STEPPED] = torch.zeros(size, dtype=torch.bool)
    if version_key is not None and version_key not in keys_of(response):
        leaves[VERSION] = torch.zeros(size, dtype=torch.int64)
    spec = TensorDict({}, size)
    for key, value in leaves.items():
        spec.set(short_key(key), copy.copy(value))
    return PayloadLayout.from_spec(spec, name="transition")
