"""Names on a command line: expressions are read without being evaluated as Python, and "module:name" is imported."""

import sys

import pytest

import baguakit as bk
from baguakit.algorithms import bytegrad, diloco, local_sgd, top_k
from baguakit.compare.contenders import DDP, contender
from baguakit.compare.names import algorithm, split
from baguakit.compressors import UInt2, UInt4
from baguakit.stages import CompressedMean, ErrorFeedback, Mean, NeighborMean
from baguakit.topology import Ring

MINE = """
import baguakit as bk

value = bk.algorithms.bytegrad()
several = bk.during_backward(bk.stages.Mean(), stop=5) + bk.after_step(bk.stages.Mean(), start=5)
stage = bk.stages.Mean()


def function():
    return value


def broken():
    return undefined
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A module of a user in the current folder."""
    (tmp_path / "mine_of_a_user.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    sys.modules.pop("mine_of_a_user", None)


@pytest.mark.parametrize(
    "text, made",
    [
        ("bytegrad", bytegrad()),
        ("bytegrad(UInt4(), error_feedback=True)", bytegrad(UInt4(), error_feedback=True)),
        ("bk.algorithms.bytegrad(bk.compressors.UInt4())", bytegrad(UInt4())),
        ("top_k(1 / 64, values=UInt2())", top_k(1 / 64, values=UInt2())),
        ("local_sgd(every=10**9)", local_sgd(every=10**9)),
        (
            "diloco(every=30, inner=ErrorFeedback(CompressedMean(UInt4())))",
            diloco(every=30, inner=ErrorFeedback(CompressedMean(UInt4()))),
        ),
        (
            "during_backward(Mean(), stop=5) + after_step(NeighborMean(Ring()), start=5)",
            bk.during_backward(Mean(), stop=5) + bk.after_step(NeighborMean(Ring()), start=5),
        ),
        (
            "(during_backward(Mean(), stop=5), after_step(NeighborMean(Ring()), start=5))",
            bk.during_backward(Mean(), stop=5) + bk.after_step(NeighborMean(Ring()), start=5),
        ),
        ("hierarchical(bytegrad())", bk.hierarchical(bytegrad())),
        ("mine_of_a_user:value", bytegrad()),
        ("mine_of_a_user:function", bytegrad()),
        ("mine_of_a_user:several", bk.during_backward(Mean(), stop=5) + bk.after_step(Mean(), start=5)),
    ],
)
def test_text_is_an_algorithm(text, made, mine):
    assert algorithm(text) == made


@pytest.mark.parametrize("name", ["bytegrad", "decentralized", "gradient_allreduce", "local_sgd(start=5)"])
def test_the_repr_of_an_algorithm_reads_back(name):
    assert algorithm(repr(algorithm(name))) == algorithm(name)


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("byte()", r"byte\(\) is no algorithm: name 'byte' is not defined"),
        ("bytegrad(3)", r"bytegrad\(3\) is no algorithm: compressor is "),
        ("[].append(1)", r"\[\].append\(1\) is no algorithm: '\[\]' is neither a call, a number, a string nor a tuple"),
        ("bytegrad.__globals__", "is no algorithm: .* is neither a call"),
        ("bytegrad(", r"bytegrad\( is no algorithm: "),
        ("lambda", "lambda is no algorithm"),
        ("3", r"3 is a rule or a sum of rules, such as bk.algorithms.bytegrad\(\), not 3"),
        ("nowhere_to_be_found:rule", "cannot import nowhere_to_be_found:rule .* No module named 'nowhere_to_be_found'"),
        ("mine_of_a_user:rule", "cannot import mine_of_a_user:rule .* 'mine_of_a_user' has no attribute 'rule'"),
        ("mine_of_a_user:stage", r"mine_of_a_user:stage is a rule or a sum of rules, .* not Mean\(\)"),
        ("mine_of_a_user:broken", r"mine_of_a_user:broken\(\) raises NameError: name 'undefined' is not defined"),
        ("mine_of_a_user:", "an algorithm is given as module:name, such as train:make_model, not 'mine_of_a_user:'"),
    ],
)
def test_other_text_is_refused_in_one_sentence(text, sentence, mine):
    with pytest.raises(ValueError, match=sentence):
        algorithm(text)


def test_commas_inside_parentheses_do_not_split():
    assert split("ddp, bytegrad(UInt4(), error_feedback=True),mine:rule") == [
        "ddp",
        "bytegrad(UInt4(), error_feedback=True)",
        "mine:rule",
    ]


def test_contenders_know_their_period_and_whether_they_run_free(mine):
    assert contender("ddp") is DDP
    assert contender("diloco").period == 30 and contender("diloco(every=7)").period == 7
    assert contender("async_model_average").free and not contender("bytegrad").free
    assert contender("signum").optimizer == "sgd" and contender("bytegrad", optimizer="sgd").optimizer == "sgd"
    assert contender("mine_of_a_user:value").source and not contender("bytegrad").source
    with pytest.raises(ValueError, match="there is no algorithm called 'nonsense'; name one of ddp, bf16_hook, "):
        contender("nonsense")
