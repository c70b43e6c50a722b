"""All workers of a collector: started, watched, replaced and stopped by the driver."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from tensordict.nn import InteractionType

from meshinfer.collect.batches import BatchAssembler
from meshinfer.collect.keys import keys_of
from meshinfer.collect.processes import ProcessWorker
from meshinfer.collect.specs import CollectionPlan, EnvSpecs
from meshinfer.collect.threads import ThreadWorker
from meshinfer.collect.transitions import CLOSING, LOOK_SECONDS, RESETTING, STEPPING, Rings
from meshinfer.collect.workers import Begin, Failed, Ready
from meshinfer.errors import EnvironmentFailedError, RemoteError
from meshinfer.inference.remote_errors import decode_exception
from meshinfer.semaphore import Semaphore
from meshinfer.server.lifetime import describe_exit

__all__ = ["Crew", "Worker"]

logger = logging.getLogger("meshinfer.collect")

_LAST_WORDS_SECONDS = 1.0
_CLOSING_SECONDS = 10.0
"""For an environment to close, which may have processes of its own, and then for its process to end."""


class Worker(Protocol):
    """One worker, as the driver sees it."""

    @property
    def ended(self) -> bool:
        """Whether its thread or process has ended."""

    @property
    def exitcode(self) -> int | None:
        """Of its process, as :mod:`multiprocessing` has it."""

    def report(self, timeout: float = 0.0) -> Ready | Failed | None:
        """The next report, ``None`` without one for ``timeout`` seconds."""

    def begin(self, order: Begin, bell: Semaphore) -> None:
        """Have it collect; ``bell`` rings when it fails, where it can."""

    def dismiss(self) -> None:
        """Let it leave if it still waits for an order."""

    def join(self, timeout: float) -> bool:
        """Wait for its end: whether it has ended."""

    def kill(self) -> bool:
        """End it by force where that is possible: whether it has ended."""


class Crew:
    """Starts a worker for each environment; the methods are for one thread at a time, but for :meth:`stop`.

    Args:
        factories: of the environments; picklable for processes.
        context: of :mod:`multiprocessing`; ``None`` for threads.
        seed: of the first environment's first row; the others' follow.
        interaction: interaction type of all requests.
        max_restarts: how often each environment may be made anew; 0 for never.
        startup_timeout: seconds for all environments to be made.
        step_timeout: seconds for one step, and for the first reset; ``None`` for no limit.
    """

    def __init__(
        self,
        factories: Sequence[Callable[[], Any]],
        context: Any,
        *,
        seed: int | None,
        interaction: InteractionType | None,
        max_restarts: int,
        startup_timeout: float,
        step_timeout: float | None,
    ) -> None:
        self.restarts = [0] * len(factories)
        self.began = False
        self._factories = factories
        self._context = context
        self._seed = seed
        self._interaction = interaction
        self._max_restarts = max_restarts
        self._startup_timeout = startup_timeout
        self._step_timeout = step_timeout
        self._late: dict[int, int] = {}
        self._given_up: set[int] = set()
        self._stopping = False
        self._specs: EnvSpecs | None = None
        self._looked = 0.0
        self._workers: list[Worker] = []
        self._rings: Rings | None = None
        try:
            for index in range(len(factories)):
                self._workers.append(self._start(index))
        except BaseException:
            self.stop(0.0)
            raise

    def wait_until_made(self) -> EnvSpecs:
        """What every environment is like, when all have been made.

        Raises:
            EnvironmentFailedError: one was not.
            ValueError: one differs from the first.
        """
        self._meet(range(len(self._workers)))
        assert self._specs is not None
        return self._specs

    def set_up(self, plan: CollectionPlan, make_client: Callable[[], Any], capacity: int) -> None:
        """Make the rings, of ``capacity`` steps each.

        Args:
            plan: of the collection.
            make_client: a new client of the policy.
            capacity: steps.
        """
        self._plan, self._make_client = plan, make_client
        shared = self._context is not None
        self._rings = Rings(plan.transition, capacity, len(self._workers), shared=shared)
        self.rings = self._rings.rings
        names = keys_of(plan.transition)
        self._ends = [names.index(("next", name)) for name in ("terminated", "truncated", "done")]

    def begin(self) -> None:
        """Let all collect."""
        self.began = True
        for index in range(len(self._workers)):
            self._begin(index)

    def move(self, assembler: BatchAssembler, frames: int) -> bool:
        """Stage what is there until ``frames`` transitions are staged: whether there was something."""
        moved = False
        keep = int(self._max_restarts > 0)
        share = self._steps(frames - assembler.frames, len(self.rings))
        for most in (share, None):
            for index, ring in enumerate(self.rings):
                missing = self._steps(frames - assembler.frames, 1)
                for rows in ring.take(missing if most is None else min(most, missing), keep=keep):
                    assembler.stage(index, rows)
                    moved = True
        return moved

    def wait(self, frames: int) -> None:
        """Wait until there may be ``frames`` more transitions, or somebody has failed, or a moment has passed."""
        assert self._rings is not None
        keep = int(self._max_restarts > 0)
        share = self._steps(frames, len(self.rings)) + keep
        for ring in self.rings:
            ring.want(share)
        if not any(ring.written - ring.read > keep for ring in self.rings) and not self._stopping:
            self._rings.bell.wait(LOOK_SECONDS)
        for ring in self.rings:
            ring.want(0)

    def look(self) -> bool:
        """Every :data:`LOOK_SECONDS`, look after those that have ended or are late: whether it was time.

        Raises:
            EnvironmentFailedError: one has failed, and is not to be made anew, or cannot be.
            Exception: what the policy raised in a request.
        """
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return False
        self._looked = now
        for index, worker in enumerate(self._workers):
            report = worker.report()
            if self._stopping:
                continue
            if isinstance(report, Failed) or worker.ended:
                self._replace(index, self._failure(index, report))
            elif self._step_timeout is not None and self._is_late(index, self._step_timeout):
                self._end_late(index, self._step_timeout)
        return True

    def stop(self, timeout: float) -> list[int]:
        """Have all stop, in ``timeout`` seconds; which environments did not. For any thread, again and again.

        Those that do and close their environment then may take :data:`_CLOSING_SECONDS` more.
        """
        self.tell_to_stop()
        deadline = time.monotonic() + timeout
        for index, _ in self._expected():
            self._await_end(index, deadline)
        return [index for index, worker in self._expected() if not worker.ended]

    def tell_to_stop(self) -> None:
        """Have all stop when their steps are over, and who waits for them go on. Never waits."""
        self._stopping = True
        for ring in self._rings.rings if self._rings is not None else ():
            ring.stop()
        for worker in self._workers:
            worker.dismiss()
        if self._rings is not None:
            self._rings.bell.post()

    def kill(self) -> list[int]:
        """End by force who has not ended; which environments are still there."""
        return [index for index, worker in self._expected() if not worker.kill()]

    def _expected(self) -> list[tuple[int, Worker]]:
        """All that may still end."""
        return [each for each in enumerate(self._workers) if each[0] not in self._given_up]

    def _start(self, index: int) -> Worker:
        if self._context is None:
            return ThreadWorker(index, self._factories[index])
        return ProcessWorker(index, self._factories[index], self._context)

    def _begin(self, index: int) -> None:
        assert self._rings is not None
        plan, seed = self._plan, self._seed
        if seed is not None:
            everywhere = len(self._workers) * plan.num_envs
            seed += index * plan.num_envs + self.restarts[index] * everywhere
        clients = [self._make_client() for _ in range(plan.requests_per_step)]
        order = Begin(plan, self._rings.handle(index), clients, seed, self._interaction)
        self._workers[index].begin(order, self._rings.bell)

    def _meet(self, indices: Iterable[int]) -> None:
        """Wait until these have made their environments; whoever fails first is raised first."""
        deadline = time.monotonic() + self._startup_timeout
        pending = dict.fromkeys(indices)
        while pending:
            patience = LOOK_SECONDS
            for index in list(pending):
                worker = self._workers[index]
                ended, report = worker.ended, worker.report(patience)
                patience = 0.0
                if isinstance(report, Ready):
                    del pending[index]
                    self._check(index, report.specs)
                elif report is not None or ended:
                    raise self._failure(index, report)
            if pending and time.monotonic() >= deadline:
                names = ", ".join(map(str, pending))
                raise TimeoutError(
                    f"environment {names} was not made within startup_timeout={self._startup_timeout:g} s"
                )

    def _check(self, index: int, specs: EnvSpecs) -> None:
        if self._specs is None:
            self._specs = specs
        elif difference := self._specs.difference(specs):
            raise ValueError(
                f"environment {index} differs from environment 0, and one policy cannot serve both: {difference}"
            )

    def _failure(self, index: int, report: Any) -> BaseException:
        """What to raise for a worker that has ended, or is about to."""
        worker = self._workers[index]
        if not isinstance(report, Failed):
            report = worker.report(_LAST_WORDS_SECONDS)
        if not isinstance(report, Failed):
            worker.join(_LAST_WORDS_SECONDS)
            text = f"failed: its process {describe_exit(worker.exitcode)}"
            return EnvironmentFailedError(index, text, exitcode=worker.exitcode)
        cause = decode_exception(report.error)
        if report.policy:
            return cause
        remote = cause if isinstance(cause, RemoteError) else cause.__cause__
        assert isinstance(remote, RemoteError)
        error = EnvironmentFailedError(
            index,
            f"failed during {report.doing}: {remote.class_name}: {remote.message}",
            remote.traceback_text,
        )
        error.__cause__ = cause
        return error

    def _await_end(self, index: int, deadline: float) -> None:
        """Until it has ended, or the ``deadline``, which is later for one that closes."""
        worker = self._workers[index]
        ended = worker.join(max(deadline - time.monotonic(), 0.0))
        if not ended and self._rings is not None and self.rings[index].call[0] == CLOSING:
            worker.join(max(deadline + _CLOSING_SECONDS - time.monotonic(), 0.0))

    def _is_late(self, index: int, step_timeout: float) -> bool:
        """Whether it was late at the last look already, in the same call: meanwhile all of us may have been stopped."""
        call, since = self.rings[index].call if self.began else (0, 0)
        if call not in (RESETTING, STEPPING) or time.monotonic_ns() - since <= step_timeout * 1e9:
            self._late.pop(index, None)
            return False
        known = self._late.get(index)
        self._late[index] = since
        return known == since

    def _end_late(self, index: int, step_timeout: float) -> None:
        doing = "its first reset" if self.rings[index].call[0] == RESETTING else "a step"
        text = f"failed during {doing}, which has taken longer than step_timeout={step_timeout:g} s"
        if self._context is None:
            text += (
                "; its thread cannot be ended by force and is left to itself, so that it is not made anew "
                "(with env_backend='multiprocessing' it can be)"
            )
            self._given_up.add(index)
            raise EnvironmentFailedError(index, text)
        if not self._workers[index].kill():
            raise EnvironmentFailedError(index, f"{text}; its process cannot be killed")
        self._replace(index, EnvironmentFailedError(index, text))

    def _replace(self, index: int, failure: BaseException) -> None:
        if not isinstance(failure, EnvironmentFailedError):
            raise failure
        if self.restarts[index] >= self._max_restarts:
            raise failure
        logger.warning("%s; it is made anew", str(failure))
        self._await_end(index, time.monotonic() + _LAST_WORDS_SECONDS)
        self._workers[index].kill()
        self._end_episodes(index)
        self.rings[index].leave()  # which it did not
        self._late.pop(index, None)
        self.restarts[index] += 1
        self._workers[index] = self._start(index)
        self._meet([index])
        self._begin(index)

    def _end_episodes(self, index: int) -> None:
        """What has lost its environment ends here: the last row was kept for this."""
        ring = self.rings[index]
        if ring.written > ring.read:
            last = (ring.written - 1) % ring.capacity
            views = self._plan.transition.views(ring.rows[last])
            _, truncated, done = (views.tensors[place] for place in self._ends)
            truncated |= ~done
            done.fill_(True)

    def _steps(self, frames: int, workers: int) -> int:
        return max(math.ceil(frames / (workers * self._plan.num_envs)), 0)
