"""Checks of arguments: each returns the value to use, or raises an error that names the argument and its value.

    every = integer("every", every, 1)         TypeError: every is a whole number, 1 or more, not '8'

A wrong type raises a TypeError, and a wrong value raises a ValueError. `checked` reads types from the annotations of a
function, and `check_fields` from the annotations of a dataclass. Both also read ranges, as in
`flows: Annotated[int, Range(1, 64)]`. A check takes less than a microsecond.
"""

import importlib
import sys
import types
import typing
from collections import abc
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from dataclasses import fields
from functools import cache, lru_cache, wraps
from inspect import Parameter, isclass, signature, unwrap
from itertools import chain, cycle, repeat
from math import inf
from operator import is_
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, ParamSpec, TypeVar, Union, get_args, get_origin

import numpy as np
import torch
from torch import Tensor

EXAMPLES = {
    "Comm": "a bk.Comm",
    "Compressor": "a compressor such as MinMaxUInt8()",
    "Algorithm": "a rule or a sum of rules, such as bk.algorithms.bytegrad()",
    "Rule": "a rule such as bk.algorithms.bytegrad()",
    "Stage": "a stage such as Mean()",
    "Topology": "a topology such as Ring()",
}
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def message(name: str, wanted: str, value: Any) -> str:
    """Return an error message that says which value an argument needs, and which value was given."""
    return f"{name} is {wanted}, not {describe(value)}"


def describe(value: Any) -> str:
    """Describe a value in an error message: by shape and dtype if it is a tensor or array, else by a shortened repr."""
    if isinstance(value, Tensor):
        layout = "" if value.layout is torch.strided else f" of layout {value.layout}"
        return f"a tensor {tuple(value.shape)} of {value.dtype} on {value.device}{layout}"
    if isinstance(value, np.ndarray):
        return f"an array {value.shape} of {value.dtype}"
    try:
        printed = " ".join(repr(value).split())
    except Exception:  # the message is more important than the error of the repr
        return f"a {type(value).__name__}"
    return printed if len(printed) <= 100 else f"{printed[:99]}…"


def integer(name: str, value: Any, least: float = -inf, most: float = inf, power_of_two: bool = False) -> int:
    """Return `value` if it is a whole number from `least` to `most`, and a power of two if asked for; else raise."""
    if type(value) is int and least <= value <= most and not power_of_two:  # which is fast
        return value
    return int(_in_range(int, least, most, power_of_two=power_of_two).take(name, value))


def real(
    name: str, value: Any, least: float = -inf, most: float = inf, above: float = -inf, below: float = inf
) -> float:
    """Return `value` if it is finite, in [`least`, `most`] and in the open interval (`above`, `below`); else raise."""
    if type(value) is float and least <= value <= most and above < value < below:
        return value
    return float(_in_range(float, least, most, above, below).take(name, value))


def truth(name: str, value: Any) -> bool:
    """Return `value` if it is True or False; else raise."""
    return bool(instance(name, value, (bool, np.bool_), "True or False"))


def text(name: str, value: Any) -> str:
    """Return `value` if it is a string that is not empty; else raise."""
    if not (given := instance(name, value, str, "a string")):
        raise ValueError(message(name, "a string that is not empty", value))
    return given


def one_of(name: str, value: Any, choices: Collection[Any]) -> Any:
    """Return `value` if it is one of the choices. Else raise ValueError, or TypeError if no choice has its type."""
    if isinstance(value, str | int | float | None) and value in choices:
        return value
    kind = ValueError if isinstance(value, tuple(map(type, choices))) else TypeError
    raise kind(message(name, " or ".join(map(repr, choices)), value))


def instance(name: str, value: Any, kinds: type[T] | tuple[type[T], ...], example: str) -> T:
    """Return `value` if it is an instance of `kinds`; else raise a TypeError that says `example`, such as "a Comm"."""
    if not isinstance(value, kinds):
        raise TypeError(message(name, example, value))
    return value


