"""Resume: bitwise the run that was not interrupted; with other buckets or ranks, as declared."""

import io
from itertools import pairwise

import pytest
import torch
from pool import ranks
from training import flat, loss, net, sgd

RULES = {
    "all-reduce": lambda bk: bk.algorithms.gradient_allreduce(),
    "bytegrad": lambda bk: bk.algorithms.bytegrad(bk.compressors.MinMaxUInt8(block=64), error_feedback=True),
    "qadam": lambda bk: bk.algorithms.qadam(6, compressor=bk.compressors.MinMaxUInt8(block=64), error_feedback=True),
    "top_k": lambda bk: bk.algorithms.top_k(0.1),
    "power_sgd": lambda bk: bk.algorithms.power_sgd(rank=1, warmup_steps=4),
    "dcd": lambda bk: bk.algorithms.low_precision_decentralized(every=2),
    "choco": lambda bk: bk.algorithms.choco(),
    "choco, one peer": lambda bk: bk.algorithms.choco(bk.topology.OnePeerExact(), gamma=1.0),
    "diloco": lambda bk: bk.algorithms.diloco(every=4),
    "diloco, delayed": lambda bk: bk.algorithms.diloco(every=4, delay=2),
    "diloco, adam": lambda bk: bk.algorithms.diloco(every=3, optimizer=torch.optim.Adam, lr=0.01),
    "diloco, fragments": lambda bk: bk.algorithms.diloco(every=4, fragments=3, delay=1),
    "tracking": lambda bk: bk.algorithms.gradient_tracking(),
    "push_sum": lambda bk: bk.algorithms.push_sum(bk.topology.FromDigraph([(0, 1), (1, 2), (2, 0), (0, 2)])),
    "awc": lambda bk: bk.algorithms.decentralized(),
    "awc every third": lambda bk: bk.algorithms.decentralized(every=3),
    "atc": lambda bk: bk.algorithms.decentralized(order="atc"),
    "local": lambda bk: bk.algorithms.local_sgd(every=4),
    "post-local": lambda bk: bk.algorithms.local_sgd(every=2, start=6),
    "delayed": lambda bk: bk.after_step(bk.stages.Mean(), every=4, delay=2),
}


def run(rule, stops, steps=12, cuts=(1 << 20,)):
    """Train `steps` steps; at each of `stops` save everything, and go on from it with a new model and attachment."""
    import torch.distributed as dist

    import baguakit as bk

    saved = None
    bounds = [0, *stops, steps]
    for i, (start, stop) in enumerate(pairwise(bounds)):
        model = net()
        optimizer = sgd(model.parameters())
        with bk.attach(model, optimizer, rule(bk), bucket_bytes=cuts[i % len(cuts)]) as att:
            if saved is not None:
                loaded = torch.load(io.BytesIO(saved), weights_only=True)
                model.load_state_dict(loaded["model"])
                optimizer.load_state_dict(loaded["optimizer"])
                att.load_state_dict(loaded["att"])
            for step in range(start, stop):
                optimizer.zero_grad()
                loss(model, dist.get_rank(), step).backward()
                optimizer.step()
            buffer = io.BytesIO()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "att": att.state_dict()}
            torch.save(state, buffer)
            saved = buffer.getvalue()
    return flat(model), att.step


@pytest.mark.parametrize("rule", RULES)
def test_a_resumed_run_is_the_uninterrupted_one(rule):
    whole, parts = ranks(3, run, RULES[rule], ()), ranks(3, run, RULES[rule], (3, 5, 10))
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(whole, parts, strict=True))
    assert all(step == 12 for _, step in parts)


@pytest.mark.parametrize(
    "rule",
    ["awc", "awc every third", "atc", "local", "delayed", "diloco", "diloco, delayed", "diloco, adam", "tracking"],
)
def test_other_buckets_change_nothing(rule):
    """Rules on weights are the same in any buckets; a mean over two ranks is, too."""
    whole, parts = ranks(2, run, RULES[rule], ()), ranks(2, run, RULES[rule], (3, 5, 10), 12, (1 << 20, 1, 200))
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(whole, parts, strict=True))


def test_residuals_survive_other_buckets():
    def held(bucket_bytes, state=None):
        import torch.distributed as dist

        import baguakit as bk

        model = net()
        optimizer = sgd(model.parameters())
        with bk.attach(model, optimizer, RULES["bytegrad"](bk), bucket_bytes=bucket_bytes) as att:
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


