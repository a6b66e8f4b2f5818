"""The parts of this package pass `bk.testing`; `make test` takes one algorithm of each kind in most checks.

Algorithms are those of `everything.py`; another one, or a stage, is added to the lists here.
"""

import pytest
from everything import ALGORITHMS, COMPRESSORS, kind, made, of_each_kind, on_weights, stages, windows
from test_topology import EVERY as TOPOLOGIES

import baguakit as bk
from baguakit.compressors import Compressor
from baguakit.rules import Algorithm
from baguakit.stages import Stage
from baguakit.testing import checks_of, topologies

DELAYED = ("after_step(Mean(), every=3, delay=2)", "after_step(Mean(), every=4, delay=2)")
OTHERS = (
    "CompressedMean(Sign())",
    "CompressedMean(Float8())",
    "NeighborMean(OnePeerExact())",
    "ErrorFeedback(SparseMean(TopK(0.05, values=UInt2())))",
)
FEW = ("Mean()", "ErrorFeedback(CompressedMean(MinMaxUInt8(block=64)))")  # stages that `make test` checks
STAGES = dict.fromkeys([*(stage for each in ALGORITHMS for stage in stages(made(each))), *map(made, OTHERS)])
KIND_OF = dict.fromkeys(("other_buckets", "overflow", "second_backward"), windows) | {
    "detach": on_weights
}  # else `kind`


def quick():
    """Return the cases that `make test` runs: (expression, check)."""
    applying = {}
    for each in ALGORITHMS:
        for check in checks_of(made(each)):
            applying.setdefault(check.name, []).append(each)
    few = {name: of_each_kind(each, KIND_OF.get(name, kind)) for name, each in applying.items()}
    found = {(repr(made(each)), name) for name, kept in few.items() for each in kept}
    found |= {(repr(stage), check.name) for stage in map(made, FEW) for check in checks_of(stage)}
    return found | {(each, check) for each in DELAYED[:1] for check in ("resume", "overflow", "other_buckets")}


QUICK = quick()


def marks(part, check):
    """Mark cases of algorithms and stages that are slow."""
    if check.name == "host_sync" and "Adaptive(" in repr(part):
        return pytest.mark.skip(reason="it records events of CUDA, which this build of torch may lack")
    quick = check.name == "expression" or (repr(part), check.name) in QUICK
    return [pytest.mark.slow] if isinstance(part, Algorithm | Stage) and not quick else []


PARTS = [*STAGES, *TOPOLOGIES, *map(made, (*COMPRESSORS, *ALGORITHMS, *DELAYED))]


@bk.testing.parametrize_with_checks([*dict.fromkeys(PARTS)], marks)
def test_part(part, check):
    check(part)


@pytest.mark.slow
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=repr)
def test_a_topology_of_any_size(topology, monkeypatch):
    monkeypatch.setattr(topologies, "SIZES", range(1, 65))
    bk.testing.check_topology(topology)


def test_what_it_does_not_check_is_refused():
    with pytest.raises(TypeError, match=r"^part is a compressor, a topology, a stage or an algorithm, not 3$"):
        checks_of(3)
    with pytest.raises(ValueError, match=r"^skip is some of bounds, determinism, .*, not 'resum'$"):
        bk.testing.check_compressor(Compressor(), skip=["resum"])
    with pytest.raises(TypeError, match=r"^stage is a stage such as Mean\(\), not Ring"):
        bk.testing.check_stage(bk.topology.Ring())


def test_a_check_may_be_skipped():
    bk.testing.check_compressor(made("MinMaxUInt8()"), skip=[each.name for each in checks_of(made("MinMaxUInt8()"))])
