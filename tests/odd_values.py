"""Odd values, and which of them can never be what an annotation asks for."""

import datetime
import decimal
import fractions
import math
import pathlib
import types
from collections import abc
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import numpy as np
import torch
from torch import Tensor, nn

import baguakit as bk


class Mute:
    """Cannot even be printed."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


def constant(value: Any) -> Callable[[Any], Any]:
    return lambda world: value


ODD: dict[str, Callable[[Any], Any]] = {
    **{
        repr(value): constant(value)
        for value in (None, True, False, math.nan, math.inf, -math.inf, -1, 0, 3, 2**63, 10**400, 1.5, -0.5, 1e-300)
    },
    **{repr(value): constant(value) for value in ("", "a", "grad", "é" * 300, b"", b"a", 1j, ..., NotImplemented)},
    **{repr(value): constant(value) for value in (range(3), slice(2), datetime.timedelta(0), pathlib.Path("/nowhere"))},
    "Decimal": constant(decimal.Decimal(1)),
    "Fraction": constant(fractions.Fraction(1, 2)),
    "np.float32(nan)": constant(np.float32("nan")),
    "np.float64(0.5)": constant(np.float64(0.5)),
    "np.int64(3)": constant(np.int64(3)),
    "np.int64(-1)": constant(np.int64(-1)),
    "np.bool_": constant(np.bool_(True)),
    "np.array(2)": lambda world: np.array(2),
    "np.zeros(3)": lambda world: np.zeros(3),
    "np.array of text": lambda world: np.array(["a"]),
    "[]": lambda world: [],
    "()": constant(()),
    "{}": lambda world: {},
    "set()": lambda world: set(),
    "[None]": lambda world: [None],
    "[nan]": lambda world: [math.nan],
    "[-1]": lambda world: [-1],
    "(1.5, 'a')": constant((1.5, "a")),
    "['a']": lambda world: ["a"],
    "{'a': 1}": lambda world: {"a": 1},
    "{0: nan}": lambda world: {0: math.nan},
    "[tensor]": lambda world: [torch.zeros(3)],
    "generator": lambda world: (each for each in ()),
    "lambda": constant(lambda: None),
    "object()": lambda world: object(),
    "Mute()": lambda world: Mute(),
    "int": constant(int),
    "math": constant(math),
    "Exception": lambda world: Exception("odd"),
    "nn.Linear": lambda world: nn.Linear(2, 2),
    "nn.Parameter": lambda world: nn.Parameter(torch.ones(2, 2)),
    "SGD": constant(torch.optim.SGD),
    "SGD(…)": lambda world: torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1),
    "torch.float32": constant(torch.float32),
    "torch.int8": constant(torch.int8),
    "device": constant(torch.device("meta")),
    "Comm": lambda world: bk.Comm(),
    "Ring()": constant(bk.topology.Ring()),
    "TopK(0.5)": constant(bk.compressors.TopK(0.5)),
    "Mean()": constant(bk.stages.Mean()),
    "rule": constant(bk.during_backward(bk.stages.Mean())),
    "tensor(1.)": lambda world: torch.tensor(1.0),
    "tensor(nan)": lambda world: torch.tensor(math.nan),
    "zeros(0)": lambda world: torch.zeros(0),
    "zeros(3)": lambda world: torch.zeros(3),
    "zeros(2, 3, 4)": lambda world: torch.zeros(2, 3, 4),
    "int64": lambda world: torch.zeros(3, dtype=torch.int64),
    "bool": lambda world: torch.zeros(3, dtype=torch.bool),
    "uint8": lambda world: torch.zeros(2, 9, dtype=torch.uint8),
    "complex": lambda world: torch.zeros(3, dtype=torch.complex64),
    "float8": lambda world: torch.zeros(4).to(torch.float8_e4m3fn),
    "meta": lambda world: torch.zeros(3, device="meta"),
    "sparse": lambda world: torch.zeros(3, 3).to_sparse(),
    "strided": lambda world: torch.zeros(6, 4).t()[::2],
    "expanded": lambda world: torch.zeros(1).expand(4),
    "requires_grad": lambda world: torch.zeros(3, requires_grad=True),
}

# Values that no argument of the name can work with, whatever its annotation.
NEVER: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("size", "every", "multiple_of", "flows", "steps", "of", "fragments", "k", "block"), (-1, 0)),
    **dict.fromkeys(("rank", "round", "start", "stop", "offset", "delay", "warmup_steps", "n", "epoch"), (-1,)),
    **dict.fromkeys(("timeout", "seconds"), (math.nan, math.inf, -math.inf, -1, -0.5)),
    **dict.fromkeys(("interval", "lr", "eps", "ratio", "gamma", "gain"), (math.nan, math.inf, -math.inf, -1, -0.5)),
    "bucket_bytes": (-1, 0),
    "size ": (2**63,),
    "source": (-1, 3),
    "path": ("",),
    "hosts": ("",),
    "capacity_bytes": (math.nan, -1),
}


def never(name: str, argument: str, value: Any) -> bool:
    """Return whether no argument of this name can work with a value."""
    if name in ("tune.Cost", "tune.Prediction", "tune.Trial"):
        return False  # results, which users only read
    if (
        (name, argument) in (("tune.Place().messages", "k"), ("baguakit.Fragment", "k"))
        and type(value) is int
        and value == 0
    ):
        return False  # a rank without neighbours, the first part
    return any(
        type(value) is type(each) and (value == each or value != value != each) for each in NEVER.get(argument, ())
    )


def cannot_fit(annotation: Any, value: Any) -> bool:
    """Return whether a value can never be what an annotation asks for; in doubt it can."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return cannot_fit(args[0], value)
    if origin in (Union, types.UnionType):
        return all(cannot_fit(each, value) for each in args)
    if annotation in (None, type(None)):
        return value is not None
    if annotation is int:
        return isinstance(value, bool) or not isinstance(value, int | np.integer)
    if annotation is float:
        number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
        value = value.item() if isinstance(value, np.generic) else value
        return not number or abs(value) > 2**1023 or not math.isfinite(value)
    if annotation is bool:
        return not isinstance(value, bool | np.bool_)
    if origin is Literal:
        return not isinstance(value, str) or value not in args
    if origin is abc.Callable:
        return not callable(value)
    if origin is type:
        return not isinstance(value, type) or not issubclass(value, args[0])
    if annotation is Any or isinstance(annotation, TypeVar) or getattr(annotation, "_is_protocol", False):
        return False
    if annotation is Tensor and (
        isinstance(value, types.GeneratorType)
        or (isinstance(value, list | tuple) and all(isinstance(v, Tensor) for v in value))
    ):
        return False  # where a tensor is taken, tensors often are
    kind = annotation if origin is None else origin
    if not isinstance(kind, type):
        return False
    if not isinstance(value, kind) and not (kind is tuple and isinstance(value, list)):
        return True
    if origin is tuple and ... not in args:
        return len(value) != len(args) or any(map(cannot_fit, args, value))
    listed = isinstance(value, list | tuple) and args
    return (isinstance(value, Tensor) and kind is not Tensor) or bool(
        listed and any(cannot_fit(args[0], v) for v in value)
    )
