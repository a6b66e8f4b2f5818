"""Resume: bitwise the run that was not interrupted; with other buckets or ranks, as declared."""

import tempfile
import warnings

import pytest
import torch
import torch.distributed as dist
from everything import ALGORITHMS, family, made, others_slow, runs_free
from pool import ranks
from tiers import slow_after
from torch import nn
from training import flat, loss, net, net_and_sgd, run_steps, sgd

import baguakit as bk
from baguakit.rules import rules_of

REPEATABLE = [each for each in ALGORITHMS if not runs_free(made(each))]
MOMENTUM = ("diloco", "quasi_global_momentum")  # their own momentum moves on at step size 0
MIXING = [  # rules that only average weights
    each
    for each in REPEATABLE
    if all(rule.what == "data" for rule in rules_of(made(each))) and family(each) not in MOMENTUM
]
FEEDBACK = "bytegrad(MinMaxUInt8(block=64), error_feedback=True)"


def test_residuals_survive_other_buckets():
    def held(bucket_bytes, state=None):
        model, optimizer = net_and_sgd()
        with bk.attach(model, optimizer, made(FEEDBACK), bucket_bytes=bucket_bytes) as att:
            if state is not None:
                att.load_state_dict(state)
            else:
                loss(model, dist.get_rank(), 0).backward()
                optimizer.step()
            return att.state_dict()

    def both():
        first = held(1 << 20)
        second = held(100, first)
        third = held(1 << 20, second)
        pieces = [state["rules"]["0"]["parameters"] for state in (first, second, third)]
        return [{name: held["residual"] for name, held in piece.items()} for piece in pieces]

    for first, second, third in ranks(2, both):
        assert first.keys() == dict(net().named_parameters()).keys()
        assert any(x.abs().max() > 0 for x in first.values())
        for name, p in net().named_parameters():
            assert first[name].shape == p.shape and torch.equal(first[name], second[name])
            assert torch.equal(first[name], third[name])


def test_a_state_of_one_bucket_loads_into_the_buckets_of_the_default():
    def held(state=None, **options):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with bk.attach(model, optimizer, made(FEEDBACK), **options) as att:
            if state is not None:
                att.load_state_dict(state)
            else:
                model(torch.randn(2, 512)).square().sum().backward()
                optimizer.step()
            return att.state_dict()["rules"]["0"]["parameters"], att.state_dict(), len(att.report().rows)

    def run():
        saved, state, one = held(bucket_bytes=25 << 20)
        loaded, _, several = held(state)
        same = all(torch.equal(saved[name]["residual"], loaded[name]["residual"]) for name in saved)
        return one, several > 1, saved.keys() == loaded.keys() and same

    assert ranks(2, run) == [(1, True, True)] * 2


def test_another_number_of_ranks_takes_the_mean_of_the_residuals():
    def save():
        model, optimizer = net_and_sgd()
        with bk.attach(model, optimizer, made(FEEDBACK)) as att:
            loss(model, dist.get_rank(), 0).backward()
            optimizer.step()
            return att.state_dict()

    def load(states):
        model = net()
        optimizer = sgd(model.parameters(), lr=0.0)
        with bk.attach(model, optimizer, made(FEEDBACK)) as att:
            att.load_state_dict(states[dist.get_rank()])
            (0 * loss(model, 0, 0)).backward()  # sends the mean of the residuals, and nothing else
            return {name: p.grad for name, p in model.named_parameters()}, att.state_dict()["rules"]["0"]["parameters"]

    states = ranks(3, save)
    (grads, one), (_, other) = ranks(2, load, states)
    for name, grad in grads.items():
        assert torch.equal(one[name]["residual"], other[name]["residual"])  # since both began with the mean
        residuals = [state["rules"]["0"]["parameters"][name]["residual"] for state in states[:2]]
        expected = sum(residuals) / 2
        torch.testing.assert_close(grad, expected, rtol=0, atol=float(expected.abs().max()) / 50 + 1e-9)


def saved_by(algorithm):
    """Return the weights of this rank after some steps, and the state of its attachment."""
    model, optimizer = net_and_sgd()
    with bk.attach(model, optimizer, made(algorithm)) as att:
        run_steps(model, optimizer, range(7))
        return model.state_dict(), att.state_dict()


@pytest.mark.parametrize("algorithm", others_slow([*MIXING, "gradient_tracking()"]))
@pytest.mark.parametrize("before, after", [(3, 2), pytest.param(2, 3, marks=pytest.mark.slow)])
def test_another_number_of_ranks_agrees_on_its_own_mean(algorithm, before, after):
    """Taken up by fewer or more ranks, at step size 0: their weights go to their mean, and stay there."""

    def load(states):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with bk.attach(model, optimizer, made(algorithm)) as att:
            weights, state = states[dist.get_rank() % before]
            model.load_state_dict(weights)
            att.load_state_dict(state)
            began = flat(model)
            run_steps(model, optimizer, range(24))
            return began, flat(model), att.consensus_distance()

    results = ranks(after, load, ranks(before, saved_by, algorithm))
    mean = sum(began for began, *_ in results) / after
    for _, weights, apart in results:
        assert (weights - mean).abs().max() < 2e-3 * mean.abs().max() and apart < 1e-2


