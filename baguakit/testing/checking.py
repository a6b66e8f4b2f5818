"""A check is a promise, and a function that finds where a part breaks it. It may run on live ranks."""

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import algorithms, compressors, rules, stages, topology
from ..arguments import describe, message
from ..ranks import RankError, Ranks

Finder = Callable[[Any], Iterator[str]]
TIMEOUT, LIMIT = 60.0, 300.0  # seconds that a rank waits for another one, and that a check may take

_live: dict[int, Ranks] = {}


class CheckFailed(AssertionError):
    """A part breaks a promise. The message names the part, the check, the promise, and what came instead."""


@dataclass(frozen=True)
class Check:
    """A promise of all parts of one kind. Call it with a part.

    Attributes:
        name: the name of the check.
        promise: what is expected, in words.
        find: a function that takes a part and yields a sentence for each case in which the part breaks the promise.
        ranks: the number of ranks that call `find` together; 0 for this process.
        applies: a function that takes a part and returns False if the part does not make this promise.
    """

    name: str
    promise: str
    find: Finder
    ranks: int
    applies: Callable[[Any], bool]

    def __call__(self, part: Any) -> None:
        """Raise a `CheckFailed` if the part breaks the promise or raises an error; a TypeError if it has no pickle."""
        cause: Exception | None = None
        try:
            if self.ranks:
                found = on_ranks(self.ranks, partial(_listed, self.find, part))
                said = [f"{each} (rank {rank} of {self.ranks})" for rank, listed in enumerate(found) for each in listed]
            else:
                said = _listed(self.find, part)
        except RankError as error:
            rank, reason = min(error.failures.items())
            said, cause = [f"{reason.splitlines()[-1]} (rank {rank} of {self.ranks})"], error
        except Exception as error:
            if self.ranks:  # the part cannot be sent to them
                raise
            said, cause = [f"{type(error).__name__}: {error}"], error
        if said:
            raise CheckFailed(f"{describe(part)} fails the check {self.name}: {self.promise}, but {said[0]}") from cause


class Checks(list[Check]):
    """The checks of one kind of part, in the order in which they run."""

    def add(self, promise: str, ranks: int = 0, applies: Callable[[Any], bool] = bool) -> Callable[[Finder], Finder]:
        """Return a decorator that adds a function as the `find` of a check, under its own name."""

        def added(find: Finder) -> Finder:
            self.append(Check(find.__name__, promise, find, ranks, applies))
            return find

        return added


def run(parts: Collection[tuple[Any, Checks]], skip: Collection[str]) -> None:
    """Run the checks that apply to each part, without those named in `skip`."""
    known = sorted({each.name for _, checks in parts for each in checks})
    if unknown := set(skip) - set(known):
        raise ValueError(message("skip", f"some of {', '.join(known)}", min(unknown)))
    for part, checks in parts:
        for each in checks:
            if each.name not in skip and each.applies(part):
                each(part)


def on_ranks(size: int, function: Callable[[], Any]) -> list[Any]:
    """Return the results of a function on `size` live ranks, which stay for the next call."""
    if size not in _live:
        _live[size] = Ranks(size, timeout=TIMEOUT)
    return _live[size].run(function, limit=LIMIT)


def _listed(find: Finder, part: Any) -> list[str]:
    return [*find(part)]


def expression(part: Any) -> Iterator[str]:
    """Say where `repr` is no expression that evaluates to an equal part: ranks that attach compare expressions."""
    names: dict[str, Any] = {"torch": torch, "inf": math.inf, "nan": math.nan}
    for home in (algorithms, compressors, rules, stages, topology):
        names |= vars(home)
    names |= {type(each).__name__: type(each) for each in held(part)}
    text = repr(part)
    if "…" in text or "sha256" in text:  # of a function, or of a large matrix
        return
    made = eval(text, names)
    if made != part or hash(made) != hash(part):
        yield f"its repr {text} evaluates to another value; write a frozen dataclass, whose fields are its value"
    elif repr(made) != text:
        yield f"its repr is {text}, and that of its value {made!r}"


def held(part: Any) -> Iterator[Any]:
    """Yield a part and all values in its fields, at any depth."""
    yield part
    inner = part if isinstance(part, tuple) else ()
    if is_dataclass(part):
        inner = tuple(getattr(part, f.name) for f in fields(part))
    for each in inner:
        yield from held(each)


def differences(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> Iterator[str]:
    """Yield a sentence about the first tensor that is not, bit for bit, the wanted one of its name."""
    for name in [*wanted, *(found.keys() - wanted.keys())]:
        if name not in found or name not in wanted:
            yield f"{name} is in one of two results only"
            return
        a, b = found[name], wanted[name]
        if a.dtype != b.dtype or not torch.equal(a, b):
            apart = f" by up to {float((a.double() - b.double()).abs().max()):.3g}" if a.shape == b.shape else ""
            yield f"{name} differs{apart}"
            return


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Return normal fp32 values, the same in every process."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).float()
