"""NCCL rows beside raw NCCL: two processes, one GPU or two, and a message of the same size each way."""

from __future__ import annotations

import math
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from .load import Hand
from .nccl_client import SERVER, Side, raw_answers, raw_group, remote_main
from .part import Impossible, Part
from .versions import MULTI_RANK, nccl_runtime

_HOST = "127.0.0.1"
_KIB, _MIB = 1 << 10, 1 << 20
_SIZES = (4 * _KIB, 64 * _KIB, _MIB, 10 * _MIB)
_DRY_SIZES = (4 * _KIB, _MIB)
_REPLY_BYTES = 64
_PAIRS = (1, 2, 4, 8)
_DRY_PAIRS = (1, 2)
_SECONDS = 60.0
_FEW, _MANY = 10, 2000


def run(part: Part) -> None:
    """Round trips of each size, the memory of pairs, and batches of both kinds of client."""
    side = _side(part)
    if part.dry:
        part.note(f"a stand-in for NCCL: rows that headers announce, over gloo ({side.backend})")
    with _partner(part, side) as partner:
        for nbytes in _DRY_SIZES if part.dry else _SIZES:
            part.row(**_round_trips(part, side, partner, nbytes))
        for measure in (_memory, _both_kinds):
            try:
                for row in measure(part, side, partner):
                    part.row(**row)
            except RuntimeError as error:  # the others are worth having
                part.wrong(f"{measure.__name__.strip('_')}: {error}")


def _side(part: Part) -> Side:
    """Where the server is; raises Impossible where two ranks cannot be."""
    if part.dry:
        try:
            from meshinfer.testing.announced import GlooRows
        except ImportError as error:
            raise Impossible(f"no stand-in for NCCL: {error}") from error
        return Side("cpu", GlooRows(), "gloo")
    if not torch.distributed.is_nccl_available():
        raise Impossible("this torch was built without NCCL")
    version = nccl_runtime() or (0, 0, 0)
    if torch.cuda.device_count() < 2 and version < MULTI_RANK:
        raise Impossible(
            f"one GPU, and NCCL {'.'.join(map(str, version))} refuses two ranks on it; 2.30 and later have "
            "NCCL_MULTI_RANK_GPU_ENABLE: bring a wheel with --nccl-wheel-parts"
        )
    return Side("cuda:0", "nccl", "nccl")


@contextmanager
def _partner(part: Part, side: Side) -> Iterator[Hand]:
    """The client's process, connected to this one by a raw group."""
    store = _store()
    second = torch.cuda.device_count() > 1 and not part.dry
    theirs = Side("cuda:1" if second else side.device, side.backend, side.raw)
    partner = Hand(remote_main, theirs)
    try:
        partner.tell(("group", {"port": store.port}))
        raw_group(side, store, SERVER)
        partner.answer(_SECONDS)
        yield partner
        partner.tell(None)
        torch.distributed.destroy_process_group()
        partner.answer(_SECONDS)
    finally:
        partner.end()


