r"""Measure images a second that an algorithm trains on, without loading any.

    torchrun --standalone --nproc_per_node=4 examples/synthetic_benchmark.py --algorithm bytegrad

On two machines, HOST being the first one's address, and `--node_rank=1` on the second:

    export GLOO_SOCKET_IFNAME=eth0
    torchrun --nnodes=2 --node_rank=0 --nproc_per_node=8 --master_addr=HOST --master_port=29400 \
        examples/synthetic_benchmark.py --model resnet50

The images are random, and each rank uses one batch again and again: only computation and communication are measured.
Prints images a second of each rank and of all ranks, mean ± 1.96 standard deviations over the iterations, and the
attachment's report.

Each rank has a GPU and NCCL where there are enough, otherwise the CPU and gloo. The model is a small ResNet written
below, or any model of torchvision by its name, if torchvision is installed.
"""

import argparse
import inspect
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu

import baguakit as bk

SMALL = "small_resnet"
NONE = "none"


class Block(nn.Module):
    """Two convolutions, and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        alike = stride == 1 and inputs == outputs
        self.around = nn.Identity() if alike else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, inputs, h, w) to (batch, outputs, h / stride, w / stride)."""
        return relu(self.body(x) + self.around(x))


def small_resnet(classes: int = 1000) -> nn.Module:
    """A ResNet of nine convolutions and 1.5 M parameters, for images of any size."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 7, 2, padding=3, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, padding=1),
        Block(32, 32, 1),
        Block(32, 64, 2),
        Block(64, 128, 2),
        Block(128, 256, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(256, classes),
    )


def network(name: str) -> nn.Module:
    """The model of a name.

    Raises:
        ValueError: there is none.
    """
    if name == SMALL:
        return small_resnet()
    try:
        from torchvision import models
    except ImportError:
        raise ValueError(f"--model {name} is torchvision's, which is not installed; take {SMALL}") from None
    if name not in models.list_models(module=models):
        raise ValueError(
            f"torchvision has no model called {name}; it has {', '.join(models.list_models(module=models))}"
        )
    return models.get_model(name, weights=None)


def algorithm_of(name: str) -> bk.rules.Algorithm:
    """The algorithm of a name, with its defaults; without communication it is one whose turn never comes.

    Raises:
        ValueError: there is none.
    """
    if name == NONE:
        return bk.algorithms.local_sgd(every=1_000_000_000)
    if name not in bk.algorithms.__all__:
        raise ValueError(
            f"there is no algorithm called {name!r}; choose {NONE} or one of {', '.join(bk.algorithms.__all__)}"
        )
    make: Callable[..., bk.rules.Algorithm] = getattr(bk.algorithms, name)
    needed = [
        p.name
        for p in inspect.signature(make).parameters.values()
        if p.default is p.empty and p.kind < p.VAR_POSITIONAL
    ]
    if needed:
        raise ValueError(f"bk.algorithms.{name} must be told {', '.join(needed)}: change this example for it")
    return make()


def arguments() -> argparse.Namespace:
    """The command line, checked before anything takes time."""
    parser = argparse.ArgumentParser(description="Images a second, on random images.")
    parser.add_argument(
        "--algorithm", default="gradient_allreduce", metavar="NAME", help="any of bk.algorithms, or none (%(default)s)"
    )
    parser.add_argument(
        "--model", default=SMALL, metavar="NAME", help="or one of torchvision's, such as resnet50 (%(default)s)"
    )
    parser.add_argument("--batch", type=int, default=32, help="images of a rank in a step (%(default)s)")
    parser.add_argument("--image", type=int, default=224, help="pixels of a side (%(default)s)")
    parser.add_argument("--warm-up", type=int, default=10, metavar="STEPS", help="not measured (%(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="in an iteration (%(default)s)")
    parser.add_argument("--iterations", type=int, default=10, help="each measured by itself (%(default)s)")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun --standalone --nproc_per_node=4 examples/synthetic_benchmark.py")
    for name in ("batch", "image", "steps", "iterations"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is 1 or more, not {getattr(options, name)}")
    try:
        options.network, options.rule = network(options.model), algorithm_of(options.algorithm)
    except ValueError as error:
        parser.error(str(error))
    return options


def join() -> torch.device:
    """Meet the other ranks: how to talk to them, and where to train."""
    here, gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
    if gpus < here:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // here))
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def speeds(step: Callable[[], None], images: int, iterations: int, device: torch.device) -> list[float]:
    """Images a second in each iteration; a GPU's work is waited for at its end."""
    measured = []
    for _ in range(iterations):
        began = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        measured.append(images / (time.perf_counter() - began))
    return measured


def spread(values: list[float]) -> str:
    """Mean ± 1.96 σ."""
    sigma = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.1f} ± {1.96 * sigma:.1f}"


def main() -> int:
    """Train on one random batch and say how fast that was."""
    options = arguments()
    device = join()
    comm = bk.Comm()
    torch.manual_seed(comm.rank)
    model = options.network.to(device)
    images = torch.randn(options.batch, 3, options.image, options.image, device=device)
    labels = torch.randint(1000, (options.batch,), device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()

    with bk.attach(model, optimizer, options.rule) as attachment:
        train(options.warm_up)
        dist.barrier()
        mine = speeds(lambda: train(options.steps), options.batch * options.steps, options.iterations, device)
        report = attachment.report()
    every = comm.gather_objects(mine)
    if comm.rank == 0:
        values = sum(p.numel() for p in model.parameters())
        place = torch.cuda.get_device_name() if device.type == "cuda" else "a CPU"
        print(f"{options.model}, {values:,} values; {options.batch} images a rank and step; each rank on {place}")
        print(report)
        for rank, measured in enumerate(every):
            print(f"rank {rank}: {spread(measured)} images a second")
        total = [sum(at_once) for at_once in zip(*every, strict=True)]
        print(f"{options.algorithm}, {comm.size} ranks: {spread(total)} images a second")
    dist.barrier()  # nobody leaves while another still needs it
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
