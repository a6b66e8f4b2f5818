"""Windows on live ranks: closed forms, the calls of BlueFog's windows, and formats."""

import contextlib
import itertools
import random
import time

import pytest
import torch
import torch.distributed as dist
from around import meet, neighbours
from pool import ranks

import baguakit as bk
from baguakit.compressors import BFloat16, MinMaxUInt8, TopK
from baguakit.primitives import neighbor_mean_
from baguakit.topology import Exponential, FromDigraph, FullyConnected, Ring, Star

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def drawn(rank, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float32).to(dtype)


# Closed forms.


def put_then_update(topology, dtype):
    """Return the values that `neighbor_mean_` gives, and those that a window gives."""
    comm = bk.Comm()
    x, y = drawn(comm.rank, 1000, dtype=dtype), drawn(comm.rank, 1000, dtype=dtype)
    neighbor_mean_(x, topology, comm)
    with bk.Window(y, topology, comm) as w:
        w.put()
        meet(comm)
        w.update()
        meet(comm)
    return x, y


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("topology", [Ring(), Exponential(), Star()], ids=repr)
def test_put_and_update_are_the_mean_of_neighbours(topology, dtype):
    for x, y in ranks(4, put_then_update, topology, dtype):
        assert torch.equal(x, y)


def test_put_and_update_over_all_ranks_are_the_mean():
    for x, y in ranks(4, put_then_update, FullyConnected(), torch.float64):
        torch.testing.assert_close(x, y, rtol=1e-14, atol=1e-14)


def a_list():
    comm = bk.Comm()
    x = [drawn(comm.rank, 3, 4).t(), drawn(9 + comm.rank, 5, dtype=torch.bfloat16), torch.zeros(0), torch.ones(())]
    y = [each.clone() for each in x]
    neighbor_mean_(x, Ring(), comm)
    with bk.Window(y, Ring(), comm) as w:
        w.put()
        meet(comm)
        fetched = w.fetch(neighbours(comm)[0])
        assert [each.shape for each in fetched] == [each.shape for each in y]
        assert [each.dtype for each in fetched] == [each.dtype for each in y]
        w.update()
        meet(comm)
    assert all(map(torch.equal, x, y))


def test_a_window_holds_a_list_of_shapes_strides_and_dtypes():
    ranks(4, a_list)


def push_sum_alone(seed):
    """Return the mean, x/p, and p, after each rank has sent on its own, with pauses of chance."""
    comm, draw = bk.Comm(), random.Random(seed + bk.Comm().rank)
    graph = FromDigraph([(r, (r + d) % comm.size) for r in range(comm.size) for d in (1, 2)])
    x = drawn(comm.rank, 50, dtype=torch.float64)
    mean = bk.primitives.mean_(x.clone(), comm)
    with bk.Window(x, graph, comm, zero=True) as w:
        shares = dict.fromkeys([(comm.rank + d) % comm.size for d in (1, 2)], 1 / 3)
        for _ in range(100):
            w.accumulate(dst_weights=shares, self_weight=1 / 3, wait=draw.random() < 0.1)
            if draw.random() < 0.5:
                w.collect()
        w.wait()
        meet(comm)
        w.collect()
        meet(comm)
        for _ in range(40):
            w.accumulate(dst_weights=shares, self_weight=1 / 3)
            meet(comm)
            w.collect()
            meet(comm)
    return mean, x / w.p, w.p


def test_push_sum_gives_the_mean_and_keeps_its_mass():
    found = ranks(5, push_sum_alone, 0)
    assert sum(p for _, _, p in found) == pytest.approx(5, rel=1e-12)
    for mean, x, _ in found:
        torch.testing.assert_close(x, mean, rtol=1e-9, atol=1e-9)


# The calls, as BlueFog's tests of windows ask for them, in each dtype.


