"""Compressed collectives of nothing, of few values and of wrong arguments: what is noted, and what is refused."""

import pytest
import torch
from pool import ranks

import baguakit as bk


def test_nothing_is_sent_or_lost_where_there_is_nothing():
    """Of no values on three ranks, and of any on one."""

    def run():
        byte, sent = bk.compressors.MinMaxUInt8(), {}
        comm = bk.Comm().for_flight(0, 0, 0, sent)
        n, x = comm.size, torch.arange(12.0).view(6, 2)[: 0 if comm.size > 1 else 6]
        residual = torch.full((x.numel(),), float("nan"))
        found = [
            bk.primitives.compressed_all_gather(x, byte, comm),
            bk.primitives.compressed_reduce_scatter(x, byte, comm, residual),
            bk.primitives.compressed_all_to_all(x, byte, comm),
            bk.primitives.compressed_all_to_all(x, byte, comm, [len(x), 0, 0][:n], [len(x), 0, 0][:n]),
            bk.primitives.compressed_broadcast_(x.clone(), byte, comm),
        ]
        return [torch.equal(each, x) for each in found] + [sent, bool(residual.any())]

    for n in (1, 3):
        assert ranks(n, run) == [[True] * 5 + [{}, False]] * n


def test_notes_say_what_flew():
    def run():
        byte, found = bk.compressors.MinMaxUInt8(), []
        for x in (torch.ones(2, 256), torch.ones(2, 1)):
            notes = []
            comm = bk.Comm().for_flight(0, 0, 0, {}, notes)
            bk.primitives.compressed_all_gather(x, byte, comm)
            bk.primitives.compressed_reduce_scatter(x, byte, comm)
            bk.primitives.compressed_all_to_all(x, byte, comm)
            bk.primitives.compressed_broadcast_(x, byte, comm)
            found.append([(str(note.flew), str(note.reason)) for note in notes])
        return found

    few = [("torch.float32", f"{k} on 2 ranks {verb} fewer bytes uncompressed") for k, verb in
           (("4 values", "are"), ("2 values", "are"), ("1 value", "is"), ("2 values", "are"))]  # fmt: skip
    assert ranks(2, run) == [[[("MinMaxUInt8()", "")] * 4, few]] * 2


@pytest.mark.parametrize(
    "call, words",
    [
        ("compressed_all_gather(torch.ones(2, dtype=int), byte, comm)", "x is a floating tensor"),
        ("compressed_all_gather(torch.ones(2), bk.compressors.TopK(0.5), comm)", "keeps other places on each rank"),
        ("compressed_all_gather(torch.ones(2), byte, None)", "comm is a bk.Comm"),
        ("compressed_all_gather(torch.ones(2), byte, comm, out=torch.ones(3))", "out is contiguous, of 4"),
        ("compressed_reduce_scatter(torch.ones(2), byte, comm, out=torch.ones(2))", "out is contiguous, of 1"),
        ("compressed_all_to_all(torch.ones(2), byte, comm, out=torch.ones(3))", "out is contiguous, of 2"),
        ("compressed_all_to_all(y := torch.ones(2), byte, comm, out=y)", "out shares memory with x"),
        ("compressed_reduce_scatter(torch.ones(3), byte, comm)", "a multiple of 2 ranks"),
        ("compressed_reduce_scatter(torch.ones(2), byte, comm, residual=torch.ones(3))", "as many as are averaged"),
        ("compressed_all_to_all(torch.ones(3), byte, comm)", "give output_split_sizes and input_split_sizes"),
        ("compressed_all_to_all(torch.ones(2), byte, comm, [1, 1])", "both or neither"),
        ("compressed_all_to_all(torch.ones(2), byte, comm, [1, 1], [1, 2])", "add up to the rows of x"),
        ("compressed_all_to_all(torch.ones(2), byte, comm, [1, 1], [1])", "for each of 2 ranks"),
        ("compressed_all_to_all(torch.ones(2), byte, comm, [1, 1], [-1, 3])", "0 or more"),
        ("compressed_all_to_all(torch.ones(2), byte, comm, [2, 2], [1, 1])", "rows for itself"),
        ("compressed_broadcast_(torch.ones(2), byte, comm, source=2)", "source is a whole number, 0 to 1"),
        ("compressed_send(torch.ones(2), byte, comm, comm.rank)", "peer is another rank"),
        ("compressed_receive_(torch.ones(2), byte, comm, 7)", "peer is a whole number, 0 to 1"),
        ("compressed_receive_(torch.ones(1).expand(2), byte, comm, 0)", "values lie apart"),
    ],
)
def test_a_wrong_argument_is_refused_in_a_sentence(call, words):
    def run():
        comm, byte = bk.Comm(), bk.compressors.MinMaxUInt8()
        try:
            eval(f"bk.primitives.{call}", {"bk": bk, "torch": torch, "comm": comm, "byte": byte})
        except (TypeError, ValueError) as error:
            return str(error)
        return "accepted"

    assert all(words in said for said in ranks(2, run)), ranks(2, run)
