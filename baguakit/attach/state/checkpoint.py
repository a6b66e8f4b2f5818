"""The state of an attachment, saved by parameter name, so that it can be loaded into other buckets and other ranks.

A tensor as long as the bucket is *elementwise*: it is saved in pieces, under the name and in the shape of each
parameter, and may be loaded into other buckets. A tensor of another shape that the stage declares elementwise, such as
an outer optimizer's counter of steps, is *whole*: it is saved under the name of each parameter as it is. Any other
tensor is the stage's *own*: it fits the same buckets and ranks only, and is made anew for others. A flight in the air
is saved as its result.
"""

import logging
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...buckets import Bucket, local
from ...stages import Carry, State
from ...stages.base import remembered
from ..runners.journal import Journal
from ..runners.runner import RuleRunner
from .flights import load_delayed, load_flight, save_flights
from .pieces import Names, gathered, save_pieces

log = logging.getLogger("baguakit")


def load_runners(
    runners: Sequence[RuleRunner], names: Names, saved: Mapping[str, Any], same_ranks: bool, made: bool = False
) -> None:
    """Load into every runner the state that `save_runner` returned, by the number of its rule.

    Args:
        made: the states have just been made from the weights as they are.
    """
    check_saved(runners, saved)
    anew = [not same_ranks and begins_anew(runner) for runner in runners]
    for i, runner in enumerate(runners):
        load_runner(runner, names, saved[str(i)], same_ranks, anew[i], made)
    for runner in (runner for runner, begins in zip(runners, anew, strict=True) if begins):
        log.warning("%r begins anew from the weights as they are: ranks have changed", runner.rule)
        if not made:
            runner.make_states()


def begins_anew(runner: RuleRunner) -> bool:
    """Return True if the state of a rule has no meaning for another number of ranks."""
    carries = (carry for state in runner.states for _, _, carry in remembered(runner.rule.stage, state))
    return "anew" in carries


def check_saved(runners: Sequence[RuleRunner], saved: Mapping[str, Any]) -> None:
    """Raise a ValueError unless `saved` is of the same rules."""
    if len(saved) != len(runners):
        raise ValueError(f"this state is of {len(saved)} rules, and {len(runners)} are attached")
    for i, runner in enumerate(runners):
        if (rule := saved[str(i)]["rule"]) != repr(runner.rule):
            raise ValueError(f"this state is of {rule}, and the rule attached is {runner.rule!r}")


def save_runner(runner: RuleRunner, names: Names, flights: bool = True, same_ranks: bool = True) -> dict[str, Any]:
    """Return copies of the state of a rule. Waits for its flights; those of a free-running rule are left out.

    Args:
        flights: without it all are left out, and the state is as before them, as the runner's journal knows it.
        same_ranks: without it all that another number of ranks makes anew is left out.
    """
    flights = flights and runner.rule.window != "free_running"
    if flights:
        for flight in runner.flights():  # their results, and their changes of the states
            runner.channel.monitor.wait_for(flight)
    saved: dict[str, Any] = {
        "rule": repr(runner.rule),
        "round": runner.round,
        "cut": [[names[p] for p in bucket.params] for bucket in runner.buckets],
        "parameters": {names[p]: {} for p in runner.params()},
        "own": {},
    }
    for i, bucket in enumerate(runner.buckets):
        state = runner.states[i] if flights or runner.journal is None else runner.journal.state(i, runner.states[i])
        for path, tensor, carry in remembered(runner.rule.stage, state):
            if not same_ranks and carry in (None, "anew"):
                continue
            if carry is None:
                saved["own"][f"{i}.{path}"] = tensor.clone()
            else:
                save_pieces(saved["parameters"], bucket, names, path, tensor)
                if tensor.shape != bucket.flat.shape:
                    saved["whole"] = sorted({path, *saved.get("whole", ())})
    if flights:
        save_flights(runner, names, saved["parameters"])
    return saved


