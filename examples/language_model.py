"""Train a language model on the sources of Python's own library: a real text, and nothing to download.

    torchrun --standalone --nproc_per_node=2 examples/language_model.py --algorithm "bytegrad(error_feedback=True)"

A GPT predicts the next byte. The loss is in bits per byte, of the mean of the ranks' weights, on files that no rank
trains on: one in twenty, chosen by its name. Losses compare between runs that print the same digest of the text.

With `--folder`, training continues from the newest checkpoint there, bit for bit as if it had not been interrupted.
Each rank has a GPU and NCCL where there are enough, else the CPU and gloo. README.md has the lines for two machines.
"""

import argparse
import copy
import os
import sysconfig
import time
import zlib
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy, linear, relu, scaled_dot_product_attention
from torch.optim import SGD, AdamW, Muon, Optimizer
from tqdm import tqdm

import baguakit as bk

NO_TEXT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}  # folders beside and in the library
MAY_CHANGE = ("steps", "seconds", "every", "folder")  # options of a run that is continued


def read(folder: Path, context: int) -> tuple[np.ndarray, np.ndarray, str]:
    """Return windows of `context` + 1 bytes at all places, to train on and held out, and the digest of the text."""
    names, parts = [], {True: bytearray(), False: bytearray()}
    for place, folders, inside in os.walk(folder):
        folders[:] = set(folders) - NO_TEXT
        names += [Path(place, name).relative_to(folder).as_posix() for name in inside]
    for name in sorted(name for name in names if name.endswith((".py", ".md", ".rst", ".txt"))):
        parts[zlib.crc32(name.encode()) % 20 == 0] += b"\0" + (folder / name).read_bytes()
    if min(map(len, parts.values())) <= context:
        raise SystemExit(f"{folder} has too little text: {len(parts[False])} bytes, and {len(parts[True])} held out")
    held_out, train = (np.lib.stride_tricks.sliding_window_view(part, context + 1) for part in parts.values())
    return train, held_out, f"{zlib.crc32(parts[False] + parts[True]):08x}"


def drawn(windows: np.ndarray, size: int, *seed: int) -> Tensor:
    """Return a batch of windows drawn at random: always the same for a seed, such as a step and a rank."""
    return torch.from_numpy(windows[np.random.default_rng(seed).integers(len(windows), size=size)])


def rotated(x: Tensor) -> Tensor:
    """Turn pairs of values by angles that grow with the position (Su et al. 2021, "RoFormer", arXiv:2104.09864)."""
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
        return x + self.down(relu(self.up(self.norm_2(x))).square())


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
        return cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def bits_per_byte(model: nn.Module, windows: np.ndarray, comm: bk.Comm, count: int = 128) -> float:
    """Return the loss on `count` of the windows, of which each rank computes a part. Collective."""
    chosen = np.linspace(0, len(windows) - 1, count).astype(int)[comm.rank :: comm.size]
    nats = sum(loss_of(model, part).item() * len(part) for part in torch.from_numpy(windows[chosen]).split(8))
    return float(sum(comm.gather_objects(nats)) / count / np.log(2))


@torch.no_grad()
def sample(model: nn.Module, context: int, start: str = "def ", length: int = 400, temperature: float = 0.9) -> str:
    """Return a text of `length` bytes more than its `start`, drawn one by one."""
    random, text = torch.Generator().manual_seed(0), torch.tensor([list(start.encode())])
    for _ in range(length):
        scores = model(text[:, -context:].to(next(model.parameters()).device))[0, -1].float().cpu()
        text = torch.cat([text, (scores / temperature).softmax(0).multinomial(1, generator=random)[None]], 1)
    return bytes(text[0].tolist()).decode(errors="replace")


def optimizers_of(model: GPT, name: str, lr: float) -> list[Optimizer]:
    """Return the optimizer of a name; Muon steps the matrices of the blocks and nothing else, and AdamW the rest."""
    matrices = [p for p in model.blocks.parameters() if p.dim() == 2] if name == "muon" else []
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    first = SGD(others, lr) if name == "sgd" else AdamW(others, lr, betas=(0.9, 0.95))
    return [first, Muon(matrices, lr, adjust_lr_fn="match_rms_adamw")] if matrices else [first]


def save(folder: Path, state: dict, comm: bk.Comm) -> None:
    """Write this rank's part of a checkpoint; remove its older ones when all ranks have written theirs. Collective."""
    path, unfinished = folder / f"{state['step']:08}-{comm.rank}.pt", folder / f"{comm.rank}.tmp"
    torch.save(state, unfinished)
    unfinished.rename(path)
    dist.barrier()
    for older in set(folder.glob(f"*-{comm.rank}.pt")) - {path}:
        older.unlink()


