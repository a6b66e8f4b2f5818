"""Sentences about the figures, and where they do not hold; each is computed from the results."""

import itertools
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from bench.network.table import Table

from .training.ways import TASKS, Way

Found = dict[str, Any]
DISTRIBUTIONS = 4  # the first of the sources
LEAST_ERROR, FEW_BITS = 1.25e-2, 4.25
NEAR = 0.01  # of a loss
FAR = 3  # standard errors


def bound(bits: float) -> float:
    """Return 2^(−2 bits), the least vNMSE of any code for independent normal values (Shannon 1959)."""
    return float(2.0 ** (-2 * bits))


def best(found: Found, source: Found, bits: float, ours: bool | None = None) -> str:
    """Return the name of the format of least error with so many bits or fewer, of ours or of others if asked for."""
    able = [each for each in found["formats"] if each["bits"] <= bits and ours in (None, each["ours"])]
    return str(min(able, key=lambda each: source["vnmse"][each["name"]])["name"])


def leads(found: Found, source: Found, format: Found) -> bool:
    """Return whether no format has less error in as many bits or fewer."""
    return bool(source["vnmse"][best(found, source, format["bits"])] == source["vnmse"][format["name"]])


def small(found: Found) -> list[str]:
    """Return a line for each format of few bits whose error is small on all distributions."""
    lines = []
    for format in found["formats"]:
        errors = [source["vnmse"][format["name"]] for source in found["sources"][:DISTRIBUTIONS]]
        if format["bits"] <= FEW_BITS and max(errors) <= LEAST_ERROR:
            listed = ", ".join(map(short, errors))
            lines.append(f"* {_code(format)}, {format['bits']:.4g} bits: {listed}.")
    return lines or ["* None."]


def exceptions(found: Found) -> list[str]:
    """Return a line for each source and format of others that is better than ours of as many bits or fewer."""
    lines = []
    for source, format in itertools.product(found["sources"], found["formats"]):
        if not format["ours"]:
            ours = best(found, source, format["bits"], ours=True)
            theirs, least = source["vnmse"][format["name"]], source["vnmse"][ours]
            if theirs < least:
                lines.append(
                    f"* {source['name']}: {format['name']}, {format['bits']:.4g} bits, has {short(theirs)}, and "
                    f"`{ours}`, the best of ours in as many bits or fewer, {short(least)}."
                )
    return lines or ["* Nowhere."]


def unrotated(found: Found) -> list[str]:
    """Return a line for each source on which rotation makes the error of some grids larger."""
    lines = []
    for source in found["sources"]:
        worse = []
        for name, error in source["vnmse"].items():
            plain = source["vnmse"].get(name.replace("rotate=True", "rotate=False"), error)
            if error > plain * (1 + NEAR):
                worse.append(f"`{name.replace(', rotate=True', '')}` {error / plain:.2f} ×")
        if worse:
            lines.append(f"* {source['name']}: {', '.join(worse)}.")
    return lines or ["* Nowhere."]


def biases(found: Found) -> str:
    """Return how many biases lie far from that of unbiased roundings."""
    every = [(each["name"], name, *row) for each in found["sources"] for name, row in each["bias"].items()]
    far = [row for row in every if abs(row[2] - 1) > FAR * row[3]]
    listed = "; ".join(f"`{name}` on {source}, {ratio:.3f} ± {error:.3f}" for source, name, ratio, error, _ in far)
    return f"Of {len(every)} ratios, {len(far)} lie more than {FAR} standard errors from 1{': ' * bool(far)}{listed}."


def losses(table: Table, task: str, way: Way) -> dict[int, float]:
    """Return the loss of a training in some way, by seed."""
    asked = {"task": task, "bits": way.bits, "rotate": way.rotate, "feedback": way.feedback}
    return {cell["seed"]: result["loss"] for cell, result in table if asked.items() <= cell.items()}


def change(table: Table, task: str, way: Way, base: Way) -> float | None:
    """Return by how much of it the loss of one way exceeds that of another, on average over seeds."""
    one, other = losses(table, task, way), losses(table, task, base)
    changes = [one[seed] / other[seed] - 1 for seed in one.keys() & other.keys()]
    return statistics.mean(changes) if changes else None


def four_as_eight(table: Table) -> Iterator[str]:
    """Yield a line for each task: the loss of four bits beside that of eight, with error feedback."""
    for task in TASKS:
        parts = []
        for rotate in (True, False):
            found = change(table, task, Way(4, rotate, True), Way(8, rotate, True))
            if found is not None:
                held = "within" if found <= NEAR else "NOT within"
                parts.append(f"{found:+.2%} {'rotated' if rotate else 'not rotated'}, {held} {NEAR:.0%}")
        noise = [change(table, task, Way(8, rotate, True), Way()) for rotate in (True, False)]
        told = " and ".join(f"{each:+.2%}" for each in noise if each is not None)
        yield f"* {task}: {'; '.join(parts)}. Eight bits differ from no compression by {told}."


def fixed(result: Mapping[str, Any]) -> str | None:
    """Return the fewest fixed bits whose worst error is no worse than that of the bits that were chosen."""
    accurate = [bits for bits, each in result["fixed"].items() if each["worst"] <= result["worst"]]
    return min(accurate, key=int, default=None)


def short(error: float) -> str:
    """Return an error in three digits."""
    return f"{error:.2e}".replace("e-0", "e-").replace("e+0", "e+")


def _code(format: Found) -> str:
    return f"`{format['name']}`" if format["ours"] else str(format["name"])
