"""The compressed mean in as few bits as an error allows."""

import pytest
import torch
from pool import ranks

import baguakit as bk
from baguakit.stages.adaptive import EVERY, LATER, SAMPLE, bits_of_normal_values, choice, format_of, sample_of

ERROR, ROUNDS = 2.5e-3, 160


def values(rank: int, round: int, n: int = 1 << 14) -> torch.Tensor:
    """Gradients that shrink by 100 in 160 rounds, and whose tails grow heavier."""
    source = torch.Generator().manual_seed(rank)
    x, u = torch.randn(n, generator=source), torch.rand(n, generator=source)
    return x * torch.where(u < 0.01 * round / ROUNDS, 10.0, 1.0) * 0.01 ** (round / ROUNDS)


def error(compressor, x: torch.Tensor) -> float:
    read = compressor.decompress(compressor.compress(x.view(1, -1)), x.numel())
    return float((read - x).double().square().sum() / x.double().square().sum())


def fewest(stage, x: torch.Tensor) -> int:
    return next((b for b in stage.bits if error(format_of(b), x) <= stage.error), stage.bits[-1])


@pytest.mark.parametrize("allowed", [2e-5, 1e-3, 3e-3, 0.02, 0.5])
@pytest.mark.parametrize("round", [0, ROUNDS])
def test_it_chooses_the_fewest_bits_that_are_accurate_enough(allowed, round):
    stage, x = bk.stages.Adaptive(allowed), values(0, round, 2000)
    assert int(choice(stage, x, 8)) == fewest(stage, x)


def test_zeros_and_what_is_not_finite_change_no_choice():
    stage, x = bk.stages.Adaptive(ERROR, (2, 4, 8)), values(0, 0, 2000)
    assert [int(choice(stage, torch.zeros(100), now)) for now in stage.bits] == list(stage.bits)
    for broken in (float("nan"), float("inf")):
        x[7] = broken
        assert int(choice(stage, x, 4)) == 4


def test_a_sample_is_whole_blocks_from_all_parts():
    x = torch.arange(5 * SAMPLE + 100, dtype=torch.float32)
    sample = sample_of(x)[0]
    assert SAMPLE // 2 < len(sample) <= SAMPLE and torch.equal(sample[:256], x[:256]) and sample[-1] > 4.9 * SAMPLE
    assert torch.equal(sample.view(-1, 256) - sample.view(-1, 256)[:, :1], x[:256].expand(len(sample) // 256, -1))
    assert torch.equal(sample_of(x[:100]), x[:100].view(1, -1))


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_agree_in_passing_and_the_mean_is_that_of_the_format_in_force(n):
    def run():
        stage, comm = bk.stages.Adaptive(ERROR), bk.Comm()
        state = stage.init(bk.Bucket.of(values(0, 0)), comm)
        bits, sent, equal = [], [], True
        for round in range(ROUNDS):
            counted, plain = {}, {}
            here = comm.for_flight(round, round, 0, counted)
            x, residual, lost = values(comm.rank, round), torch.zeros(1 << 14), torch.zeros(1 << 14)
            y = stage(x.clone(), state, here, residual=residual)
            bits.append(int(state["bits"]))
            sent.append(counted["flat"])
            fixed = bk.stages.CompressedMean(format_of(bits[-1]))
            z = fixed(x, {}, comm.for_flight(round, round, 0, plain), residual=lost)
            equal &= torch.equal(y, z) and torch.equal(residual, lost)
            equal &= round % EVERY == 0 or counted == plain
        return bits, sent, equal

    (bits, *others), (sent, *_), equal = zip(*ranks(n, run), strict=True)
    stage = bk.stages.Adaptive(ERROR)
    assert all(equal) and all(each == bits for each in others) and len(set(bits)) > 1
    chosen = [max(fewest(stage, values(r, t)) for r in range(n)) for t in range(0, ROUNDS, EVERY)]
    assert bits == [8] * LATER + [b for b in chosen for _ in range(EVERY)][: ROUNDS - LATER]
    # The error stays within 10 % of what was asked, for fewer bytes than the format that keeps it throughout.
    looked = [(t, values(r, t)) for r in range(n) for t in (*range(LATER, ROUNDS, 8), ROUNDS - 1, *changes(bits))]
    kept = max(error(format_of(bits[t]), x) for t, x in looked)
    fixed = next(f for f in map(format_of, stage.bits) if max(error(f, x) for _, x in looked) <= kept)
    assert kept <= 1.1 * ERROR
    assert sum(sent) < ROUNDS * 2 * (n - 1) * fixed.row_bytes((1 << 14) // n)


def changes(bits: list[int]) -> list[int]:
    """The last rounds before a change: then a choice is oldest."""
    return [t for t in range(LATER, len(bits) - 1) if bits[t] != bits[t + 1]]


def test_it_is_declared_with_a_possible_error_and_bits_that_rise():
    for wrong in (0, 1, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="error is a finite number"):
            bk.stages.Adaptive(wrong)
    for wrong, bits in ((1e-12, (2, 8)), (1.5e-5, (8,)), (4e-3, (2, 3, 4))):
        with pytest.raises(ValueError, match=rf"^error={wrong:g} is less than {bits[-1]} bits can keep, about"):
            bk.stages.Adaptive(wrong, bits)
    for wrong in ((), (0, 4), (2, 9), (8, 4), (4, 4)):
        with pytest.raises(ValueError, match="bits is"):
            bk.stages.Adaptive(ERROR, wrong)
    with pytest.raises(TypeError, match="bits is a tuple, each of it a whole number"):
        bk.stages.Adaptive(ERROR, (2.5,))
    with pytest.raises(ValueError, match="takes a compressor or an error, not both"):
        bk.algorithms.bytegrad(bk.compressors.UInt4(), error=ERROR)
    assert repr(bk.algorithms.bytegrad(error=ERROR)) == "during_backward(Adaptive(0.0025))"


def test_the_planner_predicts_the_bits_that_normal_values_need():
    assert [bits_of_normal_values(bk.stages.Adaptive(e)) for e in (2e-5, 1e-3, 5e-3, 0.02, 0.5)] == [
        8, 6, 5, 4, 2,
    ]  # fmt: skip
