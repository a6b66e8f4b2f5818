"""A byte-level language model on the sources of Python's own library: a real text, and nothing to download."""

import functools
import os
import sysconfig
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, relu, scaled_dot_product_attention

NO_TEXT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}  # folders beside and in the library
Windows = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
CONTEXT, BATCH, HELD_OUT = 64, 2, 256  # bytes of a window, windows of a rank in a step, and windows of a validation


def read(folder: Path, context: int) -> tuple[Windows, Windows, str]:
    """Return windows of `context` + 1 bytes at all places, to train on and held out, and the digest of the text."""
    names, parts = [], {True: bytearray(), False: bytearray()}
    for place, folders, inside in os.walk(folder):
        folders[:] = set(folders) - NO_TEXT
        names += [Path(place, name).relative_to(folder).as_posix() for name in inside]
    for name in sorted(name for name in names if name.endswith((".py", ".md", ".rst", ".txt"))):
        parts[zlib.crc32(name.encode()) % 20 == 0] += b"\0" + (folder / name).read_bytes()
    if min(map(len, parts.values())) <= context:
        raise ValueError(f"{folder} has too little text: {len(parts[False])} bytes, and {len(parts[True])} held out")
    held_out, train = (np.lib.stride_tricks.sliding_window_view(part, context + 1) for part in parts.values())
    return train, held_out, f"{zlib.crc32(parts[False] + parts[True]):08x}"


def drawn(windows: Windows, size: int, *seed: int) -> Tensor:
    """Return a batch of windows drawn at random: always the same for a seed, such as a step and a rank."""
    return torch.from_numpy(windows[np.random.default_rng(seed).integers(len(windows), size=size)])


def rotated(x: Tensor) -> Tensor:
    """Turn pairs of values by angles that grow with the position (rotary embeddings, by Su et al. 2021)."""
    rates = 10000.0 ** -torch.arange(0, 1, 2 / x.shape[-1], device=x.device)
    angles = torch.outer(torch.arange(x.shape[-2], device=x.device), rates)
    (a, b), cos, sin = x.chunk(2, -1), angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Block(nn.Module):
    """Attention to earlier bytes, then a network of two layers; each adds to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm_1, self.norm_2 = heads, nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        for last in (self.out, self.down):
            nn.init.zeros_(last.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) to the same."""
        y = self.norm_1(x)
        q, k, v = (f(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        y = scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x.add(self.down(relu(self.up(self.norm_2(x))).square()))


class GPT(nn.Module):
    """A transformer over bytes, whose last layer is its table of embeddings."""

    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)), nn.RMSNorm(width))
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores (batch, length, 256) of the next bytes."""
        return linear(self.blocks(self.embed(x)), self.embed.weight)


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the mean loss of predicting a byte, in nats; on GPUs in bf16 where autocast finds it safe."""
    windows = windows.to(next(model.parameters()).device, torch.long)
    with torch.autocast(windows.device.type, torch.bfloat16, enabled=windows.is_cuda):
        loss: Tensor = cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
    return loss


@torch.no_grad()
def bits_per_byte(model: nn.Module, windows: Windows, rank: int, ranks: int, count: int = 128) -> float:
    """Return the loss on this rank's part of `count` of the windows; the mean over ranks is that on all of them."""
    chosen = np.linspace(0, len(windows) - 1, count).astype(int)[rank::ranks]
    nats = sum(loss_of(model, part).item() * len(part) for part in torch.from_numpy(windows[chosen]).split(8))
    return float(nats * ranks / count / np.log(2))


@functools.cache
def text(context: int) -> tuple[Windows, Windows, str]:
    """Return the windows of Python's library to train on, those held out, and the digest of the text."""
    return read(Path(sysconfig.get_path("stdlib")), context)


def gpt(
    seed: int, rank: int, ranks: int, layers: int = 4, width: int = 256, heads: int = 4
) -> tuple[nn.Module, Any, Any]:
    """Return the training of a GPT, of 3.2 million values by default; see `training.Training`."""
    train, held_out, _ = text(CONTEXT)
    torch.manual_seed(seed)
    return (
        GPT(layers, width, heads),
        lambda model, step: loss_of(model, drawn(train, BATCH, seed, step, rank)),
        lambda model: {"bits per byte": bits_per_byte(model, held_out, rank, ranks, HELD_OUT)},
    )