def load(folder: Path, run: dict[str, str], comm: bk.Comm) -> dict:
    """Return this rank's part of the newest checkpoint of which all ranks have theirs, or nothing. Collective."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {path.stem.split("-")[0]: path for path in folder.glob(f"*-{comm.rank}.pt")}
    steps = comm.gather_objects(set(found))
    newest = max(set.intersection(*steps), default=None)
    state = torch.load(found[newest], map_location="cpu", weights_only=True) if newest else {}
    if any(steps) and state.get("run") != run:
        raise SystemExit(f"{folder} holds checkpoints of another run, {state.get('run')}; this one is {run}")
    return state


def train(options: argparse.Namespace, comm: bk.Comm, device: torch.device) -> tuple[GPT, list[tuple]]:
    """Return the model with the mean of all ranks' weights, and (step, seconds, bits per byte) of each validation."""
    windows, held_out, digest = read(options.text, options.context)
    if len(set(comm.gather_objects(digest))) > 1:
        raise SystemExit("the ranks have different texts: give all machines the same Python, or the same --text")
    facts = vars(options) | {"text": digest, "ranks": comm.size}
    run = {name: str(value) for name, value in facts.items() if name not in MAY_CHANGE}
    state = load(options.folder, run, comm) if options.folder else {}
    begin, seconds, losses = (state["step"], state["seconds"], state["losses"]) if state else (0, 0.0, [])
    end = options.steps if seconds < options.seconds else begin
    torch.manual_seed(options.seed)
    model = GPT(options.layers, options.width, options.heads).to(device)
    optimizers = optimizers_of(model, options.optimizer, options.lr)
    with bk.attach(model, optimizers, options.algorithm, comm=comm) as att:
        parts = {"model": model, **{type(each).__name__: each for each in optimizers}, "att": att}
        for name in parts if state else ():  # in this order
            parts[name].load_state_dict(state[name])
        for step in tqdm(range(begin + 1, end + 1), initial=begin, total=end, disable=None if comm.rank == 0 else True):
            began = time.perf_counter()
            for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                group["lr"] = options.lr * min(1, step / 50)  # warm-up
            model.zero_grad()
            loss_of(model, drawn(windows, options.batch, options.seed, step, comm.rank)).backward()
            for optimizer in optimizers:
                optimizer.step()
            seconds += time.perf_counter() - began
            if step % options.every == 0 or step == end:
                seconds = max(comm.gather_objects(seconds))
                mean = copy.deepcopy(model)
                bk.primitives.mean_([p.data for p in mean.parameters()], comm)
                losses.append((step, seconds, bits_per_byte(mean, held_out, comm)))
                if comm.rank == 0:
                    tqdm.write(f"step {step}, {seconds:.1f} s: {losses[-1][2]:.4f} bits per byte, text {digest}")
                if options.folder:
                    now = {"step": step, "seconds": seconds, "losses": losses, "run": run}
                    save(options.folder, now | {name: part.state_dict() for name, part in parts.items()}, comm)
                if seconds >= options.seconds:
                    break
        if comm.rank == 0:
            print(att.report())
        att.merge()
    return model, losses


def algorithm(expression: str) -> tuple[bk.Rule, ...]:
    """Return the rules that an expression makes of the names of baguakit."""
    rooms = (bk, bk.algorithms, bk.stages, bk.compressors, bk.topology)
    names = {name: getattr(room, name) for room in rooms for name in room.__all__}
    try:
        return bk.rules.rules_of(eval(expression, {"bk": bk, "torch": torch, **names}))
    except Exception as error:
        raise argparse.ArgumentTypeError(f"{expression} is no algorithm: {error}") from error


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Return the command line's options, checked."""
    parser = argparse.ArgumentParser(description="Train a byte-level language model on Python's own library.")
    add = parser.add_argument
    add("--algorithm", type=algorithm, default="gradient_allreduce()", help="an expression (%(default)s)")
    add("--optimizer", choices=("adamw", "muon", "sgd"), default="adamw", help="sgd for qadam (%(default)s)")
    add("--text", type=Path, default=Path(sysconfig.get_path("stdlib")), help="a folder of text (%(default)s)")
    add("--folder", type=Path, help="of the checkpoints of all ranks; none are written without it")
    add("--steps", type=int, default=2000, help="in all (%(default)s)")
    add("--seconds", type=float, default=float("inf"), help="of training, up to the next validation (%(default)s)")
    add("--every", type=int, default=50, help="steps between validations (%(default)s)")
    add("--layers", type=int, default=4, help="(%(default)s)")
    add("--width", type=int, default=160, help="of a layer (%(default)s)")
    add("--heads", type=int, default=5, help="of attention (%(default)s)")
    add("--context", type=int, default=128, help="bytes that the model reads (%(default)s)")
    add("--batch", type=int, default=8, help="windows of a rank in a step (%(default)s)")
    add("--lr", type=float, default=3e-3, help="learning rate (%(default)s)")
    add("--seed", type=int, default=1, help="of weights and batches (%(default)s)")
    options = parser.parse_args(words)
    for name, value in vars(options).items():
        if isinstance(value, int | float) and not value > 0:
            parser.error(f"--{name} is greater than 0, not {value}")
    if options.width % (2 * options.heads):
        parser.error(f"--width is a multiple of twice --heads, not {options.width} for {options.heads}")
    if "RANK" not in os.environ:
        parser.error("start it with torchrun --standalone --nproc_per_node=2 examples/language_model.py")
    return options


def main() -> None:
    """Meet the other ranks, train, and write a sample."""
    options, local, device = arguments(), int(os.environ["LOCAL_WORLD_SIZE"]), torch.device("cpu")
    if torch.cuda.device_count() >= local:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    nodes = (dist.get_world_size() // local, local)
    comm = bk.Comm(mesh=init_device_mesh(device.type, nodes, mesh_dim_names=("inter", "intra")))
    model, _ = train(options, comm, device)
    if comm.rank == 0:
        print(sample(model, options.context))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
