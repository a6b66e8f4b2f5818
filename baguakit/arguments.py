"""Checks of arguments: each returns the value to use, or raises an error that names the argument and its value.

    every = integer("every", every, 1)         TypeError: every is a whole number, 1 or more, not '8'

A wrong type raises a TypeError, a wrong value a ValueError. `checked` reads the types from a function's annotations,
`check_fields` those of a dataclass; ranges need a call as above. A check takes less than a microsecond.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from dataclasses import fields
from functools import wraps
from inspect import Parameter, signature, unwrap
from itertools import chain, repeat
from operator import is_
from typing import Any, ClassVar, ParamSpec, TypeVar, get_type_hints

import numpy as np
import torch
from torch import Tensor

from .annotations import Kind, describe, kind_of, message, resolved

MEMORY = 256  # combinations of types that are stored per function
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def integer(name: str, value: Any, least: int | None, most: int | None = None) -> int:
    """Return `value` if it is a whole number from `least` to `most`; else raise."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(message(name, _range("a whole number", least, most), value))
    if (least is not None and value < least) or (most is not None and value > most):
        raise ValueError(message(name, _range("a whole number", least, most), value))
    return int(value)


def real(
    name: str,
    value: Any,
    least: float | None = None,
    most: float | None = None,
    *,
    above: float | None = None,
    below: float | None = None,
) -> float:
    """Return `value` if it is a finite number from `least` to `most`, and between `above` and `below`; else raise."""
    if type(value) is not float:
        if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
            raise TypeError(message(name, _range("a finite number", least, most, above, below), value))
        number = math.inf if isinstance(value, int) and abs(value) >= 1 << 1023 else float(value)
    else:
        number = value
    if not (
        math.isfinite(number)
        and (least is None or number >= least)
        and (most is None or number <= most)
        and (above is None or number > above)
        and (below is None or number < below)
    ):
        raise ValueError(message(name, _range("a finite number", least, most, above, below), value))
    return number


