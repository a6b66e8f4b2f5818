"""A program: run torch's own tests of distributed programs on 4 forked ranks, over gloo or the backend that stands in.

    torchs_own.py POLICY FOLDER [NAME OR NUMBER ...]

POLICY is "gloo", or an expression of `bk.backend`. The tests keep the name gloo, and groups that they make by it are
groups of the backend. All run; or those of some names; or, by a number such as 0/3, every third one, from that on. For
each test a line of JSON is printed: its name, its outcome, its seconds, and its error.
"""

import json
import multiprocessing
import os
import sys
import tempfile
import time
import unittest

RANKS, SECONDS = 4, 240


def settings(folder):
    """The environment that torch's tests read, before they are imported."""
    os.makedirs(os.path.join(folder, "barrier"), exist_ok=True)
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(RANKS), TEMP_DIR=folder, MASTER_ADDR="127.0.0.1")
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(SECONDS))


def without_gpus():
    """Skip tests that need GPUs before they fork ranks."""
    from torch.testing._internal import common_distributed

    def unless(_, allow_cpu=False):
        return (lambda test: test) if allow_cpu else unittest.skip("needs GPUs")

    common_distributed.skip_if_no_gpu, common_distributed.skip_if_lt_x_gpu = unless(1), unless


def stand_in(policy):
    """Let groups that are made for gloo be of the backend, and say that they are gloo."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    import baguakit as bk

    bk.backend.register(eval(policy, vars(bk.backend) | vars(bk.compressors)))

    init, new, name = c10d.init_process_group, c10d.new_group, c10d.get_backend

    def made(backend):
        return "bagua" if backend in ("gloo", "cpu:gloo") else backend

    def initialised(backend="gloo", *args, **named):
        return init(made(backend), *args, **named)

    def grouped(*args, backend=None, **named):
        return new(*args, backend=made(backend), **named)

    for module in (dist, c10d):
        module.init_process_group, module.new_group = initialised, grouped
        module.get_backend = lambda group=None: "gloo" if name(group) == "bagua" else name(group)


def within_the_bound():
    """Take equal to mean equal up to the rounding of 8 bits.

    A block of values of at most a in absolute value spans at most 2a, and rounding moves them by (max - min) / 510, so
    by a / 255 at most. A sum of n ranks is off by n such errors as it is sent, and by n as its mean comes back, whether
    or not its values cancel: a is the largest absolute value of all ranks' inputs. The bound of a test is that of its
    collective of the largest values, as long as no value that it looks at has flown in two of them.
    """
    import torch
    import torch.distributed as dist
    from torch.testing._internal.common_utils import TestCase

    from baguakit.backend.group import BaguaGroup
    from baguakit.lanes.base import tensors_in

    fly, equal, worst = BaguaGroup._compressed, TestCase.assertEqual, [0.0]

    def flown(self, call):
        every = tensors_in([arguments for _, arguments, _ in call.passed])
        sent = [x for x in every if all(x is not out for out in call.outs)] or call.outs
        own = [x.detach().abs().max().item() for x in sent if x.numel()]
        largest = torch.tensor([max(own, default=0.0)])
        self._inner.allreduce([largest], op=dist.ReduceOp.MAX).wait()
        summed = self.size() if call.op == dist.ReduceOp.SUM else 1
        hops = 2 if call.operation == "all_reduce" else 1
        worst[0] = max(worst[0], hops * summed * largest.item() / 255)
        return fly(self, call)

    def near(self, x, y, *args, **named):
        kinds = [each.dtype for each in tensors_in([y]) if each.is_floating_point()]
        if kinds := [torch.float32] if isinstance(y, float) else kinds:  # and a few ulps, of sums and of halves
            named["atol"] = worst[0] + (named.get("atol") or 0)
            named["rtol"] = max([named.get("rtol") or 0, *(16 * torch.finfo(kind).eps for kind in kinds)])
        return equal(self, x, y, *args, **named)

    BaguaGroup._compressed, TestCase.assertEqual = flown, near


def main(policy, folder, *names):
    settings(folder)
    tempfile.tempdir = folder
    import torch
    from torch.testing._internal import common_distributed

    torch.set_num_threads(1)
    without_gpus()
    if policy != "gloo":
        stand_in(policy)
    if "UInt8" in policy:
        within_the_bound()
    common_distributed.TIMEOUT_DEFAULT = SECONDS
    common_distributed.TIMEOUT_OVERRIDE.clear()
    fork = torch.multiprocessing.get_context("fork").Process
    common_distributed.MultiProcessTestCase._spawn_processes = lambda self: self._start_processes(fork)
    from torch.testing._internal.distributed import distributed_test

    if policy not in ("gloo", "Policy(None)"):  # else events are gloo's
        distributed_test.PROFILING_SUPPORTED_BACKENDS.clear()

    class Forked(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def setUp(self):
            super().setUp()
            self._spawn_processes()

    every = unittest.TestLoader().getTestCaseNames(Forked)
    first, step = map(int, names[0].split("/")) if names and "/" in names[0] else (0, 1)
    for name in [name for name in every if step > 1 or not names or name in names][first::step]:
        begun, result = time.monotonic(), unittest.TestResult()
        Forked(name).run(result)
        bad = result.failures + result.errors
        for process in multiprocessing.active_children():
            process.kill()
            process.join(5)
        outcome = "skipped" if result.skipped else "failed" if bad else "passed"
        row = {"name": name, "outcome": outcome, "seconds": round(time.monotonic() - begun, 1)}
        print("\n" + json.dumps(row | {"why": bad[0][1][-2000:] if bad else ""}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
