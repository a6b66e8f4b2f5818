"""Train a mixture of experts whose tokens travel between ranks in 8 bits, and beside it one whose tokens travel in 32.

    torchrun --standalone --nproc_per_node=4 examples/mixture_of_experts.py

Each rank has an expert, but for the last, which has none and so gets no token: a placement is seldom even. A gate
chooses one expert for each token. Tokens fly to it and back, as many as there are, and so do their gradients: four
times in a step. Of T tokens of d values that a rank sends, packed bytes are about T d, and exact ones 4 T d.

Each rank has a GPU and NCCL where there are enough, otherwise the CPU and gloo. The data are drawn: put yours there.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

import baguakit as bk

TOKENS, WIDTH, FEATURES, DIALECTS, CLASSES = 256, 64, 32, 4, 8  # tokens of a rank in a step; values of each


class MixtureOfExperts(nn.Module):
    """A residual block:  y = x + p(e | x) · expert_e(x), e being the expert that the gate finds likeliest."""

    def __init__(self, through: bk.primitives.Differentiable, device: torch.device) -> None:
        super().__init__()
        self.through, self.experts = through, max(1, through.comm.size - 1)
        self.gate = nn.Linear(WIDTH, self.experts, bias=False, device=device)
        torch.manual_seed(1 + through.comm.rank)  # experts differ
        expert = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.expert = expert.to(device) if through.comm.rank < self.experts else None
        self.heard = 0  # tokens that came to this rank

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return what becomes of the tokens (tokens, width), and how unevenly they are spread, 1 being even."""
        likely = self.gate(x).softmax(-1)
        weight, chosen = likely.max(-1)
        order, counts = chosen.argsort(stable=True), chosen.bincount(minlength=self.through.comm.size)
        dist.all_to_all_single(coming := torch.empty_like(counts), counts)
        sends, receives = counts.tolist(), coming.tolist()
        heard = self.through.all_to_all(x[order], receives, sends)
        self.heard += len(heard)
        answered = heard if self.expert is None else self.expert(heard)
        back = self.through.all_to_all(answered, sends, receives)[order.argsort()]
        uneven = self.experts * (one_hot(chosen, self.experts).float().mean(0) * likely.mean(0)).sum()
        return x + weight[:, None] * back, uneven


class Model(nn.Module):
    """Tokens of FEATURES values and a dialect, through a mixture of experts, to scores of their classes."""

    def __init__(self, through: bk.primitives.Differentiable, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(0)  # alike on all ranks
        self.enter = nn.Linear(FEATURES + DIALECTS, WIDTH, device=device)
        self.leave = nn.Linear(WIDTH, CLASSES, device=device)
        self.mixture = MixtureOfExperts(through, device)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores (tokens, CLASSES), and how unevenly the experts are used."""
        hidden, uneven = self.mixture(self.enter(x))
        return self.leave(hidden), uneven


def batch(step: int, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return tokens and their classes: others on each rank and in each step."""
    rules = torch.randn(DIALECTS, FEATURES, CLASSES, generator=torch.Generator().manual_seed(0))
    random = torch.Generator().manual_seed(1000 * step + rank)
    x, dialect = torch.randn(TOKENS, FEATURES, generator=random), torch.randint(DIALECTS, (TOKENS,), generator=random)
    classes = torch.einsum("tf,tfc->tc", x, rules[dialect]).argmax(-1)
    return torch.cat([x, one_hot(dialect, DIALECTS)], 1).to(device), classes.to(device)


def train(steps: int, compressor: bk.compressors.Compressor | None, device: torch.device) -> list[float]:
    """Train; return the mean loss of the last quarter of the steps, the bytes sent, and the tokens heard."""
    through = bk.primitives.Differentiable(comm := bk.Comm(), forward=compressor, backward=compressor)
    model = Model(through, device)
    own = [] if model.mixture.expert is None else list(model.mixture.expert.parameters())
    shared = [p for name, p in model.named_parameters() if ".expert." not in name]
    optimizer, total = torch.optim.AdamW(model.parameters(), lr=1e-2), torch.zeros(1, device=device)
    for step in range(steps):
        x, y = batch(step, comm.rank, device)
        scores, uneven = model(x)
        loss = cross_entropy(scores, y)
        (loss + 0.01 * uneven).backward()
        bk.primitives.mean_([p.grad for p in shared], comm)
        for p in own:  # an expert has the gradient of the sum of all ranks' losses
            p.grad /= comm.size
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach() * (step >= steps - steps // 4)
    return [bk.primitives.mean_(total / (steps // 4), comm).item(), through.bytes_sent, model.mixture.heard]


def main() -> None:
    """Meet the other ranks, train twice, and say what each sent."""
    parser = argparse.ArgumentParser(description="A mixture of experts whose tokens travel in 8 bits.")
    parser.add_argument("--steps", type=int, default=400, help="(%(default)s)")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun --standalone --nproc_per_node=4 examples/mixture_of_experts.py")
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    for name, compressor in (("exact", None), ("8 bits", bk.compressors.MinMaxUInt8())):
        loss, sent, heard = train(options.steps, compressor, device)
        line = f"{name}: loss {loss:.4f}; rank {dist.get_rank()} sent {sent / 1e6:.2f} MB and heard {heard} tokens"
        lines = bk.Comm().gather_objects(line)
        if dist.get_rank() == 0:
            print("\n".join(lines), flush=True)
    dist.barrier()  # nobody leaves while another still needs it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
