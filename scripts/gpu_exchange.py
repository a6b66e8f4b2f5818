"""Means over ranks in one kernel: on virtual ranks, between processes, beside a backward, and without one of them.

    python scripts/gpu_exchange.py FACTS [--cpu]

*Processes* share a GPU: see `gpu_exchange_ranks`. *Virtual ranks* are one grid; their mean is compared with that of
kernels apart, and both are timed. *Backward* runs beside a mean of one rank through the host, with 8, 16 and 32 CTAs,
and alone. Nothing is timed before its bytes are right. Ends with 1 if any are wrong.

`--cpu` executes the kernels of virtual ranks, and of ranks that miss one, as PTX (`ptx`), and says what it leaves out.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from gpu_exchange_ranks import KINDS, LIMIT, MISSED, drawn, of_missed, of_processes, same

ROOT = Path(__file__).resolve().parents[1]
FORMATS = ("UInt4()", "MinMaxUInt8()", "UInt2()", "Sign()", "Float8()", "BFloat16()", "exact")
ONE_HOP = ("UInt4()", "exact")
REPEATS = 7


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("facts", type=Path, help="a file for the figures, as JSON")
    parser.add_argument("--cpu", action="store_true", help="execute kernels as PTX")
    asked = parser.parse_args(words)
    facts: dict[str, Any] = {}

    def note(name: str, found: Any) -> None:
        facts[name] = found
        facts["wrong"] = wrong(facts)
        asked.facts.write_text(json.dumps(facts))
        print(name, json.dumps(found), flush=True)

    if asked.cpu:
        note("processes", {"not run": "kernels of several processes need a GPU"})
        note("a rank is late", executed_late())
        note("virtual ranks", executed_virtual())
        note("backward", {"not run": "a backward beside a mean needs a GPU"})
        return int(bool(facts["wrong"]))
    for size in (2, 4, 8):
        note(f"{size} processes", of_processes(size))
    for how in MISSED:
        note(f"a rank is {how}", of_missed(how))
    # From here on this process uses the GPU itself: none can be forked of it.
    note("virtual ranks", virtual_ranks())
    note("backward", backward())
    return int(bool(facts["wrong"]))


def wrong(found: Any, name: str = "") -> list[str]:
    """Return the names of all that is False in what has been found."""
    if found is False:
        return [name]
    parts = found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else ()
    return [each for key, part in parts if key != "wrong" for each in wrong(part, f"{name}, {key}".strip(", "))]


# Virtual ranks, and a backward, on a GPU.


def milliseconds(work: Callable[[], Any]) -> float:
    """Return the median of some calls, on the device."""
    taken = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end))
    return statistics.median(taken)


def virtual_ranks(values_of_rank: int = 1 << 22) -> list[dict[str, Any]]:
    """Return, for formats, ranks and places of memory, whether the mean is right, and the time of both ways."""
    from bench.exchange.counting import CODECS
    from bench.exchange.node import Node, mean_of_virtual_ranks_, needed, separately, wire_of

    found, there = [], torch.cuda.get_device_properties(0).multi_processor_count
    for name in FORMATS:
        for one_hop in (False, True) if name in ONE_HOP else (False,):
            for ranks in (2, 4, 8):
                codec, length = CODECS[name], values_of_rank // (16 if one_hop else 1)
                wire, values = wire_of(codec), drawn(ranks, length, "cuda")
                want = separately(codec, [*values], None, one_hop)[0]
                row: dict[str, Any] = {"format": name, "hops": 2 - one_hop, "ranks": ranks, "ctas": there // ranks}
                row["ctas"] = min(32, row["ctas"])
                for place in KINDS:
                    node = Node(
                        ranks, needed(ranks, wire, length, one_hop), row["ctas"], "cuda", place == "host", 10**10
                    )
                    x = values.clone()
                    ok = mean_of_virtual_ranks_(node, wire, x, None, one_hop)
                    row[f"right, {place}"] = bool(ok.all()) and all(same(each, want) for each in x)
                    if row[f"right, {place}"]:
                        taken = milliseconds(lambda: mean_of_virtual_ranks_(node, wire, x, None, one_hop))  # noqa: B023
                        row[f"µs per MiB and rank, {place}"] = 1e3 * taken / (length / (1 << 18)) / ranks
                if codec is not None:
                    taken = milliseconds(apart(codec, values, one_hop))
                    row["µs per MiB and rank, kernels apart"] = 1e3 * taken / (length / (1 << 18)) / ranks
                found.append(row)
    return found


def apart(codec: Any, values: torch.Tensor, one_hop: bool) -> Callable[[], None]:
    """Return a function that launches what all ranks launch where kernels are apart, but for NCCL's."""
    ranks, length = values.shape
    rows = values.view(ranks, 1 if one_hop else ranks, -1)
    packed = torch.stack([codec.compress(each) for each in rows])
    inbox = packed.transpose(0, 1).contiguous()

    def work() -> None:
        for rank in range(ranks):
            codec.compress(rows[rank])
            if one_hop:
                codec.decompress(inbox[0], length).sum(0)
            else:
                codec.reduce(inbox[rank], length // ranks)
                codec.decompress(packed[rank], length // ranks, out=rows[rank])

    return work


def backward(width: int = 8192, layers: int = 6, values_of_rank: int = 1 << 24) -> dict[str, Any]:
    """Return the seconds of a backward alone, beside means of one rank through the host, and beside kernels apart."""
    from bench.exchange.counting import CODECS
    from bench.exchange.node import Node, mean_of_virtual_ranks_, needed, wire_of

    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
    model, x = model.to("cuda", torch.bfloat16), torch.randn(8192, width, device="cuda", dtype=torch.bfloat16)
    codec, length, side = CODECS["UInt4()"], values_of_rank, torch.cuda.Stream(priority=-1)
    wire, values = wire_of(codec), drawn(1, length, "cuda")

    def beside(work: Callable[[], Any] | None) -> dict[str, float]:
        alone = 0.0 if work is None else milliseconds(work)
        taken = []
        for _ in range(REPEATS):
            loss = model(x).float().square().mean()
            torch.cuda.synchronize()
            begin, end, ended = (torch.cuda.Event(enable_timing=True) for _ in range(3))
            begin.record()
            side.wait_event(begin)
            with torch.cuda.stream(side):
                for _ in range(0 if work is None else max(1, round(still / alone))):
                    work()
                ended.record()
            loss.backward()
            end.record()
            torch.cuda.synchronize()
            taken.append((begin.elapsed_time(end), begin.elapsed_time(ended)))
        both = [statistics.median(each) for each in zip(*taken, strict=True)]
        return {"ms of backward": both[0], "ms of a call alone": alone, "ms of all calls beside": both[1]}

    still = 0.0
    beside(None)  # the first takes longer
    found: dict[str, Any] = {"alone": beside(None)}
    still = found["alone"]["ms of backward"]
    for ctas in (8, 16, 32):
        node = Node(1, needed(1, wire, length), ctas, "cuda", True, 10**10)
        found[f"beside {ctas} CTAs"] = beside(lambda: mean_of_virtual_ranks_(node, wire, values))  # noqa: B023
    found["beside kernels apart"] = beside(apart(codec, values, False))
    for name, each in found.items():
        each["slowdown"] = each["ms of backward"] / still if name != "alone" else 1.0
    return found


# Without a GPU.


def executed_virtual() -> list[dict[str, Any]]:
    """Return whether virtual ranks that are executed as PTX have the right mean."""
    from baguakit.kernels import cpu
    from bench.exchange.counting import ARCH, CODECS
    from bench.exchange.node import Node, mean_of_virtual_ranks_, needed, separately, wire_of
    from ptx.driver import executed
    from ptx.ranks import together

    found = []
    for name, one_hop in (("exact", False), ("UInt4()", True)):
        wire, values = wire_of(CODECS[name]), drawn(2, 501, "cpu")
        with patch.object(cpu, "functions", return_value=None):
            want = separately(CODECS[name], [*values], None, one_hop)[0]
        node = Node(2, needed(2, wire, 501, one_hop), 2)
        with executed(ARCH) as gpu:
            together(gpu, 1, lambda _: mean_of_virtual_ranks_(node, wire, values, None, one_hop))  # noqa: B023
        found.append({"format": name, "hops": 2 - one_hop, "right": all(same(each, want) for each in values)})
    return found


def executed_late() -> dict[str, Any]:
    """Return what ranks say of one that does not come, where all are executed as PTX."""
    from baguakit.kernels.exchange.mean_gpu import mean_
    from bench.exchange.counting import ARCH
    from bench.exchange.node import Node, needed, wire_of
    from ptx.driver import executed
    from ptx.ranks import together

    wire, values = wire_of(None), drawn(3, 301, "cpu")
    node = Node(3, needed(3, wire, 301), 2, limit=round(LIMIT * 1e9))
    with executed(ARCH) as gpu:
        together(
            gpu, 3, lambda rank: None if rank == 1 else mean_(node.memory(rank), wire, values[rank]),
            symmetric={"halves": node.data}, signals={"signals": node.signals},
        )  # fmt: skip
    named = [node.control[rank].tolist() == [0, 0, 1, 0] for rank in (0, 2)]
    return {"names rank 1 alone": all(named), "all values are NaN": bool(values[[0, 2]].isnan().all())}


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]
    import gpu_exchange  # without cloudpickle, ranks find a function by the name of its module

    sys.exit(gpu_exchange.main())
