"""Bad input: one sentence, on every rank, within seconds."""

import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from everything import ALGORITHMS, made
from pool import ranks
from torch import nn
from training import loss, net, net_and_sgd, sgd

import baguakit as bk
from baguakit.rules import rules_of


def refused(n, arguments, words, kind=Exception):
    """`arguments(bk, rank)` -> (model, optimizer, rules, options) must be refused with `words` on all ranks."""

    def run():
        began = time.monotonic()
        with pytest.raises(kind, match=words) as caught:
            model, optimizer, rules, options = arguments(bk, dist.get_rank())
            bk.attach(model, optimizer, *rules, **options)
        assert bk.Comm().gather_objects(1) == [1] * n  # the group is as good as before
        return str(caught.value), time.monotonic() - began

    for said, seconds in ranks(n, run):
        assert seconds < 5 and "\n" not in said and len(said) < 400


def plain(*rules, optimizer=sgd, model=net, **options):
    m = model()
    return m, optimizer(m.parameters()) if optimizer else None, rules, options


def eighths():
    m = net()
    m.weight = nn.Parameter(torch.zeros(3, dtype=torch.float8_e5m2))
    return m


CASES = {
    "a dtype that cannot be averaged": (
        2,
        lambda bk, r: plain(bk.algorithms.bytegrad(), model=eighths),
        "parameter weight is of dtype torch.float8_e5m2",
    ),
    "an odd group of pairs": (
        3,
        lambda bk, r: plain(bk.algorithms.decentralized(bk.topology.ShiftOne())),
        "ShiftOne needs an even number of ranks and this group has 3",
    ),
    "different models": (
        2,
        lambda bk, r: plain(bk.algorithms.bytegrad(), model=lambda: nn.Linear(2 + r, 1)),
        r"rank 0 has bucket 0: bias .*weight|rank 0 has bucket 0: weight \(1, 2\)|rank 1 has bucket 0: weight \(1, 3\)",
    ),
    "different rules": (
        2,
        lambda bk, r: plain(bk.algorithms.bytegrad(error_feedback=r == 1)),
        r"rank 0 has rule during_backward\(CompressedMean.* rank 1 has rule during_backward\(ErrorFeedback",
    ),
    "different numbers of rules": (
        2,
        lambda bk, r: plain(*[bk.algorithms.gradient_allreduce(), bk.algorithms.local_sgd()][: 1 + r]),
        r"rank 0 has nothing more where rank 1 has rule after_step\(Mean\(\), every=8\)",
    ),
    "no bucket": (2, lambda bk, r: plain(bk.algorithms.bytegrad(), bucket_bytes=0), "bucket_bytes .* not 0"),
    "two rules on one parameter": (
        2,
        lambda bk, r: plain(bk.algorithms.bytegrad(), bk.algorithms.gradient_allreduce()),
        "both act on .* in the same window",
    ),
    "a free-running rule with another": (
        2,
        lambda bk, r: plain(bk.free_running(bk.stages.Mean()), bk.during_backward(bk.stages.Mean(), stop=3)),
        "shares them only with free-running rules",
    ),
    "no rule": (2, lambda bk, r: plain(), "at least one algorithm"),
    "not a rule": (2, lambda bk, r: plain(bk.stages.Mean()), r"each of algorithms is a rule .* not Mean\(\)"),
    "no parameter": (
        2,
        lambda bk, r: plain(
            bk.algorithms.bytegrad(), model=lambda: nn.Linear(1, 1).requires_grad_(False), optimizer=None
        ),
        "no trainable parameter",
    ),
    "an empty choice": (
        2,
        lambda bk, r: plain(bk.during_backward(bk.stages.Mean(), where=lambda name, p: False)),
        "selects none of the 6",
    ),
    "no optimizer at all": (2, lambda bk, r: (net(), 3.0, [bk.algorithms.bytegrad()], {}), "not iterable|Optimizer"),
    "LBFGS": (2, lambda bk, r: plain(bk.algorithms.bytegrad(), optimizer=torch.optim.LBFGS), "LBFGS evaluates"),
    "nodes that are not known": (
        2,
        lambda bk, r: plain(bk.hierarchical(bk.algorithms.bytegrad())),
        "must know the nodes",
    ),
    "a group in place of a Comm": (
        2,
        lambda bk, r: plain(bk.algorithms.bytegrad(), comm=torch.distributed.group.WORLD),
        "bk.Comm",
    ),
    "no time": (2, lambda bk, r: plain(bk.algorithms.bytegrad(), timeout=0), "timeout"),
    "another device": (2, lambda bk, r: plain(bk.algorithms.bytegrad(), model=lambda: net().to("meta")), "meta"),
    "a plain GradScaler with gossip": (
        2,
        lambda bk, r: plain(bk.algorithms.decentralized(), scaler=torch.amp.GradScaler("cpu")),
        "ShardedGradScaler",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_refused_on_every_rank(case):
    refused(*CASES[case])


def test_every_rule_on_weights_wants_the_optimizer():
    on_weights = [each for each in ALGORITHMS if any(rule.what == "data" for rule in rules_of(made(each)))]

    def run():
        said = {}
        for algorithm in on_weights:
            with pytest.raises(ValueError) as caught:
                bk.attach(net(), None, made(algorithm))
            said[algorithm] = str(caught.value)
        return said

    for said in ranks(2, run):
        assert all("give attach the optimizer" in sentence and "\n" not in sentence for sentence in said.values()), said


def test_a_rank_that_raises_is_named_on_the_others():
    def run():
        m = nn.Linear(2, 2) if dist.get_rank() != 1 else nn.Linear(2, 2).requires_grad_(False)
        with pytest.raises(ValueError) as caught:
            bk.attach(m, None, bk.algorithms.bytegrad())
        return str(caught.value)

    said = ranks(3, run)
    assert "no trainable parameter" in said[1]
    assert said[0] == said[2] and said[0].startswith("rank 1 could not attach: ValueError: the model has no trainable")


@pytest.mark.parametrize(
    "declare, words",
    [
        (lambda bk: bk.stages.ErrorFeedback(bk.stages.Mean()), r"inner is .*, not Mean\(\), which loses nothing"),
        (
            lambda bk: bk.stages.ErrorFeedback(bk.stages.Hierarchical(bk.stages.CompressedMean())),
            r"say Hierarchical\(ErrorFeedback\(CompressedMean\(MinMaxUInt8\(\)\)\)\)",
        ),
        (lambda bk: bk.stages.CompressedMean(8), "compressor is a compressor such as"),
        (lambda bk: bk.stages.CompressedMean(bk.compressors.TopK(0.1)), "use SparseMean"),
        (lambda bk: bk.stages.SparseMean(0.1), "compressor is a compressor such as"),
        (lambda bk: bk.algorithms.top_k(2), "ratio is a finite number, at most 1 and greater than 0, not 2"),
        (lambda bk: bk.stages.NeighborMean("ring"), "topology is a topology such as Ring"),
        (lambda bk: bk.stages.Hierarchical(bk.algorithms.bytegrad()), "inner is a stage such as"),
        (lambda bk: bk.after_step(bk.stages.Mean(), every=0), "every is a whole number, 1 or more, not 0"),
        (lambda bk: bk.after_step(bk.stages.Mean(), every=2, delay=3), "delay=3"),
        (lambda bk: bk.during_backward(bk.stages.Mean(), start=4, stop=4), "never acts"),
        (lambda bk: bk.during_backward(bk.stages.Mean(), where="weight"), "where is a function"),
        (
            lambda bk: bk.free_running(bk.stages.NeighborMean(bk.topology.Ring())),
            "an average with an equal result on all ranks",
        ),
        (lambda bk: bk.algorithms.decentralized(order="cta"), "order is 'awc' or 'atc', not 'cta'"),
        (lambda bk: bk.hierarchical(bk.stages.Mean()), "algorithm is a rule or a sum of rules"),
        (lambda bk: bk.hierarchical(bk.hierarchical(bk.algorithms.local_sgd())), "averages within nodes and between"),
        (lambda bk: bk.algorithms.bytegrad(error=1e-12), "error=1e-12 is less than 8 bits can keep"),
        (lambda bk: bk.Bucket([]), "at least one"),
        (lambda bk: bk.Bucket([torch.zeros(2), torch.zeros(2, dtype=torch.float64)]), "one dtype"),
        (lambda bk: bk.Bucket([torch.zeros(2, dtype=torch.int64)]), "int64, which cannot be averaged"),
    ],
)
def test_nonsense_is_refused_where_it_is_declared(declare, words):
    with pytest.raises((ValueError, TypeError), match=words):
        declare(bk)


def test_without_a_process_group():
    with pytest.raises(RuntimeError, match="call init_process_group"):
        bk.Comm()


def test_a_stage_that_returns_something_else_is_named():
    """A result that broadcasts would otherwise be taken without a word."""

    def run():
        @dataclass(frozen=True, repr=False)
        class Odd(bk.stages.Stage):
            forgets: bool = False

            def __call__(self, x, state, comm):
                return None if self.forgets else x.mean()

        @dataclass(frozen=True, repr=False)
        class Broken(bk.stages.Stage):
            def __call__(self, x, state, comm):
                try:
                    return {}["x"]
                except KeyError:
                    raise ValueError("no x today")  # noqa: B904

        said = []
        for window in (bk.during_backward, bk.after_step, bk.between_steps):
            for stage in (Odd(False), Odd(True), Broken()):
                model, optimizer = net_and_sgd()
                with pytest.raises(RuntimeError) as error, bk.attach(model, optimizer, window(stage)):
                    for step in range(2):
                        loss(model, 0, step).backward()
                        optimizer.step()
                said.append(str(error.value))
        return said

    for said in ranks(2, run):
        for mean, nothing, broken in zip(said[::3], said[1::3], said[2::3], strict=True):
            wanted = "a stage returns what becomes of x, a tensor (155,)"
            assert f"TypeError: Odd() returned a tensor (); {wanted}" in mean
            assert f"TypeError: Odd(forgets=True) returned None; {wanted}" in nothing
            assert "ValueError: no x today" in broken
