"""Odd calls: every public callable of the package, with a value in one argument that may be anything.

Callables are read off the package, methods off the values that they return. An argument that must be given is found by
its name or its annotation in the tables of `plain_calls`; then each in turn is given each of the odd values.
"""

import inspect
import math
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import GeneratorType
from typing import Annotated, Any, get_args, get_origin

import numpy as np
import plain_calls
from odd_values import ODD, cannot_fit, never
from plain_calls import ENDS, HOOKS, MADE_BY_OTHERS, World

import baguakit as bk

PACKAGE = str(Path(bk.__file__).parent)
PEERS = {"exchange", "exchange_each", "groups", "own", "receive_later", "send_later"}
ALLOWED = (ValueError, TypeError)


@dataclass(frozen=True)
class Target:
    """Something to call: a public callable, or the public method of what another target returns."""

    name: str
    function: Callable[..., Any]
    owner: "Target | None" = None  # whose result has it as a method

    def get(self, world: World) -> Callable[..., Any]:
        if self.owner is None:
            return self.function
        return getattr(self.owner.call(world), self.name.rpartition(".")[2])

    def call(self, world: World) -> Any:
        called = self.get(world)
        return world.keep(called_with(called, plain(world, self, called, inspect.signature(called))))

    @property
    def hints(self) -> dict[str, Any]:
        """The annotations of the arguments."""
        named = {}
        for name, parameter in inspect.signature(self.function).parameters.items():
            hint = parameter.annotation
            if isinstance(hint, str):
                home = sys.modules[inspect.unwrap(self.function).__module__]
                hint = eval(hint, {**vars(plain_calls), **vars(home)})
            hint = get_args(hint)[0] if get_origin(hint) is Annotated else hint
            named[name] = Any if hint is parameter.empty else hint
        return named


def rooms() -> list[Any]:
    return [bk, *(getattr(bk, name) for name in bk.__all__ if inspect.ismodule(getattr(bk, name)))]


def public() -> Iterator[Target]:
    """Everything that a room says is public."""
    seen = set()
    for room in rooms():
        own = [n for n, v in vars(room).items() if n[0] != "_" and getattr(v, "__module__", "") == room.__name__]
        for name in getattr(room, "__all__", own):
            value = getattr(room, name)
            full = f"{room.__name__.removeprefix('baguakit.')}.{name}"
            if callable(value) and not inspect.isabstract(value) and not {value, full} & (seen | MADE_BY_OTHERS):
                seen.add(value)
                yield Target(full, value)


def methods(kind: type, owner: Target) -> Iterator[Target]:
    """The public methods that a class of the package defines or takes from another one of it."""
    for name in dir(kind):
        held = inspect.getattr_static(kind, name)
        held = held.__func__ if isinstance(held, classmethod | staticmethod) else held
        ours = inspect.isfunction(held) and inspect.unwrap(held).__module__.startswith("baguakit")
        if ours and name not in HOOKS and (name[0] != "_" or name == "__call__"):
            yield Target(f"{owner.name}().{name}", held, owner)


def targets() -> list[Target]:
    """All of them: methods are found by calling, as far as that is cheap."""
    found, kinds, ahead = [], set(), list(public())
    while ahead:
        target = ahead.pop(0)
        if target.name.endswith(plain_calls.REFUSED):
            continue
        found.append(target)
        if (
            target.name in plain_calls.COSTLY
            or target.name.count("()") > 2
            or target.name.split(".")[-1] in ENDS | {"warm_up"}
        ):
            continue
        with World() as world:
            kind = type(target.call(world))
        if kind.__module__.startswith("baguakit") and kind not in kinds:
            kinds.add(kind)
            ahead += methods(kind, target)
    return found


def collectives() -> list[Target]:
    """Those that several ranks can call alike: primitives, and methods of a `Comm` that name no peer."""
    found = [target for target in public() if target.name.startswith("primitives.")]
    found += methods(bk.Comm, Target("baguakit.Comm", bk.Comm))
    return [target for target in found if target.name.split(".")[-1] not in PEERS]


def plain(world: World, target: Target, called: Any, signature: inspect.Signature) -> dict[str, Any]:
    """A value for each argument that must be given."""
    return {
        p.name: plain_calls.value_of(world, target.name, p.name, target.hints.get(p.name, Any), called)
        for p in signature.parameters.values()
        if (p.default is p.empty and p.kind is not p.VAR_KEYWORD)
        or any(target.name.endswith(end) and p.name == name for end, name in plain_calls.SPECIAL)
    }


def called_with(called: Any, values: dict[str, Any]) -> Any:
    """Make a call, with arguments by name where they can be, and return its result."""
    signature = inspect.signature(called)
    args, options, positional = [], {}, any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values())
    positional = positional or hasattr(called, "registry")  # of functools.singledispatch
    for p in signature.parameters.values():
        if p.name not in values:
            continue
        if p.kind is p.VAR_POSITIONAL or p.kind is p.POSITIONAL_ONLY or (positional and p.kind is not p.KEYWORD_ONLY):
            args.append(values[p.name])
        else:
            options[p.name] = values[p.name]
    options |= {name: value for name, value in values.items() if name not in signature.parameters}
    return called(*args, **options)


