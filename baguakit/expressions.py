"""The repr of a rule, stage or graph is the expression that builds it. `dir()` of a module lists the public names.

`eval` of a repr, with the names of this package, `torch`, `inf` and `nan`, returns an equal value. There are two
exceptions: the repr of a function is "…", and the repr of a large matrix or graph contains a digest.
"""

import sys
from dataclasses import MISSING, fields, is_dataclass
from types import ModuleType
from typing import Any


def expression(value: Any) -> str:
    """Return the expression that builds a dataclass.

    Fields that have no default or hold a dataclass are printed without a name, up to the first other field. From that
    field on, fields are printed by name. A field that equals its default is left out, unless it holds a dataclass.
    """
    shown, in_order = [], True
    for f in (f for f in fields(value) if f.init):
        held = getattr(value, f.name)
        made_of = is_dataclass(held) or (f.default is MISSING and f.default_factory is MISSING)
        in_order &= made_of and not f.kw_only
        if made_of and in_order:
            shown.append(written(held))
        elif made_of or held != f.default:
            shown.append(f"{f.name}={written(held)}")
    return f"{type(value).__name__}({', '.join(shown)})"


def written(value: Any) -> str:
    """Return the expression of a value. It shows a NumPy float as a Python float, and a function as "…"."""
    if isinstance(value, float):
        return float.__repr__(value)
    if type(value) is tuple:
        return f"({', '.join(map(written, value))}{',' * (len(value) == 1)})"
    if callable(value) and not isinstance(value, type) and not is_dataclass(value):
        return "…"
    if type(value).__repr__ is object.__repr__:  # type: ignore[comparison-overlap]  # an address, not the same twice
        return f"{type(value).__name__}(…)"
    return repr(value)


def show_public(name: str) -> None:
    """Let `dir()` of a module, and of the modules that it exports, show `__all__` and names such as `__doc__`."""
    module = sys.modules[name]
    vars(module)["__dir__"] = lambda: sorted({*module.__all__, *(name for name in vars(module) if name[:2] == "__")})
    for name in module.__all__:
        if isinstance(inner := vars(module).get(name), ModuleType):
            show_public(inner.__name__)
