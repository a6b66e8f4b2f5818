"""Every algorithm trains tensors of a device that the host cannot touch, and that is late: see `late_device`."""

import contextlib
import threading
import warnings
from functools import partial
from importlib import import_module

import late_device
import pool
import pytest
import torch
import torch.distributed as dist
from everything import ALGORITHMS, averages_gradients, made, of_each_kind, runs_free
from tiers import slow
from training import batch, flat, net, sgd

import baguakit as bk
from baguakit.rules import rules_of

pytestmark = pytest.mark.skipif(not late_device.supported(), reason="this torch has no devices in Python")
ranks = partial(pool.ranks, late=True)
STEPS = 5
FEW = tuple(of_each_kind())
REST = tuple(each for each in ALGORITHMS if each not in FEW)


def trained(entry, device, steps=STEPS, optimizer=sgd, **options):
    """Train on this rank; return the weights, the report, and by threads how often the host waited for the device."""
    model = net().to(device)
    opt = optimizer(model.parameters())
    data = [[t.to(device) for t in batch(dist.get_rank(), step)] for step in range(steps)]
    with bk.attach(model, opt, made(entry), **options) as att:
        for step, (x, y) in enumerate(data):
            if step == 1:  # the first step compares values on the host
                late_device.waits.clear()
            opt.zero_grad()
            (model(x) - y).square().mean().backward()
            opt.step()
        waits = dict(late_device.waits)
        report = att.report()
    return flat(model).cpu(), report, waits


def wrong_bits(entries, streams=True):
    """Return what differs between the device and the CPU, by algorithm."""
    different = {}
    for entry in entries:
        with late_device.flavour(streams):
            there, _, waits = trained(entry, "late")
        here, _, _ = trained(entry, "cpu")
        if not (here.isfinite().all() and there.isfinite().all() and (runs_free(made(entry)) or here.equal(there))):
            different[entry] = (here - there).abs().max().item()
        # With a quorum, the first flight, before which states are made, may begin in any step.
        begun = not any(rule.quorum or rule.grace for rule in rules_of(made(entry)))
        if streams and begun and not all(name.startswith("baguakit lane") for name in waits):
            different[entry] = waits
    return different


@pytest.mark.parametrize(
    "entries, streams", [(FEW, True), slow((REST, True)), slow((ALGORITHMS, False))], ids=["few", "rest", "no streams"]
)
def test_every_algorithm_has_the_bits_of_the_cpu(entries, streams):
    """With streams, neither the training thread nor autograd's waits for the device."""
    assert ranks(2, wrong_bits, entries, streams) == [{}, {}]


def in_the_air(entry):
    """Return whether a flight may be in the air after the last step: its bytes are sent already, or not yet."""
    return any(rule.delay or rule.window == "between_steps" for rule in rules_of(made(entry)))


def with_kernels(entries, work):
    """Return `work(entries)` with flights that compute on the device, as if baguakit had kernels for it."""
    from baguakit.comm import sending

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sending, "has_kernels", lambda device: True)
        return work(entries)


# Adaptive choices try many formats: definitions take minutes on this device.
DEFINED = tuple(each for each in FEW + REST if "error=" not in each)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("entries", [FEW[2:3], slow((DEFINED,))], ids=["one", "all"])
def test_flights_on_the_device_have_the_bits_of_the_cpu(entries):
    """Packed pieces are copied to the host, sent, received there, and copied up, each when its event has passed."""
    assert ranks(2, with_kernels, entries, wrong_bits) == [{}, {}]


def on_two_devices(entries):
    """Return by algorithm the weights of ranks on two devices, those of ranks on CPUs, and the bytes that both sent."""
    device, found = ("cpu", "late")[dist.get_rank() % 2], {}
    warnings.filterwarnings("ignore", "ranks train on cpu and late", UserWarning)
    for entry in entries:
        mixed, report, _ = trained(entry, device)
        alike, other, _ = trained(entry, "cpu")
        found[entry] = mixed, alike, report.bytes_sent, other.bytes_sent
    return found


@pytest.mark.parametrize(
    "entries, kernels",
    [(FEW[:4], False), slow((FEW[4:] + REST, False)), slow((FEW[1:4], True))],
    ids=["few", "rest", "kernels"],
)
def test_ranks_on_different_devices_train_as_on_one(entries, kernels):
    """Two ranks on CPUs and two on the device: the weights and the bytes sent are those of four CPUs.

    With kernels, flights compute on the device on two ranks, and on the CPU on the others.
    """
    entries = [each for each in entries if not runs_free(made(each))]
    by_rank = ranks(4, with_kernels if kernels else on_two_devices, entries, *[on_two_devices] * kernels)
    for entry in entries:
        for found in by_rank:
            mixed, alike, sent, other_sent = found[entry]
            assert torch.equal(mixed, alike), entry
            assert sent == other_sent or in_the_air(entry), entry
            if averages_gradients(made(entry)):
                assert torch.equal(mixed, by_rank[0][entry][0]), entry


