"""Reports of bytes and times: the figures agree with each other and with the formulas."""

import math

import pytest
import torch
import torch.distributed as dist
from pool import ranks
from torch.distributed.device_mesh import init_device_mesh
from training import flat, loss, net, net_and_sgd, run_steps, sgd

import baguakit as bk
from baguakit.report.report import written

VALUES, PARAMETERS = 155, 6  # of the toy network
# Each as an expression, evaluated on the rank.
LOSSY = [
    "bytegrad(UInt8)",
    "bytegrad(UInt8, error_feedback=True)",
    "top_k(0.1)",
    "power_sgd(rank=1)",
    "qadam(warmup_steps=1, compressor=UInt8)",
    "low_precision_decentralized(compressor=UInt8)",
    "choco(compressor=UInt8)",
    "diloco(every=2, inner=bk.stages.CompressedMean(UInt8))",
]


def algorithm(expression):
    return eval(f"bk.algorithms.{expression}", {"bk": bk, "UInt8": bk.compressors.MinMaxUInt8(block=64)})


def attached(expression, steps, look=lambda att, step: None, **options):
    """Train; return the values of `look(att, step)` after each step, and the weights."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen = []
    with bk.attach(model, optimizer, algorithm(expression), **options) as att:
        for step in range(steps):
            optimizer.zero_grad()
            loss(model, dist.get_rank(), step).backward()
            optimizer.step()
            seen.append(look(att, step))
    return seen, flat(model)


@pytest.mark.parametrize(
    "expression, per_step",
    [
        ("gradient_allreduce()", 4 * VALUES + PARAMETERS),  # 2 (n − 1)/n is 1; a byte a parameter tells who has any
        ("local_sgd(every=2)", 4 * VALUES / 2),
        ("decentralized(order='atc')", 4 * VALUES),
    ],
)
def test_bytes_are_those_of_the_formula(expression, per_step):
    def run():
        def look(att, step):
            report = att.report()
            rows = sum(sum(row.bytes.values()) for row in report.rows)
            scalars = report.scalars()
            waited = sum(row.exposed * row.landed for row in report.rows) / report.steps
            assert scalars["baguakit/exposed_seconds_per_step"] == report.exposed_per_step == waited > 0
            assert scalars["baguakit/exposed_share"] == waited / report.seconds_per_step
            return rows / report.steps, report.bytes_per_step, scalars["baguakit/bytes_per_step"]

        return attached(expression, 4, lambda att, step: look(att, step) if step == 3 else None, bucket_bytes=200)[0][
            -1
        ]

    assert ranks(2, run) == [(per_step,) * 3] * 2


def test_scalars_of_rules_add_up_and_parts_too():
    """Two rules on 2 × 2 ranks: between nodes travels half of what a flat mean of two would send."""

    def run():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("inter", "intra"))
        model, optimizer = net_and_sgd()
        rules = bk.hierarchical(bk.algorithms.local_sgd(every=1)), bk.hierarchical(bk.algorithms.bytegrad())
        with bk.attach(model, optimizer, *rules, comm=bk.Comm(mesh=mesh)) as att:
            run_steps(model, optimizer, range(2))
            report = att.report()
        return report.scalars(), str(report), report.rows[0].bytes["inter"] / 2

    for scalars, text, inter in ranks(4, run):
        for name in ("bytes_per_step", "exposed_seconds_per_step", "air_seconds_per_step"):
            parts = sum(scalars[f"baguakit/rule_{i}/{name}"] for i in (0, 1))
            assert scalars[f"baguakit/{name}"] == pytest.approx(parts, rel=1e-12)
        assert scalars["baguakit/bytes_per_step"] == sum(
            scalars[f"baguakit/bytes_per_step_{part}"] for part in ("inter", "intra", "flat")
        )
        assert inter == 4 * (VALUES + 1) / 2
        assert scalars["baguakit/exposed_share"] > 0
        head = text.splitlines()[1].split()
        assert " ".join(head) == "values dtype flights flew as sent each flat inter intra on the lane exposed"


def test_the_table_is_flush_and_its_totals_are_sums():
    def run():
        return attached("gradient_allreduce()", 3, lambda att, _: str(att.report()), bucket_bytes=200)[0][-1]

    for text in ranks(2, run):
        summary, head, rule, *buckets, together = text.splitlines()
        assert summary.startswith("3 steps of ") and "on 2 ranks, 1 group; 626 B sent a step, " in summary
        assert rule == "during_backward(Mean())"
        assert len({len(line) for line in (head, *buckets, together)}) == 1
        cells = [line.split() for line in buckets]
        assert [row[:2] for row in cells] == [["bucket", str(i)] for i in range(len(buckets))]
        total = together.split()
        assert total[:4] == ["all", str(VALUES), "float32", "3"]
        assert float(total[4]) == sum(float(row[5]) for row in cells) == 626
        for column in (-4, -2):  # seconds, rounded
            assert float(total[column]) == pytest.approx(sum(float(row[column]) for row in cells), abs=0.03)


def test_alone_nothing_is_sent_and_nothing_recorded():
    def run():
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)

        def look(att, step):
            return att.report().scalars(), len(att.timeline().spans), str(att.report()).splitlines()[0]

        seen, _ = attached("bytegrad()", 2, look, comm=bk.Comm(alone))
        dist.destroy_process_group(alone)
        return seen[-1]

    for scalars, spans, summary in ranks(2, run):
        assert set(scalars.values()) == {0.0} and "baguakit/exposed_share" not in scalars
        assert spans == 0
        assert summary == "2 steps on 1 rank, 0 groups; 0 B sent a step, 0.00 ms exposed"


@pytest.mark.parametrize("expression", ["bytegrad(UInt8)", "top_k(0.1)"])
def test_the_compression_error_is_what_the_compressor_loses(expression):
    """One step of an SGD without momentum: what is compressed is the gradient at the first weights."""

    def run():
        def look(att, step):
            bucket = att._life.runners[0].buckets[0]
            return att.compression_error(), [id(p) for p in bucket.params], bucket.flat.numel()

        rank = dist.get_rank()
        model = net()
        rule = algorithm(expression)
        with bk.attach(model, sgd(model.parameters(), lr=0.01), rule) as att:
            nothing_yet = att.compression_error()
            bucket = att._life.runners[0].buckets[0]
            mine = torch.autograd.grad(loss(model, rank, 0), bucket.params)
            loss(model, rank, 0).backward()
            measured = att.compression_error()
        x = torch.zeros_like(bucket.flat)
        x[:VALUES] = torch.cat([g.flatten() for g in mine])
        stage = getattr(rule.stage, "inner", rule.stage)
        rows = x.view(2 if stage is rule.stage else 1, -1)
        lost = torch.empty_like(rows)
        stage.compressor.compress(rows, lost)
        return nothing_yet, measured, float(lost.double().norm() / rows.double().norm())

    for nothing_yet, (measured,), by_hand in ranks(2, run):
        assert len(nothing_yet) == 1 and math.isnan(nothing_yet[0])
        assert measured == pytest.approx(by_hand, rel=1e-9) and 0 < measured < 1


def test_measuring_what_compression_loses_changes_no_bit():
    def run():
        results = []
        for expression in LOSSY:
            errors, watched = attached(expression, 4, lambda att, _: att.compression_error(), bucket_bytes=300)
            _, unwatched = attached(expression, 4, bucket_bytes=300)
            results.append((expression, errors[-1], torch.equal(watched, unwatched)))
        exact, _ = attached("gradient_allreduce()", 2, lambda att, _: att.compression_error())
        return results, exact[-1]

    for results, exact in ranks(2, run):
        for expression, errors, same in results:
            assert same, expression
            assert all(0 < error < 1 for error in errors), (expression, errors)
        assert math.isnan(exact[0])


class Writer:
    """Records what it is given."""

    def __init__(self):
        self.given = {}

    def add_scalar(self, name, value, step):
        self.given[name] = (value, step)


def test_log_writes_what_it_returns():
    def run():
        def look(att, step):
            writer = Writer() if dist.get_rank() == 0 else None
            plain = att.log(writer)
            full = att.log(writer, 70 + step, consensus=True, compression=True)
            return plain, full, writer and writer.given, att.consensus_distance(), att.compression_error(), att.step

        return attached("low_precision_decentralized(compressor=UInt8)", 2, look)[0][-1]

    (plain, full, given, distance, errors, step), (_, _, none, *_) = ranks(2, run)
    extra = {"baguakit/consensus_distance": distance, "baguakit/rule_0/compression_error": errors[0]}
    assert none is None and step == 2 and distance > 0
    assert {name: full[name] for name in extra} == extra and full.keys() - extra.keys() == plain.keys()
    assert given == {name: (value, 71) for name, value in full.items()}


def test_a_writer_that_cannot_write_is_refused():
    writer = Writer()
    assert written({"a": 1.0}, writer, 3) == {"a": 1.0} and writer.given == {"a": (1.0, 3)}
    with pytest.raises(TypeError, match=r"add_scalar.*SummaryWriter, and not \[\]; .*scalars\(\)"):
        written({"a": 1.0}, [], 3)
