"""Every algorithm, stage, rule, compressor and topology prints as an expression that evaluates to an equal value."""

import importlib
import math
import pkgutil

import everything
import numpy as np
import pytest
import torch
from test_topology import EVERY as BUILT_TOPOLOGIES

import baguakit as bk
from baguakit.compressors.base import Compressor
from baguakit.rules import Rule
from baguakit.stages import Stage
from baguakit.topology import Topology

for module in pkgutil.walk_packages(bk.algorithms.__path__, "baguakit.algorithms."):
    importlib.import_module(module.name)


def family(kind):
    """Return all classes of this kind by name, but for those in which attach wraps others."""
    found = {}
    for cls in kind.__subclasses__():
        found |= family(cls)
        if cls.__module__.startswith("baguakit.") and not cls.__module__.startswith("baguakit.attach."):
            found[cls.__name__] = cls
    return found


KNOWN = {
    **family(Stage),
    **family(Compressor),
    **family(Topology),
    **{name: getattr(bk, name) for name in bk.__all__ if callable(getattr(bk, name))},
    "Rule": Rule,
    "torch": torch,
    "inf": math.inf,
    "nan": math.nan,
}


def listed(text):
    """Expressions with blanks between them, and none within."""
    return text.split()


COMPRESSORS = [*everything.COMPRESSORS, "Float8('e5m2')", "Float8(block=256)", "TopK(0.01)"]
TOPOLOGIES = [repr(topology) for topology in BUILT_TOPOLOGIES]
TOPOLOGIES += listed("""
FromMatrix([[1]]) FromMatrix([[0.75,0.25],[0.25,0.75]]) FromMatrix([[[0,1],[1,0]],[[0.5,0.5],[0.5,0.5]]])
FromMatrix([[0.33333334,0.66666667],[0.66666667,0.33333334]]) FromGraph([(0,1),(1,2)]) FromGraph([(5,5)])
FromGraph([('b','a'),('a','c')]) FromDigraph([(0,1),(1,2),(2,0)]) FromDigraph([[(0,1)],[(1,2),(2,0)]])
FromDigraph([[(0,1),(1,0)],[(0,0)]]) FromDigraph([(1,1)]) FromGraph([(0,1),(0,2)])
""")
STAGES = listed("""
Mean() CompressedMean() Adaptive(0.001) Adaptive(0.01,(4,8)) CompressedMean(Sign())
SparseMean(TopK(0.01)) NeighborMean(Ring()) Hierarchical(Mean())
ErrorFeedback(CompressedMean(UInt4())) Hierarchical(ErrorFeedback(SparseMean(TopK(0.5))))
TrackedGradient(Ring()) PushSum(Exponential()) LowRankMean(4) MajorityVote() MajorityVote(0.8,0.95)
TrackedMean(SparseMean(TopK(0.1))) TrackedMean(CompressedMean(),momentum=0.5) TrackedMean(LowRankMean(2))
Signs(ErrorFeedback(InCosines(SparseMean(TopK(0.1))),decay=0.9)) InCosines(Mean())
DifferenceCompression(Ring()) DifferenceCompression(Ring(),Sign()) Choco(Ring()) Choco(Star(),TopK(0.1),gamma=0.3)
Choco(Ring(),gamma=1) AdamDirection(3) AdamDirection(3,(0.8,0.9),1e-6) AdamDirection(3,eps=1e-6,compressor=Sign())
AdamDirection(3,error_feedback=True) AdamDirection(3,(0.9,0.999),1e-8,UInt4(),True)
OuterStep(torch.optim.SGD,lr=1) OuterStep(torch.optim.Adam) OuterStep(torch.optim.AdamW,betas=(0.8,0.9),lr=0.1)
OuterStep(torch.optim.SGD,NeighborMean(Ring()),lr=0.7,momentum=0.9,nesterov=True)
""")
RULES = listed("""
during_backward(Mean()) during_backward(Mean(),start=3,stop=9) between_steps(NeighborMean(Ring()),every=2)
after_step(Mean(),every=4,delay=2,offset=1) free_running(Mean(),interval=0.5)
after_step(Mean(),where=Fragment(1,3)) Rule('during_backward',Mean(),every=2)
hierarchical(after_step(Mean()))
""")
STAGES += [repr(stage) for each in everything.ALGORITHMS for stage in everything.stages(everything.made(each))]
EVERY = list(dict.fromkeys(COMPRESSORS + TOPOLOGIES + STAGES + RULES))


def made(text):
    return eval(text, dict(KNOWN))


def assert_prints_itself(value):
    text = repr(value)
    assert made(text) == value and repr(made(text)) == text, text
    assert hash(made(text)) == hash(value), text


@pytest.mark.parametrize("text", EVERY)
def test_what_prints_evaluates_to_an_equal_value(text):
    assert_prints_itself(made(text))


def test_the_list_is_of_all_there_is():
    shown = {repr(made(text)).partition("(")[0] for text in EVERY}
    kinds = (family(Stage) | family(Compressor) | family(Topology)).items()
    abstract = {
        "Around",
        "Average",
        "Blockwise",
        "Cast",
        "Given",
        "Gossip",
        "MeasuredCompressor",
        "MeasuredStage",
        "Noting",
        "Ternary",
        "OnGraph",
        "_OnePeer",
    }
    no_value = {"Chosen"}  # equal to itself only: what it holds is set while it is used
    assert {name for name, _ in kinds} - abstract - no_value <= shown


def test_functions_print_as_dots_and_large_matrices_as_their_digest():
    assert repr(bk.after_step(bk.stages.Mean(), where=lambda name, p: True)) == "after_step(Mean(), where=…)"
    large = bk.topology.FromMatrix(np.full((9, 9), 1 / 9))
    assert repr(large).startswith("FromMatrix(<9 ranks, 1 round, sha256 ")


def test_numbers_of_numpy_print_as_numbers():
    assert repr(bk.compressors.TopK(np.float64(0.1))) == "TopK(0.1)"
    assert_prints_itself(bk.algorithms.diloco(lr=np.float64(0.1)))
