"""The handwritten digits that scikit-learn ships, of which each rank holds only some: what the notebooks train on."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from baguakit import Timeline

TESTED = 360  # of 1,797 images


@dataclass(frozen=True)
class Digits:
    """Images (n, 64) of values from 0 to 1 and labels (n,): to train on, and to test."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    def batches(
        self, rank: int, size: int, steps: int, batch: int = 64, seed: int = 0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Random batches of what rank `rank` of `size` holds: the digits d with d mod size = rank, and no others."""
        mine = torch.where(self.labels % size == rank)[0]
        draw = torch.Generator().manual_seed(1000 * seed + rank)
        for _ in range(steps):
            chosen = mine[torch.randint(len(mine), (batch,), generator=draw)]
            yield self.images[chosen], self.labels[chosen]

    @torch.no_grad()
    def accuracy(self, model: nn.Module) -> float:
        """The share of the test images that a network reads."""
        return float((model(self.test_images).argmax(1) == self.test_labels).float().mean())

    @torch.no_grad()
    def loss(self, model: nn.Module) -> float:
        """The mean cross entropy over the test images."""
        return float(cross_entropy(model(self.test_images), self.test_labels))


def digits() -> Digits:
    """The digits, divided in the same way every time."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    tested, trained = order[:TESTED], order[TESTED:]
    return Digits(x[trained], y[trained], x[tested], y[tested])


def network(width: int = 96, seed: int = 0) -> nn.Sequential:
    """A network of two layers, the same on every rank: 7,210 parameters as it is."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def accuracy_by_bytes(curves: dict[str, list[tuple[float, float]]]) -> "Figure":
    """Draw points (bytes sent, accuracy) by name; what sends nothing is a level, its last accuracy."""
    from matplotlib.figure import Figure  # ranks, which draw nothing, import this module
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(7.5, 3.9), layout="constrained")
    axes = figure.subplots()
    for (name, points), marker in zip(curves.items(), "osD^v<>P", strict=False):
        if points[-1][0]:
            axes.plot(*zip(*points, strict=True), marker=marker, markersize=4, label=name)
        else:
            axes.axhline(points[-1][1], color="k", linestyle=":", label=f"{name} (sends nothing)")
    axes.set(xscale="log", xlabel="sent by a rank", ylabel="test accuracy")
    axes.xaxis.set_major_formatter(EngFormatter("B"))
    figure.legend(loc="outside right center", frameon=False, fontsize=8)
    return figure


def timeline(found: "Timeline", steps: int) -> "Figure":
    """Draw the latest steps of all ranks: training grey, waits red, flights blue, and lines from launch to landing."""
    from matplotlib.figure import Figure

    rows = sorted({(s.rank, s.thread) for s in found.spans}, key=lambda row: (row[0], row[1] != "training", row[1]))
    figure = Figure(figsize=(10, 0.8 + 0.3 * len(rows)), layout="constrained")
    axes = figure.subplots()
    greys = {"step": "#dadada", "backward": "#b0b0b0"}
    for span in found.spans:
        y = rows.index((span.rank, span.thread))
        colour = "#0072B2" if span.flies else "#D55E00" if span.waits else greys.get(span.name, "#303030")
        axes.barh(y, span.end - span.start, 0.8, span.start, color=colour, zorder=2)
        if span.flies:
            axes.hlines(y, span.launched, span.landed, color=colour, linewidth=1, zorder=1)
    shown = [s for s in found.spans if s.rank == 0 and s.name == "step"][-steps:]
    axes.set(xlim=(shown[0].start, shown[-1].end), xlabel="seconds", ylim=(len(rows) - 0.5, -0.5))
    axes.set_yticks(range(len(rows)), [f"rank {rank}  {thread}" for rank, thread in rows])
    figure.suptitle(f"{found.ranks} ranks; {found.overlap():.0%} of communication hidden", fontsize=10)
    return figure
