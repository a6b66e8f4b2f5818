"""Reports in DDP, FSDP2 and Lightning name the format in which each bucket flew, as those of `attach` do."""

import torch
import torch.distributed as dist
from pool import ranks
from sharding import grid, line
from torch import nn
from torch.distributed.fsdp import fully_shard

import baguakit as bk

BYTE = bk.compressors.MinMaxUInt8(block=64)
LONG = 900  # values of a layer; the others have 3 and 4
STEPS = 3


def layers():
    """Three layers without biases: of 900, of 3 and of 4 values."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(*shape, bias=False) for shape in ((300, 3), (3, 1), (1, 4))))


def train(model, params):
    optimizer = torch.optim.SGD(params, lr=0.01)
    for step in range(STEPS):
        torch.manual_seed(step + 100 * dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(8, 300)).square().mean().backward()
        optimizer.step()


def by_values(report):
    """Each bucket in a report by its rule and values, and the lines below the table."""
    said = {}
    for row in report.rows:
        assert sum(row.ways.values()) == row.landed * len(row.latest)
        said[row.number, row.values] = (row.asked, row.flew, row.reason, row.bytes_sent / row.flights)
    return said, [text for text in str(report).splitlines() if text.startswith("  bucket") and ": " in text]


def few(values, size=2):
    return f"{values} values on {size} ranks are fewer bytes uncompressed"


def test_ddp():
    def run():
        model = layers()
        ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1e-6)
        with bk.interop.ddp(ddp, bk.algorithms.bytegrad(BYTE, error_feedback=True)) as handle:
            train(ddp, model.parameters())
            return by_values(handle.report())

    for said, lines in ranks(2, run):
        assert said == {
            (0, LONG): (repr(BYTE), repr(BYTE), "", BYTE.row_bytes(LONG)),
            (0, 3): (repr(BYTE), "float32", few(3), 12),
            (0, 4): (repr(BYTE), "float32", few(4), 16),
        }
        assert sorted(line.partition(": ")[2] for line in lines) == [f"float32, not {BYTE!r}: {few(n)}" for n in (3, 4)]


def test_fsdp_across_nodes():
    """Each rank averages its half of a layer."""

    def run():
        mesh = grid()
        model = layers()
        for layer in model:
            fully_shard(layer, mesh=mesh["intra"])
        fully_shard(model, mesh=mesh["intra"])
        stage = bk.stages.CompressedMean(BYTE)
        with bk.interop.fsdp(model, stage, bk.Comm(mesh.get_group("inter"))) as handle:
            train(model, model.parameters())
            return by_values(handle.report())[0]

    for said in ranks(4, run):
        long = [values for _, values in said if values > 100]
        assert len(long) == 1 and len(said) == 3
        for (_, values), (asked, flew, reason, sent) in said.items():
            if values in long:
                assert (asked, flew, reason, sent) == (repr(BYTE), repr(BYTE), "", BYTE.row_bytes(values))
            else:
                few_of = few(values).replace("1 values on 2 ranks are", "1 value on 2 ranks is")
                assert (asked, flew, reason, sent) == (repr(BYTE), "float32", few_of, 4 * values)


def test_fsdp_within_and_its_weights():
    """The first half of a mean, and the gather of the weights: of a layer of N values a rank sends those of N/2."""

    def run():
        model = layers()
        for layer in model:
            fully_shard(layer, mesh=line())
        fully_shard(model, mesh=line())
        half = bk.compressors.UInt4(block=64)
        with bk.interop.fsdp(model, bk.stages.CompressedMean(BYTE), weights=half) as handle:
            train(model, model.parameters())
            report = handle.report()
            told = by_values(report)
            total = sum(row.bytes_sent for row in report.rows)
            return *told, report.bytes_sent == total, {row.flights >= STEPS for row in report.rows}, repr(half)

    for said, lines, adds_up, flown, half in ranks(2, run):
        assert adds_up and flown == {True} and len(said) == 6
        for (number, values), (asked, flew, reason, sent) in said.items():
            compressor = (BYTE, bk.compressors.UInt4(block=64))[number]
            assert asked == repr(compressor) == (repr(BYTE), half)[number]
            if values > 100:
                assert (flew, reason, sent) == (asked, "", compressor.row_bytes(values // 2))
            else:
                assert (flew, reason, sent) == ("float32", few(values), 4 * values / 2)
        assert len(lines) == 4
