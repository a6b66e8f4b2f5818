"""Checks of arguments derived from annotations such as `int`, `Tensor | None` or `Sequence[float]`."""

import math
import types
from collections import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import isclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import numpy as np
import torch
from torch import Tensor

SHOWN = 100  # characters of a value in an error message
EXAMPLES = {
    "Comm": "a bk.Comm",
    "Compressor": "a compressor such as MinMaxUInt8()",
    "Rule": "a rule such as bk.algorithms.bytegrad()",
    "Stage": "a stage such as Mean()",
    "Topology": "a topology such as Ring()",
}
ELEMENTS = 1000  # the first elements of a collection, which are checked


@dataclass(frozen=True)
class Kind:
    """The check of an annotation.

    Attributes:
        words: the annotation in words, for errors.
        fits: a test of a value.
        use: the conversion of a value that fits.
        by_type: whether the type of a value alone decides if it fits.
    """

    words: str
    fits: Callable[[Any], bool]
    use: Callable[[str, Any], Any] = lambda name, value: value
    by_type: bool = False

    def take(self, name: str, value: Any) -> Any:
        """Return the converted value; raise TypeError if it does not fit."""
        if not self.fits(value):
            raise TypeError(message(name, self.words, value))
        return self.use(name, value)


def message(name: str, wanted: str, value: Any) -> str:
    """Return the error message for an argument: the wanted value and the given one."""
    return f"{name} is {wanted}, not {describe(value)}"


def describe(value: Any) -> str:
    """Return a value for an error message: shape and dtype of tensors and arrays; else the repr, shortened."""
    if isinstance(value, Tensor):
        layout = "" if value.layout is torch.strided else f" of layout {value.layout}"
        return f"a tensor {tuple(value.shape)} of {value.dtype} on {value.device}{layout}"
    if isinstance(value, np.ndarray):
        return f"an array {value.shape} of {value.dtype}"
    try:
        printed = " ".join(repr(value).split())
    except Exception:  # the message is more important than the error of the repr
        return f"a {type(value).__name__}"
    return printed if len(printed) <= SHOWN else f"{printed[: SHOWN - 1]}…"


def resolved(annotation: Any, names: Mapping[str, Any]) -> Any:
    """Return an annotation; one in a string is evaluated with these names."""
    return eval(annotation, dict(names)) if isinstance(annotation, str) else annotation


def kind_of(annotation: Any) -> Kind:
    """Return the check of an annotation."""
    if annotation in PLAIN:
        return PLAIN[annotation]
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return Kind(" or ".join(map(repr, args)), lambda value: isinstance(value, str), _chosen(args))
    if origin in (Union, types.UnionType):
        return _union([kind_of(each) for each in args])
    if origin is abc.Callable:
        return Kind("a function", callable, by_type=True)
    if origin is type:
        return Kind(
            f"a subclass of {args[0].__name__}, such as torch.optim.SGD",
            lambda v: isclass(v) and issubclass(v, args[0]),
        )
    if origin is tuple:
        return _tuple([kind_of(each) for each in args if each is not ...], repeated=... in args)
    if isclass(origin) and issubclass(origin, abc.Mapping):
        return _mapping(kind_of(args[0]), kind_of(args[1]))
    if isclass(origin) and issubclass(origin, abc.Iterable):
        return _collection(origin, kind_of(args[0]))
    if isclass(origin):
        return Kind(_named(origin), lambda value: isinstance(value, origin), by_type=True)
    if isclass(annotation) and not getattr(annotation, "_is_protocol", False):
        return Kind(_named(annotation), lambda value: isinstance(value, annotation), by_type=True)
    return ANYTHING  # a protocol, or a type variable


def _named(kind: type) -> str:
    if kind.__name__ in EXAMPLES and kind.__module__.startswith(__package__):
        return EXAMPLES[kind.__name__]
    article = "an" if kind.__name__[0] in "AEIO" else "a"
    return f"{article} {kind.__name__}"


