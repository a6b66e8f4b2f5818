"""Optimizers and models that would train past what is attached, and optimizers with states of other kinds."""

import warnings

import pytest
import torch
import torch.distributed as dist
from everything import made
from pool import ranks
from saying import said
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from training import close, flat, loss, mean_loop, net, net_and_sgd, run_steps, sgd, train

import baguakit as bk

# Optimizers


def test_rules_that_never_fly_are_said():
    def run(kind):
        model, attached = net_and_sgd()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with bk.attach(model, attached, bk.algorithms.local_sgd(every=2)):
                if kind == "replaced":
                    state = {name: value.clone() for name, value in model.state_dict().items()}
                    model.load_state_dict(state, assign=True)
                stranger = torch.optim.AdamW(model.parameters())
                run_steps(model, stranger, range(3), rank=0)
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


@pytest.mark.parametrize("window", ["between_steps", "after_step"])
def test_rules_on_weights_that_no_step_lets_fly_are_said(window):
    """By hand, not by the optimizer that is attached."""

    def run(passes):
        model, optimizer = net_and_sgd()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with bk.attach(model, optimizer, getattr(bk, window)(bk.stages.Mean())):
                for step in range(passes):
                    loss(model, dist.get_rank(), step).backward()
                    with torch.no_grad():
                        torch._foreach_sub_([*model.parameters()], [0.1 * p.grad for p in model.parameters()])
        return [str(each.message) for each in caught]

    for sentences in ranks(2, lambda: [run(0), run(1), run(1001)]):
        none, *told = sentences
        assert none == []
        for (sentence,) in told:
            assert "SGD has not stepped: no rule on weights flies before" in sentence


def test_an_optimizer_that_only_wraps_another_is_refused_unless_the_other_is_its_optimizer():
    """As accelerate's is, whose steps are those of the one inside."""

    class Wraps(torch.optim.Optimizer):
        def __init__(self, inside, name):
            self.__dict__[name] = inside

        def step(self):
            self.optimizer.step()

        def zero_grad(self):
            self.optimizer.zero_grad()

    def run(name, algorithm):
        model = net()
        optimizer = Wraps(sgd(model.parameters()), name)
        with bk.attach(model, optimizer, made(algorithm)):
            run_steps(model, optimizer, range(4))
        return flat(model)

    for sentence in ranks(2, said, run, "inside", "bytegrad()"):
        assert sentence.startswith("TypeError: Wraps wraps another optimizer") and "the one inside" in sentence
    for algorithm in ("bytegrad()", "local_sgd(2)"):
        plain = ranks(2, lambda: train(lambda _: [made(algorithm)], 4))  # noqa: B023
        assert all(map(torch.equal, ranks(2, run, "optimizer", algorithm), plain))


# Models


def test_a_model_converted_while_attached_is_refused():
    def run(name):
        model, optimizer = net_and_sgd()
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
        model = nn.Linear(2, 2)
        of = (torch.arange(6) % 2 + dist.get_rank()).view(2, 3).t().to(torch.float32).to(getattr(torch, kind))
        model.register_buffer("held", of)
        model.register_buffer("single", of[0, 0].clone())
        bk.attach(model, None, bk.algorithms.gradient_allreduce()).detach()
        return model.held.to(torch.complex64).real.tolist(), model.single.to(torch.complex64).real.item()

    first, second = ranks(2, run)
    assert first == second and first[0] == [[0, 1], [1, 0], [0, 1]]


