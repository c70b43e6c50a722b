"""A policy is served as the main job would serve it: within this process, or from rank 0 to every other rank."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from tensordict import TensorDict

from meshinfer.doctor.context import Context
from meshinfer.doctor.findings import Finding, fail, info, ok
from meshinfer.doctor.network import network_failure, pretty_seconds
from meshinfer.doctor.roster import SILENT, summary
from meshinfer.errors import MeshInferError
from meshinfer.inference.distributed import DistributedClient, DistributedTransport
from meshinfer.mesh import Mesh
from meshinfer.rendezvous import connect_store, given_secret
from meshinfer.server import InferenceServer

__all__ = ["PAIR_SHARE", "ROLL_SHARE", "pair", "roll_call"]

PAIR_SHARE = 0.7
"""Of the timeout: a rank that has no pair with rank 0 by then says so."""
ROLL_SHARE = 0.85
"""Of the timeout: rank 0 names the ranks that have not reported by then."""
_ROUNDS = 20
_NAME = "doctor"
_REQUEST = TensorDict({"rank": torch.zeros((), dtype=torch.int64), "observation": torch.zeros(4)})
_RESPONSE = TensorDict({"observation": torch.zeros(4)})


class _Echo:
    """The policy: the identity, which notes who asked."""

    def __init__(self, seen: set[int]) -> None:
        self._seen = seen

    def __call__(self, batch: Any) -> Any:
        self._seen.update(batch["rank"].flatten().tolist())
        return batch.select("observation")


def pair(context: Context) -> Finding:
    """Whether gloo pairs can be made and used, with times; rank 0 opens its server, and :func:`roll_call` tells."""
    if context.world_size == 1:
        return _with_itself(context)
    if context.mesh is None or context.roll is None:
        return info("not tried: there is no store of the job to reach")
    if context.rank == 0:
        return _open_server(context, context.mesh)
    return _with_rank_0(context, context.mesh)


def roll_call(context: Context) -> list[Finding]:
    """Rank 0: what the others report. It waits for them even if it serves nobody, so that they can write theirs."""
    roll, roster = context.roll, context.roster
    if roll is None or context.rank != 0 or context.world_size == 1:
        return []
    try:
        if not roster.served:
            roll.announce(context.failed)
        for rank in range(1, context.world_size):
            verdict = roll.verdict(rank, context.left(ROLL_SHARE))
            if verdict is not None:
                roster.verdicts[rank] = verdict
    except (RuntimeError, OSError) as error:
        return [network_failure("the job's store: ", error), *summary(context)]
    return summary(context)


def _with_itself(context: Context) -> Finding:
    timeout = context.left(PAIR_SHARE)
    try:
        with ExitStack() as stack:
            transport = stack.enter_context(_transport(context.mesh, timeout))
            stack.enter_context(InferenceServer(_Echo(set()), transport))
            client = stack.enter_context(transport.client())
            figures = _measure(client, 0, timeout)
    except (MeshInferError, TimeoutError, RuntimeError, OSError) as error:
        return network_failure("a server and a client of this process: ", error)
    return ok(f"a server and a client of this process: {_spell(figures)}", **figures)


def _transport(mesh: Mesh | None, timeout: float) -> DistributedTransport:
    if mesh is None or mesh.directory is None:
        return DistributedTransport(_REQUEST, _RESPONSE, timeout=timeout)
    return mesh.transport(_REQUEST, _RESPONSE, name=_NAME, timeout=timeout)


def _with_rank_0(context: Context, mesh: Mesh) -> Finding:
    """As a client of rank 0's server."""
    assert mesh.directory is not None
    assert context.roll is not None
    began = time.monotonic()
    try:
        failed = context.roll.wait_for_server(context.left(PAIR_SHARE))
        if failed is None:
            seconds = time.monotonic() - began
            return fail(f"rank 0 has opened no server within {seconds:.1f} s", SILENT)
        if failed:
            return fail(
                f"rank 0 opens no server: {', '.join(failed)} failed there", "see its lines"
            )
        secret = given_secret(mesh.secret)
        left = context.left(PAIR_SHARE)
        address = mesh.directory.lookup(f"{_NAME}/0", timeout=left, secret=secret)
        found = time.monotonic()
        connect_store(address.host, address.port, left, awaited="rank 0's server")
        connected = time.monotonic()
        with _transport(mesh, left) as transport, transport.client() as client:
            figures = _measure(client, mesh.rank, context.left(PAIR_SHARE))
    except (MeshInferError, TimeoutError, RuntimeError, OSError) as error:
        return network_failure("with rank 0: ", error)
    figures["connect_seconds"] = connected - found
    context.figures = figures
    where = f"with rank 0 at {address.host}:{address.port}"
    return ok(f"{where}: {_spell(figures)}", host=address.host, port=address.port, **figures)


def _measure(client: DistributedClient, rank: int, timeout: float) -> dict[str, float]:
    request = TensorDict({"rank": torch.tensor(rank), "observation": torch.ones(4)})
    times = []
    for _ in range(_ROUNDS + 1):
        began = time.monotonic()
        client(request, timeout=timeout)
        times.append(time.monotonic() - began)
    first, *others = times
    return {"pair_seconds": first, "round_trip_seconds": statistics.median(others)}


def _spell(figures: Mapping[str, float]) -> str:
    connected = figures.get("connect_seconds")
    parts = [] if connected is None else [f"connected in {pretty_seconds(connected)}"]
    parts.append(f"paired in {pretty_seconds(figures['pair_seconds'])}")
    parts.append(f"round trip {pretty_seconds(figures['round_trip_seconds'])}")
    return ", ".join(parts)


def _open_server(context: Context, mesh: Mesh) -> Finding:
    """For all other ranks. It ends after the report, since that can take long."""
    assert context.roll is not None
    try:
        transport = context.closing.enter_context(_transport(mesh, context.left(PAIR_SHARE)))
        context.closing.enter_context(InferenceServer(_Echo(context.roster.paired), transport))
        context.roll.announce([])
    except (MeshInferError, TimeoutError, RuntimeError, OSError) as error:
        return network_failure("as the server of all other ranks: ", error)
    context.roster.served = True
    address = transport.address
    assert address is not None
    return ok(
        f"serves all other ranks at {address.host}:{address.port}",
        host=address.host,
        port=address.port,
    )
