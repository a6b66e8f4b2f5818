"""Checks of a saved state before it is loaded."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...arguments import integer, one_of, said, text

VERSIONS = (1,)
TOP, RULE = ("version", "ranks", "step", "rules"), ("rule", "round", "cut", "parameters", "own")
SEAL = ("rank", "world", "run", "frozen", "sums")


def check_state(state: Any) -> None:
    """Raise a TypeError or a ValueError unless this is a state that an attachment's `state_dict` returned."""
    keys("state", state, TOP)
    one_of('state["version"]', state["version"], VERSIONS)
    integer('state["ranks"]', state["ranks"], 1)
    integer('state["step"]', state["step"], 0)
    rules = dictionary('state["rules"]', state["rules"])
    keys('state["rules"]', rules, map(str, range(len(rules))))
    for i, rule in rules.items():
        check_rule(f'state["rules"]["{i}"]', rule)
    for name in state.get("order", ()):
        text('state["order"]', name)
    for name, number in dictionary('state["tuned"]', state.get("tuned", {})).items():
        integer(f'state["tuned"]["{name}"]', number, 1)
    if "saved" in state:
        keys('state["saved"]', state["saved"], SEAL)


def check_rule(name: str, rule: Any) -> None:
    """Raise a TypeError or a ValueError unless this is the state of a rule, from `save_runner`."""
    keys(name, rule, RULE)
    text(f'{name}["rule"]', rule["rule"])
    integer(f'{name}["round"]', rule["round"], 0)
    if not isinstance(rule["cut"], list | tuple) or not all(isinstance(names, list | tuple) for names in rule["cut"]):
        raise TypeError(said(f'{name}["cut"]', "a list of lists of parameter names", rule["cut"]))
    tensors(f'{name}["own"]', rule["own"])
    for parameter, held in dictionary(f'{name}["parameters"]', rule["parameters"]).items():
        tensors(f'{name}["parameters"]["{parameter}"]', held)


def tensors(name: str, held: Any) -> None:
    """Raise a TypeError unless this is a dict of tensors."""
    for path, value in dictionary(name, held).items():
        if not isinstance(value, Tensor):
            raise TypeError(said(f'{name}["{path}"]', "a tensor", value))


def dictionary(name: str, value: Any) -> Mapping[str, Any]:
    """Return a dict, or raise a TypeError."""
    if not isinstance(value, Mapping):
        raise TypeError(said(name, "a dict, as state_dict() returned it", value))
    return value


def keys(name: str, value: Any, wanted: Any) -> None:
    """Raise a TypeError or a ValueError unless this is a dict with these keys."""
    if missing := [key for key in wanted if key not in dictionary(name, value)]:
        raise ValueError(said(name, f'a dict with "{missing[0]}" in it, as state_dict() returned it', dict(value)))
