"""Declarations print as the expressions that build them: what you wrote is what you read.

Evaluated where the names of this package, `torch`, `inf` and `nan` are known, what prints is an equal value, but for
functions, which print as …, and matrices and graphs too large to print, of which a digest stands for the numbers.
"""

from contextvars import ContextVar
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

_formerly: ContextVar[bool] = ContextVar("_formerly", default=False)


def expression(value: Any) -> str:
    """A dataclass as the expression that builds it: what it is made of, by position where that can be, and options.

    Options are shown where they are not the default, and by name, as is all that follows one that is not shown.
    """
    shown, in_order = [], True
    for f in (f for f in fields(value) if f.init):
        held = getattr(value, f.name)
        made_of = is_dataclass(held) or (f.default is MISSING and f.default_factory is MISSING)
        in_order &= made_of and not f.kw_only
        if made_of and (in_order or _formerly.get()):
            shown.append(written(held))
        elif made_of or held != f.default:
            shown.append(f"{f.name}={written(held)}")
    return f"{type(value).__name__}({', '.join(shown)})"


def written(value: Any) -> str:
    """A value as it is written in an expression: numbers of other libraries as those of Python, functions as …."""
    if _formerly.get():
        return repr(value)
    if isinstance(value, float):
        return float.__repr__(value)
    if type(value) is tuple:
        return f"({', '.join(map(written, value))}{',' * (len(value) == 1)})"
    if callable(value) and not isinstance(value, type) and not is_dataclass(value):
        return "…"
    return repr(value)


def spellings(value: Any) -> set[str]:
    """Return how a value prints, and how it printed in earlier versions: their states name their rules so."""
    token = _formerly.set(True)
    try:
        former = repr(value)
    finally:
        _formerly.reset(token)
    return {repr(value), former}


def formerly() -> bool:
    """Return whether to print as earlier versions did."""
    return _formerly.get()