def all_calls(dtype):
    comm = bk.Comm()
    r, n, near = comm.rank, comm.size, neighbours(comm)

    def value(x):
        assert x.dtype == dtype and bool((x == x.flatten()[0]).all())
        return float(x.flatten()[0])

    def window(zero=False):
        x = torch.full((23, 2), float(r), dtype=dtype)
        return x, bk.Window(x, Ring(), comm, zero=zero)

    # Two windows live at the same time; a new one mixes what it began with.
    (x, w), (y, v) = window(), window(zero=True)
    w.update()
    v.update()
    assert value(x) == pytest.approx(r, abs=1e-2) and value(y) == pytest.approx(r / 3, abs=1e-2)
    w.update(0.5, {near[0]: 0.5})
    assert value(x) == pytest.approx(r, abs=1e-2)
    assert w.versions == dict.fromkeys(near, 0)
    for each in (w, v):
        meet(comm)
        each.close()

    # Put: to all, to some with weights, other values, and without waiting.
    x, w = window()
    with w:
        w.put()
        meet(comm)
        assert {j: value(w.fetch(j)) for j in near} == {j: j for j in near}
        assert w.versions == dict.fromkeys(near, 1)
        meet(comm)
        w.put(dst_weights={(r + 1) % n: 2.0})
        meet(comm)
        assert value(w.fetch((r - 1) % n)) == 2 * ((r - 1) % n) and value(w.fetch((r + 1) % n)) == (r + 1) % n
        assert w.versions == {(r - 1) % n: 2, (r + 1) % n: 1}
        w.update(0.0, {(r - 1) % n: 1.0})
        assert value(x) == 2 * ((r - 1) % n) and w.versions == dict.fromkeys(near, 0)
        meet(comm)
        w.put(torch.full_like(x, 7.0), dst_weights=[(r + 1) % n], wait=False)
        w.wait()
        meet(comm)
        assert value(w.fetch((r - 1) % n)) == 7 and value(x) == 2 * ((r - 1) % n)
        w.update(reset=True)
        assert value(w.fetch(near[0])) == value(w.fetch(near[1])) == 0
        meet(comm)

    # Accumulate: adds, and scales this rank's own values.
    x, w = window()
    with w:
        w.accumulate()
        meet(comm)
        assert {j: value(w.fetch(j)) for j in near} == {j: r + j for j in near}
        assert w.versions == dict.fromkeys(near, 1)
        meet(comm)
        w.accumulate(dst_weights={(r + 1) % n: 0.5}, self_weight=0.5)
        meet(comm)
        assert value(x) == r / 2 and value(w.fetch((r - 1) % n)) == r + 1.5 * ((r - 1) % n)
        assert w.versions == {(r - 1) % n: 2, (r + 1) % n: 1}
        meet(comm)

    # Get: of all, of some with weights, and without waiting; what others get is a whole copy.
    x, w = window(zero=True)
    with w:
        w.get()
        assert {j: value(w.fetch(j)) for j in near} == {j: j for j in near}
        w.get({near[0]: 3.0}, wait=False)
        w.wait()
        assert value(w.fetch(near[0])) == 3 * near[0] and w.versions == {near[0]: 2, near[1]: 1}
        meet(comm)
        x.fill_(9.0)  # nobody gets it before the next call
        meet(comm)
        w.get()
        assert value(w.fetch(near[0])) == near[0]
        meet(comm)
        w.update(1.0, {})
        meet(comm)
        w.get()
        assert value(w.fetch(near[0])) == 9
        meet(comm)

    # The push-sum weight undergoes the same as the values.
    x, w = window(zero=True)
    with w:
        assert w.p == 1
        w.put(dst_weights={(r + 1) % n: 0.5})
        meet(comm)
        w.update(0.5, {(r - 1) % n: 1.0}, reset=True)
        assert w.p == 1.0 and value(x) == 0.5 * r + 0.5 * ((r - 1) % n)
        meet(comm)
        w.accumulate(dst_weights={(r + 1) % n: 0.5}, self_weight=0.5)
        meet(comm)
        assert w.p == 0.5
        w.collect()
        assert w.p == 1.0
        meet(comm)
        w.get(dict.fromkeys(near, 0.25))
        meet(comm)
        w.update(1.0, dict.fromkeys(near, 1.0))
        assert w.p == 1.5
        meet(comm)
    with pytest.raises(RuntimeError, match="this window is closed"):
        w.put()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_calls_do_what_their_equations_say(dtype):
    ranks(4, all_calls, dtype)


def one_inside():
    """Return the times at which this rank was alone inside the mutexes of all ranks, in a clock of the machine."""
    comm, spans = bk.Comm(), []
    with bk.Window(torch.zeros(1), FullyConnected(), comm) as w:
        everyone = range(comm.size)
        for _ in range(20):
            with w.mutex(everyone):
                begin = time.monotonic_ns()
                w.put()
                spans.append((begin, time.monotonic_ns()))
        with (
            w.mutex([comm.rank]),
            pytest.raises(RuntimeError, match=r"holds the mutexes of \[\d\] already"),
            w.mutex([comm.rank]),
        ):
            pass
        meet(comm)
    return spans


def test_one_rank_at_a_time_holds_a_mutex():
    spans = sorted(span for each in ranks(4, one_inside) for span in each)
    assert len(spans) == 80
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))


def given_mutexes():
    """Let rank 1 hold the mutex of rank 0 until rank 2 has had that of rank 3; rank 3 waits for the first."""
    comm, store = bk.Comm(), dist.distributed_c10d._get_default_store()
    with bk.Window(torch.zeros(1), FullyConnected(), comm) as w:
        if comm.rank == 1:
            with w.mutex([0]):
                store.set("mutex/held", "")
                store.wait(["mutex/other"])
                store.set("mutex/over", "")
        elif comm.rank > 1:
            store.wait(["mutex/held"])
            with w.mutex([3 if comm.rank == 2 else 0]):
                assert comm.rank == 2 or store.check(["mutex/over"])
            if comm.rank == 2:
                store.set("mutex/other", "")
        meet(comm)
        if comm.rank == 0:
            for key in ("held", "other", "over"):
                store.delete_key(f"mutex/{key}")


def test_a_mutex_keeps_out_those_that_ask_for_the_same_ranks():
    ranks(4, given_mutexes)


