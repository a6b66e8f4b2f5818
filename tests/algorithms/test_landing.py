"""Landings of a result: with the progress kept, mixed or overwritten, and where each of them ends."""

import pytest
import torch
import torch.distributed as dist
from pool import ranks
from quadratics import Point, curvatures, descend, optima

import baguakit as bk

H, GAMMA, N = 4, 0.3, 3


def ends(delay, mix):
    """Return the anchor's fixed point: Σ_r (I − M_r)(a − c_r) = 0, where a flight leaves with M_r (a − c_r) + c_r.

    For B = I − γ A_r, d the delay and α the mix, of one period:

        progress kept       M = B^(H−d) (I + B^(H−d) − B^H)⁻¹
        mixed               M = (1 − α) B^(H−d) (I − α B^H)⁻¹

    With α = 0 that is B^(H−d), whose fixed point is that of H − d steps without a delay.
    """
    b, c = 1 - GAMMA * curvatures(N), optima(N)
    rest = b ** (H - delay)
    m = rest / (1 + rest - b**H) if mix is None else (1 - mix) * rest / (1 - mix * b**H)
    return ((1 - m) * c).sum(0) / (1 - m).sum()


def anchored(delay, mix):
    """Descend, and return the anchor of this rank."""

    def anchor(att, model):
        return att._life.runners[0].states[0]["anchor"].clone()

    def rule(bk):  # the outer learning rate changes how soon it ends there, and not where
        return bk.algorithms.diloco(H, lr=1.0 if mix is None else 1.6, delay=delay, mix=mix)

    return descend(rule, 36 * H + 1, GAMMA, each=anchor, broadcast=True)[-1]


@pytest.mark.parametrize(
    "cases",
    [
        [(2, None), (2, 0.0), (2, 0.5)],
        pytest.param([(0, None), (0, 0.5), (H - 1, 0.0), (H - 1, None)], marks=pytest.mark.slow),
    ],
)
def test_landings_end_where_their_equations_say(cases):
    """DiLoCo on unlike quadratics: each way to land has a fixed point of its own."""

    def run():
        return torch.stack([anchored(*case) for case in cases])

    expected = torch.stack([ends(*case) for case in cases])
    for found in ranks(N, run):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("delay", [0, 1])
def test_a_landing_mixes_the_weights_as_they_are(delay, dtype):
    """x ← α x + (1 − α) result, of weights that were loaded from outside during the flight, too; α = 0 overwrites."""

    def run():
        found = []
        for mix in (None, 0.0, 0.25):
            model = Point(torch.full((3,), 4.0 * dist.get_rank(), dtype=dtype))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)  # of gradients that are zero
            rule = bk.after_step(bk.stages.Mean(), every=2, delay=delay, mix=mix)
            with bk.attach(model, optimizer, rule, broadcast=False):
                for step in range(2 + delay):
                    if step == 2:
                        model.load_state_dict({"x": torch.full((3,), 8.0, dtype=dtype)})
                    model(1.0, model.x.detach()).backward()
                    optimizer.step()
            found.append(model.x.tolist())
        return found

    mean = 2.0  # of 0 and 4
    for rank, found in enumerate(ranks(2, run)):
        x = 8.0 if delay else 4.0 * rank
        assert found == [[each] * 3 for each in (x + mean - 4.0 * rank, mean, 0.25 * x + 0.75 * mean)]


def test_mixes_without_a_meaning_are_refused():
    mean = bk.stages.Mean()
    for make, words in [
        (lambda: bk.after_step(mean, mix=1.0), "mix is a finite number, 0 or more and less than 1"),
        (lambda: bk.after_step(mean, every=4, delay=4, mix=0.25), "gives up 0.75 of the progress made in flight"),
        (lambda: bk.Rule("between_steps", mean, mix=0.5), "mix=0.5 is for after_step; between_steps keeps"),
        (lambda: bk.algorithms.diloco(4, fragments=2, mix=-0.1), "mix is a finite number"),
    ]:
        with pytest.raises(ValueError, match=words):
            make()
    rule = bk.after_step(mean, every=4, delay=2, mix=0)
    assert repr(rule) == "after_step(Mean(), every=4, delay=2, mix=0.0)"
    assert repr(bk.hierarchical(rule)) == "after_step(Hierarchical(Mean()), every=4, delay=2, mix=0.0)"
