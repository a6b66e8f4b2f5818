"""Optimizers as people use them: clipped gradients, groups, schedules, closures, and weights in two precisions."""

import pytest
import torch
import torch.distributed as dist
from everything import (
    ALGORITHMS,
    averages_gradients,
    delayed,
    exact,
    made,
    others_slow,
    runs_free,
    stages,
    usual,
    windows,
)
from pool import ranks
from quantized import Quantized
from torch import nn
from training import attached, close, flat, loss, mean_loop, net, run_steps

import baguakit as bk

REPEATABLE = [each for each in usual().values() if not runs_free(made(each))]


def backward(model, rank, step):
    loss(model, rank, step).backward()


def scheduled(model, optimizer=torch.optim.SGD, **options):
    """An optimizer whose step size halves after every second step."""
    made = optimizer(model.parameters(), **options)
    made.schedule = torch.optim.lr_scheduler.StepLR(made, 2, 0.5)
    made.register_step_post_hook(lambda *_: made.schedule.step())
    return made


# Clipping


@pytest.mark.parametrize("algorithm", others_slow(each for each in ALGORITHMS if averages_gradients(made(each))))
def test_clipping_sees_the_same_gradients_on_all_ranks(algorithm):
    """The norms are the same to the last bit, and so is what they leave; those of an exact mean are the mean's."""

    def clip_into(norms):
        return lambda model, optimizer: norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))

    def run():
        norms = []
        return attached(backward, algorithm=made(algorithm), prepare=clip_into(norms)), norms

    norms = []
    expected = flat(mean_loop(3, backward, prepare=clip_into(norms)))
    results = ranks(3, run)
    for weights, found in results:
        assert torch.equal(weights, results[0][0]) and found == results[0][1]
    if delayed(made(algorithm)):  # zeros come first, and then gradients at other weights
        return
    if exact(made(algorithm)) and all(stage.averages for stage in stages(made(algorithm))):  # which a vote does not
        close(results[0][0], expected)
    if algorithm.startswith(("gradient_allreduce", "bytegrad(MinMaxUInt8")):
        assert results[0][1] == pytest.approx(norms[::3], rel=1e-5 if exact(made(algorithm)) else 0.02)
    assert min(norms) > 0.5


# Groups and schedules


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_groups_keep_their_own_decay_and_step_size(kind):
    def groups(model):
        matrices = {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1}
        vectors = {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0, "lr": 0.003}
        return kind([matrices, vectors], lr=0.02)

    for weights in ranks(3, lambda: attached(backward, optimizer=groups)):
        close(weights, flat(mean_loop(3, backward, optimizer=groups)))


def test_a_schedule_reaches_qadam_as_it_reaches_adam():
    """In its warm-up QAdam behind SGD is Adam; at every step size, and in groups of several."""

    def adam(model):
        return scheduled(model, torch.optim.AdamW, lr=0.02, weight_decay=0.1)

    def plain(model):
        return scheduled(model, torch.optim.SGD, lr=0.02, weight_decay=0.0)

    def decayed(model, optimizer):
        """AdamW's decay, before its step."""
        for p in model.parameters():
            p.data.mul_(1 - optimizer.param_groups[0]["lr"] * 0.1)

    def run():
        return attached(backward, 6, algorithm=bk.algorithms.qadam(10), optimizer=plain, prepare=decayed)

    for weights in ranks(2, run):
        close(weights, flat(mean_loop(2, backward, 6, optimizer=adam)))


# Closures


def with_closures(algorithm, kind, fused, closures):
    """Train on this rank; the loss is evaluated in the optimizer's step, or before it."""
    model = net()
    optimizer = kind(model.parameters(), lr=0.02)
    if fused:
        bk.optim.fuse(optimizer)
    losses = []
    with bk.attach(model, optimizer, made(algorithm)) as att:
        for step in range(6):

            def closure(step=step):
                optimizer.zero_grad()
                value = loss(model, dist.get_rank(), step)
                value.backward()
                return value

            if closures:
                value = optimizer.step(closure) if step % 2 else optimizer.step(closure=closure)
            else:
                value = closure()
                optimizer.step()
            losses.append(value.item())
        return flat(model), losses, att.step


