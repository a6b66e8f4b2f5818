"""The seal of a saved state: loading uses it to find out which rank saved the state and whether it is undamaged.

    state["saved"]    "rank": the rank in the group; "world": the rank in the world, and the world size; "run": an id
                      that all ranks of an attachment share; "frozen": the names of parameters without a rule; "sums":
                      the place and the checksum of every tensor

The number of ranks and the rules are in the state itself. Earlier versions saved no seal.
"""

import json
import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..arguments import Natural, Positive, kind_of, message, one_of, truth
from ..comm import Comm
from ..keeping import finite
from ..rules import Rule
from ..runtime.agreement import first_said, plain_names
from ..runtime.runtime import Runtime
from ..stages import remembered
from ..tensors import bytes_of, plain
from .checkpoint import weights_in
from .runner import RuleRunner

FLIES = "flight."  # paths of flights in the air begin with it
log = logging.getLogger("baguakit")


def sealed(state: dict[str, Any], runtime: Runtime[Any]) -> dict[str, Any]:
    saved = {
        "rank": runtime.comm.rank,
        "world": _world(runtime.comm),
        # The run is "" if the ranks of the group may change: ranks may then save the same step in different runs.
        "run": "" if runtime.comm.membership.changes else runtime.monitor.run,
        "frozen": list(runtime.setup.frozen),
        "sums": [[place, checksum(x)] for place, _, x in tensors_in(state)],
    }
    return {**state, "saved": saved}


def opened(state: Any, runtime: Runtime[Any], runners: Sequence[RuleRunner], strict: bool) -> dict[str, Any]:
    """Check a loaded state, and return it with the parameter names of this process. Waits for no rank.

    Raise a TypeError or ValueError if `state` is no state, or belongs to other rules. If it is damaged, is of another
    rank or weights, or lacks a parameter, log this; with `strict`, raise a ValueError, also if runs or steps differ.
    """
    check_state(state, runners)
    truth("strict", strict)
    here = [*runtime.setup.names.values(), *runtime.setup.frozen]
    named = _renamed(state, here)
    others = *_other_ranks(state, runtime), *_other_weights(state, runtime.comm, runners)
    for fault in (*_damages(state), *others, *_missing(named, runtime, runners)):
        if strict:
            raise ValueError(f"{fault}; load_state_dict(state, strict=False) loads it all the same")
        log.warning("%s", fault)
    if strict:
        _check_together(state, runtime)
    return named


Tensors = Mapping[str, Tensor]
STATE = {"version": int, "ranks": Positive, "step": Natural, "rules": Mapping[str, Any]}
RULE = {"rule": str, "round": Natural, "cut": Sequence[Sequence[str]]}
RULE |= {"parameters": Mapping[str, Tensors], "own": Tensors}
SEAL = dict.fromkeys(("rank", "world", "run", "frozen", "sums"), Any)
# Some states have these.
OTHERS = {"launched": Natural, "weight": float, "order": Sequence[str], "tuned": Mapping[str, Positive]}
OTHERS["weights"] = Sequence[float]


def check_state(state: Any, runners: Sequence[RuleRunner]) -> None:
    """Raise a TypeError or a ValueError unless `state` is a result of `state_dict` for the rules of `runners`."""
    _check("state", state, STATE)
    one_of('state["version"]', state["version"], (1,))
    rules = state["rules"]
    _check('state["rules"]', rules, dict.fromkeys(map(str, range(len(rules))), Any))
    for i, rule in rules.items():
        _check(f'state["rules"]["{i}"]', rule, RULE)
    if "saved" in state:
        _check('state["saved"]', state["saved"], SEAL)
    if len(rules) != len(runners):
        raise ValueError(f"this state is of {len(rules)} rules, and {len(runners)} are attached")
    for i, runner in enumerate(runners):
        if (saved := rules[str(i)]["rule"]) != repr(runner.rule):
            raise ValueError(f"this state is of {saved}, and the rule attached is {runner.rule!r}")


def _check(name: str, value: Any, wanted: Mapping[str, Any]) -> None:
    """Raise unless `value` is a dict with the keys of `wanted`, whose values fit these annotations, or `OTHERS`."""
    if not isinstance(value, Mapping):
        raise TypeError(message(name, "a dict, as state_dict() returned it", value))
    for key in wanted:
        if key not in value:
            raise ValueError(message(name, f'a dict with "{key}" in it, as state_dict() returned it', dict(value)))
    for key, annotation in {**OTHERS, **wanted}.items():
        if key in value:
            kind_of(annotation).take(f'{name}["{key}"]', value[key])


def tensors_in(state: Mapping[str, Any]) -> Iterator[tuple[str, str, Tensor]]:
    """Yield (place, key, tensor) for every tensor of a state. `place` is the expression state[…][key] as text."""
    for i, rule in state["rules"].items():
        of_parameters = ((f'"parameters"]["{name}"', held) for name, held in rule["parameters"].items())
        for at, held in (('"own"', rule["own"]), *of_parameters):
            yield from ((f'state["rules"]["{i}"][{at}]["{path}"]', path, x) for path, x in held.items())


