"""What the tests of the transport over monarch's messages serve. Does not import monarch."""

from __future__ import annotations

import time

import torch
from tensordict import TensorDict, TensorDictBase


def request(value: float) -> TensorDict:
    return TensorDict({"x": torch.full((4,), value)})


def value_of(reply: TensorDictBase) -> float:
    return float(reply["y"][0])


class AddOne:
    """Of a request over 1000 it takes a second for each 1000."""

    def __call__(self, batch: TensorDictBase) -> TensorDict:
        most = float(batch["x"].max())
        if most >= 1000:
            time.sleep(most / 1000)
        return TensorDict({"y": batch["x"] + 1}, batch.batch_size)
