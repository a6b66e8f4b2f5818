"""A program: run torch's own tests of distributed programs on 4 forked ranks, over gloo or the backend that stands in.

    torchs_own.py POLICY FOLDER [BEGINNING OF A NAME ...]

POLICY is "gloo", or an expression of `bk.backend`. The tests keep the name gloo, and groups that they make by it are
groups of the backend. For each test a line of JSON is printed: its name, its outcome, and its error.
"""

import json
import multiprocessing
import os
import sys
import tempfile
import unittest

RANKS, SECONDS = 4, 90


def settings(folder):
    """The environment that torch's tests read, before they are imported."""
    os.makedirs(os.path.join(folder, "barrier"), exist_ok=True)
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(RANKS), TEMP_DIR=folder, MASTER_ADDR="127.0.0.1")
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(SECONDS))


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

    A block of values of at most a in absolute value spans 2a, and is rounded to multiples of 2a / 255: by a / 255 at
    most. A sum is rounded as it is sent and as it comes back: by 2a / 255 at most, a being the largest absolute value
    of the sum where the values that are summed have one sign. Tests compare tensors and single values.
    """
    import torch
    from torch.testing._internal.common_utils import TestCase

    equal = TestCase.assertEqual

    def near(self, x, y, *args, **named):
        if isinstance(y, torch.Tensor) and y.is_floating_point() and y.numel():
            named["atol"], named["rtol"] = 2 / 255 * y.detach().abs().max().item(), 0
        elif isinstance(y, float):
            named["atol"], named["rtol"] = 2 / 255 * abs(y), 0
        return equal(self, x, y, *args, **named)

    TestCase.assertEqual = near


def main(policy, folder, *names):
    settings(folder)
    tempfile.tempdir = folder
    import torch
    from torch.testing._internal import common_distributed

    torch.set_num_threads(1)
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

    for name in unittest.TestLoader().getTestCaseNames(Forked):
        if names and not name.startswith(names):
            continue
        result = unittest.TestResult()
        Forked(name).run(result)
        bad = result.failures + result.errors
        for process in multiprocessing.active_children():
            process.kill()
            process.join(5)
        outcome = "skipped" if result.skipped else "failed" if bad else "passed"
        print(
            "\n" + json.dumps({"name": name, "outcome": outcome, "why": bad[0][1][-2000:] if bad else ""}), flush=True
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
