"""`BaguaStrategy` in Lightning's Trainer, which runs on the live ranks as if torchrun had started them."""

import contextlib
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from pool import ranks
from tiers import slow_after, slow_unless
from torch import nn
from training import batch, flat, loss, net, net_and_sgd, sgd

import baguakit as bk

pytest.importorskip("lightning", reason="Lightning is not installed: pip install 'lightning>=2.5'")

ROOT = Path(__file__).parents[2]
BATCHES = 4  # in an epoch


@contextlib.contextmanager
def launched():
    """The environment that torchrun gives its processes, without Lightning's warnings."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    told = {"LOCAL_RANK": rank, "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": size, "RANK": rank, "WORLD_SIZE": size}
    before = dict(os.environ)
    os.environ.update(told)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def toy(dtype=torch.float32, fails=lambda rank, step: False):
    """The toy problem as a LightningModule, and this rank's own batches of every epoch."""
    import lightning

    class Toy(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net(dtype)
            self.seen = []

        def training_step(self, data, i):
            x, y = (each[0] for each in data)
            if fails(dist.get_rank(), i):
                raise KeyError("no such batch")
            self.seen.append(self.trainer.strategy.attachment)
            return (self.net(x) - y).square().mean()

        def configure_optimizers(self):
            return sgd(self.net.parameters())

    return Toy(), torch.utils.data.DataLoader([batch(dist.get_rank(), i, dtype) for i in range(BATCHES)], batch_size=1)


def fit(
    algorithm, epochs=1, ckpt=None, save=None, strategy=None, dtype=torch.float32, fails=None, module=None, **options
):
    """Train the toy problem, or another `module()`; return the weights and the steps that the attachment counted."""
    import lightning
    from lightning.fabric.plugins.environments import TorchElasticEnvironment

    with launched():
        make = bk.interop.lightning.BaguaStrategy if strategy is None else strategy
        rule = [] if algorithm is None else [algorithm if isinstance(algorithm, str) else algorithm(bk)]
        model, loader = toy(dtype, **({} if fails is None else {"fails": fails}))
        model = model if module is None else module()
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = lightning.Trainer(
            strategy=make(*rule, cluster_environment=TorchElasticEnvironment(), process_group_backend="gloo"),
            devices=dist.get_world_size(),
            accelerator="cpu",
            max_epochs=epochs,
            enable_checkpointing=save is not None,
            use_distributed_sampler=False,
            callbacks=[lightning.pytorch.callbacks.ModelCheckpoint(save, "{step}", save_top_k=-1)] if save else None,
            **quiet,
            **options,
        )
        trainer.fit(model, loader, ckpt_path=ckpt)
        return flat(model.net), [att.step for att in model.seen if att is not None][-1:]


def ddp(**options):
    """Lightning's own."""
    from lightning.pytorch.strategies import DDPStrategy

    return DDPStrategy(**options)


def by_hand(rule, epochs=1, before=lambda model: None):
    """The same training in a loop of one's own."""
    model, optimizer = net_and_sgd()
    with bk.attach(model, optimizer, rule(bk)):
        for step in range(epochs * BATCHES):
            optimizer.zero_grad()
            loss(model, dist.get_rank(), step % BATCHES).backward()
            before(model)
            optimizer.step()
    return flat(model)


RULES = {
    "all-reduce": lambda bk: bk.algorithms.gradient_allreduce(),
    "bytegrad": lambda bk: bk.algorithms.bytegrad(bk.compressors.MinMaxUInt8(block=64), error_feedback=True),
    "awc": lambda bk: bk.algorithms.decentralized(),
    "atc": lambda bk: bk.algorithms.decentralized(order="atc"),
    "diloco": lambda bk: bk.algorithms.diloco(every=3, delay=1),
}


@pytest.mark.parametrize("rule", slow_unless(["bytegrad"], RULES))
def test_every_window_is_where_it_is_in_a_loop_of_ones_own(rule):
    """Lightning steps with a closure that runs forward and backward; only awc notices, and lands behind the step."""
    theirs = ranks(2, by_hand, RULES[rule], 2)
    for (weights, steps), wanted in zip(ranks(2, fit, RULES[rule], 2), theirs, strict=True):
        torch.testing.assert_close(weights, wanted, rtol=0, atol=1e-6 if rule == "awc" else 0)
        assert steps == [2 * BATCHES]


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.5}])
def test_an_all_reduce_is_lightnings_ddp(options):
    ours = ranks(2, lambda: fit("gradient_allreduce", 2, **options)[0])
    theirs = ranks(2, lambda: fit_ddp(**options))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def fit_ddp(**options):
    """`fit` without an attachment to ask for."""

    def strategy(**given):
        made = ddp(**given)
        made.attachment = None
        return made

    return fit(None, 2, strategy=strategy, **options)[0]


