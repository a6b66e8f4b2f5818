"""The state of an attachment, saved by parameter name, so that other buckets and other ranks can load it.

A tensor that the stage declares *elementwise*, and that is as long as the bucket, is saved in pieces: each piece has
the name and the shape of a parameter, so that other buckets can load it. A declared tensor of another shape, such as an
outer optimizer's step counter, is *whole*: it is saved unchanged under the name of each parameter. Any other tensor is
the stage's *own*: it is loaded into the same buckets on the same ranks only, and otherwise made anew.

Flights in the air are saved as their results, under the names of the parameters:

flight.result, flight.before    the result of a flight of weights, and the weights that were launched
flight.k.result, flight.k.used  the gradients, without the loss scale, that land after k + 1 more backward passes, and
                                whether any rank had a gradient of the parameter
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..buckets import Bucket, local, pieces
from ..stages import State, remembered
from .gradients import GradientRunner
from .runner import BucketFlight, RuleRunner
from .weights import WeightRunner

Names = Mapping[Tensor, str]
log = logging.getLogger("baguakit")


def save_runner(runner: RuleRunner, names: Names, flights: bool = True, same_ranks: bool = True) -> dict[str, Any]:
    """Wait for the flights of a rule, and return copies of its state and of the flights' results.

    Flights of a free-running rule are left out: its state is that before them. If `flights` is False, all are left out:
    the state is the copy from before them in the runner's journal. If not `same_ranks`, leave out what is made anew.
    """
    free = runner.rule.window == "free_running"
    flights = flights and not free
    if flights:
        for flight in runner.flights():  # their results, and their changes of the states
            runner.channel.monitor.wait_for(flight)
    parameters: dict[str, dict[str, Tensor]] = {names[p]: {} for p in runner.params()}
    saved: dict[str, Any] = {
        "rule": repr(runner.rule),
        "round": runner.round - (free and bool(runner.air)),
        "cut": [[names[p] for p in bucket.params] for bucket in runner.buckets],
        "parameters": parameters,
        "own": {},
    }

    def save(bucket: Bucket, path: str, x: Tensor) -> None:
        parts = pieces(x, bucket.params) if x.shape == bucket.flat.shape else [x] * len(bucket.params)
        for p, part in zip(bucket.params, parts, strict=True):
            parameters[names[p]][path] = part.clone()

    for i, bucket in enumerate(runner.buckets):
        kept = (each.kept[0] for each in [*(runner.journal or ()), *runner.flights()] if each.bucket == i and each.kept)
        state = runner.states[i] if flights else next(kept, runner.states[i])
        for path, tensor, carry in remembered(runner.rule.stage, state):
            if carry is None and same_ranks:
                saved["own"][f"{i}.{path}"] = tensor.clone()
            elif carry is not None and (same_ranks or carry != "anew"):
                save(bucket, path, tensor)
                if tensor.shape != bucket.flat.shape:
                    saved["whole"] = sorted({path, *saved.get("whole", ())})
    if weights := weights_in(runner):
        saved["weights"] = weights
    if flights and isinstance(runner, WeightRunner):
        for bucket, flight in ((runner.buckets[i], flight) for i, flight in runner.air.items()):
            save(bucket, "flight.result", flight.flight.result())
            if flight.before is not None and not torch.equal(flight.before, bucket.now()):
                save(bucket, "flight.before", flight.before)
        if runner.air and runner.launched is not None:
            saved["launched"] = runner.launched
        if runner.weight:
            saved["weight"] = runner.weight
    elif flights and isinstance(runner, GradientRunner):
        for k, delayed in enumerate(runner.ring):
            for bucket in delayed.buckets:
                save(bucket, f"flight.{k}.result", bucket.flat)
            for p, used in zip(runner.params(), delayed.flags.of_all(), strict=True):
                parameters[names[p]][f"flight.{k}.used"] = torch.tensor(used)
    return saved


def weights_in(runner: RuleRunner) -> list[float]:
    """Return the weights of all ranks, of the sum 1, on which a state depends; [] if all are equal, or on none."""
    constant = any(getattr(each, "constant_weights", False) for each in runner.rule.stage.whole())
    return [weight for weight, *_ in runner.weights() or ()] if constant else []


def load_runners(
    runners: Sequence[RuleRunner], names: Names, saved: Mapping[str, Any], same_ranks: bool, made: bool = False
) -> None:
    """Load into every runner the state that `save_runner` returned. The keys of `saved` are numbers of rules.

    The state may come from other buckets or another number of ranks. If a rule's state has no meaning for this number
    of ranks, only the rule's round is loaded, and the rule begins anew. The state of parameters that are not in `saved`
    is made from the present weights, unless `made` says that the caller has just made all states.
    """
    for i, runner in enumerate(runners):
        rule, kept = saved[str(i)], (each for state in runner.states for each in remembered(runner.rule.stage, state))
        anew = not same_ranks and any(carry == "anew" for _, _, carry in kept)
        runner.drop()
        if anew:
            log.warning("%r begins anew from the weights as they are: ranks have changed", runner.rule)
        if not made and (anew or any(names[p] not in rule["parameters"] for p in runner.params())):
            runner.make_states()
        if runner.journal is not None:  # of flights that are dropped, and states that are no more
            runner.journal = []
        runner.round, runner.to_average = int(rule["round"]), []
        for b in range(0 if anew else len(runner.buckets)):
            load_bucket(runner, b, names, rule, same_ranks)
        if isinstance(runner, GradientRunner):
            # Zeros land if no gradients were saved, or if ranks have changed and results differ by rank.
            known = rule["parameters"] if same_ranks or runner.rule.stage.same_on_all_ranks else {}
            for k, delayed in enumerate(runner.ring):
                for bucket in delayed.buckets:
                    fill_(bucket.flat.zero_(), known, bucket, names, f"flight.{k}.result")
                used = [known.get(names[p], {}).get(f"flight.{k}.used", True) for p in runner.params()]
                delayed.flags.mine, delayed.flags.rows = [int(each) for each in used], None
        elif isinstance(runner, WeightRunner):
            runner.launched, runner.weight = rule.get("launched"), rule.get("weight", 0.0)


def load_bucket(runner: RuleRunner, i: int, names: Names, saved: Mapping[str, Any], same_ranks: bool) -> None:
    bucket, state, parameters = runner.buckets[i], runner.states[i], saved["parameters"]
    held = [names[p] for p in bucket.params]
    if missing := [name for name in held if name not in parameters]:
        log.warning("%r remembers nothing of %s: it is new", runner.rule, ", ".join(missing))
    same = same_ranks and saved["cut"][i : i + 1] == [held]
    make_missing(state, saved, bucket, names, runner.channel.comm._home(bucket.flat.device))
    for path, tensor, carry in remembered(runner.rule.stage, state):
        if carry is not None:
            if fill_(tensor, parameters, bucket, names, path) and not same_ranks:
                if carry == "zero":
                    tensor.zero_()
                elif carry == "mean" and tensor.dim():
                    runner.to_average.append(tensor)
        elif not same:
            log.warning("%r makes %s of bucket %d anew: buckets or ranks have changed", runner.rule, path, i)
        elif (found := saved["own"].get(f"{i}.{path}")) is None:
            log.warning("%r makes %s anew: this state has none", runner.rule, f"{i}.{path}")
        elif found.shape == tensor.shape:
            tensor.copy_(found)
        else:
            raise ValueError(
                f"this state holds a tensor {tuple(found.shape)} as {i}.{path} of {runner.rule!r}, and "
                f"{tuple(tensor.shape)} is here; load it into a model of the same shapes, or begin without it"
            )
    result = bucket.flat.clone()
    if same_ranks and fill_(result, parameters, bucket, names, "flight.result"):
        now = bucket.now()
        told = fill_(now, parameters, bucket, names, "flight.before")
        before = now if told or runner.rule.mix is None else None
        label = f"{runner.label}, bucket {i}, from a checkpoint"
        flight = runner.channel.lane.run(lambda: result)
        runner.air[i] = BucketFlight(
            label=label, flight=flight, launched=0.0, runner=runner, bucket=i, round=runner.round - 1, before=before
        )


def fill_(x: Tensor, parameters: Mapping[str, Any], bucket: Bucket, names: Names, path: str) -> bool:
    """Copy what is saved at `path` to `x`, a tensor of a bucket; return False if no parameter has it. Others stay."""
    parts = [parameters.get(names[p], {}).get(path) for p in bucket.params]
    found = [part for part in parts if part is not None]
    if found and x.shape != bucket.flat.shape:
        x.copy_(found[0])
    elif found:
        for p, view, part in zip(bucket.params, pieces(x, bucket.params), parts, strict=True):
            if part is not None and part.shape != view.shape:
                raise ValueError(
                    f"this state holds {tuple(part.shape)} of {names[p]}, and {tuple(view.shape)} is here; "
                    "shards are resumed with as many as there were"
                )
            if part is not None:
                view.copy_(part)
    return bool(found)


def whole_of(saved: Mapping[str, Any], names: Names) -> set[str]:
    """Return the paths of tensors that were saved whole under the name of each parameter.

    A state of an earlier version does not list them: there, these are the paths that hold only scalars, and that end in
    ".step" or belong to a parameter that is no scalar.
    """
    if "whole" in saved:
        return set(saved["whole"])
    parts = [(path, part, p) for p, name in names.items() for path, part in saved["parameters"].get(name, {}).items()]
    odd = {path for path, part, p in parts if part.shape != local(p).shape or path.endswith(".step")}
    return {path for path in odd if all(part.dim() == 0 for other, part, _ in parts if other == path)}


def make_missing(state: State, saved: Mapping[str, Any], bucket: Bucket, names: Names, device: torch.device) -> None:
    """Add zeros on `device` for saved tensors that `state` lacks: an outer optimizer makes some in its first step."""
    whole = whole_of(saved, names)
    for path, part in (item for p in bucket.params for item in saved["parameters"].get(names[p], {}).items()):
        if path.startswith("flight."):
            continue
        *way, last = path.split(".")
        inside = state
        for name in way:
            inside = inside.setdefault(name, {})
        if last not in inside:
            shape = part.shape if path in whole else bucket.flat.shape
            inside[last] = torch.zeros(shape, dtype=part.dtype, device=device)
