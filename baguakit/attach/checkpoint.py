"""The state of an attachment, by parameter name, so that it survives other buckets and other numbers of ranks.

A tensor as long as the bucket is *elementwise*: it is saved in pieces, under the name and in the shape of each
parameter, and may be put together again in buckets cut otherwise. One of another shape that the stage calls
elementwise, such as an outer optimizer's counter of steps, is *whole*: saved under the name of each parameter as it is.
Any other is the stage's *own*: it is good for the same buckets and ranks only, and is made anew for others. A flight
in the air is saved as what it brings.
"""

import logging
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..buckets import Bucket, local, pieces
from ..expressions import spellings
from ..lanes import Flight
from ..stages import Carry, Stage, State
from .routes import Route, Trip

log = logging.getLogger("baguakit")
Names = Mapping[Tensor, str]


class Arrived(Flight):
    """A flight that is already over: loaded from a checkpoint."""

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def done(self) -> bool:
        return True

    def result(self) -> Tensor:
        return self.value

    def seconds(self) -> tuple[float, float]:
        return 0.0, 0.0


def remembered(stage: Stage, state: State, carried: bool = True, at: str = "") -> Iterator[tuple[str, Tensor, Any]]:
    """Every tensor of a state: its path, itself, and what becomes of it with other ranks; None for the stage's own.

    What is derived from the bucket is left out.
    """
    nested = stage.nested()
    for name, value in ((name, value) for name, value in state.items() if name not in stage.derived):
        if name in nested and isinstance(value, dict):
            yield from remembered(nested[name], value, carried and not stage.shards, f"{at}{name}.")
        else:
            carry = stage.elementwise.get(name) if carried else None
            yield from ((path, tensor, carry) for path, tensor in _leaves(value, f"{at}{name}"))