ODD = {
    "sparse": lambda x: x.real.to_sparse(),
    "sparse rows": lambda x: x.real.to_sparse_csr(),
    "a conjugate view": torch.conj,
    "a negative view": lambda x: x.conj().imag,
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_buffers_of_every_layout_begin_as_on_rank_0_and_views_stay_views(kind):
    """Also a sparse one with other places on each rank; its mean is not taken, and that of views is."""

    def rows(rank):
        return torch.tensor([[0, 1 + 2j, rank], [rank - 1, 0, 3j]])

    def run():
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse")
            model = nn.Linear(2, 2)
            model.register_buffer("held", held := ODD[kind](rows(dist.get_rank())))
            dense = "view" in kind
            with bk.attach(model, None, bk.algorithms.gradient_allreduce()) as att:
                assert torch.equal(held.to_dense(), ODD[kind](rows(0)).to_dense())
                with torch.no_grad():
                    held.mul_(dist.get_rank())
                att.merge()
            wanted = ODD[kind](rows(0)).to_dense() * (0.5 if dense else dist.get_rank())
            assert model.held is held and held.is_conj() == (kind == "a conjugate view")
            assert torch.equal(held.to_dense(), wanted)

    ranks(2, run)


EXACT = "gradient_allreduce()"


def test_an_optimizer_of_which_each_rank_has_a_part():
    """It trains as the same optimizer does whole; rules on weights, which it would undo, are refused."""

    def zero(model):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch's import of it uses torch.jit
            from torch.distributed.optim import ZeroRedundancyOptimizer
        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)

    def adam(model):
        return torch.optim.Adam(model.parameters(), lr=0.01)

    def run(algorithm):
        model = net()
        optimizer = zero(model)
        with bk.attach(model, optimizer, made(algorithm)):
            run_steps(model, optimizer, range(4))
        return flat(model)

    expected = flat(mean_loop(2, lambda m, rank, step: loss(m, rank, step).backward(), optimizer=adam))
    for weights in ranks(2, run, EXACT):
        close(weights, expected)
    for sentence in ranks(2, said, run, "local_sgd()"):
        assert sentence.startswith("ValueError: ZeroRedundancyOptimizer steps each parameter on one rank and sends it")


def test_a_state_made_of_several_tensors_is_taken_from_rank_0():
    """As the states of optimizers in 8 bits are."""

    def run():
        model = nn.Linear(3, 2, bias=False)
        optimizer = sgd(model.parameters())
        a = torch.full((2, 3), float(dist.get_rank()))
        optimizer.state[model.weight]["pair"] = TwoTensor(a, a + 5)
        with bk.attach(model, optimizer, made(EXACT)):
            pair = optimizer.state[model.weight]["pair"]
        return type(pair).__name__, pair.a.tolist(), pair.b.tolist()

    for kind, a, b in ranks(2, run):
        assert kind == "TwoTensor" and a == [[0.0] * 3] * 2 and b == [[5.0] * 3] * 2


def test_lbfgs_is_refused_with_the_way_in_which_it_trains():
    def run(attached):
        model = net()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
        with bk.attach(model, optimizer if attached else None, made(EXACT)):

            def closure():
                optimizer.zero_grad()
                value = loss(model, dist.get_rank(), 0)
                value.backward()
                return value

            optimizer.step(closure)
        return flat(model)

    for sentence in ranks(2, said, run, True):
        assert "with rules on gradients give None for the optimizer, which trains as DDP does" in sentence
    a, b = ranks(2, run, False)
    assert torch.equal(a, b)


class Slow(torch.optim.SGD):
    """Lookahead, which keeps slow weights."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("slow", p.detach().clone())
        return torch.optim.SGD.step.__wrapped__(self, closure)


@pytest.mark.parametrize("algorithm, warned", [("local_sgd()", 1), (EXACT, 0)])
def test_copies_of_the_weights_in_an_optimizer_are_said_once(algorithm, warned):
    def run():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = net()
            optimizer = Slow(model.parameters(), lr=0.01)
            with bk.attach(model, optimizer, made(algorithm)):
                run_steps(model, optimizer, range(3))
        return [str(each.message) for each in caught]

    for texts in ranks(2, run):
        assert len(texts) == warned
        assert all(text.startswith("Slow keeps a copy of the weights in its state, 'slow', which") for text in texts)
