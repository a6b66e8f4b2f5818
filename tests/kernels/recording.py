"""Record what a step on GPUs asks of the device and of NCCL, on a machine that has neither.

    python recording.py CASE…       prints a line of JSON for each

Tensors lie on the CPU and say that they are on a GPU; kernels are compiled for an H100 and bound to their arguments by
Triton's own launcher, which then only notes them; collectives go through torch.distributed to a group that does
nothing. So no value means anything, and the time is that of the host. A program of its own, because Triton decides once
in a process whether kernels are interpreted.
"""

import contextlib
import json
import statistics
import sys
import time
from collections import Counter

import torch
import torch.distributed as dist
from absent_gpu import AbsentGPU

VALUES = (25 << 20) // 4  # of a bucket, in fp32
RANKS = 4
COLLECTIVES = (
    "all_reduce", "all_to_all_single", "all_gather_single", "all_gather_into_tensor", "reduce_scatter_single",
    "reduce_scatter_tensor", "batch_isend_irecv",
)  # fmt: skip
LAUNCHED, CALLED = [], []  # (kernel, programs), and names: what has been noted


def _noting(name, function):
    def noting(*args, **options):
        CALLED.append(name)
        return function(*_few(args), **options)

    return noting


def _few(args):
    """The same tensors with few values each, which the group that does nothing copies within a rank."""
    lengths = [each.numel() for each in args if isinstance(each, torch.Tensor)]
    least = min(lengths, default=1)
    return [each.view(-1)[: RANKS * each.numel() // least] if isinstance(each, torch.Tensor) else each for each in args]


for name in COLLECTIVES:
    if hasattr(dist, name):
        setattr(dist, name, _noting(name, getattr(dist, name)))

import baguakit as bk  # noqa: E402 - takes some of these functions as it is imported


@contextlib.contextmanager
def recording(ranks=RANKS):
    """Within this block: kernels and collectives are noted, and this is the first of some ranks."""
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    driver.set_active(AbsentGPU(GPUTarget("cuda", 90, 32), lambda *launch: LAUNCHED.append(launch)))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    torch.Tensor.is_cuda = True  # hides the property of torch's own class
    capturing, torch.cuda.is_current_stream_capturing = torch.cuda.is_current_stream_capturing, lambda: False
    by_nccl, bk.Comm._by_nccl = bk.Comm._by_nccl, lambda self, device: True
    try:
        yield
    finally:
        bk.Comm._by_nccl = by_nccl
        del torch.Tensor.is_cuda
        torch.cuda.is_current_stream_capturing = capturing
        dist.destroy_process_group()


# The recorded functions: each makes the work of one flight.


def bytegrad(values=VALUES, **options):
    comm, rule = bk.Comm(), bk.algorithms.bytegrad(**options)
    x = torch.zeros(values)
    state = rule.stage.init(bk.Bucket([x]), comm)
    return lambda: rule.stage(x, state, comm.at(0))


def on_one_node():
    """A Comm whose ranks are on one node, and have memory that all reach."""
    from baguakit.kernels.exchange.tiles_gpu import Memory

    words = torch.zeros(16, dtype=torch.int32)
    memory = Memory(0, RANKS, torch.zeros(RANKS, dtype=torch.int64), words, words, 1 << 30, 1)

    class Node:
        part = "flat"

        def memory(self, x, needed, differs=False):
            return memory

        @property
        def for_neighbors(self):
            return self

    comm = bk.Comm()
    vars(comm)["_node"] = Node()
    return comm


def in_one_kernel(**options):
    comm, rule, x = on_one_node(), bk.algorithms.bytegrad(**options), torch.zeros(VALUES)
    state = rule.stage.init(bk.Bucket([x]), comm)
    return lambda: rule.stage(x, state, comm.at(0))


def rows(comm, codec=None):
    """The exchanges of rows, one after another: gathered, scattered, to all, to all by splits, and of neighbours."""
    x, few = torch.zeros(RANKS * 4096), [4096, 0, 8192, 4096]
    out, lost = torch.zeros(RANKS * len(x)), None if codec is None else torch.zeros(len(x))
    p, ring = bk.primitives, bk.topology.Ring()
    return lambda: (
        p.compressed_all_gather(x, codec, comm, out), p.compressed_reduce_scatter(x, codec, comm, lost, True),
        p.compressed_all_to_all(x, codec, comm), p.compressed_all_to_all(x, codec, comm, few, few),
        p.neighbor_mean_(x, ring, comm),
    )  # fmt: skip


def power_sgd(layers):
    """Matrices of the shapes of a transformer's, and a vector for each."""
    shapes = layers * ((96, 96), (288, 96), (384, 96), (96, 384))
    comm, rule = bk.Comm(), bk.algorithms.power_sgd()
    bucket = bk.Bucket([torch.randn(shape) for rows, columns in shapes for shape in ((rows, columns), (rows,))])
    state = rule.stage.init(bucket, comm)
    return lambda: rule.stage(bucket.flat, state, comm.at(0))


def codec():
    """The three calls of a compressor, and nothing else."""
    c, x = bk.compressors.MinMaxUInt8(), torch.zeros(RANKS, VALUES // RANKS)

    def work():
        packed = c.compress(x)
        c.reduce(packed, x.shape[1])
        c.decompress(packed, x.shape[1], out=x)

    return work


CASES = {
    "bytegrad": bytegrad,
    "bytegrad, error feedback": lambda: bytegrad(error_feedback=True),
    "bytegrad, in one kernel": in_one_kernel,
    "bytegrad, error feedback, in one kernel": lambda: in_one_kernel(error_feedback=True),
    "five exchanges of rows, in one kernel each": lambda: rows(on_one_node()),
    "five exchanges of rows in four bits, in one kernel each": lambda: rows(on_one_node(), bk.compressors.UInt4()),
    "bytegrad, 100 MiB": lambda: bytegrad(4 * VALUES),
    "bytegrad, no whole tiles": lambda: bytegrad(VALUES + 64 * RANKS),
    "codec": codec,
    "power_sgd, 1 layer": lambda: power_sgd(1),
    "power_sgd, 3 layers": lambda: power_sgd(3),
}


# How: counts of one flight, and the time of many.


def counted(work):
    """The Python functions that one call of `work` calls, by their names."""
    calls = Counter()

    def note(frame, event, argument):
        if event == "call":
            calls[f"{frame.f_globals.get('__name__', '')}:{frame.f_code.co_name}"] += 1

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def dispatched(work):
    """The operators of torch that `work` calls, those that only make or view tensors left out."""
    with torch.autograd.profiler.profile(use_cpu=True) as profile:
        work()
    plain = {"empty", "view", "detach", "slice", "as_strided", "empty_strided", "unbind", "select", "alias", "reshape"}
    names = [event.name for event in profile.function_events if event.cpu_parent is None]
    return Counter(name for name in names if name.removeprefix("aten::") not in plain)


def microseconds(work, times=100):
    """Return the microseconds that the host needs for `work`: the median and the minimum of some calls."""
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return {"median": 1e6 * statistics.median(taken), "least": 1e6 * min(taken)}


def facts(name):
    with recording():
        work = CASES[name]()
        work()  # kernels are compiled
        LAUNCHED.clear()
        CALLED.clear()
        work()
        kernels, collectives = [*LAUNCHED], [*CALLED]
        calls, ops = counted(work), dispatched(work)
        return {
            "case": name,
            "launches": kernels,
            "collectives": collectives,
            "custom_ops": sum(n for name, n in ops.items() if name.startswith("baguakit::")),
            "calls": sum(calls.values()),
            "ops": ops,
            "own_calls": sum(n for name, n in calls.items() if name.startswith("baguakit")),
            "most_called": calls.most_common(12),
            "microseconds": microseconds(work),
        }


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:] or CASES:
        print(json.dumps(facts(name)), flush=True)
