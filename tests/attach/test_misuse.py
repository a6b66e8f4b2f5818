"""Misuse that would train on wrongly: it is made right, or one sentence on every rank names the rank and the call."""

import time
import warnings

import pytest
import torch
from pool import Pool, ranks
from torch import nn
from training import flat, loss, net, sgd

TIMEOUT = 3.0


@pytest.fixture(scope="module")
def pools():
    """Ranks whose groups may be broken, by their number."""
    made = {}

    def pool(size):
        return made.setdefault(size, Pool(size))

    yield pool
    for each in made.values():
        each.close()


def said(run, *args):
    """The sentence that `run` raises, with what kind of error it is; "" if none."""
    try:
        run(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def train(rule, each, steps=8, timeout=TIMEOUT, **options):
    """Train; `each(att, model, optimizer, step, rank)` comes before a step's backward, and may say to skip it."""
    import torch.distributed as dist

    import baguakit as bk

    rank, model = dist.get_rank(), net()
    optimizer = sgd(model.parameters())
    with bk.attach(model, optimizer, rule(bk), timeout=timeout, bucket_bytes=200, **options) as att:
        for step in range(steps):
            optimizer.zero_grad()
            if each(att, model, optimizer, step, rank) != "skip":
                loss(model, rank, step).backward()
                optimizer.step()
            time.sleep(0.05)
    return flat(model)


ALGORITHMS = {
    "bytegrad": lambda bk: bk.algorithms.bytegrad(error_feedback=True),
    "local_sgd": lambda bk: bk.algorithms.local_sgd(every=3),
    "gossip": lambda bk: bk.algorithms.decentralized(),
}


# A second backward before a step


@pytest.mark.parametrize("name", ["qadam", "gradient_tracking"])
def test_a_second_backward_after_the_gradient_was_replaced_is_refused(name):
    def run(zeroed):
        import baguakit as bk

        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with bk.attach(model, optimizer, getattr(bk.algorithms, name)()):
            loss(model, 0, 0).backward()
            if zeroed is not None:
                optimizer.zero_grad(set_to_none=zeroed)
            loss(model, 0, 1).backward()
            optimizer.step()

    for sentence in ranks(2, said, run, None):
        assert sentence.startswith("RuntimeError: a second backward has added gradients to what during_backward(")
        assert "att.no_sync()" in sentence
    for zeroed in (True, False):
        assert ranks(2, said, run, zeroed) == ["", ""]


# Calls that all ranks must make


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("size", [2, 3])
def test_a_collective_call_on_one_rank_only_is_named(pools, name, size):
    def each(att, model, optimizer, step, rank):
        if step == 4 and rank == 0:
            att.merge()

    for sentence in pools(size).run(said, train, ALGORITHMS[name], each):
        assert sentence.startswith("PeerError: rank") and "merge()" in sentence, sentence
        if size == 3:
            assert sentence.startswith("PeerError: rank 0 has parted from ranks 1, 2:"), sentence


def test_a_collective_call_on_one_rank_at_the_end_is_named(pools):
    def run():
        import torch.distributed as dist

        import baguakit as bk

        model = net()
        with bk.attach(model, sgd(model.parameters()), bk.algorithms.local_sgd(), timeout=TIMEOUT) as att:
            if dist.get_rank() == 1:
                att.consensus_distance()

    first, second = pools(2).run(said, run)
    assert first == "" and second.startswith("PeerError: rank 0 has left after") and "consensus_distance()" in second


def test_a_parameter_that_one_rank_alone_unfreezes_is_named(pools):
    def each(att, model, optimizer, step, rank):
        if step == 0:
            model[0].bias.requires_grad_(False)
        if step == 3 or rank == 1:
            model[0].bias.requires_grad_(step == 3 and rank == 1)

    for sentence in pools(3).run(said, train, ALGORITHMS["bytegrad"], each):
        assert sentence.startswith("PeerError: rank 1 has parted from ranks 0, 2:"), sentence
        assert "other parameters" in sentence


@pytest.mark.parametrize("difference", ["broadcast", "optimizer"])
def test_options_that_differ_between_ranks_are_refused(difference):
    def run():
        import torch.distributed as dist

        import baguakit as bk

        odd = dist.get_rank() == 1
        model = net()
        kind = torch.optim.Adam if odd and difference == "optimizer" else torch.optim.SGD
        broadcast = not odd if difference == "broadcast" else True
        bk.attach(model, kind(model.parameters(), lr=0.1), bk.algorithms.bytegrad(), broadcast=broadcast)

    wanted = {"broadcast": "broadcast=True where rank 1 has broadcast=False", "optimizer": "where rank 1 has Adam with"}
    for sentence in ranks(2, said, run):
        assert sentence.startswith("ValueError: ranks must attach the same: ") and wanted[difference] in sentence


@pytest.mark.parametrize("name", ["bytegrad", "gossip"])
def test_a_rank_that_loads_an_older_state_is_named(pools, name):
    def run():
        held = {}

        def each(att, model, optimizer, step, rank):
            if step == 2:
                held.update(att.state_dict())
            if step == 6 and rank == 2:
                att.load_state_dict(held)

        train(ALGORITHMS[name], each, steps=40)

    sentences = pools(3).run(said, run)
    for sentence in sentences:
        assert sentence.startswith("PeerError: rank 2 has parted from ranks 0, 1:"), sentences


def test_a_rank_that_steps_without_a_backward_is_named(pools):
    def each(att, model, optimizer, step, rank):
        if step == 3 and rank == 1:
            optimizer.step()
            return "skip"

    for sentence in pools(3).run(said, train, ALGORITHMS["bytegrad"], each, 40):
        assert sentence.startswith("PeerError: rank 1 has parted from ranks 0, 2:"), sentence


# A backward that fails on one rank


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        raise MemoryError("out of memory")


RULES = {
    "all-reduce": lambda bk: bk.algorithms.gradient_allreduce(),
    "bytegrad": lambda bk: bk.algorithms.bytegrad(bk.compressors.MinMaxUInt8(block=64), True),
    "qadam": lambda bk: bk.algorithms.qadam(3),
    "power_sgd": lambda bk: bk.algorithms.power_sgd(2),
    "top_k": lambda bk: bk.algorithms.top_k(0.1),
    "gradient_tracking": lambda bk: bk.algorithms.gradient_tracking(),
    "post-local": lambda bk: bk.algorithms.local_sgd(every=2, start=5),
}


def skipping(rule, at, without, scaled=False, steps=8):
    """Train, and skip a batch whose backward fails: rank 1's at step `at`; or, `without`, no rank sees that batch."""
    import torch.distributed as dist

    import baguakit as bk

    rank, model = dist.get_rank(), net()
    optimizer = sgd(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    with bk.attach(model, optimizer, rule(bk), bucket_bytes=200, scaler=scaler if scaled else None) as att:
        for step in range(steps):
            if without and step == at:
                continue
            optimizer.zero_grad()
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + rank))
            hidden = model[2](model[1](model[0](x)))
            hidden = Fails.apply(hidden) if step == at and rank == 1 else hidden
            try:
                scaler.scale(model[4](model[3](hidden)).square().mean()).backward()
            except MemoryError:
                continue
            scaler.step(optimizer)
            scaler.update(1024.0 if scaled else None)
        return flat(model), att.step


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_a_failed_backward_costs_all_ranks_the_same_step(name, scaled):
    if scaled and name in ("gradient_tracking", "post-local"):
        pytest.skip("rules on weights want a ShardedGradScaler")
    here, there = (ranks(3, skipping, RULES[name], 3, without, scaled) for without in (False, True))
    for (weights, step), (expected, wanted) in zip(here, there, strict=True):
        assert torch.equal(weights, expected) and step == wanted == 7