def truth(name: str, value: Any) -> bool:
    """Return `value` if it is True or False; else raise."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(message(name, "True or False", value))
    return bool(value)


def text(name: str, value: Any) -> str:
    """Return `value` if it is a string that is not empty; else raise."""
    if not isinstance(value, str):
        raise TypeError(message(name, "a string", value))
    if not value:
        raise ValueError(message(name, "a string that is not empty", value))
    return value


def one_of(name: str, value: Any, choices: Collection[Any]) -> Any:
    """Return `value` if it is one of the choices; else raise, TypeError if its type is not that of a choice."""
    if isinstance(value, str | int | float | None) and value in choices:
        return value
    kind = TypeError if not isinstance(value, tuple(map(type, choices))) else ValueError
    raise kind(message(name, " or ".join(map(repr, choices)), value))


def instance(name: str, value: Any, kinds: type[T] | tuple[type[T], ...], example: str) -> T:
    """Return `value` if it is an instance; else raise with the example, such as "a topology such as Ring()"."""
    if not isinstance(value, kinds):
        raise TypeError(message(name, example, value))
    return value


def pair(name: str, values: Any, least: float, *, below: float) -> tuple[float, float]:
    """Return `values` if they are two finite numbers from `least` to less than `below`; else raise."""
    listed = several(name, values, "a pair of numbers")
    if len(listed) != 2:
        raise ValueError(message(name, "a pair of numbers", values))
    first, second = (real(f"each of {name}", value, least, below=below) for value in listed)
    return first, second


def function(name: str, value: Any, example: str) -> Any:
    """Return `value` if it is callable; else raise with the example, such as "a function (name, parameter) -> bool"."""
    if not callable(value):
        raise TypeError(message(name, example, value))
    return value


def integers(name: str, values: Any, least: int, most: int | None = None) -> list[int]:
    """Return `values` if they are one or more whole numbers; else raise."""
    listed = several(name, values, _range("whole numbers", least, most))
    if not listed:
        raise ValueError(message(name, _range("at least one whole number", least, most), values))
    return [integer(name, value, least, most) for value in listed]


def several(name: str, values: Any, example: str, ordered: bool = False) -> list[Any]:
    """Return `values` as a list; raise if they are not iterable, text, a tensor, a mapping or, if `ordered`, a set."""
    wrong = isinstance(values, str | bytes | Tensor | Mapping) or (ordered and isinstance(values, Set))
    if wrong or not isinstance(values, Iterable):
        raise TypeError(message(name, example, values))
    try:
        return list(values)
    except TypeError:  # an array without dimensions is an Iterable, but raises
        raise TypeError(message(name, example, values)) from None


def every(name: str, values: Iterable[Any], kind: type[T], example: str) -> Iterable[T]:
    """Return `values` if each is an instance; else raise with the example."""
    return [instance(f"each of {name}", value, kind, example) for value in values]


def tensor(name: str, value: Any, *, floating: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    """Return `value` if it is a dense tensor with data, `floating` or of a `dtype` if required; else raise."""
    if not isinstance(value, Tensor):
        raise TypeError(message(name, "a tensor", value))
    if value.layout is not torch.strided:
        raise TypeError(message(name, "a dense tensor", value) + "; call .to_dense() first")
    if value.is_meta:
        raise ValueError(message(name, "a tensor that holds values", value))
    if floating and not value.is_floating_point():
        raise TypeError(message(name, "a floating tensor", value) + "; convert it to a floating dtype first")
    if dtype is not None and value.dtype != dtype:
        raise TypeError(message(name, f"a tensor of {dtype}", value))
    return value


def tensors(name: str, values: Any, *, floating: bool = False) -> list[Tensor]:
    """Return a list of `values` if they are dense tensors, or one; else raise."""
    listed = (
        [values] if isinstance(values, Tensor) else several(name, values, "a tensor or a list of tensors", ordered=True)
    )
    return [tensor(name, value, floating=floating) for value in listed]


def checked(called: Callable[P, R], like: Callable[..., Any] | None = None) -> Callable[P, R]:
    """Return the function with a check of its arguments: a wrong type raises a TypeError of one sentence.

    Numbers must be finite; numbers of NumPy are converted to Python's. The function checks ranges itself. Combinations
    of types that have passed are stored and pass faster, if their types alone decide.

    Args:
        called: the function.
        like: the function with the annotations; None for `called`.
    """
    home = called if like is None else like
    kinds: dict[str, Kind] = {}
    names: list[str] = []
    rest: list[str] = []  # the name of all positional arguments after those with names of their own
    lasting: set[str] = set()  # arguments whose type alone decides
    passed: set[tuple[Any, ...]] = set()

    def learn() -> None:  # at the first call, when all names in the annotations are defined
        for name, parameter in signature(home).parameters.items():
            if parameter.kind is not Parameter.VAR_KEYWORD and parameter.annotation is not Parameter.empty:
                kinds[name] = kind_of(resolved(parameter.annotation, getattr(unwrap(home), "__globals__", {})))
            if parameter.kind is not Parameter.KEYWORD_ONLY:
                names.append(name)
            if parameter.kind is Parameter.VAR_POSITIONAL:
                rest.append(name)
            if name not in kinds or kinds[name].by_type:
                lasting.add(name)
        if not kinds:
            kinds[""] = kind_of(Any)

    def look(types: tuple[Any, ...], args: Any, options: dict[str, Any]) -> tuple[Any, Any]:
        if not kinds:
            learn()
        each = chain(names, repeat(*rest or [""]))  # of what is more than all names, Python speaks itself
        taken = [_taken(kinds, name, value) for name, value in zip(each, args, strict=False)]
        named = {name: _taken(kinds, name, value) for name, value in options.items()}
        by_type = lasting.issuperset(names[: len(args)]) and lasting.issuperset(options)
        if by_type and len(passed) < MEMORY and all(map(is_, [*taken, *named.values()], [*args, *options.values()])):
            passed.add(types)
        return taken, named

    @wraps(called)
    def call(*args: P.args, **options: P.kwargs) -> R:
        types = (*map(type, args), *options, *map(type, options.values()))
        if types in passed:
            return called(*args, **options)
        taken, named = look(types, args, options)
        return called(*taken, **named)

    return call


def _taken(kinds: dict[str, Kind], name: str, value: Any) -> Any:
    kind = kinds.get(name)
    return value if kind is None else kind.take(name, value)


class Doors:
    """A class whose public methods check their arguments, those of a subclass like those of the class itself.

    The annotations that count are those of the first class with the method. What the package itself calls often it
    calls as `method.unchecked`, the function as it is written.

    Attributes:
        doors: the names of the methods.
    """

    doors: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls) -> None:
        for name in cls.doors & vars(cls).keys():
            first = next(vars(base)[name] for base in reversed(cls.__mro__) if name in vars(base))
            door: Any = checked(vars(cls)[name], like=first)
            door.unchecked = vars(cls)[name]
            setattr(cls, name, door)


def check_fields(declared: Any) -> None:
    """Check the public fields of a dataclass as `checked` does arguments; for its `__post_init__`."""
    for name, kind in _fields_of(type(declared)):
        value = getattr(declared, name)
        taken = kind.take(name, value)
        if taken is not value:
            object.__setattr__(declared, name, taken)


class Declared:
    """A base of dataclasses whose fields are checked when one is made."""

    def __post_init__(self) -> None:
        check_fields(self)


def _fields_of(kind: type) -> list[tuple[str, Kind]]:
    if kind not in _known:
        _known[kind] = list(_read_fields(kind))
    return _known[kind]


_known: dict[type, list[tuple[str, Kind]]] = {}


def _read_fields(kind: Any) -> Iterator[tuple[str, Kind]]:
    hints = get_type_hints(kind)
    yield from ((f.name, kind_of(hints[f.name])) for f in fields(kind) if f.init and not f.name.startswith("_"))


def _range(
    what: str, least: float | None, most: float | None, above: float | None = None, below: float | None = None
) -> str:
    """Return the words for a range, such as "a whole number, 1 to 64"."""
    if least is not None and most is not None:
        return f"{what}, {least} to {most}"
    parts = [f"{least} or more"] * (least is not None) + [f"at most {most}"] * (most is not None)
    parts += [f"greater than {above}"] * (above is not None) + [f"less than {below}"] * (below is not None)
    return f"{what}, {' and '.join(parts)}" if parts else what


__all__ = [
    "Doors",
    "check_fields",
    "checked",
    "describe",
    "every",
    "function",
    "instance",
    "integer",
    "integers",
    "message",
    "one_of",
    "pair",
    "real",
    "several",
    "tensor",
    "tensors",
    "text",
    "truth",
]