def test_another_number_of_ranks_takes_the_mean_of_the_residuals():
    def save():
        import torch.distributed as dist

        import baguakit as bk

        model = net()
        optimizer = sgd(model.parameters())
        with bk.attach(model, optimizer, RULES["bytegrad"](bk)) as att:
            loss(model, dist.get_rank(), 0).backward()
            optimizer.step()
            return att.state_dict()

    def load(states):
        import torch.distributed as dist

        import baguakit as bk

        model = net()
        optimizer = sgd(model.parameters(), lr=0.0)
        with bk.attach(model, optimizer, RULES["bytegrad"](bk)) as att:
            att.load_state_dict(states[dist.get_rank()])
            (0 * loss(model, 0, 0)).backward()  # sends the mean of the residuals, and nothing else
            return {name: p.grad for name, p in model.named_parameters()}

    states = ranks(3, save)
    grads = ranks(2, load, states)
    for name, grad in grads[0].items():
        residuals = [state["rules"]["0"]["parameters"][name]["residual"] for state in states[:2]]
        expected = sum(residuals) / 2
        torch.testing.assert_close(grad, expected, rtol=0, atol=float(expected.abs().max()) / 50 + 1e-9)


def saved_by(make):
    """What this rank has after some steps: (weights, what the rules remember)."""
    import torch.distributed as dist

    import baguakit as bk

    model = net()
    optimizer = sgd(model.parameters())
    with bk.attach(model, optimizer, make(bk)) as att:
        for step in range(7):
            optimizer.zero_grad()
            loss(model, dist.get_rank(), step).backward()
            optimizer.step()
        return model.state_dict(), att.state_dict()


@pytest.mark.parametrize("rule", ["awc", "atc", "dcd", "choco", "choco, one peer", "tracking", "push_sum", "local"])
@pytest.mark.parametrize("before, after", [(3, 2), (2, 3)])
def test_another_number_of_ranks_agrees_on_its_own_mean(rule, before, after):
    """Taken up by fewer or more ranks, at step size 0: their weights go to their mean, and stay there."""

    def made(bk):
        return bk.algorithms.push_sum(bk.topology.Exponential()) if rule == "push_sum" else RULES[rule](bk)

    def save():
        return saved_by(made)

    def load(states):
        import torch.distributed as dist

        import baguakit as bk

        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with bk.attach(model, optimizer, made(bk)) as att:
            weights, state = states[dist.get_rank() % before]
            model.load_state_dict(weights)
            att.load_state_dict(state)
            began = flat(model)
            for step in range(60):
                optimizer.zero_grad()
                loss(model, dist.get_rank(), step).backward()
                optimizer.step()
            return began, flat(model), att.consensus_distance()

    results = ranks(after, load, ranks(before, save))
    mean = sum(began for began, *_ in results) / after
    for _, weights, apart in results:
        assert (weights - mean).abs().max() < 2e-3 * mean.abs().max() and apart < 1e-2


def test_another_number_of_ranks_tracks_its_own_gradients():
    """Taken up by two of three ranks, the tracked gradients have the sum of the gradients again."""

    def save():
        return saved_by(RULES["tracking"])

    def load(states):
        import torch.distributed as dist

        import baguakit as bk

        model, rank = net(), dist.get_rank()
        with bk.attach(model, sgd(model.parameters(), lr=0.01), RULES["tracking"](bk)) as att:
            att.load_state_dict(states[rank][1])
            off = []
            for step in range(4):
                model.zero_grad()
                exact = torch.autograd.grad(loss(model, rank, step), list(model.parameters()))
                loss(model, rank, step).backward()
                off.append(flatten(p.grad for p in model.parameters()) - flatten(exact))
        return torch.stack(off)

    one, other = ranks(2, load, ranks(3, save))
    assert (one + other).abs().max() < 1e-5 and one.abs().max() > 0.1


def flatten(tensors):
    return torch.cat([x.flatten() for x in tensors])


def test_a_state_of_other_rules_is_refused():
    def both():
        import baguakit as bk

        model = net()
        optimizer = sgd(model.parameters())
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
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp

        import baguakit as bk

        model = net()
        optimizer = sgd(model.parameters())
        key = f"att{dist.get_rank()}"
        with bk.attach(model, optimizer, RULES["bytegrad"](bk)) as att:
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

    import tempfile
    import warnings

    with tempfile.TemporaryDirectory() as folder:

        def quietly():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return both(folder)

        assert ranks(2, quietly) == [True, True]
