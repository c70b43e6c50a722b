"""What may be given as a transport's ``backend`` and ``device``, and what is said of anything else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from meshinfer import DistributedTransport, InferenceServer, NcclRows, ProcessInferenceServer
from meshinfer.inference.distributed.pair import plain
from meshinfer.testing import GlooRows

SPEC = TensorDict({"x": torch.zeros(1)})


@pytest.mark.parametrize("role", ["server", "client"])
@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"backend": GlooRows}, TypeError, r"backend=GlooRows: a class.*GlooRows\(\.\.\.\)"),
        ({"backend": NcclRows}, TypeError, "backend=NcclRows: a class"),
        ({"backend": object()}, TypeError, "backend=<object.*expected 'gloo', 'nccl' or a Row"),
        ({"backend": None}, TypeError, "backend=None: expected 'gloo', 'nccl'"),
        ({"backend": "NCCL"}, ValueError, "backend='NCCL': expected 'gloo' or 'nccl'"),
        ({"backend": "nccl", "device": "tpu"}, ValueError, "device='tpu': expected a CUDA device"),
        ({"backend": "nccl", "device": "cpu"}, ValueError, "device='cpu'.*backend='gloo'"),
        ({"device": 0}, ValueError, "device='0'.*backend='nccl' too, or leave"),
        ({"device": "tpu"}, ValueError, "device='tpu'.*backend='nccl' too"),
        ({"device": "cuda:0"}, ValueError, "device='cuda:0'.*backend='nccl' too"),
        ({"backend": GlooRows(), "device": 0}, ValueError, "device='0': a ready backend has its"),
        ({"backend": GlooRows(), "window": 3}, ValueError, "window=3: at most 2 over 'announced"),
    ],
)
def test_what_cannot_work_is_named_when_the_transport_is_made(
    role: str, arguments: Any, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        DistributedTransport(SPEC, SPEC, role=role, port=1, secret="s", **arguments)


def test_gloo_has_its_payloads_in_cpu_memory() -> None:
    with DistributedTransport(SPEC, SPEC, device="cpu") as transport:
        assert transport.backend == "gloo"
        assert transport.row_device is None


def test_a_client_is_over_gloo_or_as_its_transport() -> None:
    with (
        DistributedTransport(SPEC, SPEC, backend=GlooRows()) as transport,
        pytest.raises(ValueError, match=r"backend='nccl': expected 'gloo', or nothing.*announced"),
    ):
        transport.client(backend="nccl")  # type: ignore[arg-type]


def test_an_option_of_the_transport_beside_the_server_s_arguments() -> None:
    said = r"ProcessInferenceServer has no argument 'backend'.*transport_options=\{\.\.\.\}"
    with pytest.raises(TypeError, match=said):
        ProcessInferenceServer(dict, "distributed", backend="nccl")  # type: ignore[call-arg]


def test_who_chose_the_transport_that_lacks_an_option() -> None:
    with pytest.raises(TypeError, match="transport 'auto' chose 'queue', which has no option"):
        InferenceServer(dict, transport_options={"backend": "nccl"})  # type: ignore[arg-type]


def test_several_kinds_for_a_server_elsewhere() -> None:
    with pytest.raises(TypeError, match=r"several transports at once.*service_backend='thread'"):
        InferenceServer(dict, ["shared_memory", "distributed"], service_backend="process")  # type: ignore[call-overload]


@pytest.mark.parametrize(
    "said",
    [
        "[/build/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:27017. This is typically"
        " caused by a remote worker crashing. Check the logs of the remote worker before reporting an error.",
        "Connection closed by peer [127.0.0.1]:27017",
    ],
)
def test_gloo_s_words_without_its_source_and_its_advice(said: str) -> None:
    assert plain(RuntimeError(said)) == "Connection closed by peer [127.0.0.1]:27017"
