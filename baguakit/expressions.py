"""Declarations print as the expressions that build them: what you wrote is what you read."""

from dataclasses import MISSING, fields, is_dataclass
from typing import Any


def expression(value: Any) -> str:
    """A dataclass as the expression that builds it: what it is made of by position, options where not default."""
    shown = []
    for f in fields(value):
        held = getattr(value, f.name)
        if is_dataclass(held) or (f.default is MISSING and f.default_factory is MISSING):
            shown.append(repr(held))
        elif held != f.default:
            shown.append(f"{f.name}={held!r}")
    return f"{type(value).__name__}({', '.join(shown)})"
