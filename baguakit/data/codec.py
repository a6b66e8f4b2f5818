"""Encode samples as bytes. `Plain` writes a JSON header, then the raw bytes of tensors and arrays.

    magic number (4 bytes) · crc32 of the rest (4 bytes) · length of the header (8 bytes) · header · raw bytes

`Plain` runs no code when it decodes. So a person who can write to the store can change samples, but cannot run code.
"""

import itertools
import json
import math
import pickle
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from ..arguments import describe, instance
from ..tensors import bytes_of, plain

HEAD = struct.Struct("<4sI")
PLAIN, PICKLED = b"bkS1", b"bkP1"
SCALARS = {type(None), bool, int, float, str}
CONTAINERS = {kind.__name__: kind for kind in (list, tuple, set, frozenset)}


class Corrupt(ValueError):
    """An error for bytes that are not a complete sample."""


def _framed(magic: bytes, *parts: Any) -> bytes:
    body = b"".join(parts)
    return HEAD.pack(magic, zlib.crc32(body)) + body


def _unframed(magic: bytes, stored: bytes, read: Callable[[memoryview], Any]) -> Any:
    instance("stored", stored, (bytes, bytearray, memoryview), "bytes")
    body = memoryview(stored)[HEAD.size :]
    if len(stored) < HEAD.size or HEAD.unpack_from(stored) != (magic, zlib.crc32(body)):
        found = f"{len(stored)} bytes, {describe(bytes(stored[:8]))} …"
        raise Corrupt(f"stored is {found}, not a complete sample of this codec")
    try:
        return read(body)
    except Exception as error:
        raise Corrupt(f"the sample cannot be read: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class Plain:
    """A codec that runs no code when it decodes, for dense CPU tensors, numpy arrays and plain Python values.

    It stores tensors, arrays (except arrays of objects or with fields), bytes, str, int, float, complex, bool, None,
    and lists, tuples, dicts and sets of these types. Other types, including subclasses (named tuples, defaultdicts,
    enums), raise a TypeError. A decoded sample is an equal, contiguous copy.
    """

    tag: ClassVar[str] = "plain1"  # a part of every key, so that a codec never reads samples of another one

    def encode(self, sample: Any) -> bytes:
        """Return the sample as bytes. If a part of it cannot be stored, raise a TypeError that names this part."""
        buffers: list[Any] = []
        try:
            tree = _tree(sample, buffers, "the sample")
            header = json.dumps([tree, [len(b) for b in buffers]], separators=(",", ":")).encode()
        except (RecursionError, ValueError) as error:
            raise TypeError(f"the sample is nested too deeply or holds itself ({error})") from None
        return _framed(PLAIN, struct.pack("<Q", len(header)), header, *buffers)

    def decode(self, stored: bytes) -> Any:
        """Return the sample; raise `Corrupt` if the bytes are damaged."""
        return _unframed(PLAIN, stored, _read)


@dataclass(frozen=True)
class Pickle:
    """A codec for samples of any picklable type.

    Unpickling can run any code. So use this codec only with a store to which nobody else can write: your own LMDB
    directory, or a Redis server with TLS and a password that nobody else has.
    """

    tag: ClassVar[str] = "pickle1"

    def encode(self, sample: Any) -> bytes:
        """Return the sample as bytes; raise TypeError if it cannot be pickled."""
        try:
            return _framed(PICKLED, pickle.dumps(sample, protocol=5))
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise TypeError(f"the sample, a {type(sample).__name__}, cannot be pickled ({why})") from error

    def decode(self, stored: bytes) -> Any:
        """Return the sample; raise `Corrupt` if the bytes are damaged."""
        return _unframed(PICKLED, stored, pickle.loads)


Codec = Plain | Pickle


def _tree(x: Any, buffers: list[Any], where: str) -> Any:
    """Return `x` as a JSON value: a scalar as it is, another value as [kind, …]. Append its raw bytes to `buffers`."""
    kind = type(x)
    if kind in SCALARS:
        return x
    if kind is dict:
        keys = [_tree(k, buffers, f"a key of {where}") for k in x]
        return ["dict", keys, [_tree(v, buffers, f"{where}[{k!r}]") for k, v in x.items()]]
    if kind in CONTAINERS.values():
        if set(map(type, x)) <= SCALARS:
            return [kind.__name__, list(x)]
        return [kind.__name__, [_tree(v, buffers, f"{where}[{i}]") for i, v in enumerate(x)]]
    if kind is torch.Tensor:
        if x.device.type != "cpu" or x.layout is not torch.strided or x.is_quantized:
            raise _refusal(where, f"a tensor on {x.device} with layout {x.layout} and dtype {x.dtype}")
        if x.requires_grad:
            raise _refusal(where, f"a tensor {tuple(x.shape)} that requires grad (detach it)")
        try:
            flat = bytes_of(plain(x))
        except RuntimeError as error:  # a dtype that torch does not implement
            raise _refusal(where, f"a tensor of dtype {x.dtype} ({error})") from None
        buffers.append(flat.numpy().data if flat.numel() else b"")
        return ["tensor", len(buffers) - 1, str(x.dtype).removeprefix("torch."), list(x.shape)]
    if kind is np.ndarray or isinstance(x, np.generic):
        if x.dtype.hasobject or np.dtype(x.dtype.str) != x.dtype:  # of objects, or with fields
            raise _refusal(where, f"a numpy {kind.__name__} of dtype {x.dtype}")
        buffers.append(x.tobytes())
        return ["array" if kind is np.ndarray else "scalar", len(buffers) - 1, x.dtype.str, list(x.shape)]
    if kind in (bytes, bytearray):
        buffers.append(x)
        return [kind.__name__, len(buffers) - 1]
    if kind is complex:
        return ["complex", x.real, x.imag]
    raise _refusal(where, f"a {kind.__module__}.{kind.__qualname__}")


def _refusal(where: str, what: str) -> TypeError:
    return TypeError(
        f"{where} is {what}, which cannot be stored; return tensors, arrays, bytes or plain containers,"
        " or pass codec=Pickle() if nobody else can write to the store"
    )


def _read(body: memoryview) -> Any:
    (length,) = struct.unpack_from("<Q", body)
    tree, sizes = json.loads(bytes(body[8 : 8 + length]))
    ends = np.cumsum([8 + length, *sizes]).tolist()
    if ends[-1] != len(body):
        raise Corrupt("the header gives another length of the buffers")
    return _sample(tree, [body[a:b] for a, b in itertools.pairwise(ends)])


def _sample(tree: Any, buffers: list[memoryview]) -> Any:
    if type(tree) in SCALARS:
        return tree
    kind, *rest = tree
    if kind in ("dict", "map"):  # older versions wrote "map" if some key is not a string
        return {_sample(k, buffers): _sample(v, buffers) for k, v in zip(*rest, strict=True)}
    if kind in CONTAINERS:
        return CONTAINERS[kind](_sample(v, buffers) for v in rest[0])
    if kind == "complex":
        return complex(*rest)
    data, form = bytearray(buffers[rest[0]]), rest[1:]
    if kind == "tensor":
        dtype = getattr(torch, form[0])
        if not isinstance(dtype, torch.dtype):
            raise Corrupt(f"{dtype} is not a dtype")
        return torch.from_numpy(np.ndarray(len(data), np.uint8, data)).view(dtype).reshape(form[1])
    if kind in ("array", "scalar"):
        dtype, shape = np.dtype(str(form[0])), form[1]
        if dtype.hasobject or len(data) != dtype.itemsize * math.prod(shape):  # the bytes of objects are pointers
            raise Corrupt(f"{len(data)} bytes for an array of shape {shape} and dtype {dtype}")
        array = np.ndarray(shape, dtype, data)
        return array if kind == "array" else array[()]
    return {"bytes": bytes, "bytearray": bytearray}[kind](data)
