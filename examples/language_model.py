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
from pathlib import Path
from statistics import fmean

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from tqdm import tqdm

import baguakit as bk
from baguakit.compare import names
from baguakit.compare.language import GPT, bits_per_byte, drawn, loss_of, read
from baguakit.compare.training import OPTIMIZERS, optimizers_of

MAY_CHANGE = ("steps", "seconds", "every", "folder")  # options of a run that is continued


@torch.no_grad()
def sample(model: nn.Module, context: int, start: str = "def ", length: int = 400, temperature: float = 0.9) -> str:
    """Return a text of `length` bytes more than its `start`, drawn one by one."""
    random, text = torch.Generator().manual_seed(0), torch.tensor([list(start.encode())])
    for _ in range(length):
        scores = model(text[:, -context:].to(next(model.parameters()).device))[0, -1].float().cpu()
        text = torch.cat([text, (scores / temperature).softmax(0).multinomial(1, generator=random)[None]], 1)
    return bytes(text[0].tolist()).decode(errors="replace")


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
    try:
        windows, held_out, digest = read(options.text, options.context)
    except ValueError as error:
        raise SystemExit(str(error)) from error
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
                losses.append(
                    (step, seconds, fmean(comm.gather_objects(bits_per_byte(mean, held_out, comm.rank, comm.size))))
                )
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


def algorithm(text: str) -> bk.Algorithm:
    """Return the algorithm of "module:name" or of an expression of the names of baguakit."""
    try:
        return names.algorithm(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Return the command line's options, checked."""
    parser = argparse.ArgumentParser(description="Train a byte-level language model on Python's own library.")
    add = parser.add_argument
    add(
        "--algorithm",
        type=algorithm,
        default="gradient_allreduce()",
        help="an expression, or MODULE:NAME (%(default)s)",
    )
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help="sgd for qadam (%(default)s)")
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
    dist.barrier()  # nobody leaves while another still needs it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
