"""What travels beside the payload: the interaction type and the policy version."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn.probabilistic import InteractionType, interaction_type, set_interaction_type

from meshinfer.inference.protocol import InferenceClient
from meshinfer.server import ThreadInferenceServer
from meshinfer.testing.check import conformance_check
from meshinfer.testing.harness import TransportHarness, report
from meshinfer.testing.serving import AddOne, request, request_spec, response_spec, serving

__all__ = ["CHECKS"]

KINDS = tuple(InteractionType)
UNSET = -1


class _Kind(AddOne):
    """``y`` is the number of the interaction type under which the policy was called."""

    def __call__(self, batch: TensorDictBase) -> TensorDict:
        result = super().__call__(batch)
        kind = interaction_type()
        result["y"].fill_(UNSET if kind is None else KINDS.index(kind))
        return result


@conformance_check()
def the_interaction_type_travels(harness: TransportHarness) -> None:
    """Each request is computed under its client's interaction type; mixed ones in separate forwards."""
    policy = _Kind()
    number = 2 * (len(KINDS) + 1)
    with serving(harness, policy, batch=number) as server:
        harness.run_client(_ask_each_way, server.clients(number)).result(harness.patience)
    forwards = sorted(sorted(batch) for batch in policy.batches)
    assert forwards == [[kind, kind + 100] for kind in range(len(KINDS) + 1)], policy.batches


def _ask_each_way(clients: list[InferenceClient]) -> None:
    futures, others = [], iter(clients)
    for first in (0, 100):
        for index, kind in enumerate(KINDS):
            with set_interaction_type(kind):
                futures.append((index, next(others).submit(request(first + index))))
        futures.append((UNSET, next(others).submit(request(first + len(KINDS)))))
    for expected, future in futures:
        found = future.result()["y"].unique().tolist()
        assert found == [expected], f"computed under {found} instead of {expected}"


class _Weight(torch.nn.Module):
    """``y`` is the weight, a buffer; so a reply shows which weights computed it."""

    weight: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.tensor(7))

    def forward(self, batch: TensorDictBase) -> TensorDict:
        y = self.weight.expand_as(batch["x"]).clone()
        return TensorDict({"y": y}, batch_size=batch.batch_size)


def _set_weight(server: ThreadInferenceServer, version: int) -> None:
    def change(model: Any) -> None:
        model.weight.fill_(version)

    server.update_model(change, version=version)


@conformance_check()
def the_version_is_that_of_the_weights(harness: TransportHarness) -> None:
    """A reply carries the version of the weights that computed it, also while they change."""
    with serving(harness, _Weight(), policy_version=7) as server:
        run = harness.run_client(_read_versions, server.client(), "policy_version", ())
        assert run.next_report(harness.patience) == 7
        for version in (8, 9, 10, 50):
            _set_weight(server, version)
        assert server.policy_version == 50
        run.result(harness.patience)


@conformance_check()
def the_version_goes_where_it_is_wanted(harness: TransportHarness) -> None:
    """``policy_version_key`` may be nested, is in every row of a vectorised reply, and ``None`` leaves it out."""
    key = ("meta", "version")
    specs = request_spec(3), response_spec(3)
    with serving(harness, _Weight(), specs, policy_version=7, policy_version_key=key) as server:
        run = harness.run_client(_read_versions, server.client(), key, (3,))
        run.next_report(harness.patience)
        _set_weight(server, 50)
        run.result(harness.patience)
    with serving(harness, _Weight(), policy_version_key=None) as server:
        harness.run_client(_read_no_version, server.client()).result(harness.patience)


def _read_versions(client: InferenceClient, key: Any, batch_size: tuple[int, ...]) -> None:
    """Until version 50 comes; reports the first."""
    version = -1
    while version != 50:
        reply = client(request(0, *batch_size))
        stamp = reply[key]
        assert stamp.dtype == torch.int64, stamp.dtype
        assert stamp.shape == batch_size, stamp.shape
        weights = reply["y"].unique().tolist()
        assert stamp.unique().tolist() == weights, f"version {stamp}, computed by {weights}"
        if version == -1:
            report(weights[0])
        version = weights[0]


def _read_no_version(client: InferenceClient) -> None:
    keys = set(client(request(0)).keys(True, True))
    assert keys == {"y"}, keys


CHECKS = (
    the_interaction_type_travels,
    the_version_is_that_of_the_weights,
    the_version_goes_where_it_is_wanted,
)
