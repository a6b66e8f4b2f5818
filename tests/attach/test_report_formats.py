"""A bucket that did not fly in the format that was asked for has a reason in the report, and no other has one."""

from dataclasses import dataclass
from typing import ClassVar

import everything
import pytest
import torch
import torch.distributed as dist
from pool import ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import baguakit as bk
from baguakit.compressors import Compressor, MinMaxUInt8, UInt4
from baguakit.costs import Line, Link, Load, Network, Place
from baguakit.rules import rules_of
from baguakit.stages import Mean, Stage
from baguakit.tune import Codec

STEPS = 6
BYTE = MinMaxUInt8(block=64)
ASKING = "diloco(every=2, inner=ErrorFeedback(CompressedMean()))"
ADAPTIVE = "error="  # bits, and so bytes, by the values: no stage can declare them beforehand
EVERY = (*(name for name in everything.ALGORITHMS if ADAPTIVE not in name), ASKING)


class Layers(nn.Module):
    """A long matrix, a small one, and a vector of three values: with small buckets, each in one of its own."""

    def __init__(self, values):
        super().__init__()
        torch.manual_seed(0)
        self.long = nn.Parameter(torch.randn(values // 20, 20))
        self.small = nn.Parameter(torch.randn(2, 2))
        self.vector = nn.Parameter(torch.randn(3))


def trained(algorithm, values, look, steps=STEPS, **options):
    """Train on random gradients; return what `look(att)` returns after the last step."""
    model = Layers(values)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with bk.attach(model, optimizer, algorithm, bucket_bytes=8, **options) as att:
        for step in range(steps):
            torch.manual_seed(1 + step + 100 * dist.get_rank())
            optimizer.zero_grad()
            sum((p * torch.randn_like(p)).sum() for p in model.parameters()).backward()
            optimizer.step()
        return look(att)


def place_of(stages):
    """Two ranks, in a network of which only the bytes matter."""
    codecs = {repr(stage.compressor) for stage in stages if hasattr(stage, "compressor")}
    line = Line(1e-3, 1e-7)
    links = (Link("flat", 1, 2, line, line),)
    return Place(Network(2, 1, "cpu", 1, links, tuple(Codec(name, 1e-9, 1e-9, 1e-9) for name in codecs)))


def rows_of(att):
    """The rows, each with the shapes in its bucket."""
    runners = att._life.runners
    rows = att.report().rows
    shapes = [tuple(tuple(p.shape) for p in runners[row.number].buckets[row.bucket].params) for row in rows]
    return [
        (row.number, row.bucket, row.values, row.flights, row.landed, row.bytes_sent, row.asked, row.flew, row.reason,
         dict(row.ways), each)
        for row, each in zip(rows, shapes, strict=True)
    ]  # fmt: skip


def check(name, values):
    """Compare the reports of two ranks with what the stages of an algorithm declare that they send."""
    algorithm = everything.made(name)
    rules = rules_of(algorithm)
    place = place_of(everything.stages(algorithm))
    for rows in ranks(2, lambda: trained(everything.made(name), values, rows_of)):
        assert {row[0] for row in rows} <= set(range(len(rules)))
        for number, bucket, length, flights, landed, sent, asked, flew, reason, ways, shapes in rows:
            stage = rules[number].stage
            asks = any(held.lossy or hasattr(held, "compressor") for held in everything.stages(rules[number]))
            which = f"{name}, rule {number}, bucket {bucket}"
            assert bool(asked) == bool(flew) == bool(ways) == (asks and landed > 0), which
            assert all(way.reason or way.flew == way.asked for way in ways), which
            if not asks or flights > landed:
                continue
            load = Load(length, 4, shapes)
            exact = sum(times for way, times in ways.items() if way.reason == "warm-up")
            last = bucket == max(row[1] for row in rows if row[0] == number)
            flags = 3 * flights if last and rules[number].what == "grad" else 0  # a byte for each parameter
            full, small = Mean().cost(load, place).sent, stage.cost(load, place).sent
            due = exact * full + (flights - exact) * small + flags
            if stage.one_sided:  # a neighbour that has not answered is sent nothing
                assert 0 < sent <= due and sent % small == 0, which
            else:
                assert sent == due, which
            assert (reason != "") == (small >= full), which
            assert flew != "float32" or small == full, which


@pytest.mark.parametrize("name", everything.others_slow(["top_k(1.0)", *everything.usual(EVERY).values(), ASKING]))
def test_bytes_are_those_of_the_format_that_the_report_names(name):
    check(name, 1000)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in EVERY if "fragments" not in name])  # it has one long layer only
