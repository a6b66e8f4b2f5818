"""What training scripts do, and what must not change for it."""

import pytest
import torch
from pool import ranks
from torch import nn
from training import batch, flat, loss, net, sgd

GOSSIP = [lambda bk: bk.algorithms.decentralized(), lambda bk: bk.algorithms.decentralized(order="atc")]
ALL = [lambda bk: bk.algorithms.gradient_allreduce(), lambda bk: bk.algorithms.bytegrad(), *GOSSIP]


def mean_loop(n, backward, steps=4, model=net):
    """n ranks in one process: gradients averaged by hand. `backward(model, rank, step)`."""
    models = [model() for _ in range(n)]
    optimizers = [sgd(m.parameters()) for m in models]
    for step in range(steps):
        for rank, (m, o) in enumerate(zip(models, optimizers, strict=True)):
            o.zero_grad()
            backward(m, rank, step)
        for ps in zip(*(m.parameters() for m in models), strict=True):
            if any(p.grad is not None for p in ps):
                g = sum(p.grad if p.grad is not None else torch.zeros_like(p) for p in ps) / n
                for p in ps:
                    p.grad = g.clone()
        for o in optimizers:
            o.step()
    return models[0]


def attached(backward, steps=4, model=net, algorithm=None, **options):
    import torch.distributed as dist

    import baguakit as bk

    m = model()
    o = sgd(m.parameters())
    with bk.attach(m, o, (algorithm or bk.algorithms.gradient_allreduce()), **options):
        for step in range(steps):
            o.zero_grad()
            backward(m, dist.get_rank(), step)
            o.step()
    return flat(m)