def test_another_number_of_ranks_tracks_its_own_gradients():
    """Taken up by two of three ranks, the tracked gradients have the sum of the gradients again."""

    def load(states):
        model, rank = net(), dist.get_rank()
        with bk.attach(model, sgd(model.parameters(), lr=0.01), made("gradient_tracking()")) as att:
            att.load_state_dict(states[rank][1])
            off = []
            for step in range(4):
                model.zero_grad()
                exact = torch.autograd.grad(loss(model, rank, step), list(model.parameters()))
                loss(model, rank, step).backward()
                off.append(flatten(p.grad for p in model.parameters()) - flatten(exact))
        return torch.stack(off)

    one, other = ranks(2, load, ranks(3, saved_by, "gradient_tracking()"))
    assert (one + other).abs().max() < 1e-5 and one.abs().max() > 0.1


def flatten(tensors):
    return torch.cat([x.flatten() for x in tensors])


def test_a_state_of_other_rules_is_refused():
    def both():
        model, optimizer = net_and_sgd()
        with bk.attach(model, optimizer, bk.algorithms.local_sgd(4)) as att:
            state = att.state_dict()
        with bk.attach(model, optimizer, bk.algorithms.local_sgd(5)) as att:
            with pytest.raises(
                ValueError, match=r"state is of after_step\(Mean\(\), every=4\), and the rule attached is"
            ):
                att.load_state_dict(state)
            with pytest.raises(ValueError, match="of 0 rules, and 1 are attached"):
                att.load_state_dict({"version": 1, "ranks": 2, "step": 0, "rules": {}})

    ranks(2, both)


def test_distributed_checkpoint():
    """torch.distributed.checkpoint saves and loads it; each rank's own under a key of its own."""

    def both(folder):
        import torch.distributed.checkpoint as dcp

        model, optimizer = net_and_sgd()
        key = f"att{dist.get_rank()}"
        with bk.attach(model, optimizer, made(FEEDBACK)) as att:
            loss(model, dist.get_rank(), 0).backward()
            optimizer.step()
            state = att.state_dict()
            dcp.save({key: state}, checkpoint_id=folder)
            fresh = {key: att.state_dict()}
            for held in fresh[key]["rules"]["0"]["parameters"].values():
                held["residual"].zero_()
            dcp.load(fresh, checkpoint_id=folder)
            att.load_state_dict(fresh[key])
            again = att.state_dict()
        pairs = [(s["rules"]["0"]["parameters"]) for s in (state, again)]
        return all(torch.equal(pairs[0][n]["residual"], pairs[1][n]["residual"]) for n in pairs[0])

    with tempfile.TemporaryDirectory() as folder:

        def quietly():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return both(folder)

        assert ranks(2, quietly) == [True, True]


def kept_for_others(expression):
    model, optimizer = net_and_sgd()
    with bk.attach(model, optimizer, made(expression)) as att:
        run_steps(model, optimizer, range(2))
        (rule,) = att._life.state_dict(same_ranks=False)["rules"].values()
    return {path for parts in rule["parameters"].values() for path in parts}, rule["own"]


def test_what_another_number_of_ranks_makes_anew_is_not_sent_to_a_rank_that_joins():
    assert ranks(2, kept_for_others, "choco()") == [(set(), {})] * 2
    assert ranks(2, kept_for_others, "bytegrad(error_feedback=True)") == [({"residual"}, {})] * 2


SHAPES = [[(), (3, 4)], [(3, 4), ()], [(), ()], [(3,), (0,)], [(0, 4), (3, 2), (), (0,)]]


def with_scalars(shapes, optimizer, stops, cuts, older):
    """Return the weights after seven steps, taken up at each of `stops` by a new attachment with the next of `cuts`."""
    torch.manual_seed(0)
    model = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    state, options = None, {"lr": 0.1}
    for i, (start, stop) in enumerate(zip((0, *stops), (*stops, 7), strict=True)):
        rule = bk.algorithms.diloco(2, optimizer, **options)
        with bk.attach(model, inner, rule, broadcast=False, bucket_bytes=cuts[i % len(cuts)]) as att:
            if state is not None:
                if older:  # which did not say
                    state["rules"]["0"].pop("whole")
                att.load_state_dict(state)
            for step in range(start, stop):
                inner.zero_grad()
                sum(((p - dist.get_rank() - step) ** 2).sum() for p in model).backward()
                inner.step()
            state = att.state_dict()
    return torch.cat([p.detach().flatten() for p in model])


@pytest.mark.parametrize("optimizer", slow_after(1, [torch.optim.Adam, torch.optim.RMSprop, torch.optim.NAdam]))
def test_they_resume_in_any_buckets(optimizer):
    def run():
        for shapes in SHAPES:
            whole = with_scalars(shapes, optimizer, (), (1 << 20,), False)
            for cuts, older in (((1 << 20, 1), False), ((1 << 20,), True), ((1, 1 << 20), True)):
                if older and optimizer is torch.optim.NAdam and shapes == [(), ()]:
                    continue  # its mu_product cannot be told from a moment
                assert torch.equal(whole, with_scalars(shapes, optimizer, (3, 5), cuts, older)), (shapes, cuts, older)

    ranks(2, run)