def test_bytes_of_long_buckets_are_those_of_the_format_that_the_report_names(name):
    check(name, 100_000)


def test_one_rank_sends_nothing_and_says_so():
    def run():
        alone = bk.Comm(dist.new_group([dist.get_rank()], use_local_synchronization=True))
        found = []
        for name in everything.usual(EVERY).values():
            found.append((name, trained(everything.made(name), 1000, rows_of, steps=3, comm=alone)))
        dist.destroy_process_group(alone.group)
        return found

    for found in ranks(2, run):
        for name, rows in found:
            rules = rules_of(everything.made(name))
            for number, *_, landed, sent, asked, flew, reason, _, _ in rows:
                asks = not everything.exact(rules[number])
                said = (flew, reason) if landed else ("nothing", "one rank")
                assert sent == 0 and said == (("nothing", "one rank") if asks else ("", "")), name
                assert bool(asked) == (asks and landed > 0), name


@dataclass(frozen=True, repr=False)
class Parts(Stage):
    """The mean in one format for the first values and in another for the rest, which change places every other round.

    It declares no multiple: its buckets are not padded.
    """

    first: Compressor
    second: Compressor
    cut: int = 3
    same_on_all_ranks: ClassVar[bool] = True
    averages: ClassVar[bool] = True

    def __call__(self, x, state, comm):
        held = (self.first, self.second) if comm.round % 2 == 0 else (self.second, self.first)
        for part, compressor in zip((x[: self.cut], x[self.cut :]), held, strict=True):
            bk.primitives.compressed_mean_(part, compressor, comm)
        return x


def test_several_formats_in_a_flight_and_others_in_the_next_are_counted():
    def run():
        def look(att):
            row = next(row for row in att.report().rows if row.values == 1000)
            return row.asked, row.flew, row.reason, row.ways, str(att.report()).splitlines()

        return trained(bk.during_backward(Parts(BYTE, UInt4(block=64))), 1000, look, steps=5)

    byte, half, few = repr(BYTE), repr(UInt4(block=64)), "3 values on 2 ranks are fewer bytes uncompressed"
    for asked, flew, reason, ways, lines in ranks(2, run):
        assert asked == f"{byte} + {half}" and flew == f"float32 + {half}" and reason == few
        assert {(way.asked, way.flew, way.reason): times for way, times in ways.items()} == {
            (byte, "float32", few): 3,
            (half, half, ""): 3,
            (half, "float32", few): 2,
            (byte, byte, ""): 2,
        }
        one = few.replace("3 values on 2 ranks are", "1 value on 2 ranks is")
        assert lines[-6:] == [
            f"  buckets 0-2: float32 in 3 of 5 flights, not {byte}: {few}",
            f"  buckets 0-2: float32 in 2 of 5 flights, not {half}: {few}",
            f"  bucket 1: float32 in 3 of 5 flights, not {half}: {one}",
            f"  bucket 1: float32 in 2 of 5 flights, not {byte}: {one}",
            f"  bucket 2: {half} in 3 of 5 flights",
            f"  bucket 2: {byte} in 2 of 5 flights",
        ]


def test_between_nodes_the_reason_says_where():
    def run(nodes):
        comm = bk.Comm(mesh=init_device_mesh("cpu", (nodes, 4 // nodes), mesh_dim_names=("inter", "intra")))
        rule = bk.during_backward(bk.stages.Hierarchical(Parts(BYTE, BYTE, cut=2)))
        return trained(rule, 1000, lambda att: str(att.report()).splitlines()[-1], 2, comm=comm)

    few = "2 values on 2 ranks are fewer bytes uncompressed"
    assert set(ranks(4, run, 2)) == {f"  buckets 0-2, between nodes: float32, not {BYTE!r}: {few}"}
    assert set(ranks(4, run, 1)) == {f"  buckets 0-2, between nodes: nothing, not {BYTE!r}: one rank"}
