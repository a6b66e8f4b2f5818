"""The identity of a dataset: sixteen bytes that every stored sample's key begins with."""

from __future__ import annotations

import pickle
import sys
from hashlib import blake2b
from types import CodeType, FunctionType
from typing import Any

import torch

UNSAID = {"__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "__firstlineno__"}  # no part of a code


def namespace(dataset: Any, name: str | None, version: str | int, codec_tag: str) -> bytes:
    """16 bytes from what the dataset is (or `name`, if given), `version` and the codec; equal in all processes.

    Raises ValueError where the dataset cannot be told from others and no name is given.
    """
    what = fingerprint(dataset) if name is None else f"name:{name}"
    text = "\0".join(["baguakit-1", codec_tag, f"{type(version).__name__}:{version}", what])
    return blake2b(text.encode(), digest_size=16).digest()


def fingerprint(dataset: Any) -> str:
    """The dataset's class and a hash of all it holds, as pickle sees it.

    Code that can be imported counts by its name only: what changes there is told by `version`.
    """
    sink = _Sink()
    try:
        _Hasher(sink).dump(dataset)
    except Exception as error:
        kind = type(dataset).__qualname__
        raise ValueError(
            f"this {kind} cannot be told from other datasets by what it holds ({type(error).__name__}: {error});"
            " pass name= (and version=, to be changed with its transform)"
        ) from error
    return f"content:{type(dataset).__qualname__}:{sink.hash.hexdigest()}"


def position(index: Any, length: int | None) -> bytes:
    """The key of a sample within its dataset. Raises TypeError for an index that is neither an integer nor a str."""
    if isinstance(index, str):
        return b"s" + blake2b(index.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    try:
        number = index.__index__()
    except (AttributeError, TypeError):
        raise TypeError(f"samples are cached by integer or str, not by {type(index).__name__} {index!r}") from None
    if number < 0 and length is not None:
        number += length
    if not 0 <= number < 1 << 63:
        raise IndexError(f"index {index} of a dataset with {length} samples")
    return b"i" + int(number).to_bytes(8, "big")


class _Sink:
    def __init__(self) -> None:
        self.hash = blake2b(digest_size=16)

    def write(self, data: Any) -> int:
        self.hash.update(data)
        return len(data)


class _Hasher(pickle.Pickler):
    """Pickles tensors as their values (torch names their storage's address), caches as what they cache, and functions
    and classes that cannot be imported as their code."""

    def __init__(self, sink: _Sink) -> None:
        super().__init__(sink, protocol=5)
        self._met: list[Any] = []  # functions and classes seen, which may refer to themselves

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
            own = {k: v for k, v in vars(obj).items() if k not in UNSAID and not k.startswith("_abc_")}
            return tuple, ([name, obj.__bases__, sorted(own), [own[k] for k in sorted(own)]],)
        cells = [cell.cell_contents for cell in obj.__closure__ or ()]
        return tuple, ([name, obj.__code__, obj.__defaults__, obj.__kwdefaults__, cells],)


def _importable(obj: FunctionType | type) -> bool:
    found: Any = sys.modules.get(obj.__module__)
    for name in obj.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is obj
