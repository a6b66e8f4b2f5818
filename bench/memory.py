"""Memory that each algorithm takes beyond plain training, in copies of the model: `python -m bench.memory`

Each rank trains a model of 128 MB (32 layers of 1024 × 1024 in fp32) with plain SGD, on the CPU over gloo, and reads
the most memory that its process ever held resident: first without communication, then with each algorithm, once it
has flown. The difference over the size of the model is what is printed: buckets, what stages remember, what is in the
air, and gloo's own buffers. Gradients that become views of a bucket are held once, and so cost nothing.

Needs Linux (/proc/self/status), as many processes as ranks, and about 3 GB in all. Writes JSON beside the table.
"""

import argparse
import datetime
import gc
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import baguakit as bk
from baguakit.tune.planning import compressors_in

RESULTS = Path(__file__).parent / "results" / "memory-cpu.json"
WIDTH, LAYERS = 1024, 32
MODEL = 4 * LAYERS * WIDTH * WIDTH
SHORT = (
    "qadam(1)",
    "local_sgd(2)",
    "diloco(2)",
    "decoupled_diloco(2)",
    "push_sum(Exponential())",
)  # which exchange in every second step
VARIANTS = (
    "gradient_allreduce(delay=1)",
    "bytegrad(error_feedback=True, delay=2)",
    "bytegrad(error_feedback=True)",
    "bytegrad(error=0.001)",
    "ef21(momentum=0.9)",
    'decentralized(order="atc")',
    "choco(OnePeerExact(), gamma=1.0)",
    "diloco(2, delay=1)",
    "diloco(4, fragments=4, delay=1)",
    "diloco(4, fragments=4, delay=1, mix=0.5)",
)
USUAL = [f"{name}()" for name in bk.algorithms.__all__ if not any(each.startswith(f"{name}(") for each in SHORT)]
ALGORITHMS = {each: eval(each, vars(bk.algorithms) | vars(bk.topology)) for each in (*USUAL, *SHORT, *VARIANTS)}


def resident(most: bool) -> int:
    """Bytes that this process holds, or the most that it held since `forget_the_most`."""
    field = "VmHWM:" if most else "VmRSS:"
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) << 10


def forget_the_most() -> None:
    """Let the high-water mark begin anew at what is held now."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")


def most_of(steps: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The most memory held in some steps of training."""
    forget_the_most()
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, WIDTH)).square().mean().backward()
        optimizer.step()
    return resident(most=True)


def measure(rule: bk.rules.Algorithm) -> float:
    """Copies of the model beyond plain training, on the rank that has most of them. Collective."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    most_of(2, model, optimizer)
    plain = most_of(2, model, optimizer)
    with bk.attach(model, optimizer, rule):
        most_of(4, model, optimizer)  # what is made once, at the first flights, is freed again
        attached = most_of(4, model, optimizer)
    beyond = torch.tensor((attached - plain) / MODEL)
    dist.all_reduce(beyond, dist.ReduceOp.MAX)
    return float(beyond)


def ranks_main() -> None:
    """Train on each rank; rank 0 prints one line of JSON for each algorithm."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for each in compressors_in([*ALGORITHMS.values()]):
        each.warm_up("cpu")  # the compiler's own memory is the same for any model
    for name, rule in ALGORITHMS.items():
        copies = measure(rule)
        if dist.get_rank() == 0:
            print(json.dumps({"algorithm": name, "expression": repr(rule), "copies": round(copies, 2)}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks, print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    # Freed memory goes back to the system at once, so that the high-water mark is that of what is in use.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "CUDA_VISIBLE_DEVICES": ""}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.ranks}"]
    rows = []
    with subprocess.Popen(
        [*torchrun, "-m", "bench.memory", "--a-rank"], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout or ():
            rows.append(json.loads(line))
            print(f"{rows[-1]['algorithm']:<34} {rows[-1]['copies']:>6.2f}   {rows[-1]['expression']}", flush=True)
    if process.returncode:
        sys.exit(process.returncode)
    machine = {"ranks": options.ranks, "torch": torch.__version__, "python": platform.python_version(), "device": "CPU"}
    found = {"date": datetime.date.today().isoformat(), **machine, "model_bytes": MODEL, "rows": rows}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    ranks_main() if "--a-rank" in sys.argv else main()