def _union(kinds: list[Kind]) -> Kind:
    def use(name: str, value: Any) -> Any:
        return next(kind for kind in kinds if kind.fits(value)).use(name, value)

    kinds = sorted(kinds, key=lambda kind: kind is NOTHING)
    words, by_type = " or ".join(kind.words for kind in kinds), all(kind.by_type for kind in kinds)
    return Kind(words, lambda value: any(kind.fits(value) for kind in kinds), use, by_type)


def _collection(origin: type, each: Kind) -> Kind:
    def fits(values: Any) -> bool:
        if not isinstance(values, origin) or isinstance(values, str | bytes | bytearray | Tensor | np.ndarray):
            return False
        return not isinstance(values, list | tuple | range) or all(map(each.fits, values[:ELEMENTS]))

    def use(name: str, values: Any) -> Any:
        if type(values) not in (list, tuple):
            return values
        used = [each.use(name, value) for value in values]
        return values if all(a is b for a, b in zip(values, used, strict=True)) else type(values)(used)

    kind = {"Sequence": "a list", "Iterable": "a list"}.get(origin.__name__, f"a {origin.__name__}")
    return Kind(f"{kind}, each of it {each.words}" if each is not ANYTHING else kind, fits, use)


def _tuple(kinds: list[Kind], repeated: bool) -> Kind:
    if repeated:
        return _collection(tuple, kinds[0])

    def fits(values: Any) -> bool:
        as_long = isinstance(values, tuple | list) and len(values) == len(kinds)
        return as_long and all(kind.fits(value) for kind, value in zip(kinds, values, strict=True))

    def use(name: str, values: Any) -> Any:
        return tuple(kind.use(name, value) for kind, value in zip(kinds, values, strict=True))

    return Kind(f"a tuple ({', '.join(kind.words for kind in kinds)})", fits, use)


def _mapping(key: Kind, held: Kind) -> Kind:
    def fits(values: Any) -> bool:
        return isinstance(values, abc.Mapping) and all(key.fits(k) and held.fits(v) for k, v in values.items())

    def use(name: str, values: Any) -> Any:
        for k, value in values.items():  # not copied: the function may write to the mapping
            key.use(name, k)
            held.use(name, value)
        return values

    return Kind(f"a dict of {key.words} to {held.words}", fits, use)


def _chosen(choices: tuple[Any, ...]) -> Callable[[str, Any], Any]:
    def use(name: str, value: Any) -> Any:
        if value not in choices:
            raise ValueError(message(name, " or ".join(map(repr, choices)), value))
        return value

    return use


def _finite(name: str, value: Any) -> float | int:
    if isinstance(value, float | np.floating) and not math.isfinite(value):
        raise ValueError(message(name, "a finite number", value))
    if isinstance(value, int | np.integer) and abs(int(value)) >= 1 << 1023:
        raise ValueError(message(name, "a finite number", value))
    return value if isinstance(value, int | float) and type(value) is not np.float64 else value.item()


def _is_whole(value: Any) -> bool:
    return type(value) is int or (isinstance(value, int | np.integer) and not isinstance(value, bool))


def _is_real(value: Any) -> bool:
    return type(value) is float or (isinstance(value, int | float | np.integer | np.floating) and value is not True
                                    and value is not False)  # fmt: skip


ANYTHING = Kind("anything", lambda value: True, by_type=True)
NOTHING = Kind("None", lambda value: value is None, by_type=True)
PLAIN: dict[Any, Kind] = {
    Any: ANYTHING,
    object: ANYTHING,
    TypeVar: ANYTHING,
    None: NOTHING,
    type(None): NOTHING,
    int: Kind("a whole number", _is_whole, lambda name, value: int(value), by_type=True),
    float: Kind("a finite number", _is_real, _finite),
    bool: Kind(
        "True or False", lambda value: isinstance(value, bool | np.bool_), lambda _, value: bool(value), by_type=True
    ),
    str: Kind("a string", lambda value: isinstance(value, str), by_type=True),
    Tensor: Kind("a tensor", lambda value: isinstance(value, Tensor), by_type=True),
}
