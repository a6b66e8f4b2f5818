"""Tables to read, in plain text."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from baguakit.compare.pacing import bits_per_second

from .contenders import ALONE, CONTENDERS, FOUR_BITS
from .runs import UNSHAPED
from .steps import RATES
from .table import Table


def line_of(formula: float | None, rate: str) -> float | None:
    """The ideal time of so many bytes at a rate, in seconds; None where there is none."""
    return None if formula is None or rate not in RATES[:-1] else 8 * formula / bits_per_second(rate)


def names_with(cells: Iterable[tuple[Mapping[str, Any], Any]]) -> list[str]:
    """The names of all contenders, in their order; behind them those in the cells that are not installed here."""
    here = [each.name for each in (*CONTENDERS, *FOUR_BITS)]
    return [*here, *sorted({cell["algorithm"] for cell, _ in cells} - set(here))]


def of_exchanges(table: Table) -> str:
    """Every exchange beside its line."""
    rows = [("rate", "hosts", "MiB", "exchange", "seconds", "line", "ratio", "MB sent", "to formula")]
    for cell, result in sorted(table, key=lambda row: (RATES.index(row[0]["rate"]), row[0]["hosts"], row[0]["mib"])):
        for name, r in result.items():
            line = line_of(r.get("busiest", r["formula"]), cell["rate"])
            place = (cell["rate"], str(cell["hosts"]), str(cell["mib"]), name)
            rows.append(
                (*place, *beside(r["seconds"], line), f"{r['sent'] / 1e6:.2f}", share(r["payload"], r["formula"]))
            )
    return aligned(rows)


def of_versions(table: Table) -> str:
    """Weights that changed beside their line, and what a host computes alone."""
    alone = [("rate", "hosts", "MiB", "a host alone", "pack s", "check s", "apply s")]
    for cell, result in table:
        for name, r in result.items():
            if "alone" in r:
                times = (f"{r['alone'][part]:.3f}" for part in ("pack", "check", "apply"))
                alone.append((cell["rate"], str(cell["hosts"]), str(cell["mib"]), name, *times))
    return f"{of_exchanges(table)}\n\n{aligned(alone)}"


def of_few(table: Table) -> str:
    """The compressed mean of few values beside a plain one."""
    rows = [("rate", "hosts", "values", "mean_ µs", "spread", "compressed_mean_ µs", "spread", "ratio")]
    for cell, result in sorted(table, key=lambda row: (RATES.index(row[0]["rate"]), row[0]["hosts"])):
        for values, r in result.items():
            plain, compressed = r.values()
            both = [text for each in (plain, compressed) for text in (f"{each['seconds'] * 1e6:.0f}", spread_of(each))]
            ratio = f"{compressed['seconds'] / plain['seconds']:.2f}"
            rows.append((cell["rate"], str(cell["hosts"]), values, *both, ratio))
    return aligned(rows)


def of_backend(table: Table) -> str:
    """Programs over the backend, beside gloo and beside what they compute alone."""
    rows = [("rate", "hosts", "program", "step ms", "spread", "compute", "line", "to line", "to gloo", "MB", "formula")]
    for cell, result in table:
        compute = f"{result['compute']['seconds'] * 1e3:.1f}"
        for name, r in result.items():
            if name == "compute":
                continue
            seconds, *to_line = beside(r["seconds"], line_of(r["formula"], cell["rate"]), scale=1e3)
            gain = f"{result[name.partition(',')[0] + ', gloo']['seconds'] / r['seconds']:.2f}"
            sent = (f"{r['payload'] / 1e6:.2f}", share(r["payload"], r["formula"]))
            rows.append((cell["rate"], str(cell["hosts"]), name, seconds, spread_of(r), compute, *to_line, gain, *sent))
    return aligned(rows)


def of_staged(table: Table) -> str:
    """Steps through the memory of the host, beside those of tensors on the CPU.

    The last column leaves out what the device takes longer than the CPU for a step without communication.
    """
    rows = [("rate", "hosts", "algorithm", "tensors", "step ms", "spread", "least", "to CPU", "less its own time")]
    alone = {(cell["rate"], cell["hosts"]): result for cell, result in table if cell["algorithm"] == ALONE}
    for cell, result in table:
        cpu, own = result["CPU"], alone.get((cell["rate"], cell["hosts"]))
        for name, r in result.items():
            times = (f"{r['seconds'] * 1e3:.1f}", spread_of(r), f"{r['least'] * 1e3:.1f}")
            ratio = f"{r['seconds'] / cpu['seconds']:.2f}"
            longer = own[name]["seconds"] - own["CPU"]["seconds"] if own else 0.0
            less = f"{(r['seconds'] - longer) / cpu['seconds']:.2f}" if own and own is not result else "–"
            rows.append((cell["rate"], str(cell["hosts"]), cell["algorithm"], name, *times, ratio, less))
    return aligned(rows)


def of_flows(table: Table) -> str:
    """Several connections beside their line, which is what their caps let pass together, and beside one of them."""
    rows = [("rate", "cap", "hosts", "MiB", "exchange", "flows", "seconds", "spread", "line", "to line", "times one")]
    for cell, result in table:
        if "caps" in cell:
            rows.append(one_slow_flow(cell, result))
            continue
        place = (cell["rate"], cell.get("flow_cap", "none"), str(cell["hosts"]), str(cell["mib"]))
        for name, r in result.items():
            counts = [key for key in r if key != "formula"]
            for count in counts:
                carried = carries(cell, int(count))
                seconds, *to_line = beside(r[count]["seconds"], carried and r["formula"] / carried)
                gain = f"{r[counts[0]]['seconds'] / r[count]['seconds']:.2f}"
                rows.append((*place, name, count, seconds, spread_of(r[count]), *to_line, gain))
    return aligned(rows)


def carries(cell: Mapping[str, Any], count: int) -> float | None:
    """Bytes a second that so many connections carry together; None if nothing limits them."""
    limits = [count * bits_per_second(cell["flow_cap"]) / 8] if "flow_cap" in cell else []
    limits += [] if cell["rate"] == UNSHAPED else [bits_per_second(cell["rate"]) / 8]
    return min(limits, default=None)


def one_slow_flow(cell: Mapping[str, Any], result: Mapping[str, Any]) -> tuple[str, ...]:
    """The row of flows with caps of their own."""
    caps = [bits_per_second(rate) / 8 for rate in cell["caps"]]
    seconds, *to_line = beside(result["seconds"], result["formula"] / sum(caps))
    place = (cell["rate"], "one a quarter", str(cell["hosts"]), str(cell["mib"]), "mean_", str(len(caps)))
    return (*place, seconds, spread_of(result), *to_line, "–")


def spread_of(result: Mapping[str, Any]) -> str:
    """The distance of the quartiles, to the median."""
    return f"{(result['quartiles'][2] - result['quartiles'][0]) / result['seconds']:.0%}"


def of_steps(table: Table) -> str:
    """Every step beside its line, its own computing, and DDP at the same place."""
    header = ("task", "rate", "hosts", "straggler", "algorithm", "step ms", "spread", "compute", "line", "to line")
    rows = [(*header, "to DDP", "MB sent", "to formula", "loss", "test")]
    places = sorted(
        {tuple(cell[key] for key in ("task", "straggler", "rate", "hosts", "steps")) for cell, _ in table},
        key=lambda p: (p[0], p[1], RATES.index(p[2]), p[3]),
    )
    found = {
        (*(cell[key] for key in ("task", "straggler", "rate", "hosts", "steps")), cell["algorithm"]): r
        for cell, r in table
    }
    names = names_with(table)
    for place in places:
        ddp = found.get((*place, "DDP"))
        for name in names:
            r = found.get((*place, name))
            if r is None:
                continue
            task, straggler, rate, hosts, _ = place
            line = line_of(r["formula"], rate)
            spread = f"{(r['quartiles'][2] - r['quartiles'][0]) / r['step']:.0%}" if r["quartiles"] else "–"
            seconds, line_text, to_line = beside(r["step"], line, scale=1e3)
            rows.append(
                (
                    *(task, rate, str(hosts), "yes" if straggler else "", name),
                    *(seconds, spread, f"{r['compute'] * 1e3:.1f}", line_text, to_line),
                    f"{ddp['step'] / r['step']:.2f}" if ddp else "–",
                    *(f"{r['sent'] / 1e6:.2f}", share(r["payload"], r["formula"])),
                    *(f"{late(r['losses']):.3f}", f"{r['test_loss']:.3f}"),
                )
            )
    return aligned(rows)


def throughput(result: dict[str, object]) -> float:
    """Images a second, of all hosts together."""
    steps = result["step_by_rank"]
    assert isinstance(steps, list)
    return sum(result["batch"] / step for step in steps)  # type: ignore[operator]


def late(losses: Sequence[float]) -> float:
    """The mean training loss of the last quarter of the steps."""
    tail = losses[-max(1, len(losses) // 4) :]
    return sum(tail) / len(tail)


def beside(seconds: float, line: float | None, scale: float = 1) -> tuple[str, str, str]:
    """A time, its ideal line and the ratio, to read."""
    if not line:
        return f"{seconds * scale:.3f}", "–", "–"
    return f"{seconds * scale:.3f}", f"{line * scale:.3f}", f"{seconds / line:.2f}"


def share(payload: float, formula: float | None) -> str:
    """Payload counted to bytes computed."""
    return f"{payload / formula:.3f}" if formula else "–"


def aligned(rows: Iterable[Sequence[str]]) -> str:
    """Columns as wide as their widest entry; numbers to the right."""
    rows = list(rows)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    words = ("algorithm", "cap", "exchange", "program", "rate", "task", "tensors")
    left = [name in words for name in rows[0]]
    return "\n".join(
        "  ".join(
            text.ljust(width) if side else text.rjust(width)
            for text, width, side in zip(row, widths, left, strict=True)
        ).rstrip()
        for row in rows
    )
