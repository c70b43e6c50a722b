"""PayloadLayout: bytes of a payload, round trips over every dtype, and what is refused."""

from __future__ import annotations

import copy
import json
import pickle
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, lazy_stack, tensorclass
from torch import Tensor

from meshinfer.layout import ALIGNMENT, PayloadLayout

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")

DTYPES = [
    torch.bool,
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex32, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
    torch.float8_e8m0fnu,
]
WORDS = st.sampled_from(["a", "b", "a.b", "obs", "é", " ", "'", "('a', 'b')"])
SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)
BATCHES = st.lists(st.integers(0, 3), max_size=2).map(tuple)
LEAVES = st.tuples(SHAPES, st.sampled_from(DTYPES))
TREES = st.recursive(LEAVES, lambda below: st.dictionaries(WORDS, below, max_size=4), max_leaves=6)


def leaf_count(tree: Any) -> int:
    return sum(map(leaf_count, tree.values())) if isinstance(tree, dict) else 1


SPECS = st.dictionaries(WORDS, TREES, min_size=1, max_size=4).filter(leaf_count)


def random_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Every bit pattern, NaNs included; a bool holds 0 or 1."""
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (prod(shape) * dtype.itemsize,))
    return raw.to(torch.uint8).view(dtype).view(shape)


def spread(tensor: Tensor, how: str) -> Tensor:
    """The same values behind other strides."""
    if how == "transposed" and tensor.dim() > 1:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if how == "strided" and tensor.dim():
        wide = torch.stack([tensor, tensor], -1) if tensor.numel() else tensor.unsqueeze(-1)
        return wide[..., 0]
    if how == "expanded" and tensor.dim() and tensor.shape[-1]:
        return tensor[..., :1].expand(tensor.shape)
    return tensor


def build(tree: Any, batch: tuple[int, ...], how: str = "plain") -> Any:
    if isinstance(tree, dict):
        source = {key: build(below, batch, how) for key, below in tree.items()}
        return TensorDict(source, batch_size=batch)
    shape, dtype = tree
    return spread(random_bytes((*batch, *shape), dtype), how)


def bits(tensor: Tensor) -> list[int]:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    return flat.copy_(tensor.detach().reshape(-1)).view(torch.uint8).tolist()


def same(found: TensorDict, expected: TensorDict) -> None:
    """Equal keys, dtypes, shapes and bits; levels without a leaf do not travel."""
    keys = set(expected.keys(True, True))
    assert set(found.keys(True, True)) == keys
    assert found.batch_size == expected.batch_size
    for key in keys:
        left, right = found.get(key), expected.get(key)
        assert (left.dtype, left.shape) == (right.dtype, right.shape), key
        assert bits(left) == bits(right), key


def packed(layout: PayloadLayout, payload: Any) -> TensorDict:
    views = layout.views(layout.new_rows())
    layout.pack(payload, views)
    return layout.unpack(views)


def refused(spec: Any, payload: Any, error: type[Exception], name: str = "request") -> str:
    """The message of the refusal; nothing may have been written."""
    layout = PayloadLayout.from_spec(spec, name=name)
    row = layout.new_rows()
    with pytest.raises(error) as caught:
        layout.pack(payload, layout.views(row))
    assert not row.any()
    return str(caught.value)


# Round trips


@settings(deadline=None, max_examples=120)
@given(SPECS, BATCHES, st.sampled_from(["plain", "transposed", "strided", "expanded"]))
def test_round_trip_is_bit_exact(tree: Any, batch: tuple[int, ...], how: str) -> None:
    spec, payload = build(tree, batch), build(tree, batch, how)
    layout = PayloadLayout.from_spec(spec)
    found = packed(layout, payload)
    same(found, payload)
    assert all(t.is_contiguous() for t in found.values(True, True))


@settings(deadline=None, max_examples=80)
@given(SPECS, BATCHES, st.integers(0, 3), st.sampled_from([0, 16, 64]))
def test_blocks_equal_rows_one_by_one(
    tree: Any, batch: tuple[int, ...], n: int, header: int
) -> None:
    layout = PayloadLayout.from_spec(build(tree, batch))
    payloads = [build(tree, batch) for _ in range(n)]
    buffer = layout.new_rows(4, header_bytes=header)
    buffer[:, :header] = 7
    block = layout.views(buffer[:, header:])
    for index, payload in enumerate(payloads):
        layout.pack(payload, layout.views(buffer[index, header:]))
    result = layout.unpack_rows(block, n)
    assert result.batch_size == (n * prod(batch),)
    if n:
        same(result, torch.stack(payloads).reshape(n * prod(batch)))

    back = layout.new_rows(4, header_bytes=header)
    layout.pack_rows(result, layout.views(back[:, header:]), n)
    for index, payload in enumerate(payloads):
        same(layout.unpack(layout.views(back[index, header:])), payload)
    assert not back[n:].any()
    assert (buffer[:, :header] == 7).all()


@settings(deadline=None, max_examples=80)
@given(SPECS, BATCHES)
def test_leaves_are_sorted_aligned_and_disjoint(tree: Any, batch: tuple[int, ...]) -> None:
    layout = PayloadLayout.from_spec(build(tree, batch))
    assert [x.key for x in layout.leaves] == sorted(x.key for x in layout.leaves)
    end = 0
    for leaf in layout.leaves:
        assert leaf.offset % ALIGNMENT == 0
        assert leaf.offset >= end
        assert leaf.nbytes == prod(batch) * prod(leaf.shape) * leaf.dtype.itemsize
        end = leaf.offset + leaf.nbytes
    assert layout.row_bytes >= max(end, ALIGNMENT)
    assert layout.row_bytes % ALIGNMENT == 0


@settings(deadline=None, max_examples=150)
@given(SPECS, BATCHES, SPECS, BATCHES, st.booleans())
def test_fingerprint_is_equal_iff_the_layout_is(
    tree: Any, batch: tuple[int, ...], other_tree: Any, other_batch: tuple[int, ...], alike: bool
) -> None:
    if alike:
        other_tree, other_batch = dict(reversed(tree.items())), batch
    one = PayloadLayout.from_spec(build(tree, batch))
    two = PayloadLayout.from_spec(build(other_tree, other_batch), name="response")
    equal = (one.leaves, one.batch_size) == (two.leaves, two.batch_size)
    assert (one.fingerprint == two.fingerprint) is equal
    assert (one == two) is equal
    assert len({one, two}) == 2 - equal
    over_the_wire = json.loads(json.dumps(two.describe()))
    assert bool(one.difference(over_the_wire)) is not equal


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_as_scalar_empty_and_matrix(dtype: torch.dtype) -> None:
    payload = TensorDict(
        {k: random_bytes(s, dtype) for k, s in [("s", ()), ("e", (0, 2)), ("m", (3, 2))]}
    )
    same(packed(PayloadLayout.from_spec(payload), payload), payload)


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128], ids=str)
def test_conjugate_and_negative_views_are_resolved(dtype: torch.dtype) -> None:
    z = torch.complex(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])).to(dtype)
    payload = TensorDict({"conj": z.conj(), "neg": z.conj().imag})
    found = packed(PayloadLayout.from_spec(payload), payload)
    assert found["conj"].tolist() == [1 - 3j, 2 - 4j]
    assert found["neg"].tolist() == [-3.0, -4.0]


def test_only_empty_leaves_still_make_a_row() -> None:
    layout = PayloadLayout.from_spec({"e": torch.zeros(0, 3)})
    assert layout.row_bytes == ALIGNMENT
    assert packed(layout, TensorDict({"e": torch.zeros(0, 3)}))["e"].shape == (0, 3)


def test_extra_keys_are_dropped() -> None:
    layout = PayloadLayout.from_spec({"obs": torch.zeros(2)})
    payload = TensorDict({"obs": torch.ones(2), "note": "text", "x": {"y": torch.zeros(1)}})
    assert list(packed(layout, payload).keys(True, True)) == ["obs"]


def test_nested_levels_keep_the_batch_size_of_the_root() -> None:
    payload = TensorDict({"a": TensorDict({"x": torch.rand(2, 3, 4)}, [2, 3])}, [2])
    found = packed(PayloadLayout.from_spec(payload), payload)
    assert found["a"].batch_size == (2,)
    assert torch.equal(found["a", "x"], payload["a", "x"])


@tensorclass
class Observation:
    pixels: Tensor
    reward: Tensor


def test_tensorclass_as_spec_and_payload() -> None:
    layout = PayloadLayout.from_spec(Observation(torch.zeros(2, 3), torch.zeros(2), batch_size=[2]))
    payload = Observation(torch.rand(2, 3), torch.rand(2), batch_size=[2])
    same(packed(layout, payload), payload.to_tensordict())
    nested = PayloadLayout.from_spec(TensorDict({"o": payload}, [2]))
    assert packed(nested, TensorDict({"o": payload}, [2]))["o", "reward"].equal(payload.reward)


def test_lazy_stacks_as_spec_and_payload() -> None:
    parts = [TensorDict({"a": torch.rand(3), "n": {"b": torch.rand(())}}) for _ in range(2)]
    stack = lazy_stack(parts)
    assert isinstance(stack, LazyStackedTensorDict)
    same(packed(PayloadLayout.from_spec(stack), stack), torch.stack(parts))


# Specs


def test_mapping_with_tuple_keys_equals_the_nested_one() -> None:
    x, y = torch.zeros(2), torch.zeros((), dtype=torch.int64)
    nested = PayloadLayout.from_spec({"a": {"x": x}, "y": y})
    assert nested == PayloadLayout.from_spec({("a", "x"): x, ("y",): y})
    assert nested == PayloadLayout.from_spec({"a": TensorDict({"x": x}), "y": y})
    assert nested == PayloadLayout.from_spec(TensorDict({"a": {"x": x}, "y": y}, device="cpu"))


def test_ready_layout_is_returned_unchanged() -> None:
    layout = PayloadLayout.from_spec({"x": torch.zeros(1)})
    assert PayloadLayout.from_spec(layout, name="response") is layout


def test_object_with_zero_and_meta_leaves() -> None:
    class Composite:
        def zero(self) -> TensorDict:
            return TensorDict({"x": torch.zeros(8, 2, device="meta")}, [8])

    layout = PayloadLayout.from_spec(Composite())
    assert layout == PayloadLayout.from_spec(TensorDict({"x": torch.ones(8, 2)}, [8]))


@pytest.mark.parametrize(
    "spec", [None, 3, [torch.zeros(1)], torch.zeros(1), TensorDict, Observation]
)
def test_spec_of_another_type(spec: object) -> None:
    with pytest.raises(TypeError, match=r"request spec: expected a TensorDict, .* found "):
        PayloadLayout.from_spec(spec)


@pytest.mark.parametrize("spec", [{}, {"a": {}}, TensorDict({}, [3])], ids=["{}", "nested", "td"])
def test_spec_without_leaf(spec: Any) -> None:
    with pytest.raises(ValueError, match="response spec: expected at least one tensor"):
        PayloadLayout.from_spec(spec, name="response")


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        ({"a": {"b": 1.5}}, r"\('a', 'b'\): expected an example tensor, found float"),
        (TensorDict({"n": "text"}), "'n': expected an example tensor, found NonTensorData"),
        ({3: torch.zeros(1)}, "keys of str or tuples of it, found 3"),
        ({(): torch.zeros(1)}, r"keys of str or tuples of it, found \(\)"),
        (
            {"s": torch.eye(2).to_sparse()},
            "'s': expected a dense tensor, found one of torch.sparse_coo",
        ),
        (
            {"b": torch.empty(2, dtype=torch.bits8)},
            "'b': expected a dtype of whole bytes, found bits8",
        ),
        (
            {"i": torch.empty(2, dtype=torch.uint4)},
            "'i': expected a dtype of whole bytes, found uint4",
        ),
    ],
)
def test_spec_with_a_leaf_that_cannot_travel(spec: Any, match: str) -> None:
    with pytest.raises(TypeError, match=match):
        PayloadLayout.from_spec(spec)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_quantized_spec() -> None:
    spec = {"q": torch.quantize_per_tensor(torch.zeros(3), 1.0, 0, torch.quint8)}
    with pytest.raises(TypeError, match="'q': expected a dtype of whole bytes, found quint8"):
        PayloadLayout.from_spec(spec)


def test_key_that_is_tensor_and_level() -> None:
    for spec in (
        {"a": torch.zeros(1), ("a", "b"): torch.zeros(1)},
        {"a": {"b": torch.zeros(1)}, ("a", "b"): torch.zeros(1)},
    ):
        with pytest.raises(ValueError, match=r"found \('a', 'b'\) beside the tensor"):
            PayloadLayout.from_spec(spec)


def test_lazy_stack_of_different_shapes_as_spec() -> None:
    spec = lazy_stack([TensorDict({"a": torch.zeros(3)}), TensorDict({"a": torch.zeros(4)})])
    with pytest.raises(ValueError, match="request spec: expected one shape per leaf"):
        PayloadLayout.from_spec(spec)


# Refusals of pack


OBS = {("agents", "obs"): torch.zeros(3, 84, 84)}


@pytest.mark.parametrize(
    ("leaf", "error", "text"),
    [
        (torch.zeros(4, 84, 84), ValueError, "found float32[4, 84, 84]"),
        (torch.zeros(84, 84), ValueError, "found float32[84, 84]"),
        (torch.zeros(3, 84, 84).double(), TypeError, "found float64[3, 84, 84]; nothing is cast"),
        (
            torch.zeros(3, 84, 84, device="meta"),
            TypeError,
            "on meta, not on cpu; call .cpu() first",
        ),
        (torch.zeros(3, 84, 84).to_sparse(), TypeError, "found a tensor of torch.sparse_coo"),
        (NonTensorData("text"), TypeError, "found NonTensorData; only tensors travel"),
        (TensorDict({"x": torch.zeros(1)}), TypeError, "found TensorDict; only tensors travel"),
    ],
)
def test_leaf_that_does_not_fit(leaf: Any, error: type[Exception], text: str) -> None:
    message = refused(OBS, TensorDict({"agents": {"obs": leaf}}), error)
    assert message.startswith("request ('agents', 'obs'): expected float32[3, 84, 84], found ")
    assert text in message


def test_missing_keys_name_what_is_there() -> None:
    payload = TensorDict({"x": torch.zeros(1), "agents": {"o": torch.zeros(1)}})
    message = refused(OBS, payload, ValueError)
    assert "request ('agents', 'obs'): expected float32[3, 84, 84], found nothing" in message
    assert "present: 'x', ('agents', 'o')" in message
    assert "present: no keys" in refused(OBS, TensorDict({}), ValueError)
    assert "('agents', 'obs')" in refused(OBS, TensorDict({"agents": torch.zeros(1)}), ValueError)


def test_nothing_is_written_when_the_last_leaf_fails() -> None:
    spec = {"a": torch.zeros(2), "z": torch.zeros(2)}
    payload = TensorDict({"a": torch.ones(2), "z": torch.ones(3)})
    assert "response 'z': expected float32[2], found float32[3]" in refused(
        spec, payload, ValueError, name="response"
    )


def test_shapes_that_would_broadcast_are_refused() -> None:
    assert "found float32[1]" in refused(
        {"a": torch.zeros(4)}, TensorDict({"a": torch.ones(1)}), ValueError
    )
    assert "found float32[]" in refused(
        {"a": torch.zeros(1)}, TensorDict({"a": torch.tensor(1.0)}), ValueError
    )


def test_batch_size_that_differs() -> None:
    spec = TensorDict({"a": torch.zeros(8, 2)}, [8])
    message = refused(spec, TensorDict({"a": torch.ones(4, 2)}, [4]), ValueError)
    assert message == "request batch_size: expected [8], found [4]"
    message = refused(spec, TensorDict({"a": torch.ones(8, 2)}, []), ValueError)
    assert message == "request batch_size: expected [8], found []"


@pytest.mark.parametrize("payload", [{"a": torch.ones(1)}, torch.ones(1), None, TensorDict])
def test_payload_of_another_type(payload: Any) -> None:
    message = refused({"a": torch.zeros(1)}, payload, TypeError)
    assert message.startswith("request: expected a TensorDict or a tensorclass, found ")
    assert message.endswith(type(payload).__qualname__)


def test_lazy_stack_of_different_shapes_as_payload() -> None:
    spec = TensorDict({"a": torch.zeros(2, 3)}, [2])
    payload = lazy_stack([TensorDict({"a": torch.ones(3)}), TensorDict({"a": torch.ones(4)})])
    assert "request 'a': expected a dense tensor" in refused(spec, payload, ValueError)


# Blocks


def test_single_observations_reach_the_policy_without_a_copy() -> None:
    layout = PayloadLayout.from_spec({"a": torch.zeros(4), "b": torch.zeros((), dtype=torch.int16)})
    rows = layout.new_rows(3)
    batch = layout.unpack_rows(layout.views(rows), 2)
    batch["a"].fill_(1.0)
    batch["a"].requires_grad_()
    assert layout.unpack(layout.views(rows[1]))["a"].tolist() == [1.0] * 4
    layout.pack_rows(batch.detach(), layout.views(rows), 2)


def test_one_batched_leaf_without_padding_reaches_the_policy_without_a_copy() -> None:
    layout = PayloadLayout.from_spec(TensorDict({"a": torch.zeros(2, 4)}, [2]))
    rows = layout.new_rows(3)
    batch = layout.unpack_rows(layout.views(rows))
    assert batch["a"].shape == (6, 4)
    assert batch["a"].data_ptr() == rows.data_ptr()


def test_results_lose_undeclared_keys_and_gradients() -> None:
    layout = PayloadLayout.from_spec({"action": torch.zeros(2)}, name="response")
    rows = layout.new_rows(3)
    views = layout.views(rows)
    action = torch.rand(2, 2, requires_grad=True)
    layout.pack_rows(TensorDict({"action": action * 2, "hidden": torch.zeros(2, 9)}, [2]), views, 2)
    found = layout.unpack_rows(views, 2)
    assert list(found.keys()) == ["action"]
    assert torch.equal(found["action"], action.detach() * 2)
    assert not views.tensors[0].requires_grad


@pytest.mark.parametrize(
    ("results", "error", "text"),
    [
        (TensorDict({"x": torch.ones(2, 1)}, [2]), KeyError, "found nothing; present: 'x'"),
        (TensorDict({"action": torch.ones(2, 2).double()}), TypeError, "found float64[2, 2]"),
        (TensorDict({"action": torch.ones(2, 3)}), ValueError, "found float32[2, 3]"),
        (TensorDict({"action": torch.ones(1, 2)}), ValueError, "found float32[1, 2]"),
        (TensorDict({"action": torch.ones(2, 1, 2)}), ValueError, "found float32[2, 1, 2]"),
        (TensorDict({"action": "left"}), TypeError, "found NonTensorData"),
    ],
)
def test_results_that_do_not_fit(results: Any, error: type[Exception], text: str) -> None:
    layout = PayloadLayout.from_spec({"action": torch.zeros(2)}, name="response")
    rows = layout.new_rows(4)
    with pytest.raises(error) as caught:
        layout.pack_rows(results, layout.views(rows), 2)
    message = caught.value.args[0]
    assert message.startswith("response 'action': expected float32[2, 2], found ")
    assert text in message
    assert not rows.any()


def test_results_of_another_type() -> None:
    layout = PayloadLayout.from_spec({"a": torch.zeros(2)}, name="response")
    with pytest.raises(
        TypeError, match="response: expected a TensorDict or a tensorclass, found dict"
    ):
        layout.pack_rows({"a": torch.ones(1, 2)}, layout.views(layout.new_rows(1)), 1)  # type: ignore[arg-type]


def test_one_row_and_blocks_are_not_confused() -> None:
    layout = PayloadLayout.from_spec({"a": torch.zeros(2)})
    one, block = layout.views(layout.new_rows()), layout.views(layout.new_rows(3))
    payload = TensorDict({"a": torch.ones(2)})
    for call in (lambda: layout.pack(payload, block), lambda: layout.unpack(block)):
        with pytest.raises(ValueError, match="expected views of one row, found 3 rows"):
            call()
    with pytest.raises(ValueError, match="expected views of a block of rows, found one row"):
        layout.unpack_rows(one)
    for n in (-1, 4):
        with pytest.raises(ValueError, match=f"expected 0 to 3 rows, found n={n}"):
            layout.unpack_rows(block, n)


# Memory, gradients and modes


def test_copies_are_independent_and_borrowed_views_are_not() -> None:
    layout = PayloadLayout.from_spec({"a": torch.zeros(2)})
    views = layout.views(layout.new_rows())
    layout.pack(TensorDict({"a": torch.ones(2)}), views)
    copied, borrowed = layout.unpack(views), layout.unpack(views, copy=False)
    borrowed["a"].requires_grad_()
    layout.pack(TensorDict({"a": torch.full((2,), 5.0)}), views)
    assert copied["a"].tolist() == [1.0, 1.0]
    assert borrowed["a"].tolist() == [5.0, 5.0]


def test_leaves_that_require_grad() -> None:
    layout = PayloadLayout.from_spec({"a": torch.zeros(2), "b": torch.zeros(2)})
    views = layout.views(layout.new_rows())
    weight = torch.nn.Parameter(torch.ones(2))
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            layout.pack(TensorDict({"a": weight, "b": weight * 3}), views)
        assert not any(view.requires_grad for view in views.tensors)
        found = layout.unpack(views)
        assert found["b"].tolist() == [3.0, 3.0]
        assert not found["a"].requires_grad


def test_memory_made_in_inference_mode_is_writable_outside() -> None:
    layout = PayloadLayout.from_spec({"a": torch.zeros(2)})
    with torch.inference_mode():
        views = layout.views(layout.new_rows())
        payload = TensorDict({"a": torch.ones(2)})
    layout.pack(payload, views)
    with torch.inference_mode():
        layout.pack(payload, views)
        found = layout.unpack(views)
    assert not found["a"].is_inference()
    assert (found["a"] * torch.ones(2, requires_grad=True)).sum().backward() is None


def test_default_device_of_the_user_is_ignored() -> None:
    layout = PayloadLayout.from_spec({"a": torch.zeros(2)})
    with torch.device("meta"):
        rows = layout.new_rows(2, header_bytes=32)
        views = layout.views(rows[:, 32:])
    assert rows.device == views.device == torch.device("cpu")
    assert rows.shape == (2, 32 + layout.row_bytes)


def test_rows_that_do_not_fit() -> None:
    layout = PayloadLayout.from_spec({"a": torch.zeros(4)})
    with torch.inference_mode():
        inference = torch.zeros(16, dtype=torch.uint8)
    for row, match in (
        (torch.zeros(32, dtype=torch.uint8), r"expected uint8\[16\] .*, found uint8\[32\]"),
        (torch.zeros(16), r"found float32\[16\]"),
        (torch.zeros(1, 1, 16, dtype=torch.uint8), r"found uint8\[1, 1, 16\]"),
        (torch.zeros(32, dtype=torch.uint8)[8:24], "at multiples of 16 bytes, found offset 8"),
        (torch.zeros(2, 24, dtype=torch.uint8)[:, :16], r"strides \(24, 1\)"),
        (torch.zeros(32, dtype=torch.uint8)[::2], r"strides \(2,\)"),
        (inference, "found one of inference mode"),
    ):
        with pytest.raises(ValueError, match=match):
            layout.views(row)
    for header in (8, -16):
        with pytest.raises(ValueError, match=f"multiple of 16, found {header}"):
            layout.new_rows(header_bytes=header)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_payloads_are_refused_and_cuda_results_are_fetched() -> None:
    spec = TensorDict(
        {"a": torch.rand(3, 2, device="cuda"), "b": torch.rand(3, device="cuda")}, [3]
    )
    message = refused(spec, spec, TypeError)
    assert "it on cuda:0, not on cpu; call .cpu() first" in message
    layout = PayloadLayout.from_spec(spec)
    views = layout.views(layout.new_rows(4))
    layout.pack_rows(spec, views, 1)
    same(layout.unpack_rows(views, 1), spec.cpu())


# As a value


def test_layouts_pickle_and_copy() -> None:
    layout = PayloadLayout.from_spec(
        TensorDict({"a": {"b": torch.zeros(2, 3)}}, [2]), name="response"
    )
    for other in (pickle.loads(pickle.dumps(layout)), copy.deepcopy(layout)):
        assert other == layout
        assert hash(other) == hash(layout)
        assert (other.name, other.leaves, other.row_bytes) == ("response", layout.leaves, 32)
        payload = TensorDict({"a": {"b": torch.rand(2, 3)}}, [2])
        same(packed(other, payload), payload)


def test_layouts_are_immutable_and_readable() -> None:
    layout = PayloadLayout.from_spec({"a": {"b": torch.zeros(2)}, "c": torch.tensor(True)})
    with pytest.raises(AttributeError):
        layout.row_bytes = 1  # type: ignore[misc]
    assert layout != "layout"
    assert repr(layout) == (
        "PayloadLayout(request: {('a', 'b'): float32[2], 'c': bool[]}, batch_size=[], row_bytes=32)"
    )


def test_difference_names_the_keys() -> None:
    here = PayloadLayout.from_spec({"a": {"b": torch.zeros(4)}, "x": torch.zeros(1)})
    there = PayloadLayout.from_spec({"a": {"b": torch.zeros(4).double()}, "a.b": torch.zeros(1)})
    assert here.difference(json.loads(json.dumps(there.describe()))) == (
        "key 'a.b' only there; key 'x' only here; key ('a', 'b'): float32[4] here, float64[4] there"
    )
    batched = PayloadLayout.from_spec(TensorDict({"x": torch.zeros(2)}, [2]))
    assert here.difference(batched.describe()).startswith("batch_size: [] here, [2] there; ")
    many = PayloadLayout.from_spec({f"k{i}": torch.zeros(1) for i in range(9)})
    assert here.difference(many.describe()).endswith("; and 6 more")
    assert here.difference({}).startswith("batch_size: [] here, None there")