INTERPRETED = (
    "bytegrad(MinMaxUInt8(block=64))",
    "bytegrad(UInt4(block=64), error_feedback=True)",
    "top_k(0.1)",
    "decentralized()",
)


class Stepped(torch.optim.Optimizer):
    """SGD with momentum, by our kernel of steps."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
            bk.primitives.sgd_step_(p, p.grad, momentum, lr=0.05, momentum=0.9)


@contextlib.contextmanager
def interpreted(device):
    """Run Triton's kernels on the tensors of a device, interpreted; yield the families that have run."""
    from triton.runtime.interpreter import GridExecutor

    from baguakit.comm import sending
    from baguakit.compressors.base import Compressor
    from baguakit.kernels import operators
    from baguakit.kernels.steps import operators as steps

    taken, one_at_a_time, execute = set(), threading.Lock(), GridExecutor.__call__

    def home(x, family, *written, in_c=True):
        if x.device.type != device:
            return home_of(x, family, *written, in_c=in_c)
        taken.add(family)
        operators.increment_version([each for each in written if each is not None])
        return import_module(f"baguakit.kernels.{operators.MODULES[family][2]}")

    def launch(self, *args, **options):
        with one_at_a_time:  # the interpreter has one number of a program, whatever the thread
            execute(self, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        home_of = operators.home_of
        for module in (operators, steps):
            patch.setattr(module, "home_of", home)
        patch.setattr(GridExecutor, "__call__", launch)
        patch.setattr(sending, "has_kernels", lambda device: True)
        patch.setattr(Compressor, "warm_up", lambda *args: None)  # of 330,000 values, for minutes, and no compiler
        yield taken


def beside_interpreted_kernels(device):
    """Return by algorithm what `on_two_devices` returns, and the families of kernels that ran interpreted."""
    warnings.filterwarnings("ignore", "ranks train on cpu and late", UserWarning)
    odd, found = dist.get_rank() % 2 == 1, {}
    optimizer = Stepped if device == "cpu" else sgd  # a step's tables hold addresses, which the interpreter cannot read
    with interpreted(device) if odd else contextlib.nullcontext(set()) as taken:
        mixed = [trained(entry, device if odd else "cpu", 3, optimizer) for entry in INTERPRETED]
    for entry, (weights, report, _) in zip(INTERPRETED, mixed, strict=True):
        alike, other, _ = trained(entry, "cpu", 3, optimizer)
        found[entry] = weights, alike, report.bytes_sent, other.bytes_sent
    return found, taken


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "late"])
def test_ranks_beside_interpreted_kernels_train_as_on_one(device):
    """Two ranks run kernels of CPUs, and two those of GPUs, interpreted: weights and bytes are those of four CPUs."""
    pytest.importorskip("triton")
    by_rank = ranks(4, beside_interpreted_kernels, device)
    families = {"blockwise", "mixing", "topk"} | ({"steps"} if device == "cpu" else set())
    assert [taken for _, taken in by_rank] == [set(), families] * 2
    for entry in INTERPRETED:
        for found, _ in by_rank:
            mixed, alike, sent, other_sent = found[entry]
            assert torch.equal(mixed, alike), entry
            assert sent == other_sent or in_the_air(entry), entry
            if averages_gradients(made(entry)):
                assert torch.equal(mixed, by_rank[0][0][entry][0]), entry


def rounds_up(op, inside, run=late_device.run):
    """Do an operation as a device whose square roots are one unit in the last place larger."""
    out = run(op, inside)
    return out.copy_(out.nextafter(torch.full_like(out, torch.inf))) if "sqrt" in op.name() else out


def apart(algorithm, steps):
    """Train with AdamW; return the warnings, and the distance after each step and after a merge."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(late_device, "run", rounds_up)
        return trained_apart(algorithm, steps)


def trained_apart(algorithm, steps):
    device = ("cpu", "late")[dist.get_rank() % 2]
    model = net().to(device)
    optimizer, distances = torch.optim.AdamW(model.parameters(), lr=0.01), []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with bk.attach(model, optimizer, made(algorithm)) as att:
            for step in range(steps):
                x, y = (t.to(device) for t in batch(dist.get_rank(), step))
                optimizer.zero_grad()
                (model(x) - y).square().mean().backward()
                optimizer.step()
                distances.append(att.consensus_distance())
            att.merge()
            distances.append(att.consensus_distance())
    return [str(each.message) for each in said], distances


def test_replicas_on_two_devices_drift_apart_until_they_are_merged():
    """The mean of the gradients is exact, and AdamW's square root is rounded in another way on each device."""
    (said, distances), (others, _) = ranks(2, apart, "gradient_allreduce()", 40)
    assert len(said) == 1 and "replicas drift apart; call merge()" in said[0] and others == []
    assert 0 < max(distances[:-1]) < 1e-4 and distances[-1] == 0
    (said, distances), _ = ranks(2, apart, "local_sgd(every=2)", 4)
    assert said == [] and distances[1] == distances[3] == 0 < min(distances[::2][:2])