def _leaves(value: Any, at: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield at, value
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from _leaves(each, f"{at}.{name}")


def save_routes(routes: Sequence[Route], names: Names) -> dict[str, Any]:
    """Return the state of every rule, by its number."""
    return {str(i): save_route(route, names) for i, route in enumerate(routes)}


def load_routes(routes: Sequence[Route], names: Names, saved: Mapping[str, Any], same_ranks: bool) -> None:
    """Let every rule remember what `save_routes` saved."""
    check_saved(routes, saved)
    for i, route in enumerate(routes):
        load_route(route, names, saved[str(i)], same_ranks)
    if not same_ranks:
        for route in routes:
            if begins_anew(route):
                log.warning("%r begins anew from the weights as they are: ranks have changed", route.rule)
                route.to_average = []
                route.make_states()


def begins_anew(route: Route) -> bool:
    """Whether a rule remembers what means nothing to another number of ranks."""
    carries = (carry for state in route.states for _, _, carry in remembered(route.rule.stage, state))
    return "anew" in carries


def check_saved(routes: Sequence[Route], saved: Mapping[str, Any]) -> None:
    """Raise unless `saved` is of the same rules."""
    if len(saved) != len(routes):
        raise ValueError(f"this state is of {len(saved)} rules, and {len(routes)} are attached")
    for i, route in enumerate(routes):
        if re.sub(r"np\.\w+\(([^()]*)\)", r"\1", saved[str(i)]["rule"]) not in spellings(route.rule):  # NumPy's numbers
            raise ValueError(f"this state is of {saved[str(i)]['rule']}, and the rule attached is {route.rule!r}")


def save_route(route: Route, names: Names) -> dict[str, Any]:
    """Return copies of the state of a rule. Waits for its flights; those of a free-running rule are left out."""
    if route.rule.window != "free_running":
        for trip in route.air.values():  # what they bring, and what they change in the states
            trip.flight.result()
    saved: dict[str, Any] = {
        "rule": repr(route.rule),
        "round": route.round,
        "cut": [[names[p] for p in bucket.params] for bucket in route.buckets],
        "parameters": {names[p]: {} for p in route.params()},
        "own": {},
    }
    for i, bucket in enumerate(route.buckets):
        for path, tensor, carry in remembered(route.rule.stage, route.states[i]):
            if carry is None:
                saved["own"][f"{i}.{path}"] = tensor.clone()
            else:
                _save_pieces(saved["parameters"], bucket, names, path, tensor)
                if tensor.shape != bucket.flat.shape:
                    saved["whole"] = sorted({path, *saved.get("whole", ())})
        if i in route.air and route.rule.window != "free_running":
            trip = route.air[i]
            _save_pieces(saved["parameters"], bucket, names, "flight.result", trip.flight.result())
            if trip.before is not None and not torch.equal(trip.before, bucket.now()):
                _save_pieces(saved["parameters"], bucket, names, "flight.before", trip.before)
    return saved


def _save_pieces(saved: dict[str, Any], bucket: Bucket, names: Names, path: str, x: Tensor) -> None:
    parts = [x] * len(bucket.params) if x.shape != bucket.flat.shape else pieces(x, bucket.params)
    for p, part in zip(bucket.params, parts, strict=True):
        saved[names[p]][path] = part.clone()


def load_route(route: Route, names: Names, saved: Mapping[str, Any], same_ranks: bool) -> None:
    """Let a rule remember what `save_route` saved, perhaps in other buckets or with another number of ranks."""
    route.drop()
    route.round = int(saved["round"])
    route.to_average = []
    for i in range(len(route.buckets)):
        load_bucket(route, i, names, saved, same_ranks)


def load_bucket(route: Route, i: int, names: Names, saved: Mapping[str, Any], same_ranks: bool) -> None:
    """Let a rule remember of bucket `i` what `save_route` saved of the parameters in it."""
    bucket, state, parameters = route.buckets[i], route.states[i], saved["parameters"]
    held = [names[p] for p in bucket.params]
    if missing := [name for name in held if name not in parameters]:
        log.warning("%r remembers nothing of %s: it is new", route.rule, ", ".join(missing))
    same = same_ranks and i < len(saved["cut"]) and saved["cut"][i] == held
    _make_room(state, parameters, bucket, names, whole_of(saved, names))
    for path, tensor, carry in remembered(route.rule.stage, state):
        if carry is not None:
            _load_carried(route, tensor, _gathered(parameters, bucket, names, path, tensor), carry, same_ranks)
        elif same:
            _load_own(route, tensor, saved["own"], f"{i}.{path}")
        else:
            log.warning("%r makes %s of bucket %d anew: buckets or ranks have changed", route.rule, path, i)
    if same_ranks:
        _load_flight(route, i, parameters, names)


def _load_own(route: Route, tensor: Tensor, own: Mapping[str, Tensor], path: str) -> None:
    found = own.get(path)
    if found is None or found.shape != tensor.shape:
        held = "nothing" if found is None else f"a tensor {tuple(found.shape)}"
        raise ValueError(
            f"this state holds {held} as {path} of {route.rule!r}, and {tuple(tensor.shape)} is here; "
            "load it into a model of the same shapes, or begin without it"
        )
    tensor.copy_(found)


def whole_of(saved: Mapping[str, Any], names: Names) -> set[str]:
    """The paths of what was saved whole under the name of each parameter.

    Earlier versions did not say: then it is what has not the shape of its parameter; and of scalars, which tell
    nothing, an optimizer's "step".
    """
    if "whole" in saved:
        return set(saved["whole"])
    parts = [(path, part, p) for p, name in names.items() for path, part in saved["parameters"].get(name, {}).items()]
    odd = {path for path, part, p in parts if part.shape != local(p).shape}
    odd |= {path for path, _, _ in parts if path.endswith(".step")}
    return {path for path in odd if all(part.dim() == 0 for other, part, _ in parts if other == path)}


def _make_room(
    state: State, parameters: Mapping[str, Any], bucket: Bucket, names: Names, whole: Container[str]
) -> None:
    """Put a tensor wherever one was saved that a new stage has not: an optimizer in it makes its state as it steps."""
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


def _load_carried(route: Route, tensor: Tensor, loaded: Tensor | None, carry: Carry, same_ranks: bool) -> None:
    if loaded is None:
        return
    tensor.copy_(loaded)
    if not same_ranks and carry == "zero":
        tensor.zero_()
    if not same_ranks and carry == "mean" and tensor.dim():
        route.to_average.append(tensor)


def _load_flight(route: Route, i: int, parameters: Mapping[str, Any], names: Names) -> None:
    bucket = route.buckets[i]
    result = _gathered(parameters, bucket, names, "flight.result", bucket.flat)
    if result is not None:
        before = _gathered(parameters, bucket, names, "flight.before", bucket.flat)
        trip = Trip(route, i, route.round - 1, None, 0.0, Arrived(result), bucket.now() if before is None else before)
        route.air[i] = trip


def _gathered(parameters: Mapping[str, Any], bucket: Bucket, names: Names, path: str, like: Tensor) -> Tensor | None:
    """The pieces of an elementwise tensor put together like `like`; None if no parameter has one.

    A parameter that has none (it is new) keeps what `like` holds of it.
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
