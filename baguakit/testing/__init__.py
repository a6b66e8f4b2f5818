"""Checks of your own compressor, topology, stage or algorithm: the tests that the parts of this package pass.

    bk.testing.check_algorithm(my_algorithm)     # raises a CheckFailed whose sentence tells what is wrong

Or in pytest, one test for each part and check:

    @bk.testing.parametrize_with_checks([MyStage(), my_algorithm])
    def test_my_parts(part, check):
        check(part)

Checks of stages and algorithms run on two or three ranks: processes of this machine, which stay for the next check. A
part must be picklable: define its class in a module or, with cloudpickle, anywhere. An algorithm takes some seconds.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..arguments import checked, message
from ..compressors import Compressor
from ..expressions import show_public
from ..rules import Algorithm
from ..stages import Stage
from ..topology import Topology
from .algorithms import ALGORITHMS
from .checking import Check, CheckFailed, run
from .compressors import COMPRESSORS
from .stages import STAGES
from .topologies import TOPOLOGIES

__all__ = [
    "Check", "CheckFailed", "check_algorithm", "check_compressor", "check_stage", "check_topology", "checks_of",
    "parametrize_with_checks",
]  # fmt: skip
KINDS = ((Compressor, COMPRESSORS), (Topology, TOPOLOGIES), (Stage, STAGES), (Algorithm, ALGORITHMS))


@checked
def check_compressor(compressor: Compressor, skip: Sequence[str] = ()) -> None:
    """Check the bytes, errors and random draws of a compressor, and that it passes on values that are not finite.

    Args:
        compressor: the compressor.
        skip: names of checks that are left out.

    Raises:
        CheckFailed: the compressor breaks a promise.
        ValueError: there is no check of a name in `skip`.
    """
    run([(compressor, COMPRESSORS)], skip)


@checked
def check_topology(topology: Topology, skip: Sequence[str] = ()) -> None:
    """Check the matrices of a topology for many sizes, and what the topology says of them.

    Args, errors: as in `check_compressor`, for a `topology`; `skip`.
    """
    run([(topology, TOPOLOGIES)], skip)


@checked
def check_stage(stage: Stage, skip: Sequence[str] = ()) -> None:
    """Check a stage, called by hand on three ranks: its results, its state, and the declarations of its class.

    Args, errors: as in `check_compressor`, for a `stage`; `skip`. Also a TypeError if it cannot be pickled.
    """
    run([(stage, STAGES)], skip)


@checked
def check_algorithm(algorithm: Algorithm, skip: Sequence[str] = ()) -> None:
    """Train with an algorithm on two and three ranks, interrupted in many ways; and check the stages of its rules.

    Args, errors: as in `check_stage`, for an `algorithm`; `skip` may name checks of stages, too.
    """
    stages = [(rule.stage, STAGES) for rule in algorithm.rules]
    run([*stages, (algorithm, ALGORITHMS)], skip)


def checks_of(part: Any) -> list[Check]:
    """Return the checks of `part`, a compressor, topology, stage or algorithm, in order; else raise a TypeError."""
    for kinds, checks in KINDS:
        if isinstance(part, kinds):
            return [each for each in checks if each.applies(part)]
    raise TypeError(message("part", "a compressor, a topology, a stage or an algorithm", part))


@checked
def parametrize_with_checks(parts: Iterable[Any], marks: Callable[[Any, Check], Any] = lambda part, check: ()) -> Any:
    """Return a pytest decorator that calls a test with (part, check) for every check that applies to a part.

    The test calls `check(part)`. Its id is the `repr` of the part and the name of the check. Needs pytest.

    Args:
        parts: compressors, topologies, stages and algorithms. Stages of algorithms are checked if they are listed.
        marks: a function of (part, check) that returns the pytest marks of a case, such as `pytest.mark.slow`.
    """
    import pytest

    pairs = [(part, each) for part in parts for each in checks_of(part)]
    cases = [pytest.param(*pair, id=f"{pair[0]!r}-{pair[1].name}", marks=marks(*pair)) for pair in pairs]
    return pytest.mark.parametrize(("part", "check"), cases)


show_public(__name__)