def same(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_two_backwards_before_a_step():
    def backward(m, rank, step):
        loss(m, rank, step).backward()
        loss(m, rank, step + 100).backward()

    for x in ranks(3, attached, backward):
        same(x, flat(mean_loop(3, backward)))


@pytest.mark.parametrize("algorithm", GOSSIP)
def test_two_backwards_from_one_forward(algorithm):
    def backward(m, rank, step):
        value = loss(m, rank, step)
        value.backward(retain_graph=True)
        value.backward()

    def run():
        import baguakit as bk

        return attached(backward, algorithm=algorithm(bk))

    assert torch.isfinite(torch.stack(ranks(2, run))).all()


def test_gradients_kept_as_zeros():
    def run():
        import torch.distributed as dist

        import baguakit as bk

        m = net()
        o = sgd(m.parameters())
        addresses = set()
        with bk.attach(m, o, bk.algorithms.gradient_allreduce()):
            for step in range(4):
                o.zero_grad(set_to_none=False)
                loss(m, dist.get_rank(), step).backward()
                addresses.add(tuple(p.grad.data_ptr() for p in m.parameters()))
                o.step()
        return flat(m), len(addresses)

    expected = flat(mean_loop(3, lambda m, r, s: loss(m, r, s).backward()))
    for x, addresses in ranks(3, run):
        same(x, expected)
        assert addresses == 1


class Odd(nn.Module):
    """A shared parameter, a frozen one, one that is never used, one used on some ranks only, and two dtypes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
        self.two.weight = self.one.weight
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.never = nn.Parameter(torch.randn(4))
        self.some = nn.Parameter(torch.randn(6))
        self.precise = nn.Linear(6, 1, dtype=torch.float64)

    def forward(self, x, some):
        x = self.two(torch.tanh(self.one(x))) + self.frozen
        return self.precise((x * self.some if some else x).double())


def odd_backward(m, rank, step):
    x, y = batch(rank, step)
    (m(x, rank == 1 and step % 2 == 0) - y).square().mean().backward()


def test_shared_frozen_unused_and_mixed_parameters():
    expected = mean_loop(3, odd_backward, model=Odd)

    def run():
        import torch.distributed as dist

        import baguakit as bk

        m = Odd()
        o = torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9)
        missing = []
        with bk.attach(m, o, bk.algorithms.gradient_allreduce(), bucket_bytes=100):
            for step in range(4):
                o.zero_grad()
                odd_backward(m, dist.get_rank(), step)
                missing.append((m.never.grad is None, m.some.grad is None))
                o.step()
        return flat(m), missing

    for x, missing in ranks(3, run):
        same(x, flat(expected))
        assert missing == [(True, False), (True, True)] * 2


def test_an_unused_parameter_is_not_decayed():
    def run():
        import torch.distributed as dist

        import baguakit as bk

        m = Odd()
        before = m.never.detach().clone()
        o = torch.optim.AdamW(m.parameters(), lr=0.1, weight_decay=0.5)
        with bk.attach(m, o, bk.algorithms.bytegrad(error_feedback=True)):
            for step in range(3):
                o.zero_grad()
                odd_backward(m, dist.get_rank(), step)
                o.step()
        return torch.equal(before, m.never)

    assert all(ranks(2, run))


def test_a_gradient_that_nobody_touched_stays_as_it_was():
    def run():
        import baguakit as bk

        m = nn.Linear(3, 3)
        extra = nn.Parameter(torch.ones(5))
        m.register_parameter("extra", extra)
        o = sgd(m.parameters())
        with bk.attach(m, o, bk.algorithms.bytegrad(error_feedback=True)):
            (m(torch.ones(1, 3)).sum() + (extra * torch.arange(5.0) / 3).sum()).backward()
            held = extra.grad.clone()
            for p in (m.weight, m.bias):
                p.grad = None
            m(torch.ones(1, 3)).sum().backward()
            return torch.equal(held, extra.grad)

    assert all(ranks(3, run))


def test_everything_begins_as_on_rank_0():
    def run():
        import torch.distributed as dist

        import baguakit as bk

        torch.manual_seed(dist.get_rank())
        m = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        m[0].bias.requires_grad = False
        o = torch.optim.AdamW(m.parameters(), lr=0.1 + dist.get_rank())
        m(torch.randn(5, 4)).sum().backward()
        o.step()
        with bk.attach(m, o, bk.algorithms.gradient_allreduce()):
            moments = [o.state[p]["exp_avg"].flatten() for p in m.parameters() if p.requires_grad]
            held = torch.cat([*(x.detach().flatten().double() for x in [*m.parameters(), *m.buffers()]), *moments])
            return held, o.param_groups[0]["lr"]

    results = ranks(3, run)
    assert all(torch.equal(results[0][0], held) and lr == 0.1 for held, lr in results)


def test_broadcast_may_be_declined():
    def run():
        import torch.distributed as dist

        import baguakit as bk

        m = nn.Linear(1, 1)
        nn.init.constant_(m.weight, dist.get_rank())
        with bk.attach(m, sgd(m.parameters()), bk.algorithms.decentralized(order="atc"), broadcast=False) as att:
            apart = att.consensus_distance()
            att.merge()
            return m.weight.item(), apart, att.consensus_distance()

    for weight, apart, together in ranks(3, run):
        assert weight == 1.0 and together < 1e-6 and apart >= (2 / 3) ** 0.5 - 1e-6


@pytest.mark.parametrize("algorithm", ALL)
def test_evaluation_is_undisturbed_and_compilation_whole(algorithm):
    """One frame, no graph break, whatever is attached; a forward in between launches nothing."""

    def run():
        import torch._dynamo
        import torch.distributed as dist
        from torch._dynamo.testing import CompileCounter

        import baguakit as bk

        torch._dynamo.reset()
        counter = CompileCounter()
        m = net()
        keys = list(m.state_dict())
        compiled = torch.compile(m, backend=counter, fullgraph=True)
        o = sgd(m.parameters())
        with bk.attach(m, o, algorithm(bk)) as att:
            for step in range(4):
                o.zero_grad()
                x, y = batch(dist.get_rank(), step)
                (compiled(x) - y).square().mean().backward()
                o.step()
            flights = [row.flights for row in att.report().rows]
            with torch.no_grad():
                m(x)
            unchanged = flights == [row.flights for row in att.report().rows]
        return counter.frame_count, unchanged, keys == list(m.state_dict())

    for result in ranks(2, run):
        assert result == (1, True, True)


@pytest.mark.parametrize("algorithm", GOSSIP)
@pytest.mark.parametrize(
    "write", [lambda p: p.zero_(), lambda p: p.data.zero_(), lambda p: p.copy_(torch.ones_like(p))]
)
def test_weights_written_between_steps_are_kept(algorithm, write):
    """Loading a checkpoint, swapping in averaged weights or clamping: what an exchange brings is added to it."""

    def run():
        import torch.distributed as dist

        import baguakit as bk

        m = nn.Linear(8, 8, bias=False)
        o = torch.optim.SGD(m.parameters(), lr=0.0)
        with bk.attach(m, o, algorithm(bk)):
            for step in range(3):
                m(torch.ones(1, 8)).sum().backward()
                o.step()
                if step == 1:
                    with torch.no_grad():
                        write(m.weight)
                    held = m.weight.detach().clone()
        return torch.allclose(held, m.weight, atol=1e-6), dist.get_rank()

    assert all(kept for kept, _ in ranks(2, run))


def test_what_a_flight_brings_is_added_to_an_outside_write():
    """AWC with a write of +10 while the exchange is in the air:  x ← (x + 10) + (W x − x)."""

    def run():
        import torch.distributed as dist

        import baguakit as bk

        m = nn.Linear(1, 1, bias=False)
        nn.init.constant_(m.weight, float(dist.get_rank()))
        o = torch.optim.SGD(m.parameters(), lr=0.0)
        with bk.attach(m, o, bk.algorithms.decentralized(bk.topology.FullyConnected()), broadcast=False):
            m(torch.ones(1, 1)).sum().backward()
            m.weight.data.add_(10)
            o.step()
        return m.weight.item()

    assert ranks(3, run) == [11.0, 11.0, 11.0]


def test_an_exception_in_backward_is_forgotten_by_the_next():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            raise ValueError("out of luck")

    def backward(m, rank, step):
        if step == 1:
            x, y = batch(rank, 77)
            hidden = m[2](m[1](Fails.apply(m[0](x))))
            with pytest.raises(ValueError, match="out of luck"):
                (m[4](m[3](hidden)) - y).square().mean().backward()
            m.zero_grad()
        loss(m, rank, step).backward()

    def run():
        return attached(backward, bucket_bytes=100)

    expected = flat(mean_loop(2, lambda m, r, s: loss(m, r, s).backward()))
    for x in ranks(2, run):
        same(x, expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    from torch.utils.checkpoint import checkpoint

    def backward(m, rank, step):
        x, y = batch(rank, step)
        x = m[1](m[0](x))
        x = checkpoint(lambda v: m[3](m[2](v)), x, use_reentrant=reentrant)
        (m[4](x) - y).square().mean().backward()

    def run():
        return attached(backward, bucket_bytes=100)

    for x in ranks(2, run):
        same(x, flat(mean_loop(2, lambda m, r, s: loss(m, r, s).backward())))


def test_reentrant_checkpointing_with_memory_is_refused():
    from torch.utils.checkpoint import checkpoint

    def run():
        import baguakit as bk

        m = net()
        with (
            pytest.raises(RuntimeError, match="use_reentrant=False"),
            bk.attach(m, sgd(m.parameters()), bk.algorithms.bytegrad(error_feedback=True)),
        ):
            x, y = batch(0, 0)
            x = checkpoint(lambda v: m[3](m[2](v)), m[1](m[0](x)), use_reentrant=True)
            (m[4](x) - y).square().mean().backward()

    ranks(2, run)


def test_two_optimizers_on_one_model():
    """The step ends when the last has stepped: after every step replicas are equal."""

    def run():
        import torch.distributed as dist

        import baguakit as bk

        m = net()
        a = sgd([p for p in m.parameters() if p.ndim > 1])
        b = torch.optim.AdamW([p for p in m.parameters() if p.ndim == 1])
        apart = []
        with bk.attach(m, [a, b], bk.algorithms.local_sgd(every=1)) as att:
            for step in range(3):
                m.zero_grad()
                loss(m, dist.get_rank(), step).backward()
                (a if step % 2 else b).step()
                (b if step % 2 else a).step()
                apart.append(att.consensus_distance())
            return apart, att.step

    assert all(result == ([0.0, 0.0, 0.0], 3) for result in ranks(2, run))


def test_gradient_rules_need_no_optimizer():
    def run():
        import torch.distributed as dist

        import baguakit as bk

        m = net()
        with bk.attach(m, None, bk.during_backward(bk.stages.Mean(), stop=2)) as att:
            equal = []
            for step in range(3):
                m.zero_grad()
                loss(m, dist.get_rank(), step).backward()
                equal.append(bk.Comm().gather_objects(m[0].weight.grad.tolist()))
            return [all(g == each[0] for g in each) for each in equal], att.step

    assert all(result == ([True, True, False], 3) for result in ranks(2, run))


def test_several_models_and_attachments():
    def run():
        import torch.distributed as dist

        import baguakit as bk

        a, b = net(), net()
        oa, ob = sgd(a.parameters()), sgd(b.parameters())
        with bk.attach(a, oa, bk.algorithms.gradient_allreduce()), bk.attach(b, ob, bk.algorithms.local_sgd(1)):
            for step in range(4):
                for m, o in ((a, oa), (b, ob)):
                    o.zero_grad()
                    loss(m, dist.get_rank(), step).backward()
                    o.step()
        return flat(a), flat(b)

    first, *rest = ranks(3, run)
    assert all(torch.equal(x, y) for other in rest for x, y in zip(first, other, strict=True))


def test_rules_with_a_range_and_a_choice():
    """All-reduce for two steps, then gossip; biases are averaged on their own."""

    def run():
        import torch.distributed as dist

        import baguakit as bk

        m = net()
        o = sgd(m.parameters())
        rules = (
            bk.during_backward(bk.stages.Mean(), stop=2),
            bk.after_step(bk.stages.Mean(), start=2, every=2, where=lambda name, p: p.ndim > 1),
            bk.after_step(bk.stages.Mean(), start=2, where=lambda name, p: p.ndim == 1),
        )
        apart = []
        with bk.attach(m, o, rules):
            for step in range(6):
                o.zero_grad()
                loss(m, dist.get_rank(), step).backward()
                o.step()
                everywhere = bk.Comm().gather_objects([p.tolist() for p in m.parameters()])
                apart.append([w != everywhere[0][i] for i, w in enumerate(everywhere[1])])
        return apart

    equal, biases = [False] * 6, [True, False] * 3
    assert ranks(2, run)[0] == [equal, equal, biases, equal, biases, equal]


def test_channels_last_parameters():
    def backward(m, rank, step):
        x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        m(x.to(memory_format=torch.channels_last)).square().mean().backward()

    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3)).to(memory_format=torch.channels_last)

    for x in ranks(2, lambda: attached(backward, model=model)):
        same(x, flat(mean_loop(2, backward, model=model)))


def test_empty_parameter_groups_and_parameters():
    def run():
        import torch.distributed as dist

        import baguakit as bk

        m = net()
        m.register_parameter("empty", nn.Parameter(torch.empty(0)))
        o = torch.optim.SGD([{"params": []}, {"params": list(m.parameters())}], lr=0.1)
        with bk.attach(m, o, bk.algorithms.gradient_allreduce(), bucket_bytes=1) as att:
            loss(m, dist.get_rank(), 0).backward()
            o.step()
            return att.consensus_distance()

    assert ranks(2, run) == [0.0, 0.0]


def test_parameters_unfrozen_frozen_and_added_on_the_way():
    """Replicas stay equal, and equal a loop that averages every gradient there is."""

    def script(m, o, step):
        if step == 2:
            m[0].weight.requires_grad_(True)
        if step == 3:
            m[4].bias.requires_grad_(False)
            m[4].bias.grad = None
        if step == 4:
            m.add_module("5", nn.Linear(1, 1))
            m[5].load_state_dict({"weight": torch.ones(1, 1), "bias": torch.zeros(1)})
            o.add_param_group({"params": m[5].parameters()})

    def start():
        m = net()
        m[0].weight.requires_grad_(False)
        return m

    def run(algorithm):
        import torch.distributed as dist

        import baguakit as bk

        m = start()
        o = sgd(m.parameters())
        with bk.attach(m, o, algorithm(bk), bucket_bytes=300) as att:
            for step in range(6):
                script(m, o, step)
                o.zero_grad()
                loss(m, dist.get_rank(), step).backward()
                o.step()
            return flat(m), att.consensus_distance()

    models = [start() for _ in range(3)]
    optimizers = [sgd(m.parameters()) for m in models]
    for step in range(6):
        for rank, (m, o) in enumerate(zip(models, optimizers, strict=True)):
            script(m, o, step)
            o.zero_grad()
            loss(m, rank, step).backward()
        for ps in zip(*(m.parameters() for m in models), strict=True):
            if ps[0].grad is not None:
                g = sum(p.grad for p in ps) / 3
                for p in ps:
                    p.grad = g.clone()
        for o in optimizers:
            o.step()
    for x, apart in ranks(3, run, lambda bk: bk.algorithms.gradient_allreduce()):
        same(x, flat(models[0]))
        assert apart == 0.0
    for _, apart in ranks(3, run, lambda bk: bk.algorithms.local_sgd(every=1)):
        assert apart == 0.0


@pytest.mark.parametrize("algorithm", GOSSIP)
def test_micro_batches_under_gossip_are_one_batch(algorithm):
    """An exchange in the air lands when the optimizer steps, so that both micro-batches see the same weights."""

    def run(parts):
        import torch.distributed as dist

        import baguakit as bk

        m = net(torch.float64)
        o = sgd(m.parameters())
        with bk.attach(m, o, algorithm(bk)):
            for step in range(6):
                o.zero_grad()
                x, y = batch(dist.get_rank(), step, torch.float64)
                for rows in torch.arange(8).chunk(parts):
                    ((m(x[rows]) - y[rows]).square().mean() / parts).backward()
                o.step()
        return flat(m)

    for a, b in zip(ranks(3, run, 1), ranks(3, run, 4), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "algorithm",
    [
        lambda bk: bk.algorithms.diloco(every=2),
        lambda bk: bk.algorithms.low_precision_decentralized(),
        lambda bk: bk.algorithms.choco(),
    ],
)
def test_copies_of_the_weights_follow_a_checkpoint_loaded_after_attach(algorithm):
    """At lr 0 the loaded weights stay: no stale anchor or replica pulls them back."""

    def run():
        import baguakit as bk

        m = net()
        o = torch.optim.SGD(m.parameters(), lr=0.0)
        with bk.attach(m, o, algorithm(bk)):
            m.load_state_dict({name: value + 1 for name, value in net().state_dict().items()})
            before = flat(m)
            for step in range(4):
                o.zero_grad()
                loss(m, 0, step).backward()
                o.step()
        return float((flat(m) - before).abs().max())

    assert max(ranks(2, run)) < 1e-5


def test_two_rules_that_look_alike():
    """Rules are told apart by their place: equal ones on other parameters do not share flights or state."""

    def run():
        import torch.distributed as dist

        import baguakit as bk

        m = net()
        o = sgd(m.parameters())
        mean = bk.stages.CompressedMean(bk.compressors.MinMaxUInt8(block=64))
        rules = [
            bk.during_backward(bk.stages.ErrorFeedback(mean), where=lambda name, p: p.ndim > 1),
            bk.during_backward(bk.stages.ErrorFeedback(mean), where=lambda name, p: p.ndim == 1),
        ]
        with bk.attach(m, o, rules) as att:
            for step in range(3):
                o.zero_grad()
                loss(m, dist.get_rank(), step).backward()
                o.step()
            return (
                att.consensus_distance(),
                [row.rule for row in att.report().rows],
                [row.flights for row in att.report().rows],
            )

    for apart, names, flights in ranks(2, run):
        assert apart == 0.0 and len(set(names)) == 1 and flights == [3, 3]