def _store() -> torch.distributed.TCPStore:
    """Where both processes find each other, on the loopback interface alone."""
    listener = socket.create_server((_HOST, 0))
    port = listener.getsockname()[1]
    return torch.distributed.TCPStore(
        _HOST,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


@contextmanager
def _serving(side: Side, nbytes: int, batch: int = 1) -> Iterator[Any]:
    """A server whose reply is the first bytes of each observation, and where it is."""
    import meshinfer

    transport = meshinfer.DistributedTransport(
        *_specs(nbytes), backend=side.backend, **side.placed(), host=_HOST
    )
    with (
        transport,
        meshinfer.InferenceServer(
            _first_bytes,
            transport,
            policy_device=side.device,
            max_batch_size=max(batch, 1),
            min_batch_size=batch,
            timeout=0.2,
        ) as server,
    ):
        assert transport.address is not None
        address = {"port": transport.address.port, "secret": transport.address.secret}
        yield server, {"nbytes": nbytes, "reply": _REPLY_BYTES, **address}


def _specs(nbytes: int) -> tuple[TensorDict, TensorDict]:
    request, reply = (
        TensorDict({name: torch.zeros(size, dtype=torch.uint8)})
        for name, size in (("observation", nbytes), ("action", _REPLY_BYTES))
    )
    return request, reply


def _first_bytes(batch: TensorDictBase) -> TensorDict:
    return TensorDict({"action": batch["observation"][:, :_REPLY_BYTES]}, batch.batch_size)


def _round_trips(part: Part, side: Side, partner: Hand, nbytes: int) -> dict[str, Any]:
    """Bursts of raw messages, of ours and of a gloo client's with copies through the host, in turn."""
    rounds, seconds = (2, 0.05) if part.dry else (3, 0.2) if part.quick else (5, 0.3)
    times: dict[str, list[float]] = {}
    with _serving(side, nbytes) as (_, address):
        names = list(_connected(part, side, partner, address))
        # A few round trips of each kind tell how many there is time for: two processes that share a GPU take turns,
        # and one kind may need more of them than another.
        few = [_raw(side, partner, nbytes, _FEW, waits=waits) for waits in (False, True)]
        few += [_told(partner, "burst", name=name, count=_FEW) for name in names]
        count = max(_FEW, min(_MANY, math.ceil(seconds / max(few))))
        for _ in range(rounds):
            medians = {
                "raw": _raw(side, partner, nbytes, count, waits=False),
                "raw, host waits": _raw(side, partner, nbytes, count, waits=True),
                **{name: _told(partner, "burst", name=name, count=count) for name in names},
            }
            for name, median in medians.items():
                times.setdefault(name, []).append(median)
        for name in names:
            _told(partner, "leave", name=name)
    return _compared(nbytes, times)


def _connected(part: Part, side: Side, partner: Hand, address: dict[str, Any]) -> Iterator[str]:
    """The clients that could connect."""
    for name, backend in (("ours", side.backend), ("gloo", "gloo")):
        try:
            _told(partner, "connect", name=name, backend=backend, **address)
            yield name
        except RuntimeError as error:  # raw numbers are worth having all the same
            part.wrong(f"{name}, {address['nbytes']} bytes: {error}")


def _raw(side: Side, partner: Hand, nbytes: int, count: int, *, waits: bool) -> float:
    """Seconds of a raw round trip, the median of `count`."""
    partner.tell(("raw", {"nbytes": nbytes, "reply": _REPLY_BYTES, "count": count}))
    raw_answers(side, nbytes, _REPLY_BYTES, count, waits=waits)
    return float(partner.answer(_SECONDS))


def _compared(nbytes: int, times: dict[str, list[float]]) -> dict[str, Any]:
    """Medians over the rounds in microseconds, and ratios round by round."""
    row: dict[str, Any] = {"what": "round trip", "bytes": nbytes}
    columns = {"raw": "raw", "raw, host waits": "raw_host", "ours": "ours", "gloo": "gloo"}
    for name in times:
        row[f"{columns[name]}_us"] = 1e6 * statistics.median(times[name])
    for name in ("raw", "ours"):
        if name in times:
            row[f"{name}_gb_per_s"] = nbytes / statistics.median(times[name]) / 1e9
    for column, base in (("ratio", "raw"), ("ratio_host", "raw, host waits")):
        if "ours" in times:
            pairs = zip(times["ours"], times[base], strict=True)
            row[column] = statistics.median(ours / raw for ours, raw in pairs)
    return row


def _memory(part: Part, side: Side, partner: Hand) -> Iterator[dict[str, Any]]:
    """MiB of the GPUs that pairs take, both ends together."""
    pairs = _DRY_PAIRS if part.dry else _PAIRS
    with _serving(side, 4 * _KIB) as (_, address):
        before, built, began = _used(side), 0, time.monotonic()
        for count in pairs:
            while built < count:
                _told(partner, "connect", name=f"pair {built}", backend=side.backend, **address)
                built += 1
            grown = _used(side) - before
            each = (time.monotonic() - began) / built
            yield {
                "what": "memory",
                "pairs": built,
                "mib": grown / _MIB,
                "mib_per_pair": grown / _MIB / built,
                "connect_s": each,
            }
        for number in range(built):
            _told(partner, "leave", name=f"pair {number}")


def _used(side: Side) -> int:
    """Bytes of all GPUs here that are taken, by whatever process."""
    if side.device == "cpu":
        return 0
    torch.cuda.synchronize()
    sizes = (torch.cuda.mem_get_info(index) for index in range(torch.cuda.device_count()))
    return sum(total - free for free, total in sizes)


def _both_kinds(part: Part, side: Side, partner: Hand) -> Iterator[dict[str, Any]]:
    """One client of each kind, and batches that wait for both."""
    count = 50 if part.dry else 500
    other = Hand(remote_main, Side("cpu", "gloo", "gloo"))
    with ExitStack() as stack:
        stack.callback(other.end)
        server, address = stack.enter_context(_serving(side, 64 * _KIB, batch=2))
        commands: list[tuple[Hand, str, Any]] = [
            (partner, "ours", side.backend),
            (other, "gloo", "gloo"),
        ]
        _all_told(commands, lambda name, kind: ("connect", dict(address, name=name, backend=kind)))
        server.stats(reset=True)
        _all_told(commands, lambda name, _: ("burst", {"name": name, "count": count}))
        found = server.stats()
        _all_told(commands, lambda name, _: ("leave", {"name": name}))
        other.tell(None)
        other.answer()
    yield {
        "what": "both kinds in one batch",
        "requests": found.requests,
        "mean_batch": found.mean_batch_size,
        "us_per_batch": 1e6 * found.seconds / max(found.batches, 1),
    }


def _told(partner: Hand, command: str, **arguments: Any) -> Any:
    partner.tell((command, arguments))
    return partner.answer(_SECONDS)


def _all_told(
    hands: list[tuple[Hand, str, Any]], make: Callable[[str, Any], tuple[str, dict[str, Any]]]
) -> None:
    for hand, name, kind in hands:
        hand.tell(make(name, kind))
    for hand, _, _ in hands:
        hand.answer(_SECONDS)
