"""The state of an attachment, saved by parameter name, so that it can be loaded into other buckets and other ranks.

A tensor as long as the bucket is *elementwise*: it is saved in pieces, under the name and in the shape of each
parameter, and may be loaded into other buckets. A tensor of another shape that the stage declares elementwise, such as
an outer optimizer's counter of steps, is *whole*: it is saved under the name of each parameter as it is. Any other
tensor is the stage's *own*: it fits the same buckets and ranks only, and is made anew for others. A flight in the air
is saved as its result.

Pieces of an elementwise tensor are saved under the names of the parameters of its bucket.

Flights in the air are saved as their results:

flight.result, flight.before    of weights
flight.k.result, flight.k.used  of gradients that land in the k-th backward from here, counted from 0: without the
                                loss scale; and whether some rank had a gradient of the parameter
"""

import logging
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..arguments import integer, message, one_of, text
from ..buckets import Bucket, local, pieces
from ..lanes import Flight
from ..stages import Carry, State
from ..stages.base import remembered
from .gradients import GradientRunner
from .runner import BucketFlight, Journal, RuleRunner
from .weights import WeightRunner

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
    integer(f'{name}["launched"]', rule.get("launched", 0), 0)
    if not isinstance(rule["cut"], list | tuple) or not all(isinstance(names, list | tuple) for names in rule["cut"]):
        raise TypeError(message(f'{name}["cut"]', "a list of lists of parameter names", rule["cut"]))
    tensors(f'{name}["own"]', rule["own"])
    for parameter, held in dictionary(f'{name}["parameters"]', rule["parameters"]).items():
        tensors(f'{name}["parameters"]["{parameter}"]', held)


def tensors(name: str, held: Any) -> None:
    """Raise a TypeError unless this is a dict of tensors."""
    for path, value in dictionary(name, held).items():
        if not isinstance(value, Tensor):
            raise TypeError(message(f'{name}["{path}"]', "a tensor", value))


def dictionary(name: str, value: Any) -> Mapping[str, Any]:
    """Return a dict, or raise a TypeError."""
    if not isinstance(value, Mapping):
        raise TypeError(message(name, "a dict, as state_dict() returned it", value))
    return value


def keys(name: str, value: Any, wanted: Any) -> None:
    """Raise a TypeError or a ValueError unless this is a dict with these keys."""
    if missing := [key for key in wanted if key not in dictionary(name, value)]:
        raise ValueError(message(name, f'a dict with "{missing[0]}" in it, as state_dict() returned it', dict(value)))


Names = Mapping[Tensor, str]


def save_pieces(saved: dict[str, Any], bucket: Bucket, names: Names, path: str, x: Tensor) -> None:
    """Save copies of the pieces of a tensor; of one of another length than the bucket, a copy for each parameter."""
    parts = [x] * len(bucket.params) if x.shape != bucket.flat.shape else pieces(x, bucket.params)
    for p, part in zip(bucket.params, parts, strict=True):
        saved[names[p]][path] = part.clone()


def gathered(parameters: Mapping[str, Any], bucket: Bucket, names: Names, path: str, like: Tensor) -> Tensor | None:
    """Return the pieces of an elementwise tensor put together like `like`; None if no parameter has one.

    A parameter that has none (it is new) keeps its values in `like`.
    """
    parts = [parameters.get(names[p], {}).get(path) for p in bucket.params]
    if all(part is None for part in parts):
        return None
    if like.shape != bucket.flat.shape:
        return torch.as_tensor(next(part for part in parts if part is not None), device=like.device)
    flat = like.clone()
    for p, view, part in zip(bucket.params, pieces(flat, bucket.params), parts, strict=True):
        if part is not None:
            if part.shape != view.shape:
                raise ValueError(
                    f"this state holds {tuple(part.shape)} of {names[p]}, and {tuple(view.shape)} is here; "
                    "shards are resumed with as many as there were"
                )
            view.copy_(part)
    return flat


class Arrived(Flight):
    """A flight that has ended: loaded from a checkpoint."""

    def __init__(self, value: Tensor) -> None:
        self._value = value

    def done(self) -> bool:
        return True

    def result(self) -> Any:
        return self._value


def save_flights(runner: RuleRunner, names: Names, saved: dict[str, Any]) -> None:
    """Save the results of the flights in the air, which have ended, in `saved` by parameter name."""
    if not isinstance(runner, GradientRunner):
        for i, flight in runner.air.items():
            bucket = runner.buckets[i]
            save_pieces(saved, bucket, names, "flight.result", flight.flight.result())
            if flight.before is not None and not torch.equal(flight.before, bucket.now()):
                save_pieces(saved, bucket, names, "flight.before", flight.before)
        return
    for k, delayed in enumerate(runner.ring):
        for bucket in delayed.buckets:
            save_pieces(saved, bucket, names, f"flight.{k}.result", bucket.flat)
        for p, used in zip(runner.params(), delayed.flags.of_all(), strict=True):
            saved[names[p]][f"flight.{k}.used"] = torch.tensor(used)


def load_flight(runner: RuleRunner, i: int, parameters: Mapping[str, Any], names: Names) -> None:
    """Load the result of the flight of weights of bucket `i`, if one was saved."""
    bucket = runner.buckets[i]
    result = gathered(parameters, bucket, names, "flight.result", bucket.flat)
    if result is not None:
        before = gathered(parameters, bucket, names, "flight.before", bucket.flat)
        if before is None and runner.rule.mix is None:
            before = bucket.now()
        runner.air[i] = BucketFlight(
            label=f"{runner.label}, bucket {i}, from a checkpoint",
            flight=Arrived(result),
            launched=0.0,
            runner=runner,
            bucket=i,
            round=runner.round - 1,
            before=before,
        )


def load_delayed(runner: RuleRunner, names: Names, parameters: Mapping[str, Any], same_ranks: bool) -> None:
    """Load the delayed gradients, or zeros where none were saved or each rank had its own and ranks have changed."""
    if not isinstance(runner, GradientRunner):
        return
    known = parameters if same_ranks or runner.rule.stage.same_on_all_ranks else {}
    for k, delayed in enumerate(runner.ring):
        for bucket in delayed.buckets:
            result = gathered(known, bucket, names, f"flight.{k}.result", bucket.flat.zero_())
            if result is not None:
                bucket.flat.copy_(result)
        used = [known.get(names[p], {}).get(f"flight.{k}.used", True) for p in runner.params()]
        delayed.flags.mine, delayed.flags.rows = [int(each) for each in used], None


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
        if runner.air and isinstance(runner, WeightRunner) and runner.launched is not None:
            saved["launched"] = runner.launched
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
    if isinstance(runner, WeightRunner):
        runner.launched = saved.get("launched")


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
