"""Payloads of any structure: told apart, copied, stacked and split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    lazy_stack,
    tensorclass,
)

from meshinfer.items import check_collection, copy_item, split_items, stack_items, structure_of

DTYPES = (torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64)


@tensorclass
class Pose:
    joints: torch.Tensor
    name: str


def observation(**changes: Any) -> TensorDict:
    leaves: dict[str, Any] = {
        "x": torch.zeros(3),
        "agent": {"count": torch.zeros(2, dtype=torch.int64)},
    }
    return TensorDict({**leaves, **changes})


# --- Structure -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        observation(x=torch.zeros(4)),
        observation(x=torch.zeros(3, dtype=torch.float64)),
        observation(more=torch.zeros(1)),
        observation().exclude("x"),
        observation(agent=torch.zeros(2)),
        observation(agent={"count": torch.zeros(3, dtype=torch.int64)}),
        observation(x="a word"),
        observation(x=torch.zeros(3).to_sparse()),
        observation().expand(2),
        observation().expand(1),
    ],
)
def test_what_cannot_be_stacked_differs(other: TensorDict) -> None:
    assert structure_of(other) != structure_of(observation())
    assert hash(structure_of(other)) == hash(structure_of(other))


@pytest.mark.parametrize(
    "other",
    [
        observation(x=torch.ones(3)),
        observation(x=torch.ones(3, requires_grad=True)),
        observation(x=torch.ones(6)[::2]),
        TensorDict({key: observation()[key] for key in ("agent", "x")}),
        observation().lock_(),
        observation().to("cpu"),
    ],
)
def test_what_can_be_stacked_is_alike(other: TensorDict) -> None:
    assert structure_of(other) == structure_of(observation())


def test_values_that_are_no_tensors_do_not_count() -> None:
    assert structure_of(observation(note="a")) == structure_of(observation(note="b"))
    assert structure_of(observation(note="a")) != structure_of(observation())


def test_sparse_tensors_are_each_on_their_own() -> None:
    sparse = [observation(x=torch.zeros(3).to_sparse()) for _ in range(2)]
    assert structure_of(sparse[0]) != structure_of(sparse[1])


@pytest.mark.parametrize(
    ("value", "name"),
    [({"x": 1}, "dict"), (TensorDict, "TensorDict"), (NonTensorData("x"), "NonTensor")],
)
def test_what_is_no_payload_is_refused(value: Any, name: str) -> None:
    with pytest.raises(TypeError, match=f"expected a TensorDict or a tensorclass, found {name}"):
        check_collection(value)


# --- Copies --------------------------------------------------------------------------------------


def test_a_copy_is_independent_and_plain() -> None:
    weight = torch.ones(3, requires_grad=True)
    source = observation(x=weight * 2, note="a").lock_()
    copy = copy_item(source)
    source["x"].detach().fill_(9)
    assert copy["x"].tolist() == [2, 2, 2]
    assert copy["note"] == "a"
    assert not copy["x"].requires_grad
    assert not copy.is_locked


def test_a_lazy_stack_of_equals_becomes_dense() -> None:
    equal = lazy_stack([observation(), observation()])
    assert type(copy_item(equal)) is TensorDict
    assert structure_of(copy_item(equal)) == structure_of(
        torch.stack([observation(), observation()])
    )
    unequal = copy_item(lazy_stack([observation(), observation(x=torch.ones(5))]))
    assert isinstance(unequal, LazyStackedTensorDict)
    assert unequal[1]["x"].tolist() == [1] * 5


# --- There and back ------------------------------------------------------------------------------


@st.composite
def payloads(draw: st.DrawFn) -> tuple[list[TensorDict], torch.Size]:
    """Several payloads of one structure, with values of their own."""
    batch = torch.Size(draw(st.lists(st.integers(1, 3), max_size=2)))
    shapes = st.lists(st.integers(0, 3), max_size=2)
    specs = draw(st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=3))
    depth, count = draw(st.integers(0, 2)), draw(st.integers(1, 4))

    def one(seed: int) -> TensorDict:
        leaves: Any = {
            f"k{i}": (torch.arange(batch.numel() * torch.Size(shape).numel()) * 7 + seed)
            .view((*batch, *shape))
            .to(dtype)
            for i, (shape, dtype) in enumerate(specs)
        }
        for _ in range(depth):
            leaves = {"down": leaves, **leaves}
        return TensorDict(leaves, batch_size=batch)

    return [one(seed) for seed in range(count)], batch


@given(payloads())
@settings(max_examples=60, deadline=None)
def test_splitting_undoes_stacking(drawn: tuple[list[TensorDict], torch.Size]) -> None:
    parts, batch_size = drawn
    assert len({structure_of(part) for part in parts}) == 1
    batch = stack_items(parts)
    assert batch.batch_size == torch.Size([len(parts) * batch_size.numel()])
    for back, part in zip(split_items(batch, len(parts), batch_size), parts, strict=True):
        assert structure_of(back) == structure_of(part)
        assert (back == part).all()


def test_what_is_no_tensor_is_stacked_and_split_too() -> None:
    parts = [
        observation(note=word, pose=Pose(torch.full((2,), i), word)) for i, word in enumerate("ab")
    ]
    batch = stack_items(parts)
    assert isinstance(batch.get("note"), NonTensorStack)
    assert batch["pose"].joints.shape == (2, 2)
    for back, word, value in zip(split_items(batch, 2, torch.Size()), "ab", (0, 1), strict=True):
        assert back["note"] == word
        assert back["pose"].joints.tolist() == [value, value]
        assert back["pose"].name == word


def test_vectorised_words_keep_their_rows() -> None:
    parts = [TensorDict({"note": NonTensorStack(*words)}, [2]) for words in ("ab", "cd")]
    batch = stack_items(parts)
    assert batch["note"] == ["a", "b", "c", "d"]
    assert [back["note"] for back in split_items(batch, 2, torch.Size([2]))] == [
        ["a", "b"],
        ["c", "d"],
    ]


def test_a_payload_without_leaves() -> None:
    batch = stack_items([TensorDict(), TensorDict()])
    assert batch.batch_size == (2,)
    assert [back.batch_size for back in split_items(batch, 2, torch.Size())] == [(), ()]


def test_parts_share_no_memory_with_the_batch_or_each_other() -> None:
    batch = TensorDict({"y": torch.zeros(3, 2)}, [3])
    first, second, _ = split_items(batch, 3, torch.Size())
    first["y"].fill_(1)
    first["y"].mul_(torch.ones(2, requires_grad=True))
    assert first["y"].requires_grad
    assert batch["y"].sum() == second["y"].sum() == 0
    assert not second["y"].requires_grad
    assert second["y"].untyped_storage().nbytes() == 8


@pytest.mark.parametrize(
    ("results", "found"),
    [
        (
            lambda: TensorDict({"y": torch.zeros(3)}, [3]),
            "returned 3 rows for 2 requests, expected 4",
        ),
        (lambda: TensorDict({"y": torch.zeros(4)}), "returned 0 rows for 2 requests, expected 4"),
    ],
)
def test_a_wrong_number_of_rows_is_an_error(results: Callable[[], TensorDict], found: str) -> None:
    with pytest.raises(ValueError, match=found):
        split_items(results(), 2, torch.Size([2]))
