"""Actors and policies for the tests of monarch's meshes. Monarch's processes get them by value."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from monarch.actor import Actor, current_rank, endpoint
from tensordict import TensorDict, TensorDictBase

from meshinfer import TransportError

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SECONDS = 60.0


def request(value: float) -> TensorDict:
    return TensorDict({"observation": torch.tensor([value])}, [])


def response() -> TensorDict:
    return TensorDict({"action": torch.zeros(1)}, [])


class Scale(torch.nn.Module):
    """Twice the observation, or as the weights say."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, data: TensorDictBase) -> TensorDict:
        observation = data["observation"]
        return TensorDict({"action": observation * self.factor}, data.batch_size)


class PidOf:
    """The process that computes; a policy without specs."""

    def __call__(self, data: TensorDictBase) -> TensorDict:
        pids = torch.full((*data.batch_size, 1), os.getpid(), dtype=torch.int64)
        return TensorDict({"pid": pids}, data.batch_size)


def refuse() -> Any:
    raise LookupError("no policy today")


class Env(Actor):
    """One environment rank, with a client of each server handle that it is given."""

    def __init__(self, *servers: Any) -> None:
        self.clients = [server.client() for server in servers]
        self.rank = current_rank().rank

    @endpoint
    def ask(self, value: float, which: int = 0) -> tuple[float, int]:
        """What the policy makes of ``value``, and its version."""
        reply = self.clients[which](request(value), timeout=SECONDS)
        return reply["action"].item(), int(reply["policy_version"])

    @endpoint
    def server_pid(self, which: int = 0) -> int:
        return int(self.clients[which](request(0.0), timeout=SECONDS)["pid"])

    @endpoint
    def ask_with(self, client: Any, value: float) -> float:
        """With a client that was handed over by hand."""
        with client:
            return float(client(request(value), timeout=SECONDS)["action"].item())

    @endpoint
    def ask_until_error(self, which: int, note: str) -> str:
        """Ask without an end; the name of the error that ends it, which is noted in a file too."""
        count = 0
        try:
            while True:
                self.clients[which](request(float(count)))
                count += 1
                if count == 10:
                    Path(f"{note}.asking").touch()
        except TransportError as error:
            Path(note).write_text(type(error).__name__)
            return type(error).__name__

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def fail(self) -> None:
        sys.exit(3)
