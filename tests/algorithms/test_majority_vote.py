"""Signum and Lion with a majority vote: the vote is counted, and on one rank they are the optimizers themselves."""

import pytest
import torch
from pool import ranks
from tiers import slow_after
from torch.distributed.device_mesh import init_device_mesh
from training import flat, loss, net, run_steps

import baguakit as bk
from baguakit.algorithms.signs import MajorityVote, Ternary

LION = MajorityVote(0.9, 0.99)
BY_NAME = {"signum": bk.algorithms.signum(), "lion_vote": bk.algorithms.lion_vote()}


def sgd(params):
    return torch.optim.SGD(params, lr=0.01)


def drawn(rank, step, length):
    """Gradients of which many are zero, and many equal but for their sign: many ties."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(-1, 2, (length,), generator=draw) * torch.tensor(0.5)


def test_the_names_are_settings_of_one_stage():
    assert BY_NAME["signum"].stage == MajorityVote(0.9, 0.9) and BY_NAME["lion_vote"].stage == LION
    for wrong in (lambda: bk.algorithms.signum(1.0), lambda: bk.algorithms.lion_vote((0.9, -0.1))):
        with pytest.raises(ValueError, match=r"beta.* is a finite number, .*, not"):
            wrong()


def test_five_signs_are_a_byte():
    """Every byte up to 242 has five signs of its own, and every other says that they are not finite."""
    codes = torch.arange(256, dtype=torch.uint8)
    signs = Ternary().decompress(codes.view(1, -1), 5 * 256)
    assert torch.equal(Ternary().compress(signs)[0], codes.clamp(max=243).where(codes < 243, 255))
    signs = signs[0]
    assert signs[: 5 * 243].unique().tolist() == [-1, 0, 1] and signs[5 * 243 :].isnan().all()
    seven = Ternary().compress(signs[:7].view(1, -1))
    assert seven.shape == (1, 2)
    assert torch.equal(Ternary().decompress(seven, 10)[0], torch.cat([signs[:7], torch.zeros(3)]))


@pytest.mark.parametrize("name, betas", [("signum", (0.9, 0.9)), ("lion_vote", (0.9, 0.99))])
def test_one_rank_is_the_optimizer_bit_for_bit(name, betas):
    def ours():
        model = net()
        optimizer = sgd(model.parameters())
        with bk.attach(model, optimizer, getattr(bk.algorithms, name)()):
            run_steps(model, optimizer, range(8))
        return flat(model)

    def theirs():
        model = net()
        held = [torch.zeros_like(p) for p in model.parameters()]
        for step in range(8):
            model.zero_grad()
            loss(model, 0, step).backward()
            for p, m in zip(model.parameters(), held, strict=True):
                bk.primitives.lion_step_(p.detach(), p.grad, m, lr=0.01, betas=betas)
        return flat(model)

    assert torch.equal(ranks(1, ours)[0], theirs())


@pytest.mark.parametrize("n", slow_after(1, [3, 2, 5]))
def test_the_vote_is_counted_exactly(n):
    """d = sign(Σ_r sign(β₁ m_r + (1 − β₁) g_r)), with ties and zeros, for lengths that no shard divides."""

    def run(length):
        comm = bk.Comm()
        state = LION.init(bk.Bucket.of(torch.zeros(length)), comm)
        return [(LION(drawn(comm.rank, t, length), state, comm.at(t)).clone(), state["m"].clone()) for t in range(3)]

    for length in (0, 1, 7, 1000):
        found, m = ranks(n, run, length), torch.zeros(n, length)
        for t in range(3):
            g = torch.stack([drawn(rank, t, length) for rank in range(n)])
            votes = (m * 0.9 + g * (1 - 0.9)).sign().sum(0)
            m = m * 0.99 + g * (1 - 0.99)
            assert length < 1000 or ((votes == 0).any() and (votes.abs() == n).any())
            for rank in range(n):
                assert torch.equal(found[rank][t][0], votes.sign()) and torch.equal(found[rank][t][1], m[rank])


def test_between_nodes_the_means_of_nodes_vote():
    """Each rank holds the momentum of its shard of the mean of its node."""

    def run():
        comm = bk.Comm(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("inter", "intra")))
        stage = bk.stages.Hierarchical(LION)
        state = stage.init(bk.Bucket.of(torch.zeros(101)), comm)
        return [stage(drawn(comm.rank, t, 101), state, comm.at(t)).clone() for t in range(3)]

    found, m = ranks(4, run), torch.zeros(2, 101)
    for t in range(3):
        g = torch.stack([drawn(rank, t, 101) for rank in range(4)]).view(2, 2, 101).mean(1)
        votes = (m * 0.9 + g * (1 - 0.9)).sign().sum(0)
        m = m * 0.99 + g * (1 - 0.99)
        assert all(torch.equal(each[t], votes.sign()) for each in found)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_reaches_all_and_is_kept_by_none(bad):
    def run():
        comm = bk.Comm()
        state = LION.init(bk.Bucket.of(torch.zeros(100)), comm)
        LION(drawn(comm.rank, 0, 100), state, comm.at(0))
        held, g = state["m"].clone(), drawn(comm.rank, 1, 100)
        if comm.rank == 1:
            g[17] = bad
        result = LION(g, state, comm.at(1))
        return torch.equal(state["m"], held) and bool(held.any()), result

    for kept, result in ranks(3, run):
        assert kept and result[17].isnan() and result[:15].isfinite().all() and result[20:].isfinite().all()
