"""Reads the tensors and nodes of an ONNX file, which is one protobuf message. Runs no graph, needs no ONNX package."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from oval_adapters.models.errors import BuildError

__all__ = ["OnnxFile", "OnnxNode", "read_onnx"]

# numbers of fields in onnx.proto
_MODEL_GRAPH = 7
_GRAPH_NODE, _GRAPH_TENSOR = 1, 5
_NODE_INPUT, _NODE_OUTPUT, _NODE_NAME, _NODE_TYPE = 1, 2, 3, 4
_TENSOR_DIMS, _TENSOR_TYPE, _TENSOR_NAME, _TENSOR_BYTES = 1, 2, 8, 9
_DTYPES = {1: torch.float32, 7: torch.int64, 10: torch.float16}
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True, slots=True)
class OnnxNode:
    """One operation.

    Attributes:
        name: its own.
        kind: such as "MatMul".
        inputs: names of tensors.
        outputs: names of tensors.
    """

    name: str
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OnnxFile:
    """What a file holds.

    Attributes:
        tensors: weights by name; those of other types than float32, float16 and int64 are left out.
        nodes: operations in order.
    """

    tensors: Mapping[str, torch.Tensor]
    nodes: tuple[OnnxNode, ...]


def read_onnx(path: Path) -> OnnxFile:
    """Reads a file whose weights are inside it.

    Raises:
        BuildError: the file is cut off, or no ONNX model.
    """
    data = memoryview(path.read_bytes())
    tensors: dict[str, torch.Tensor] = {}
    nodes = []
    try:
        for graph in _messages(data, _MODEL_GRAPH):
            nodes += [_node(message) for message in _messages(graph, _GRAPH_NODE)]
            for message in _messages(graph, _GRAPH_TENSOR):
                name, tensor = _tensor(message)
                if tensor is not None:
                    tensors[name] = tensor
    except (IndexError, ValueError, RuntimeError) as error:
        raise BuildError(
            f"{path.name} is cut off, or no ONNX model ({error}). Build again with --force."
        ) from error
    if not tensors:
        raise BuildError(f"{path.name} holds no weights. Build again with --force.")
    return OnnxFile(tensors, tuple(nodes))


def _messages(data: memoryview, wanted: int) -> Iterator[memoryview]:
    for field, value in _fields(data):
        if field == wanted and isinstance(value, memoryview):
            yield value


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yields number and value of each field of a message: an integer, or bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == _VARINT:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if wire == _BYTES:
            length, at = _varint(data, at)
        elif wire in (_FIXED32, _FIXED64):
            length = 4 if wire == _FIXED32 else 8
        else:
            raise ValueError(f"wire type {wire} at byte {at}")
        if at + length > len(data):
            raise ValueError(f"{length} bytes at byte {at} of {len(data)}")
        yield key >> 3, data[at : at + length]
        at += length


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError(f"a number without end at byte {at}")


def _node(message: memoryview) -> OnnxNode:
    texts: dict[int, list[str]] = {}
    for field, value in _fields(message):
        if isinstance(value, memoryview) and field <= _NODE_TYPE:
            texts.setdefault(field, []).append(str(value, "utf-8"))
    return OnnxNode(
        name="".join(texts.get(_NODE_NAME, ())),
        kind="".join(texts.get(_NODE_TYPE, ())),
        inputs=tuple(texts.get(_NODE_INPUT, ())),
        outputs=tuple(texts.get(_NODE_OUTPUT, ())),
    )


def _tensor(message: memoryview) -> tuple[str, torch.Tensor | None]:
    dims: list[int] = []
    name, kind, raw = "", 0, memoryview(b"")
    for field, value in _fields(message):
        if field == _TENSOR_DIMS:
            dims += [value] if isinstance(value, int) else _packed(value)
        elif field == _TENSOR_TYPE and isinstance(value, int):
            kind = value
        elif field == _TENSOR_NAME and isinstance(value, memoryview):
            name = str(value, "utf-8")
        elif field == _TENSOR_BYTES and isinstance(value, memoryview):
            raw = value
    if kind not in _DTYPES or not raw:
        return name, None
    return name, torch.frombuffer(bytearray(raw), dtype=_DTYPES[kind]).reshape(dims)


def _packed(value: memoryview) -> list[int]:
    found, at = [], 0
    while at < len(value):
        number, at = _varint(value, at)
        found.append(number)
    return found