def test_a_failed_backward_whose_gradients_lie_in_the_buckets_is_told_to_all(pools):
    def run():
        import torch.distributed as dist

        import baguakit as bk

        model = net()
        optimizer = sgd(model.parameters())
        with bk.attach(model, optimizer, bk.algorithms.gradient_allreduce(), timeout=TIMEOUT, bucket_bytes=200):
            for step in range(4):
                optimizer.zero_grad(set_to_none=False)
                x = model[3](model[2](model[1](model[0](torch.ones(2, 6)))))
                x = Fails.apply(model[1](model[0](torch.ones(2, 6)))) if step == 2 and dist.get_rank() == 1 else None
                hidden = model[1](model[0](torch.ones(2, 6))) if x is None else x
                try:
                    model[4](model[3](model[2](hidden))).sum().backward()
                except MemoryError:
                    continue
                optimizer.step()

    for sentence in pools(3).run(said, run):
        assert sentence.startswith("PeerError: a backward failed on rank 1 after "), sentence
        assert sentence.endswith("use zero_grad(set_to_none=True)")


# Optimizers


def test_rules_that_never_fly_are_said():
    def run(kind):
        import baguakit as bk

        model = net()
        attached = sgd(model.parameters())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with bk.attach(model, attached, bk.algorithms.local_sgd(every=2)):
                if kind == "replaced":
                    state = {name: value.clone() for name, value in model.state_dict().items()}
                    model.load_state_dict(state, assign=True)
                stranger = torch.optim.AdamW(model.parameters())
                for step in range(3):
                    stranger.zero_grad()
                    loss(model, 0, step).backward()
                    stranger.step()
        return [str(each.message) for each in caught]

    def heard(kind):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            sentence = said(run, kind)
        return sentence, len(caught)

    for kind in ("another optimizer", "replaced"):
        for sentence, _ in ranks(2, heard, kind):
            assert sentence.startswith("RuntimeError: AdamW has trained the model and is not the optimizer that was")