def several(name: str, values: Any, example: str, ordered: bool = False) -> list[Any]:
    """Return the iterable `values` as a list. Raise for text, a tensor, a mapping and, if `ordered`, a set."""
    wrong = isinstance(values, str | bytes | Tensor | Mapping) or (ordered and isinstance(values, Set))
    if wrong or not isinstance(values, Iterable) or (isinstance(values, np.ndarray) and not values.ndim):
        raise TypeError(message(name, example, values))
    return list(values)


def tensor(name: str, value: Any, *, floating: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    """Return `value` if it is a dense tensor with data and, if asked for, `floating` or of this `dtype`; else raise."""
    x = instance(name, value, Tensor, "a tensor")
    if x.layout is not torch.strided:
        raise TypeError(message(name, "a dense tensor", value) + "; call .to_dense() first")
    if x.is_nested or x.is_quantized:
        raise TypeError(f"{name} is a dense tensor, not a {'nested' if x.is_nested else 'quantized'} one")
    if x.is_meta:
        raise ValueError(message(name, "a tensor that holds values", value))
    if floating and not x.is_floating_point():
        raise TypeError(message(name, "a floating tensor", value) + "; convert it to a floating dtype first")
    if dtype is not None and x.dtype != dtype:
        raise TypeError(message(name, f"a tensor of {dtype}", value))
    return x


class Range(NamedTuple):
    """The range of a number, in an annotation. The bounds are as in `real`; `power_of_two` is as in `integer`."""

    least: float = -inf
    most: float = inf
    above: float = -inf
    below: float = inf
    power_of_two: bool = False


Natural = Annotated[int, Range(0)]
Positive = Annotated[int, Range(1)]
Decay = Annotated[float, Range(0, below=1)]
Betas = tuple[Decay, Decay]
LARGEST = sys.float_info.max
NO = object()  # in checks of annotations, such as `int` or `Sequence[float]`: in place of a value that does not fit


class Kind(NamedTuple):
    """The check that belongs to an annotation."""

    words: str  # the annotation in words, for errors
    use: Callable[[str, Any], Any]  # returns what to use for the value of an argument; `NO` for one of a wrong type
    by_type: bool = False  # whether the type of a value alone decides if it fits

    def take(self, name: str, value: Any) -> Any:
        """Return the value to use instead of `value`; raise TypeError if `value` does not fit."""
        if (used := self.use(name, value)) is NO:
            raise TypeError(message(name, self.words, value))
        return used


def kind_of(annotation: Any) -> Kind:
    """Return the check for arguments with this annotation."""
    if annotation in PLAIN:
        return PLAIN[annotation]
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _in_range(args[0], *args[1])
    if origin is Literal:
        words = " or ".join(map(repr, args))
        return Kind(words, lambda name, value: one_of(name, value, args) if isinstance(value, str) else NO)
    if origin in (Union, types.UnionType):
        return _union(*map(kind_of, args))
    if origin is abc.Callable:
        return _instance("a function", abc.Callable)
    if origin is type:
        words = f"a subclass of {args[0].__name__}, such as torch.optim.SGD"
        return Kind(words, lambda _, value: value if isclass(value) and issubclass(value, args[0]) else NO)
    if origin is tuple and ... not in args:
        return _tuple(*map(kind_of, args))
    if isclass(origin) and issubclass(origin, abc.Mapping):
        return _mapping(*map(kind_of, args))
    if isclass(origin) and issubclass(origin, abc.Iterable):
        return _collection(origin, kind_of(args[0]))
    kind = origin or annotation
    if not isclass(kind) or (origin is None and getattr(kind, "_is_protocol", False)):
        return ANYTHING  # a protocol, or a type variable
    if kind.__name__ in EXAMPLES and kind.__module__.startswith(__package__):
        return _instance(EXAMPLES[kind.__name__], kind)
    return _instance(f"{'an' if kind.__name__[0] in 'AEIO' else 'a'} {kind.__name__}", kind)


def _instance(words: str, kind: Any) -> Kind:
    return Kind(words, lambda _, value: value if isinstance(value, kind) else NO, by_type=True)


@lru_cache(1024, typed=True)
def _in_range(
    number: type, least: float = -inf, most: float = inf, above: float = -inf, below: float = inf, power_of_two: Any = 0
) -> Kind:
    """Return the check of whole or finite numbers in a `Range`, whose words are such as "a whole number, 1 to 64"."""
    whole = (int, np.integer)
    kinds = whole if number is int else (*whole, float, np.floating)
    words = "a power of two" if power_of_two else "a whole number" if number is int else "a finite number"
    parts = [f"{least} or more"] * (least > -inf) + [f"at most {most}"] * (most < inf)
    parts = [f"{least} to {most}"] if len(parts) == 2 else parts
    parts += [f"greater than {above}"] * (above > -inf) + [f"less than {below}"] * (below < inf)
    words = f"{words}, {' and '.join(parts)}" if parts else words

    def use(name: str, value: Any) -> Any:
        if not isinstance(value, kinds) or isinstance(value, bool):
            return NO
        used = int(value) if isinstance(value, whole) else float(value)
        fits = least <= used <= most and above < used < below and (number is int or abs(used) <= LARGEST)
        if not fits or (power_of_two and int(used) & (int(used) - 1)):
            raise ValueError(message(name, words, value))
        return used

    return Kind(words, use, by_type=number is int and not parts and not power_of_two)


def _union(*kinds: Kind) -> Kind:
    def use(name: str, value: Any) -> Any:
        return next((used for kind in kinds if (used := kind.use(name, value)) is not NO), NO)

    words = [kind.words for kind in sorted(kinds, key=lambda kind: kind is NOTHING)]
    return Kind(" or ".join(words), use, all(kind.by_type for kind in kinds))


def _all_used(name: str, values: Iterable[Any], kinds: Iterable[Kind]) -> Any:
    """Return the list of values to use, each checked by its kind; return `NO` if a value does not fit."""
    used = [kind.use(name, value) for kind, value in zip(kinds, values, strict=False)]
    return NO if any(each is NO for each in used) else used


def _collection(origin: type, each: Kind) -> Kind:
    def use(name: str, values: Any) -> Any:
        if not isinstance(values, origin) or isinstance(values, str | bytes | bytearray | Tensor | np.ndarray):
            return NO
        if not isinstance(values, abc.Collection):  # an iterator has no second pass
            return values
        used = _all_used(name, values[:1] if isinstance(values, range) else values, repeat(each))
        if used is NO or type(values) not in (list, tuple) or all(map(is_, values, used)):
            return used if used is NO else values
        return tuple(used) if isinstance(values, tuple) else used

    words = {"Sequence": "a list", "Iterable": "a list"}.get(origin.__name__, f"a {origin.__name__}")
    return Kind(words if each is ANYTHING else f"{words}, each of it {each.words}", use)


def _tuple(*kinds: Kind) -> Kind:
    def use(name: str, values: Any) -> Any:
        if not isinstance(values, tuple | list) or len(values) != len(kinds):
            return NO
        used = _all_used(name, values, kinds)
        return used if used is NO else tuple(used)

    return Kind(f"a tuple ({', '.join(kind.words for kind in kinds)})", use)


def _mapping(key: Kind, held: Kind) -> Kind:
    def use(name: str, values: Any) -> Any:  # not copied: the function may write to the mapping
        fits = isinstance(values, abc.Mapping) and _all_used(name, chain(*values.items()), cycle((key, held))) is not NO
        return values if fits else NO

    return Kind(f"a dict of {key.words} to {held.words}", use)


ANYTHING = Kind("anything", lambda _, value: value, by_type=True)
NOTHING = _instance("None", type(None))
PLAIN: dict[Any, Kind] = {
    Any: ANYTHING,
    object: ANYTHING,
    type(None): NOTHING,
    int: _in_range(int),
    float: _in_range(float),
    bool: Kind("True or False", lambda _, v: bool(v) if isinstance(v, bool | np.bool_) else NO, by_type=True),
    str: _instance("a string", str),
    Tensor: _instance("a tensor", Tensor),
}


@cache
def _kinds_of(called: Any) -> tuple[dict[str, Kind], list[str], str]:
    """Return the checks of arguments, the names of the positional arguments, and the name of `*args` ("" if none)."""
    kinds, names, rest = {}, [], ""
    for name, parameter in signature(called).parameters.items():
        hint = parameter.annotation
        if parameter.kind is not Parameter.VAR_KEYWORD and hint is not Parameter.empty:
            kinds[name] = kind_of(eval(hint, dict(unwrap(called).__globals__)) if isinstance(hint, str) else hint)
        if parameter.kind is not Parameter.KEYWORD_ONLY:
            names.append(name)
        rest = name if parameter.kind is Parameter.VAR_POSITIONAL else rest
    return kinds, names, rest


def checked(called: Callable[P, R], like: Callable[..., Any] | None = None) -> Callable[P, R]:
    """Return the function with a check of its arguments: a wrong type raises a TypeError of one sentence.

    Numbers must be finite, and within the `Range` in the annotation, if any; NumPy's numbers are converted to Python's.
    If the types alone determine the result, a combination of types that has passed is stored, and later passes faster.

    Args:
        called: the function.
        like: the function whose annotations are used; None for `called` itself.
    """
    home = called if like is None else like
    passed: set[tuple[Any, ...]] = set()

    def look(types: tuple[Any, ...], args: Any, options: dict[str, Any]) -> tuple[Any, Any]:
        kinds, names, rest = _kinds_of(home)  # at the first call all names in the annotations are defined
        named = [*zip(chain(names, repeat(rest)), args, strict=False), *options.items()]
        asked = [kinds.get(name, ANYTHING) for name, _ in named]
        used = [kind.take(name, value) for kind, (name, value) in zip(asked, named, strict=True)]
        by_type = all(kind.by_type for kind in asked) and all(map(is_, used, [*args, *options.values()]))
        if by_type and len(passed) < 256:
            passed.add(types)
        return used[: len(args)], dict(zip(options, used[len(args) :], strict=True))

    @wraps(called)
    def call(*args: P.args, **options: P.kwargs) -> R:
        types = (*map(type, args), *options, *map(type, options.values()))
        if types in passed:
            return called(*args, **options)
        taken, named = look(types, args, options)
        return called(*taken, **named)

    return call


class Doors:
    """A base class: methods whose names are in `doors` check their arguments, in subclasses, too.

    The annotations are those of the base class that first defines the method. For a method `name`, the package itself
    calls `_unchecked_name`, the function without checks.
    """

    doors: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls) -> None:
        for name in cls.doors & vars(cls).keys():
            written = vars(cls)[name]
            setattr(cls, f"_unchecked_{name.strip('_')}", written)
            setattr(cls, name, cls._door(name, written))

    @classmethod
    def _door(cls, name: str, written: Callable[..., Any]) -> Callable[..., Any]:
        return checked(written, like=next(vars(base)[name] for base in reversed(cls.__mro__) if name in vars(base)))


def check_fields(declared: Any) -> None:
    """Check the public fields of a dataclass, as `checked` checks arguments. Call it in `__post_init__`."""
    for name, kind in _fields_of(type(declared)):  # type: ignore[arg-type]
        value = getattr(declared, name)
        if (taken := kind.take(name, value)) is not value:
            object.__setattr__(declared, name, taken)


@cache
def _fields_of(kind: type) -> list[tuple[str, Kind]]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return [(f.name, kind_of(hints[f.name])) for f in fields(kind) if f.init and not f.name.startswith("_")]


class Declared:
    """A base class for dataclasses. It checks the fields of each new instance."""

    __post_init__ = check_fields


def package(name: str, user: str) -> Any:
    """Import and return a package that `user` needs; if it is missing, raise an ImportError with the pip command."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ImportError(f"{user} needs the {name} package: pip install {name}") from None