def load_runner(
    runner: RuleRunner, names: Names, saved: Mapping[str, Any], same_ranks: bool, anew: bool, made: bool
) -> None:
    """Load the state that `save_runner` returned, perhaps for other buckets or another number of ranks.

    With `anew` only the round is loaded, and no state. Unless the states have just been `made`, what is remembered of
    parameters that are not in `saved` begins with their weights as they are.
    """
    runner.drop()
    if not (anew or made) and any(names[p] not in saved["parameters"] for p in runner.params()):
        runner.make_states()
    if runner.journal is not None:  # of flights that are dropped, and states that are no more
        runner.journal = Journal(len(runner.buckets))
    runner.round = int(saved["round"])
    runner.to_average = []
    for i in range(0 if anew else len(runner.buckets)):
        load_bucket(runner, i, names, saved, same_ranks)
    load_delayed(runner, names, saved["parameters"], same_ranks)


def load_bucket(runner: RuleRunner, i: int, names: Names, saved: Mapping[str, Any], same_ranks: bool) -> None:
    """Load into bucket `i` the state that `save_runner` returned for its parameters."""
    bucket, state, parameters = runner.buckets[i], runner.states[i], saved["parameters"]
    held = [names[p] for p in bucket.params]
    if missing := [name for name in held if name not in parameters]:
        log.warning("%r remembers nothing of %s: it is new", runner.rule, ", ".join(missing))
    same = same_ranks and i < len(saved["cut"]) and saved["cut"][i] == held
    _make_missing(state, parameters, bucket, names, whole_of(saved, names))
    for path, tensor, carry in remembered(runner.rule.stage, state):
        if carry is not None:
            _load_carried(runner, tensor, gathered(parameters, bucket, names, path, tensor), carry, same_ranks)
        elif same:
            _load_own(runner, tensor, saved["own"], f"{i}.{path}")
        else:
            log.warning("%r makes %s of bucket %d anew: buckets or ranks have changed", runner.rule, path, i)
    if same_ranks:
        load_flight(runner, i, parameters, names)


def _load_own(runner: RuleRunner, tensor: Tensor, own: Mapping[str, Tensor], path: str) -> None:
    found = own.get(path)
    if found is None:
        log.warning("%r makes %s anew: this state has none", runner.rule, path)
    elif found.shape == tensor.shape:
        tensor.copy_(found)
    else:
        raise ValueError(
            f"this state holds a tensor {tuple(found.shape)} as {path} of {runner.rule!r}, and {tuple(tensor.shape)} "
            "is here; load it into a model of the same shapes, or begin without it"
        )


def whole_of(saved: Mapping[str, Any], names: Names) -> set[str]:
    """Return the paths of tensors that were saved whole under the name of each parameter.

    Earlier versions did not save that: then it is a tensor without the shape of its parameter; and of scalars, whose
    shapes tell nothing, an optimizer's "step".
    """
    if "whole" in saved:
        return set(saved["whole"])
    parts = [(path, part, p) for p, name in names.items() for path, part in saved["parameters"].get(name, {}).items()]
    odd = {path for path, part, p in parts if part.shape != local(p).shape}
    odd |= {path for path, _, _ in parts if path.endswith(".step")}
    return {path for path in odd if all(part.dim() == 0 for other, part, _ in parts if other == path)}


def _make_missing(
    state: State, parameters: Mapping[str, Any], bucket: Bucket, names: Names, whole: Container[str]
) -> None:
    """Make the tensors that were saved and a new stage lacks: an optimizer in it makes its state when it steps."""
    for p in bucket.params:
        for path, part in parameters.get(names[p], {}).items():
            *way, last = path.split(".")
            if way[:1] != ["flight"]:
                inside = state
                for name in way:
                    inside = inside.setdefault(name, {})
                if last not in inside:
                    shape = part.shape if path in whole else bucket.flat.shape
                    inside[last] = torch.zeros(shape, dtype=part.dtype, device=bucket.flat.device)


def _load_carried(runner: RuleRunner, tensor: Tensor, loaded: Tensor | None, carry: Carry, same_ranks: bool) -> None:
    if loaded is None:
        return
    tensor.copy_(loaded)
    if not same_ranks and carry == "zero":
        tensor.zero_()
    if not same_ranks and carry == "mean" and tensor.dim():
        runner.to_average.append(tensor)