def stale(staleness):
    """Return how far this rank was ahead of its neighbours in its updates, at most."""
    comm = bk.Comm()
    x = torch.zeros(1)
    with bk.Window(x, Ring(), comm, zero=True) as w:
        ahead = 0
        for k in range(1, 101):
            x.fill_(k)
            w.put(wait=False)
            w.update(1.0, dict.fromkeys(neighbours(comm), 0.0), staleness=staleness)
            ahead = max(ahead, *(k - int(w.fetch(j)) for j in neighbours(comm)))
        w.wait()
        meet(comm)
    return ahead


@pytest.mark.parametrize("staleness", [0, 3])
def test_staleness_is_bounded(staleness):
    assert all(ahead <= staleness for ahead in ranks(4, stale, staleness))


def random_calls(seeds):
    """Make random calls that end with what all ranks know: each buffer has the last put and all later sums."""
    comm = bk.Comm()
    for seed in seeds:
        draw = random.Random(seed)  # the same on all ranks, which all know what all do
        x = torch.zeros(7, dtype=torch.float64)
        with bk.Window(x, FullyConnected(), comm, zero=True) as w:
            expected = dict.fromkeys(neighbours(comm, FullyConnected()), (0.0, 0.0))
            for _ in range(draw.randint(1, 12)):
                for rank in range(comm.size):
                    kind, weight = draw.choice("pa"), draw.choice([0.5, 1.0])
                    value, wait = draw.randrange(9), draw.random()
                    to = draw.choice([j for j in range(comm.size) if j != rank])
                    if rank == comm.rank:
                        given = torch.full_like(x, value)
                        call = w.put if kind == "p" else w.accumulate
                        with w.mutex([to]) if wait > 0.7 else contextlib.nullcontext():
                            call(given, dst_weights={to: weight}, wait=wait < 0.3)
                    if to == comm.rank:
                        old = expected[rank] if kind == "a" else (0.0, 0.0)
                        expected[rank] = (old[0] + weight * value, old[1] + weight)
            w.wait()
            meet(comm)
            for j, (value, p) in expected.items():
                assert torch.equal(w.fetch(j), torch.full_like(x, value)), (seed, j)
                assert w._memory.ps[j] == p
            w.collect()
            assert torch.equal(x, torch.full_like(x, sum(value for value, _ in expected.values())))
            meet(comm)


@pytest.mark.parametrize("size", [2, 4])
def test_random_calls_end_as_they_must(size):
    ranks(size, random_calls, range(10))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_500_random_calls_end_as_they_must(size):
    ranks(size, random_calls, range(10, 135))


# Formats.


def compressed(compressor):
    """Return the largest error after 60 puts of values that change little, and after 60 sums, in all."""
    comm = bk.Comm()
    x = drawn(comm.rank, 4096)
    with (
        bk.Window(x, Ring(), comm, compressor, zero=True) as w,
        bk.Window(x, Ring(), comm, compressor, zero=True) as sums,
    ):
        for _ in range(60):
            w.put()
            sums.accumulate()
        meet(comm)
        put = max(float((w.fetch(j) - drawn(j, 4096)).abs().max()) for j in neighbours(comm))
        added = max(float((sums.fetch(j) / 60 - drawn(j, 4096)).abs().max()) for j in neighbours(comm))
        w.get()
        got = max(float((w.fetch(j) - drawn(j, 4096)).abs().max()) for j in neighbours(comm))
        meet(comm)
    return put, added, got


@pytest.mark.parametrize(
    ("compressor", "errors"),
    [(MinMaxUInt8(), (1e-6, 1e-3, 0.04)), (BFloat16(), (1e-6, 1e-3, 0.02)), (TopK(0.1), (1e-6, 0.5, 3.5))],
    ids=["MinMaxUInt8", "BFloat16", "TopK"],
)
def test_puts_of_replicas_forget_the_error_and_sums_make_it_up(compressor, errors):
    for found in ranks(4, compressed, compressor):
        assert all(error <= most for error, most in zip(found, errors, strict=True)), found


def not_finite():
    comm = bk.Comm()
    x = drawn(comm.rank, 64)
    with bk.Window(x, Ring(), comm, MinMaxUInt8()) as w:
        x[3] = float("nan")
        w.put()
        meet(comm)
        assert not w.fetch(neighbours(comm)[0]).isfinite().all()
        meet(comm)
        x[3] = 0.0
        w.put()
        meet(comm)
        assert all(w.fetch(j).isfinite().all() for j in neighbours(comm))
        meet(comm)


def test_a_value_that_is_not_finite_is_passed_on_and_not_kept():
    ranks(4, not_finite)


def on_another_device():
    comm = bk.Comm()
    x = drawn(comm.rank, 9).to("late")
    y = drawn(comm.rank, 9)
    neighbor_mean_(y, Ring(), comm)
    with bk.Window(x, Ring(), comm) as w:
        w.put()
        meet(comm)
        w.update()
        meet(comm)
    assert torch.equal(x.cpu(), y)


def test_tensors_of_another_device_are_copied_to_the_host():
    ranks(4, on_another_device, late=True)