def differs_between_ranks(rules: Sequence[Rule], state: Mapping[str, Any]) -> bool:
    """Return whether a state holds tensors that may differ between ranks."""
    for i, rule in enumerate(rules):
        saved = state["rules"][str(i)]
        alike = rule.what == "grad" and rule.stage.same_on_all_ranks  # then gradients in the air do not differ
        paths = (path for held in saved["parameters"].values() for path in held)
        if saved["own"] or any(not (alike and path.startswith(FLIES)) for path in paths):
            return True
    return False


def checksum(x: Tensor) -> int:
    """Return a checksum of the dtype, the shape and the bits of a tensor."""
    bits: Any = bytes_of(plain(x.detach().cpu())).numpy()
    return zlib.crc32(bits, zlib.crc32(f"{x.dtype} {tuple(x.shape)}".encode()))


def _damages(state: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each tensor that is missing, not as it was saved, or not finite."""
    sums = dict(state.get("saved", {}).get("sums", ()))
    for place, path, x in tensors_in(state):
        wide = x.float() if x.is_floating_point() and x.itemsize == 1 else x  # torch asks no float8 if it is finite
        if sums.pop(place, checked := checksum(x)) != checked:
            yield f"{place} is damaged: its values are not those that were saved"
        elif not (path.startswith(FLIES) or finite(wide)):  # a gradient in the air may be: its step will be skipped
            yield f"{place} holds a value that is not finite, which training would keep"
    for place in sums:
        yield f"{place} is missing: it was saved"


def _other_ranks(state: Mapping[str, Any], runtime: Runtime[Any]) -> Iterator[str]:
    saved, comm = state.get("saved"), runtime.comm
    if saved is None or state["ranks"] != comm.size or not differs_between_ranks(runtime.setup.rules, state):
        return
    (theirs, there), (ours, here) = (saved["rank"], saved["world"]), (comm.rank, _world(comm))
    if theirs == ours and there[1] == here[1]:
        theirs, ours = there[0], here[0]  # ranks of other groups hold other shards
    if theirs != ours:
        yield f"this state is of rank {theirs}, and this is rank {ours}: each rank loads what it saved itself"


def _other_weights(state: Mapping[str, Any], comm: Comm, runners: Sequence[RuleRunner]) -> Iterator[str]:
    for i, runner in enumerate(runners) if state["ranks"] == comm.size else ():
        saved, here = state["rules"][str(i)].get("weights", []), weights_in(runner)
        if saved != here:
            there, now = (f"the weights {each}" if each else "equal weights" for each in (saved, here))
            yield f"{runner.rule!r} remembers sums over ranks of {there}, and here they have {now}; attach with them"


def _world(comm: Comm) -> list[int]:
    return [dist.get_rank(), dist.get_world_size()] if dist.is_initialized() else [comm.rank, comm.size]


def _missing(state: Mapping[str, Any], runtime: Runtime[Any], runners: Sequence[RuleRunner]) -> Iterator[str]:
    """Yield a sentence for each parameter or tensor that the rules need and the saved state lacks."""
    names, frozen = runtime.setup.names, {*state.get("saved", {}).get("frozen", ())}
    anywhere = {name for rule in state["rules"].values() for name in rule["parameters"]}
    for i, runner in enumerate(runners):
        saved = state["rules"][str(i)]
        known = frozen if runner.rule.where is None else frozen | anywhere  # which may choose others of more parameters
        if runner.remembers() and saved["round"] > 0:
            for name in (names[p] for p in runner.params()):
                if name not in saved["parameters"] and name not in known:
                    yield f"this state has nothing of parameter {name}, and {runner.rule!r} needs what it remembered"
        for b, held in enumerate(runner.states):
            cut = [names[p] for p in runner.buckets[b].params]
            for path, _, carry in remembered(runner.rule.stage, held):
                if carry is None and saved["cut"][b : b + 1] == [cut] and f"{b}.{path}" not in saved["own"]:
                    yield f"this state holds nothing as {b}.{path} of {runner.rule!r}"


def _renamed(state: Mapping[str, Any], here: Sequence[str]) -> dict[str, Any]:
    """Return a state whose parameters are named as in this process: without prefixes that wrappers had added."""
    rules = {i: dict(rule) for i, rule in state["rules"].items()}
    known, all_names = set(here), {name for rule in rules.values() for name in rule["parameters"]}
    plain = {name: name if name in known else short for name, short in plain_names(all_names).items()}
    for rule in rules.values():
        rule["parameters"] = {plain[name]: held for name, held in rule["parameters"].items()}
        rule["cut"] = [[plain.get(name, name) for name in bucket] for bucket in rule["cut"]]
    order = [plain.get(name, name) for name in state.get("order", ())]
    return {**state, "rules": rules, "order": order, "saved": state.get("saved", {})}


def _check_together(state: Mapping[str, Any], runtime: Runtime[Any]) -> None:
    if runtime.comm.membership.changes:
        return
    free = any(rule.window == "free_running" for rule in runtime.setup.rules)  # ranks are at steps of their own
    mine = f"run {state.get('saved', {}).get('run', 'unknown')}" + ("" if free else f", step {state['step']}")
    said = first_said(runtime.monitor, "load_state_dict()", json.dumps([runtime.comm.rank, mine]))
    rank, theirs = json.loads(said)
    if theirs != mine:
        raise ValueError(
            f"this state is of {mine}, and rank {rank} has loaded one of {theirs}: all ranks load what they saved "
            "together; load_state_dict(state, strict=False) loads it all the same"
        )