class Networks(nn.Module):
    """The generator and the discriminator of Lightning's GAN, small, and the losses of its manual optimization."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.LeakyReLU(0.2), nn.Linear(8, 6))
        self.discriminator = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1), nn.Sigmoid())

    def optimizers(self):
        each = (self.generator, self.discriminator)
        return [torch.optim.Adam(net.parameters(), lr=0.01, betas=(0.5, 0.999)) for net in each]

    def losses(self, real, step):
        """Yield the loss of the generator, and then that of the discriminator."""
        z = torch.randn(len(real), 3, generator=torch.Generator().manual_seed(step))
        valid, fake = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        of = nn.functional.binary_cross_entropy
        yield of(self.discriminator(self.generator(z)), valid)
        generated = self.discriminator(self.generator(z).detach())
        yield (of(self.discriminator(real), valid) + of(generated, fake)) / 2


def gan():
    """Lightning's template of a GAN: manual optimization, with the other network toggled off."""
    import lightning

    class GAN(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Networks()
            self.seen = []
            self.automatic_optimization = False

        def training_step(self, data, i):
            self.seen.append(self.trainer.strategy.attachment)
            losses = self.net.losses(data[0][0], i)
            for optimizer in self.optimizers():
                self.toggle_optimizer(optimizer)
                self.manual_backward(next(losses))
                optimizer.step()
                optimizer.zero_grad()
                self.untoggle_optimizer(optimizer)

        def configure_optimizers(self):
            return self.net.optimizers(), []

    return GAN()


def averaged_gan(gradients, every=1):
    """The same on two ranks in one process, with gradients or weights averaged by hand."""
    networks = [Networks() for _ in range(2)]
    optimizers = [each.optimizers() for each in networks]
    for step in range(2 * BATCHES):
        i = step % BATCHES
        losses = [each.losses(batch(rank, i)[0], i) for rank, each in enumerate(networks)]
        for k in range(2):
            for loss_of, both in zip(losses, optimizers, strict=True):
                next(loss_of).backward()
                other = both[1 - k].param_groups[0]["params"]
                for p in other:
                    p.grad = None
            pairs = zip(*(both[k].param_groups[0]["params"] for both in optimizers), strict=True)
            for a, b in pairs if gradients else ():
                a.grad = b.grad = (a.grad + b.grad) / 2
            for both in optimizers:
                both[k].step()
                both[k].zero_grad()
        for pair in zip(*(each.parameters() for each in networks), strict=True) if not gradients else ():
            if (step + 1) % every == 0:
                mean = sum(p.detach() for p in pair) / 2
                for p in pair:
                    p.data.copy_(mean)
    return [flat(each) for each in networks]


@pytest.mark.parametrize("every", slow_after(1, [0, 2]))
def test_lightnings_gan_is_averaged_as_by_hand(every):
    """Its gradients, or its weights after every second step of both optimizers."""

    def rule(bk):
        return bk.algorithms.local_sgd(every=every) if every else bk.algorithms.gradient_allreduce()

    wanted = averaged_gan(gradients=not every, every=every)
    for (weights, steps), mine in zip(ranks(2, lambda: fit(rule, 2, module=gan)), wanted, strict=True):
        torch.testing.assert_close(weights, mine, rtol=0, atol=1e-6)
        assert steps == [2 * BATCHES]


@pytest.mark.parametrize("rule", slow_after(1, ["bytegrad", "awc", "diloco"]))
def test_a_resumed_fit_is_the_uninterrupted_one(rule, tmp_path):
    """On every rank, also where each has its own weights, momenta and residuals."""

    def parts():
        fit(RULES[rule], 1, save=str(tmp_path))
        return fit(RULES[rule], 2, ckpt=str(tmp_path / f"step={BATCHES}.ckpt"))[0]

    whole = ranks(2, lambda: fit(RULES[rule], 2)[0])
    assert all(torch.equal(a, b) for a, b in zip(whole, ranks(2, parts), strict=True))
    assert torch.equal(*whole) == (rule == "bytegrad")
    assert [path.name for path in (tmp_path / "ranks").iterdir()] == [f"step={BATCHES}.ckpt.1"]


def test_where_ranks_are_alike_a_checkpoint_is_one_file(tmp_path):
    ranks(2, lambda: fit("bytegrad", save=str(tmp_path)))
    assert [path.name for path in tmp_path.iterdir()] == [f"step={BATCHES}.ckpt"]


def test_a_part_of_a_checkpoint_that_is_missing_is_named(tmp_path):
    def resume():
        fit(RULES["awc"], 1, save=str(tmp_path))
        dist.barrier()
        if dist.get_rank() == 1:
            (tmp_path / "ranks" / f"step={BATCHES}.ckpt.1").unlink()
            with pytest.raises(FileNotFoundError, match="saved in parts by 2 ranks"):
                part(tmp_path / f"step={BATCHES}.ckpt")
        return True

    def part(path):
        from lightning.fabric.plugins.environments import TorchElasticEnvironment
        from lightning.pytorch.trainer.states import TrainerFn

        with launched():
            strategy = bk.interop.lightning.BaguaStrategy(
                "decentralized", cluster_environment=TorchElasticEnvironment()
            )
            strategy._lightning_module = SimpleNamespace(
                trainer=SimpleNamespace(state=SimpleNamespace(fn=TrainerFn.FITTING))
            )
            return strategy.load_checkpoint(path)

    assert all(ranks(2, resume))


@pytest.mark.parametrize("precision, dtype", [("bf16-mixed", torch.float32), ("64-true", torch.float64)])
def test_precision_plugins(precision, dtype):
    results = ranks(2, lambda: fit("bytegrad", precision=precision, dtype=dtype)[0])
    exact = ranks(2, by_hand, RULES["all-reduce"])
    assert torch.equal(*results) and results[0].dtype == dtype
    assert (results[0] - exact[0]).norm() < 0.05 * exact[0].norm()


def test_nodes_are_known():
    results = ranks(2, lambda: fit(lambda bk: bk.hierarchical(bk.algorithms.gradient_allreduce()))[0])
    exact = ranks(2, by_hand, RULES["all-reduce"])
    torch.testing.assert_close(results[0], exact[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "arguments, options, words",
    [
        (["bytegard"], {}, "there is no bk.algorithms.bytegard; there are .*bytegrad"),
        ([3], {}, "is a rule or a sum of rules"),
        ([], {"find_unused_parameters": True}, "does not wrap the model, and takes no find_unused_parameters="),
    ],
)
def test_what_cannot_work_is_refused_in_words(arguments, options, words):
    with pytest.raises((TypeError, ValueError), match=words):
        bk.interop.lightning.BaguaStrategy(*arguments, **options)


DIGITS = """
import lightning, torch
from sklearn.datasets import load_digits
from torch.nn import functional
import baguakit as bk


class Digits(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))

    def training_step(self, batch, i):
        x, y = batch
        return functional.cross_entropy(self.net(x), y)

    def validation_step(self, batch, i):
        x, y = batch
        right = (self.net(x).argmax(1) == y).float().mean()
        self.log("right", right, sync_dist=True, prog_bar=False)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


if __name__ == "__main__":
    lightning.seed_everything(0)
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    train, test = torch.utils.data.TensorDataset(x[:1440], y[:1440]), torch.utils.data.TensorDataset(x[1440:], y[1440:])
    trainer = lightning.Trainer(
        strategy=bk.interop.lightning.BaguaStrategy("bytegrad"), devices=2, accelerator="cpu", max_epochs=8,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, accumulate_grad_batches=2,
    )
    model = Digits()
    trainer.fit(
        model,
        torch.utils.data.DataLoader(train, batch_size=16, shuffle=True),
        torch.utils.data.DataLoader(test, batch_size=64),
    )
    if trainer.is_global_zero:
        print("right:", float(trainer.callback_metrics["right"]))
"""


@pytest.mark.slow  # two processes import Lightning
@pytest.mark.timeout(320)
def test_lightning_starts_the_ranks_itself_and_they_learn_digits(tmp_path):
    script = tmp_path / "digits.py"
    script.write_text(DIGITS)
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    environment.update(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    result = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert float(result.stdout.split("right:")[1].split()[0]) > 0.85
