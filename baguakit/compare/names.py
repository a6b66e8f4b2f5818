"""Objects that a command line names: "MODULE:NAME", or an expression of the names of this package."""

import ast
import importlib
import operator
import os
import sys
from typing import Any

import torch

from .. import algorithms, compressors, rules, stages, topology
from ..rules import Algorithm, rules_of, together

OPERATORS: dict[type, Any] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv, ast.Pow: pow,
}  # fmt: skip


def named(place: str, what: str = "it") -> Any:
    """Return the object at "module:name". The module may be a file in the current folder.

    Args:
        place: such as "train:make_model".
        what: the object, as error messages call it.

    Raises:
        ValueError: there is no such module or name, or importing the module raises.
    """
    module_name, colon, name = place.partition(":")
    if not (module_name and colon and name):
        raise ValueError(f"{what} is given as module:name, such as train:make_model, not {place!r}")
    if os.getcwd() not in sys.path:  # `python -m` adds it, and the console script does not
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module_name), name)
    except ModuleNotFoundError as error:
        missing = f"there is no module {error.name}"
        raise ValueError(f"cannot import {module_name} for {place}: {missing}; start in its folder") from error
    except Exception as error:
        if isinstance(error, AttributeError) and module_name in sys.modules:
            raise ValueError(f"the module {module_name} has no {name}, which {place} names") from error
        raise ValueError(f"importing {module_name} for {place} raises {type(error).__name__}: {error}") from error


def called(function: Any, place: str) -> Any:
    """Return `function()`; raise a ValueError that names `place` if it raises."""
    try:
        return function()
    except Exception as error:
        raise ValueError(f"{place}() raises {type(error).__name__}: {error}") from error


def split(text: str) -> list[str]:
    """Return the parts of a text between commas, except commas inside parentheses."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def algorithm(text: str) -> Algorithm:
    """Return an algorithm: of "module:name", a value or function, or of an expression.

    An expression is made of calls of what `bk.algorithms`, `bk.stages`, `bk.compressors`, `bk.topology` and `bk.rules`
    define, numbers, strings, tuples and arithmetic, such as "bytegrad(UInt4(), error_feedback=True)". A function may be
    given without parentheses. Nothing else is evaluated.

    Raises:
        ValueError: `text` is not an algorithm.
    """
    if ":" in text:
        value = named(text, "an algorithm")
    else:
        try:
            value = _value(ast.parse(text.strip(), mode="eval").body)
        except Exception as error:
            raise ValueError(f"{text} is no algorithm: {error}") from error
    value = called(value, text) if callable(value) and not isinstance(value, stages.Stage) else value
    try:
        return together(rules_of(value, name=text))
    except TypeError as error:
        raise ValueError(str(error)) from error


def _value(node: ast.AST) -> Any:
    """Return the value of a parsed expression."""
    match node:
        case ast.Constant():
            return node.value
        case ast.Name(id=name):
            return _named(name)
        case ast.Attribute(value=owner, attr=name) if name[0] != "_":
            return getattr(_value(owner), name)
        case ast.Tuple(elts=parts):
            return tuple(map(_value, parts))
        case ast.UnaryOp(op=ast.USub(), operand=number):
            return -_value(number)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in OPERATORS:
            return OPERATORS[type(sign)](_value(left), _value(right))
        case ast.Call(func=function, args=args, keywords=keywords) if all(each.arg for each in keywords):
            return _value(function)(*map(_value, args), **{str(each.arg): _value(each.value) for each in keywords})
    raise ValueError(f"{ast.unparse(node)!r} is neither a call, a number, a string nor a tuple")


def _named(name: str) -> Any:
    """Return what the package exports under a name, or `torch`, or the package itself as `bk`."""
    for room in (algorithms, stages, compressors, topology):
        if name in room.__all__:
            return getattr(room, name)
    found = {"torch": torch, "bk": sys.modules[algorithms.__name__.partition(".")[0]]}.get(name) or vars(rules).get(
        name
    )
    if found is None or name[0] == "_":
        raise ValueError(f"name {name!r} is not defined")
    return found
