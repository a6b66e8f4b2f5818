"""The repr of a declaration is the expression that builds it. The `dir()` of a module lists its public names.

`eval` of a repr, with the names of this package, `torch`, `inf` and `nan`, returns an equal value. There are two
exceptions: functions print as …, and large matrices and graphs print as a digest.
"""

from dataclasses import MISSING, fields, is_dataclass
from types import ModuleType
from typing import Any


def expression(value: Any) -> str:
    """Return the expression that builds a dataclass.

    Fields without a default, and fields that are dataclasses, are positional. Other fields are printed by name, only
    if they differ from their default. After a field that is left out, all fields are printed by name.
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
    """Return a value as an expression: floats of NumPy as Python's floats, functions as …."""
    if isinstance(value, float):
        return float.__repr__(value)
    if type(value) is tuple:
        return f"({', '.join(map(written, value))}{',' * (len(value) == 1)})"
    if callable(value) and not isinstance(value, type) and not is_dataclass(value):
        return "…"
    if type(value).__repr__ is object.__repr__:  # type: ignore[comparison-overlap]  # an address, not the same twice
        return f"{type(value).__name__}(…)"
    return repr(value)


def show_public(module: ModuleType) -> None:
    """Let `dir()` of a module, and of the modules that it exports, show `__all__` and names such as `__doc__`."""
    vars(module)["__dir__"] = lambda: sorted({*module.__all__, *(name for name in vars(module) if name[:2] == "__")})
    for name in module.__all__:
        if isinstance(inner := vars(module).get(name), ModuleType):
            show_public(inner)