def test_a_stranger_is_warned_of_once_and_backwards_without_steps_too():
    def run():
        import baguakit as bk

        model = net()
        attached, stranger = sgd(model.parameters()), torch.optim.AdamW(model.parameters())
        texts = []
        for passes, optimizer in ((3, stranger), (40, None)):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                with bk.attach(model, attached, bk.algorithms.gradient_allreduce()):
                    for step in range(passes):
                        loss(model, 0, step).backward()
                        if optimizer:
                            optimizer.step()
            texts.append([str(each.message) for each in caught])
        return texts

    for (stranger,), (passes,) in ranks(2, run):
        assert stranger.startswith("AdamW steps parameters of the attached model and is not the optimizer that was")
        assert passes.startswith("32 backward passes have been averaged since the attached optimizer stepped")


def test_a_step_within_backward_is_refused():
    def run():
        import baguakit as bk

        model = net()
        optimizers = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
        with bk.attach(model, optimizers, bk.algorithms.gradient_allreduce()):
            for p, optimizer in zip(model.parameters(), optimizers, strict=True):
                p.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
            loss(model, 0, 0).backward()

    for sentence in ranks(2, said, run):
        assert "SGD steps within a backward, before the gradients of all ranks have landed" in sentence


def test_an_optimizer_that_only_wraps_another_is_refused():
    class Wraps(torch.optim.Optimizer):
        def __init__(self, optimizer):
            self.optimizer = optimizer

        param_groups = property(lambda self: self.optimizer.param_groups)

    def run():
        import baguakit as bk

        model = net()
        bk.attach(model, Wraps(sgd(model.parameters())), bk.algorithms.gradient_allreduce())

    for sentence in ranks(2, said, run):
        assert sentence.startswith("TypeError: Wraps wraps another optimizer") and ".optimizer" in sentence


# Models


def test_a_model_converted_while_attached_is_refused():
    def run(name):
        import baguakit as bk

        model = net()
        optimizer = sgd(model.parameters())
        with bk.attach(model, optimizer, getattr(bk.algorithms, name)()):
            model.double()
            model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
            optimizer.step()

    for name in ("gradient_allreduce", "local_sgd"):
        for sentence in ranks(2, said, run, name):
            assert "is torch.float64 on cpu and was torch.float32 on cpu when it was attached" in sentence, sentence


KINDS = ["int8", "int16", "uint16", "uint32", "int64", "bool", "complex64", "bfloat16", "float8_e4m3fn", "float8_e5m2"]


@pytest.mark.parametrize("kind", KINDS)
def test_buffers_of_every_dtype_begin_as_on_rank_0(kind):
    def run():
        import torch.distributed as dist

        import baguakit as bk

        model = nn.Linear(2, 2)
        of = (torch.arange(6) % 2 + dist.get_rank()).view(2, 3).t().to(torch.float32).to(getattr(torch, kind))
        model.register_buffer("held", of)
        model.register_buffer("single", of[0, 0].clone())
        bk.attach(model, None, bk.algorithms.gradient_allreduce()).detach()
        return model.held.to(torch.complex64).real.tolist(), model.single.to(torch.complex64).real.item()

    first, second = ranks(2, run)
    assert first == second and first[0] == [[0, 1], [1, 0], [0, 1]]
