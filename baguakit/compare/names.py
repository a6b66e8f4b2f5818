"""Objects that a command line names: "MODULE:NAME", or an expression of the names of this package."""

import ast
import functools
import os
import pkgutil
import sys
import zlib
from pathlib import Path
from typing import Any

import torch

from .. import algorithms, compressors, rules, stages, topology
from ..rules import Algorithm, rules_of, together

ALLOWED = (
    *(ast.Expression, ast.Call, ast.keyword, ast.Name, ast.Attribute, ast.Load, ast.Constant, ast.Tuple),
    *(ast.UnaryOp, ast.USub, ast.BinOp, ast.operator),
)


def named(place: str, what: str = "it") -> Any:
    """Return the object at "module:name", perhaps of a file in this folder; raise a ValueError that calls it `what`."""
    if not all(place.partition(":")):
        raise ValueError(f"{what} is given as module:name, such as train:make_model, not {place!r}")
    if os.getcwd() not in sys.path:  # `python -m` adds it, and the console script does not
        sys.path.insert(0, os.getcwd())
    try:
        return pkgutil.resolve_name(place)
    except Exception as error:
        raise ValueError(f"cannot import {place} in this folder: {type(error).__name__}: {error}") from error


@functools.cache
def source_of(place: str) -> str:
    """Return the digest of the file of the module in "module:name"; "" if `place` names none."""
    file = getattr(sys.modules.get(place.partition(":")[0]), "__file__", None) if ":" in place else None
    return f"{zlib.crc32(Path(file).read_bytes()):08x}" if file else ""


def called(function: Any, place: str) -> Any:
    """Return `function()`; raise a ValueError that names `place` if it raises."""
    try:
        return function()
    except Exception as error:
        raise ValueError(f"{place}() raises {type(error).__name__}: {error}") from error


def split(text: str) -> list[str]:
    """Return the parts of a text between commas, except commas inside parentheses."""
    parts = [""]
    for piece in text.split(","):
        inside = parts[-1].count("(") > parts[-1].count(")")
        parts = [*parts[:-1], f"{parts[-1]},{piece}"] if inside else [*parts, piece]
    return [part.strip() for part in parts[1:]]


def algorithm(text: str) -> Algorithm:
    """Return the algorithm of "module:name" or of an expression such as "bytegrad(UInt4())"; else raise a ValueError.

    An expression has names of `bk.algorithms`, `stages`, `compressors`, `topology` and `rules`, calls, numbers,
    strings, tuples and arithmetic. Nothing else is evaluated. A function may be given without parentheses.
    """
    try:
        value = named(text, "an algorithm") if ":" in text else _value(text)
    except Exception as error:
        raise ValueError(str(error) if ":" in text else f"{text} is no algorithm: {error}") from error
    value = called(value, text) if callable(value) and not isinstance(value, stages.Stage) else value
    try:
        return together(rules_of(value, name=text))
    except TypeError as error:
        raise ValueError(str(error)) from error


def _value(text: str) -> Any:
    """Return the value of an expression of the package's exported names, `torch`, and the package as `bk`."""
    tree = ast.parse(text.strip(), mode="eval")
    for node in ast.walk(tree):
        if not isinstance(node, ALLOWED) or getattr(node, "attr", getattr(node, "id", "")).startswith("_"):
            raise ValueError(f"{ast.unparse(node)!r} is neither a call, a number, a string nor a tuple")
    inside = [module for path, module in sys.modules.items() if path.startswith(f"{algorithms.__name__}.")]
    known = {each: value for module in (rules, *inside) for each, value in vars(module).items()}
    for room in (algorithms, stages, compressors, topology):
        known |= {each: getattr(room, each) for each in room.__all__}
    known |= {"torch": torch, "bk": sys.modules[__name__.partition(".")[0]]}
    return eval(compile(tree, text, "eval"), known | {"__builtins__": {}})
