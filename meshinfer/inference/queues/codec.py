"""Payloads as bytes: a row where all leaves are plain tensors, pickled otherwise."""

from __future__ import annotations

import pickle
from functools import lru_cache
from typing import Any, Final, TypeAlias

import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from torch import Tensor

from meshinfer.inference.queues.pickling import PLAIN, check_devices, dump, on_another_device
from meshinfer.inference.queues.wire import HEADER_BYTES
from meshinfer.layout import PayloadLayout

__all__ = ["MAX_LAYOUTS", "Message", "Packer", "Structure", "structure_of"]

MAX_LAYOUTS: Final = 256
"""Layouts that one end of a stream remembers; of a payload whose shape never returns each is described anew."""
_SPARE_BYTES: Final = 1 << 20
_SPARE_MESSAGES: Final = 4

_Key: TypeAlias = tuple[str, ...]
_Signature: TypeAlias = tuple[Any, ...]


class Structure:
    """What payloads of one kind have in common: everything but the values.

    Attributes:
        layout: of the row.
        key: equal for equal layouts.
        description: for :func:`structure_of` at the other end.
    """

    __slots__ = ("_plan", "description", "key", "layout")

    def __init__(self, layout: PayloadLayout, description: bytes | None = None) -> None:
        self.layout = layout
        self.key = layout.fingerprint
        self.description = pickle.dumps(layout) if description is None else description
        lead = layout.batch_size
        self._plan = [
            (leaf.dtype, (lead + leaf.shape).numel(), leaf.offset, _reshaped(lead + leaf.shape))
            for leaf in layout.leaves
        ]

    def unpack(self, row: bytearray | memoryview) -> TensorDict:
        """The payload in ``row``, uint8 ``[row_bytes]`` at a multiple of 16 bytes.

        The tensors live in the row's memory, which they keep, and are independent of each other.
        """
        read = torch.frombuffer
        tensors = []
        for dtype, count, offset, shape in self._plan:
            if count:
                tensor = read(row, dtype=dtype, count=count, offset=offset)
                # Resized in place: as a view it would share autograd's version counter with another tensor.
                tensors.append(tensor if shape is None else tensor.resize_(shape))
            else:
                tensors.append(torch.empty(shape or (0,), dtype=dtype, device="cpu"))
        return self.layout.assemble(tensors)


@lru_cache(maxsize=4 * MAX_LAYOUTS)
def structure_of(description: bytes) -> Structure:
    """The structure that a peer described. Only from one that has proved to hold the secret: it is unpickled."""
    return Structure(pickle.loads(description), description)


class Message:
    """A packed payload. The header, which begins the first buffer, is written when it is sent.

    Attributes:
        buffers: header and body.
        length: bytes of the body.
        structure: ``None`` for a pickled one.
    """

    __slots__ = ("_home", "_targets", "buffers", "length", "structure")

    def __init__(self, buffers: list[memoryview], home: _Known | None = None) -> None:
        self.buffers = buffers
        self.length = sum(map(len, buffers)) - HEADER_BYTES
        self.structure = None if home is None else home.structure
        self._home = home
        self._targets: list[Tensor] = []

    @classmethod
    def for_rows(cls, home: _Known) -> Message:
        """One whose row may be written again and again."""
        layout = home.structure.layout
        with torch.inference_mode(False):
            frame = torch.empty(HEADER_BYTES + layout.row_bytes, dtype=torch.uint8, device="cpu")
        octets: Any = frame.numpy()
        made = cls([memoryview(octets)], home)
        targets = layout.views(frame[HEADER_BYTES:]).tensors
        made._targets = [targets[index] for index in home.order]
        return made

    def fill(self, tensors: list[Tensor]) -> Message:
        """Write the row: ``tensors`` in the order in which the payload has them."""
        torch._foreach_copy_(self._targets, tensors)
        return self

    def recycle(self) -> None:
        """All of it has left: its memory may take another payload."""
        home = self._home
        if home is not None and self.length <= _SPARE_BYTES and len(home.spare) < _SPARE_MESSAGES:
            home.spare.append(self)


class _Known:
    """A structure as the payloads of one sender have it: where their first leaf goes, where the second, and so on."""

    __slots__ = ("order", "spare", "structure")

    def __init__(self, structure: Structure, order: list[int]) -> None:
        self.structure = structure
        self.order = order
        self.spare: list[Message] = []


class Packer:
    """Makes messages. Remembers structures: a payload like an earlier one costs a look at each leaf and one copy.

    May be used by several threads at once.

    Args:
        name: what errors call the payload.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._known: dict[_Signature, _Known | None] = {}

    def pack(self, payload: TensorDictBase) -> Message:
        """Copy ``payload`` into a message, which refers to nothing of it.

        Raises:
            TypeError: no TensorDict or tensorclass; a tensor that is not on the CPU, or something that cannot be
                pickled.
        """
        if type(payload) is TensorDict:
            tensors: list[Tensor] = []
            signature = self._look(payload, tensors, ())
            known = None if signature is None else self._recall(signature, payload)
            if known is not None:
                spare = known.spare
                return (spare.pop() if spare else Message.for_rows(known)).fill(tensors)
        elif isinstance(payload, type) or not is_tensor_collection(payload):
            kind = payload if isinstance(payload, type) else type(payload)
            raise TypeError(
                f"{self._name}: expected a TensorDict or a tensorclass, found {kind.__qualname__}"
            )
        check_devices(payload, self._name)
        return Message([memoryview(bytearray(HEADER_BYTES)), dump(payload, self._name)])

    def _look(self, payload: TensorDict, tensors: list[Tensor], prefix: _Key) -> _Signature | None:
        """Collect the leaves; what tells their layout, ``None`` when a row cannot hold the payload as it is."""
        found: list[Any] = [payload.batch_size]
        items: Any = payload.items()
        for key, value in items:
            kind = type(value)
            if kind in PLAIN:
                if not value.is_cpu:
                    raise on_another_device(self._name, (*prefix, key), value)
                if value.layout is not torch.strided or value.is_nested:
                    return None
                tensors.append(value.detach() if value.requires_grad else value)
                found.append((key, value.dtype, value.shape))
            elif kind is TensorDict:
                below = self._look(value, tensors, (*prefix, key))
                if below is None or below[0] != found[0]:
                    return None
                found.append((key, below))
            else:
                return None
        # A row knows neither empty levels nor names of dimensions.
        return None if len(found) == 1 or payload._has_names() else tuple(found)  # type: ignore[no-untyped-call]

    def _recall(self, signature: _Signature, payload: TensorDict) -> _Known | None:
        try:
            return self._known[signature]
        except KeyError:
            pass
        if len(self._known) >= MAX_LAYOUTS:
            self._known.clear()
        known = self._known[signature] = self._learn(signature, payload)
        return known

    def _learn(self, signature: _Signature, payload: TensorDict) -> _Known | None:
        try:
            layout = PayloadLayout.from_spec(payload, name=self._name)
        except (TypeError, ValueError):  # a quantized tensor: it can still be pickled
            return None
        places = {leaf.key: index for index, leaf in enumerate(layout.leaves)}
        return _Known(Structure(layout), [places[key] for key in _keys(signature, ())])


def _keys(signature: _Signature, prefix: _Key) -> list[_Key]:
    """The leaves in the order in which the payload has them."""
    found: list[_Key] = []
    for entry in signature[1:]:
        key = (*prefix, entry[0])
        found += [key] if len(entry) == 3 else _keys(entry[1], key)
    return found


def _reshaped(shape: torch.Size) -> torch.Size | None:
    return None if len(shape) == 1 and shape.numel() else shape
