"""What one worker does, in a thread or in a process: make its environment, then request, step and record."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from tensordict import TensorDict
from tensordict.nn import InteractionType

from meshinfer.collect.calls import make_call
from meshinfer.collect.envs import Environment, ObservationRows, StepResult, as_environment
from meshinfer.collect.keys import keys_of, next_key
from meshinfer.collect.specs import (
    EPISODE,
    STEP,
    STEPPED,
    VERSION,
    CollectionPlan,
    EnvSpecs,
)
from meshinfer.collect.transitions import (
    CLOSING,
    RESETTING,
    STEPPING,
    Ring,
    RingHandle,
    array_of,
)
from meshinfer.inference.interaction import computing_under
from meshinfer.inference.remote_errors import encode_exception
from meshinfer.inference.rowcall import RowCall
from meshinfer.layout import PayloadLayout, RowViews
from meshinfer.specs import short_key

__all__ = ["Begin", "Failed", "Link", "Ready", "work"]

logger = logging.getLogger("meshinfer.collect")

_Array = Any
_Key = tuple[str, ...]


@dataclass(frozen=True)
class Ready:
    """Report: the environment was made."""

    specs: EnvSpecs


@dataclass(frozen=True)
class Failed:
    """Report: the worker ends because of an exception, encoded; ``doing`` says during what.

    ``policy`` tells that a request raised it, not the environment.
    """

    error: bytes
    doing: str
    policy: bool


@dataclass(frozen=True)
class Begin:
    """Order: collect, until told to stop through the ring. Picklable where its parts are."""

    plan: CollectionPlan
    ring: RingHandle
    clients: Sequence[Any]
    seed: int | None
    interaction: InteractionType | None


class Link(Protocol):
    """A worker's way to the driver."""

    def report(self, report: Ready | Failed) -> None:
        """Tell the driver; a driver that has gone is not an error."""

    def order(self) -> Begin | None:
        """What to do once the environment was made; ``None``: leave."""


def work(link: Link, factory: Callable[[], Any]) -> None:
    """Everything that a worker does, from making its environment to closing it."""
    env: Environment | None = None
    rollout: _Rollout | None = None
    try:
        env = as_environment(factory())
        link.report(Ready(_specs_of(env)))
        begin = link.order()
        if begin is not None:
            with nullcontext() if begin.interaction is None else computing_under(begin.interaction):
                rollout = _Rollout(env, begin)
                rollout.run(begin.seed)
    except (
        BaseException
    ) as error:  # an environment may raise anything; its worker ends, and the driver says why
        policy = rollout is not None and rollout.asking
        doing = "being made" if rollout is None else rollout.doing
        link.report(Failed(encode_exception(error), doing, policy))
    finally:
        _close(env, rollout)


def _specs_of(env: Environment) -> EnvSpecs:
    return EnvSpecs(env.observation_spec, env.action_spec, env.num_envs, env.is_batched)


def _close(env: Environment | None, rollout: _Rollout | None) -> None:
    for thing in (rollout, env):
        try:
            if thing is not None:
                thing.close()
        except (
            Exception
        ) as error:  # what an environment raises while it closes changes nothing any more
            logger.warning("closing raised %s: %s", type(error).__name__, str(error))


class _Rollout:
    """Steps one environment, and fills a ring with what happens.

    Args:
        env: not reset yet.
        begin: the driver's order.
    """

    def __init__(self, env: Environment, begin: Begin) -> None:
        plan = begin.plan
        self.asking = False
        """Whether the policy has been asked, and not answered."""
        self.doing = "its first reset"
        self._env = env
        self._plan = plan
        self._clients = begin.clients
        self._ring = begin.ring.open()
        self._columns = _Columns(plan, self._ring)
        self._calls = [
            make_call(x, plan.request, plan.response, plan.version_key) for x in begin.clients
        ]
        self._exchange = _Exchange(plan, self._columns, self._calls)
        self._state = _State(plan, self._columns, self._exchange.reply)
        self._episodes = _Episodes(self._ring, self._columns)

    def run(self, seed: int | None) -> None:
        """Until told to stop; then the environment is to be closed."""
        try:
            self._run(seed)
        finally:
            self._ring.enter(CLOSING)

    def _run(self, seed: int | None) -> None:
        ring, exchange, env, columns = self._ring, self._exchange, self._env, self._columns
        episodes, state, action = self._episodes, self._state, self._exchange.action
        ring.enter(RESETTING)
        observation = env.reset(seed)
        ring.leave()
        self.doing = "a step"
        while (row := ring.next_row()) is not None:
            columns.root.write(row, observation)
            state.before(row)
            self.asking = True
            exchange(row)
            self.asking = False
            ring.enter(STEPPING)
            result = env.step(action)
            ring.leave()
            columns.next.write(row, result.next)
            ended = columns.record(row, result)
            state.after(row, ended, result.stepped)
            episodes(row, ended, result.stepped)
            ring.publish()
            observation = result.observation

    def close(self) -> None:
        """Leave the policy."""
        for client in self._clients:
            client.close()


