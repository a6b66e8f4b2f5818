"""The identity of a dataset: the first 16 bytes of the key of every stored sample."""

from __future__ import annotations

import pickle
import sys
from hashlib import blake2b
from types import CodeType, FunctionType
from typing import Any

import torch

LEFT_OUT = {"__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "__firstlineno__"}  # of a class


def namespace(dataset: Any, name: str | None, version: str | int, codec_tag: str) -> bytes:
    """Return 16 bytes that identify the content of the dataset (or `name`), `version` and the codec.

    They are equal in all processes.

    Args:
        dataset: the dataset.
        name: the name to use instead of a hash of the content; None for the hash.
        version: the version of the dataset's code.
        codec_tag: the codec's tag.

    Raises:
        ValueError: the content cannot be hashed, and there is no name.
    """
    what = fingerprint(dataset) if name is None else f"name:{name}"
    text = "\0".join(["baguakit-1", codec_tag, f"{type(version).__name__}:{version}", what])
    return blake2b(text.encode(), digest_size=16).digest()


def fingerprint(dataset: Any) -> str:
    """Return the dataset's class and a hash of its content, as pickle sees it.

    Importable code is hashed by its name only: `version` must change with it.
    """
    sink = _Sink()
    try:
        _Hasher(sink).dump(dataset)
    except Exception as error:
        kind = type(dataset).__qualname__
        raise ValueError(
            f"the content of this {kind} cannot be hashed ({type(error).__name__}: {error});"
            " pass name= (and version=, which you change with the transform)"
        ) from error
    return f"content:{type(dataset).__qualname__}:{sink.hash.hexdigest()}"


def position(index: Any, length: int | None) -> bytes:
    """Return the key of a sample within its dataset; raise TypeError if the index is not an integer or a str."""
    if isinstance(index, str):
        return b"s" + blake2b(index.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    try:
        number = index.__index__()
    except (AttributeError, TypeError):
        raise TypeError(
            f"the index of a cached sample is an integer or str, not the {type(index).__name__} {index!r}"
        ) from None
    if number < 0 and length is not None:
        number += length
    if not 0 <= number < 1 << 63:
        raise IndexError(f"index {index} is out of range for a dataset with {length} samples")
    return b"i" + int(number).to_bytes(8, "big")


class _Sink:
    def __init__(self) -> None:
        self.hash = blake2b(digest_size=16)

    def write(self, data: Any) -> int:
        self.hash.update(data)
        return len(data)


class _Hasher(pickle.Pickler):
    """A pickler for hashing.

    It pickles tensors by value (torch would include storage addresses), caches as the identity of their samples, and
    functions and classes that cannot be imported as their code.
    """

    def __init__(self, sink: _Sink) -> None:
        super().__init__(sink, protocol=5)
        self._met: list[Any] = []  # functions and classes pickled so far, which may refer to themselves

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (FunctionType, type)):
            return NotImplemented if _importable(obj) else self._code(obj)
        if isinstance(obj, (staticmethod, classmethod)):
            return tuple, ([type(obj).__name__, obj.__func__],)
        if isinstance(obj, property):
            return tuple, (["property", obj.fget, obj.fset, obj.fdel],)
        if isinstance(obj, CodeType):
            return tuple, ([obj.co_code, obj.co_names, obj.co_varnames, obj.co_consts],)
        if isinstance(obj, torch.Tensor) and obj.layout is torch.strided and not obj.is_quantized:
            flat = obj.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            return bytes, (flat.numpy().tobytes(), str(obj.dtype), tuple(obj.shape))
        identity = getattr(obj, "cache_identity", None)
        return (str, (str(identity()),)) if callable(identity) else NotImplemented

    def _code(self, obj: FunctionType | type) -> Any:
        name = f"{obj.__module__}.{obj.__qualname__}"
        if any(obj is met for met in self._met):
            return str, (name,)
        self._met.append(obj)
        if isinstance(obj, type):
            own = {k: v for k, v in vars(obj).items() if k not in LEFT_OUT and not k.startswith("_abc_")}
            return tuple, ([name, obj.__bases__, sorted(own), [own[k] for k in sorted(own)]],)
        cells = [cell.cell_contents for cell in obj.__closure__ or ()]
        return tuple, ([name, obj.__code__, obj.__defaults__, obj.__kwdefaults__, cells],)


def _importable(obj: FunctionType | type) -> bool:
    found: Any = sys.modules.get(obj.__module__)
    for name in obj.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is obj