@dataclass(frozen=True)
class OddCall:
    """One argument of one callable, and the odd value that it gets."""

    target: Target
    argument: str
    odd: str

    def __str__(self) -> str:
        return f"{self.target.name}({self.argument}={self.odd})"

    def impossible(self) -> bool:
        """Return whether the value can never work."""
        with World() as world:
            value = ODD[self.odd](world)
        return cannot_fit(self.target.hints.get(self.argument, Any), value) or never(
            self.target.name, self.argument, value
        )

    def fault(self) -> str:
        """Return the fault in how the call ends; "" if there is none."""
        with World() as world:
            called = self.target.get(world)
            values = plain(world, self.target, called, inspect.signature(called))
            value = values[self.argument] = ODD[self.odd](world)
            bad = cannot_fit(self.target.hints.get(self.argument, Any), value) or never(
                self.target.name, self.argument, value
            )
            if not bad and (self.target.name in plain_calls.COSTLY or self.target.name.endswith("warm_up")):
                return ""
            try:
                world.keep(called_with(called, values))
            except Exception as error:
                return obscurity(error, self.argument, value)
            return "accepted, and cannot work" if bad else ""


def odd_calls(found: list[Target]) -> list[OddCall]:
    """All that there are."""
    calls = []
    for target in found:
        parameters = inspect.signature(target.function).parameters
        names = [n for n, p in parameters.items() if n not in ("self", "cls") and n[0] != "_"]
        names = [n for n in names if parameters[n].kind is not inspect.Parameter.VAR_KEYWORD]
        names += plain_calls.OPTIONS.get(target.name, [])
        calls += [OddCall(target, name, odd) for name in names for odd in ODD if not own(target, name, odd)]
    return calls


def own(target: Target, argument: str, odd: str) -> bool:
    """Return whether only another argument can be at fault.

    What is in a dict for the state of a stage, its own `init` alone knows; and anything with a length is a dataset,
    for which there are then too many or too few costs. A class may be called as a function, and raise for itself.
    """
    if (argument == "dataset" and "LoadBalanced" in target.name) or (
        argument == "complexity" and odd in ("SGD", "lambda")
    ):
        return True
    if argument == "n" and target.name.endswith("decompress"):  # of the shape of `out`, which is named
        return odd in ("3", "np.int64(3)")
    if argument == "marks" and odd in ("lambda", "int", "nn.Linear", "SGD", "Mean()"):  # functions, which may raise
        return True
    if argument == "link" and odd in ("'a'", "'grad'"):  # hosts that cannot be reached
        return True
    return argument == "state" and odd[0] == "{" and target.name.endswith("__call__")


def obscurity(error: Exception, argument: str, value: Any) -> str:
    """Return the fault of an error; "" if it is a sentence of ours that names the argument and the value."""
    said, where = str(error), traceback.extract_tb(error.__traceback__)[-1].filename
    what = f"{type(error).__name__}: {said[:200]}"
    if isinstance(error, OSError) and argument in ("path", "to", "source") and error.filename is not None:
        return ""  # the system's word on a file
    if not isinstance(error, ALLOWED) and type(error).__name__ not in ("PeerError", "RankError"):
        return f"of a type that is not allowed: {what}"
    if not where.startswith(PACKAGE):
        return f"from {Path(where).name}: {what}"
    if not re.search(rf"\b({argument}|{plain_calls.ALIASES.get(argument, argument)})\b", said):
        return f"does not name the argument: {what}"
    if re.match(r"the value of rank \d cannot be (sent; that rank says why|read)", said):
        return ""
    hidden = "not shown, since it may hold a password" in said
    return "" if hidden or shows(said, value) else f"does not show the value: {what}"


def shows(said: str, value: Any) -> bool:
    """Return whether a sentence shows a value, or its type, shape, dtype, device or layout."""
    signs = [type(value).__name__]
    try:
        signs.append(repr(value)[:16])
        signs.append(str(value)[:16] or "''")
    except Exception:
        return type(value).__name__ in said
    for name in ("shape", "dtype", "device", "layout"):
        held = getattr(value, name, None)
        if held is not None:
            signs.append(str(tuple(held) if name == "shape" else held))
    if isinstance(value, list | tuple | set | dict | range | bytes | np.ndarray | GeneratorType):
        listed = list(np.ravel(value)) if isinstance(value, np.ndarray) else list(value)
        if not listed or any(shows(said, each) for each in listed):
            return True
    if type(value) is int:
        signs.append(str(float(value) if abs(value) < 2**1023 else math.inf))  # where a real number is meant
    if isinstance(value, dict) and value:
        signs += [repr(each)[:16] for pair in value.items() for each in pair]
    return any(sign in said for sign in signs)


__all__ = ["OddCall", "Target", "collectives", "odd_calls", "targets"]
