"""The other process of `nccl`: raw messages, and clients that connect, ask and leave as they are told."""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

SERVER, CLIENT = 0, 1
_HOST = "127.0.0.1"
_TIMEOUT = timedelta(seconds=50)


@dataclass(frozen=True)
class Side:
    """One end: its device, how its rows travel, and the backend of the raw group."""

    device: str
    backend: Any
    raw: str

    def placed(self) -> dict[str, Any]:
        """Arguments of the transport; a ready backend has its own device."""
        return {"device": self.device} if self.backend == "nccl" else {}

    def settle(self) -> None:
        """Until the current stream has done its work."""
        if self.device != "cpu":
            import torch

            torch.cuda.current_stream().synchronize()


def raw_group(side: Side, store: Any, rank: int) -> None:
    """Join the default process group; a first message builds what it needs."""
    import torch
    from torch import distributed

    if side.device != "cpu":
        torch.cuda.set_device(side.device)
    distributed.init_process_group(side.raw, store=store, rank=rank, world_size=2, timeout=_TIMEOUT)
    one = torch.ones(1, device=side.device)
    steps: list[Callable[..., Any]] = [distributed.send, distributed.recv]
    for step in steps if rank == SERVER else steps[::-1]:
        step(one, 1 - rank)
    side.settle()


def raw_answers(side: Side, nbytes: int, reply: int, count: int, *, waits: bool) -> None:
    """Answer `count` raw messages; `waits`: the host sees each before it answers, as a server with a policy must."""
    from torch import distributed

    incoming, outgoing = _rows(side, nbytes), _rows(side, reply)
    for _ in range(count):
        distributed.recv(incoming, CLIENT)
        if waits:
            side.settle()
        distributed.send(outgoing, CLIENT)
    side.settle()


def _rows(side: Side, nbytes: int) -> Any:
    import torch

    return torch.zeros(nbytes, dtype=torch.uint8, device=side.device)


class Remote:
    """The commands that the other side may send, one method each."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self._clients: dict[str, tuple[Any, Any, Callable[[], Any]]] = {}

    def group(self, port: int) -> None:
        """Join the raw group at the store on `port`."""
        from torch.distributed import TCPStore

        raw_group(self._side, TCPStore(_HOST, port, is_master=False), CLIENT)

    def raw(self, nbytes: int, reply: int, count: int) -> float:
        """Seconds of a raw round trip, the median of `count`."""
        from torch import distributed

        outgoing, incoming = _rows(self._side, nbytes), _rows(self._side, reply)

        def trip() -> None:
            distributed.send(outgoing, SERVER)
            distributed.recv(incoming, SERVER)
            self._side.settle()

        return _median(trip, count)

    def connect(
        self, name: str, backend: Any, nbytes: int, reply: int, port: int, secret: bytes
    ) -> None:
        """A client of that name; a gloo client's observations lie on the device all the same, and are copied."""
        import torch
        from tensordict import TensorDict

        from meshinfer import DistributedTransport

        side = Side(self._side.device, backend, self._side.raw)
        request, answer = (
            TensorDict({key: torch.zeros(size, dtype=torch.uint8)})
            for key, size in (("observation", nbytes), ("action", reply))
        )
        transport = DistributedTransport(
            request,
            answer,
            role="client",
            backend=backend,
            host=_HOST,
            port=port,
            secret=secret,
            **side.placed(),
        )
        client = transport.client()
        row = (torch.arange(nbytes) % 251).to(device=side.device, dtype=torch.uint8)
        expected = row[:reply].clone()
        payload = TensorDict({"observation": row})
        through_host = backend == "gloo" and side.device != "cpu"

        def trip() -> Any:
            action = client(payload.cpu() if through_host else payload)["action"]
            if through_host:
                action = action.to(side.device)
            side.settle()
            return action

        if not torch.equal(trip(), expected):
            raise AssertionError(f"{name}: the reply is not the observation's first {reply} bytes")
        self._clients[name] = transport, client, trip

    def burst(self, name: str, count: int) -> float:
        """Seconds of a round trip, the median of `count`."""
        return _median(self._clients[name][2], count)

    def leave(self, name: str) -> None:
        transport, client, _ = self._clients.pop(name)
        client.close()
        transport.close()


def _median(trip: Callable[[], Any], count: int) -> float:
    times = []
    for _ in range(count):
        began = time.perf_counter()
        trip()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def remote_main(side: Side, pipe: Connection) -> None:
    """Carry out commands until `None`; what fails is told, and the next one may do better."""
    remote = Remote(side)
    with suppress(EOFError):  # the other side is gone
        while (command := pipe.recv()) is not None:
            name, arguments = command
            pipe.send(_outcome(getattr(remote, name), arguments))
        pipe.send(_outcome(_leave_group, {}))


def _outcome(step: Callable[..., Any], arguments: dict[str, Any]) -> tuple[str, Any]:
    try:
        return "done", step(**arguments)
    except Exception:
        return "failed", traceback.format_exc()


def _leave_group() -> None:
    from torch import distributed

    if distributed.is_initialized():
        distributed.destroy_process_group()