class _Columns:
    """The rows of a ring, leaf by leaf: arrays ``[capacity, *batch_size, *shape]``."""

    def __init__(self, plan: CollectionPlan, ring: Ring) -> None:
        views = plan.transition.views(ring.rows)
        rows = TensorDict({}, [ring.capacity])
        for key, tensor in zip(keys_of(plan.transition), views.tensors, strict=True):
            rows.set(short_key(key), tensor)
        arrays = map(array_of, views.tensors)
        self.of: dict[_Key, _Array] = dict(zip(keys_of(plan.transition), arrays, strict=True))
        self.root = ObservationRows(plan.observation, rows)
        self.next = ObservationRows(plan.observation, rows.get("next"))
        outcome = [
            self.of["next", name][..., 0] for name in ("reward", "terminated", "truncated", "done")
        ]
        self._reward, self._terminated, self._truncated, self._done = outcome
        self._stepped = self.of[STEPPED]
        self._batched = plan.is_batched

    def record(self, row: int, result: StepResult) -> Any:
        """Write what came of a step; where an episode ended: a bool, or ``None`` or bool ``[B]`` for a vector."""
        terminated, truncated = result.terminated, result.truncated
        ended = terminated | truncated
        self._reward[row] = result.reward
        self._terminated[row] = terminated
        self._truncated[row] = truncated
        self._done[row] = ended
        self._stepped[row] = True if result.stepped is None else result.stepped
        if self._batched:
            return ended if ended.any() else None
        return ended


class _Exchange:
    """The policy's answer to one row, in one request or several."""

    def __init__(self, plan: CollectionPlan, columns: _Columns, calls: Sequence[RowCall]) -> None:
        self._calls = calls
        size = plan.num_envs // len(calls)
        whole = len(calls) == 1
        parts = [... if whole else slice(i * size, (i + 1) * size) for i in range(len(calls))]
        self._requests = [
            (columns.of[key], part, target)
            for call, part in zip(calls, parts, strict=True)
            for key, target in _arrays(plan.request, call.request)
        ]
        views = calls[0].reply if whole else _whole_reply(plan)
        self._joins = [] if whole else _joins(plan, calls, parts, views)
        self.reply: dict[_Key, _Array] = dict(_arrays(_reply_layout(plan), views))
        self.action = {short_key(key): array for key, array in self.reply.items()}
        """The reply, for environments; its memory is the same for all."""
        carried = set(plan.carried.values())
        self._outputs = [
            (columns.of[key], array) for key, array in self.reply.items() if key not in carried
        ]
        self._versions = [(columns.of[VERSION], part) for part in parts] if plan.stamps else []

    def __call__(self, row: int) -> None:
        """Ask for the actions of ``row``, and record the reply there."""
        for column, part, target in self._requests:
            target[...] = column[row][part]
        for call in self._calls:
            call.send()
        versions = [call.receive() for call in self._calls]
        for target, source in self._joins:
            target[...] = source
        for column, source in self._outputs:
            column[row] = source
        for (column, part), version in zip(self._versions, versions, strict=False):
            column[row, part] = version


def _arrays(layout: PayloadLayout, views: RowViews) -> list[tuple[_Key, _Array]]:
    return list(zip(keys_of(layout), map(array_of, views.tensors), strict=True))


def _reply_layout(plan: CollectionPlan) -> PayloadLayout:
    if plan.requests_per_step == 1:
        return plan.response
    views = plan.response.views(plan.response.new_rows(plan.requests_per_step))
    return PayloadLayout.from_spec(plan.response.unpack_rows(views), name="response")


def _whole_reply(plan: CollectionPlan) -> RowViews:
    layout = _reply_layout(plan)
    return layout.views(layout.new_rows())


def _joins(
    plan: CollectionPlan, calls: Sequence[RowCall], parts: Sequence[Any], views: RowViews
) -> list[tuple[_Array, _Array]]:
    whole = [array for _, array in _arrays(_reply_layout(plan), views)]
    return [
        (target[part], source)
        for call, part in zip(calls, parts, strict=True)
        for target, (_, source) in zip(whole, _arrays(plan.response, call.reply), strict=True)
    ]


class _State:
    """The policy's own state, which each reply hands on to the next request, until an episode ends."""

    def __init__(self, plan: CollectionPlan, columns: _Columns, reply: dict[_Key, _Array]) -> None:
        self._leaves = []
        for key, source in plan.carried.items():
            initial = array_of(plan.initial.get(short_key(key)).contiguous())
            leaf = (
                columns.of[key],
                columns.of[next_key(key)],
                reply[source],
                initial,
                initial.copy(),
            )
            self._leaves.append(leaf)

    def before(self, row: int) -> None:
        """Write it into the row, where the request is taken from."""
        for root, _, _, _, current in self._leaves:
            root[row] = current

    def after(self, row: int, ended: Any, stepped: Any) -> None:
        """Take it from the reply; it begins anew where an episode ended, or a row was only reset."""
        for _, following, reply, initial, current in self._leaves:
            following[row] = reply
            current[...] = reply
            if ended is True:
                current[...] = initial
            elif ended is not None and ended is not False:
                current[ended] = initial[ended]
            if stepped is not None:
                current[~stepped] = initial[~stepped]


class _Episodes:
    """Counts episodes and the steps within; a ring's second worker goes on where the first one ended."""

    def __init__(self, ring: Ring, columns: _Columns) -> None:
        self._numbers, self._steps = columns.of[EPISODE], columns.of[STEP]
        self._number = np.zeros(self._numbers.shape[1:], dtype=np.int64)
        self._step = np.zeros_like(self._number)
        if ring.written:
            self._number[...] = self._numbers[(ring.written - 1) % ring.capacity] + 1

    def __call__(self, row: int, ended: Any, stepped: Any) -> None:
        """Number the row's step."""
        self._numbers[row] = self._number
        self._steps[row] = self._step
        if stepped is None:
            self._step += 1
        else:
            self._step += stepped
        if ended is True:
            self._number += 1
            self._step[...] = 0
        elif ended is not None and ended is not False:
            self._number[ended] += 1
            self._step[ended] = 0