@pytest.mark.parametrize("algorithm", others_slow(REPEATABLE, windows))
def test_a_closure_is_the_loop(algorithm):
    """To the last bit. Only what has flown between steps lands behind a step with a closure: x − γ g + (W x − x)."""
    rounded = "between_steps" in windows(made(algorithm))

    def run(kind, fused):
        return [with_closures(algorithm, kind, fused, closures) for closures in (True, False)]

    for kind, fused in ((torch.optim.SGD, False), (torch.optim.Adam, True)):
        for (a, losses, steps), (b, expected, _) in ranks(2, run, kind, fused):
            close(a, b)
            close(torch.tensor(losses), torch.tensor(expected))
            assert (rounded or (torch.equal(a, b) and losses == expected)) and steps == 6, (kind, fused)


@pytest.mark.parametrize("calls", [0, 2])
def test_optimizers_that_call_their_closure_never_or_twice(calls):
    """An exchange under way lands once: at step size 0, AWC over all ranks is the mean."""

    def run():
        class Calls(torch.optim.SGD):
            def step(self, closure=None):
                for _ in range(calls):
                    with torch.enable_grad():
                        closure()
                return super().step()

        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, float(dist.get_rank()))
        optimizer = Calls(model.parameters(), lr=0.0)
        with bk.attach(model, optimizer, bk.algorithms.decentralized(bk.topology.FullyConnected()), broadcast=False):
            optimizer.step(lambda: model(torch.ones(1, 1)).sum().backward())
        return model.weight.item()

    assert ranks(3, run) == [1.0] * 3


# Weights in two precisions


def test_masters_in_fp32_of_weights_in_bf16():
    """The optimizer steps fp32 copies: rules on gradients, and no optimizer for attach, which is said when it is."""

    class Masters(torch.optim.SGD):
        """SGD over fp32 copies of a bf16 model."""

        def __init__(self, model):
            self.model = model
            super().__init__([p.detach().float() for p in model.parameters()], lr=0.05, momentum=0.9)

        def step(self):
            masters = self.param_groups[0]["params"]
            for master, p in zip(masters, self.model.parameters(), strict=True):
                master.grad = p.grad.float()
            super().step()
            for master, p in zip(masters, self.model.parameters(), strict=True):
                p.data.copy_(master)

        def zero_grad(self):
            self.model.zero_grad()

    def run():
        model = net(torch.bfloat16)
        optimizer = Masters(model)
        with pytest.raises(ValueError, match=r"Masters steps a tensor \(10, 6\) in group 0 .* None for the optimizer"):
            bk.attach(model, optimizer, bk.algorithms.gradient_allreduce())
        with bk.attach(model, None, bk.algorithms.gradient_allreduce()):
            run_steps(model, optimizer, range(4))
        return torch.cat([master.flatten() for master in optimizer.param_groups[0]["params"]])

    expected = mean_loop(2, backward, model=lambda: net(torch.bfloat16), optimizer=Masters)
    for masters in ranks(2, run):
        assert masters.dtype == torch.float32 and torch.equal(masters.bfloat16(), flat(expected))


# States in tensors that consist of others, such as quantized ones


class Rounds(torch.optim.SGD):
    """An optimizer with a quantized state."""

    def load_state_dict(self, state):
        self.loaded = state["state"]


@pytest.mark.parametrize("empty", [0, 1])
def test_a_quantized_state_comes_from_rank_0_whole(empty):
    def run():
        model, rank = net(), dist.get_rank()
        optimizer = Rounds(model.parameters(), lr=0.1)
        if rank == 0 or not empty:
            codes = torch.arange(6, dtype=torch.uint8) + rank
            first = {"quantized": Quantized(codes, torch.tensor(0.5 + rank)), "step": torch.tensor(3.0 + rank)}
            optimizer.state[next(model.parameters())] = first
        with bk.attach(model, optimizer, bk.algorithms.gradient_allreduce()):
            pass
        if rank == 0:
            return None
        came = optimizer.loaded[0]
        return type(came["quantized"]).__name__, came["quantized"].codes, came["quantized"].scale, came["step"]

    kind, codes, scale, step = ranks(2, run)[1]
    assert (kind, codes.tolist(), float(scale), float(step)) == ("Quantized", list(range(6)), 0.5, 3.0)
