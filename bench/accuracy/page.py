"""The page of accuracies: bench/accuracy/README.md."""

import json
import os
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench.network.page import machine
from bench.network.table import Table

from . import claims
from .claims import DISTRIBUTIONS, FEW_BITS, LEAST_ERROR, Found, bound, short
from .training import asked, ways
from .training.ways import TASKS, Way

PAGE = Path(__file__).parent / "README.md"
NAME = "accuracy"

HEAD = """# Accuracy of wire formats

This page is written by `python -m bench.accuracy` from the JSON in `bench/results/`; do not edit it.

The error of a format Q is its vNMSE, Σ (Q(x) − x)² / Σ x². MXFP8, MXINT8, MXFP6, MXFP4 (OCP Microscaling Formats,
version 1.0) and NVFP4 (arXiv:2509.25149) are encoded as their documents define them (`bench/accuracy/references.py`);
they are no formats of baguakit. `Uniform(bits, block, rotate)` includes `MinMaxUInt8()`, which is
`Uniform(8, 512, rotate=False)`, `UInt2()`, which is `Uniform(2, 128, rotate=True)`, and `UInt4(rotate=…)`, which is
`Uniform(4, 256, rotate=…)`.
"""

SOURCES = """Distributions have {values:,} values each: normal; Student's t with 3 degrees of freedom; normal, of which
one in a thousand is 30 times as large; and normal in runs of 64 values, each run times a log-normal scale. Gradients
are those of one batch and the whole model, at an early and at the last step of a training of one rank: of the GPT of
`examples/language_model.py` (text {text}), of the network of `baguakit demo`, and of the table of embeddings of
`bench.network.tasks`, whose gradient is zero in most rows. Measured on {on}.
"""

BOLD = """
A rotation gives every block the shape of normal values. That is a gain where a few values are far larger than the
others, and a loss where many are zero, which a grid that is not rotated keeps exactly, or where most have one sign:
such a grid reaches from the least to the largest value only. The first rows of the tables show this. *Kurtosis* is
n Σ x⁴ / (Σ x²)², 3 of normal values; *span* the mean over blocks of 256 values of (max x − min x) / (2 max |x|), which
is 1 if both ends are as far from zero, and ½ or less of values of one sign.

Bold: no format in the table has less error in as many bits or fewer. *Over the bound* is the error on normal values
over 2^(−2 bits), which no code for independent normal values falls below (Shannon 1959).
"""

BIASES = """## Bias

With `stochastic=True` a value is rounded up or down at random. Of {draws:,} roundings of {drawn:,} values of x in a
row, with mean m and variance s² of each value, the table has

    draws · Σ (m − x)² / Σ s²

which is 1 if roundings are unbiased, whatever the number of draws is. A bias of 1 % of a rounding's standard deviation
would add {added:.2g}. After ± stands its standard error. {far}
"""

GROUPS = """## Heavy tails, by parameter

Errors are those of `Uniform(4, rotate=False)` and of `Uniform(4, rotate=True)`, early and late in training. Groups of
the digits and the embeddings are layers.
"""

TRAINING = """## Training

Two ranks train with `bytegrad(Uniform(bits, rotate=…), error_feedback=True)`, the default block of 256 values, and
without compression; *no EF* is without error feedback. Data and weights are those of the seed, the same in all rows.
Learning rates fall to zero. Losses are on data that no rank trains on, in nats, of the language model in bits per byte,
as the mean over {seeds} seeds and over three tests, after 90, 95 and 100 % of the steps. In brackets: the change
against no compression, the mean over seeds. Bytes are those that a rank sends in a step.

{tasks}

Trained on {on}.

At four bits with error feedback, the loss exceeds that of eight bits by

{held}
"""

ASKED = """## An error instead of bits

Two ranks train the same tasks with `bytegrad(error=…)`, seed {seed}, in buckets of {kib} KiB. The errors are those of
all flights of all ranks, each measured on the whole bucket before it was sent: their median, the worst, and how many
lie more than 10 % over what was asked. *Gradients change by* is the largest norm of a bucket on a rank over its
smallest. *Beside it* stands the format of fixed bits that sends least among those with no worse error on the same
gradients. Bytes are those that a rank sends in a step. At the end all ranks have {equal} weights.

Trained on {on}.
"""


def write(results: Path, page: Path = PAGE) -> Path:
    """Write the picture and the page from the JSON in the folder of results, and return the page's path."""
    from . import picture

    found = json.loads((results / f"{NAME}.json").read_text())
    picture.draw(found).savefig(results / f"{NAME}.png", dpi=150)
    trained, wanted = Table(results / ways.PATH.name), Table(results / asked.PATH.name)
    page.write_text(text(found, trained, wanted, os.path.relpath(results, page.parent)))
    return page


def text(found: Found, trained: Table, wanted: Table, results: str) -> str:
    """Return the page, whose picture is in the folder `results`."""
    values = found["sources"][0]["values"]
    parts = [
        HEAD,
        f"![Error against bits a value of each format, on three sources]({results}/{NAME}.png)\n",
        SOURCES.format(values=values, text=found["text"], on=machine(found["machine"])),
        *_errors(found),
        BIASES.format(**found, added=found["draws"] * 1e-4, far=claims.biases(found)),
        _biases(found),
        GROUPS,
        _groups(found),
    ]
    return "\n".join(parts + _training(trained) + _asked(wanted))


def _errors(found: Found) -> list[str]:
    few, errors = f"{FEW_BITS:g} bits", short(LEAST_ERROR)
    return [
        f"## Error and bits\n\nAt most {few} and a vNMSE of at most {errors} on all four distributions:\n",
        *claims.small(found),
        "\nSources on which a format of others has less error than every one of ours of as many bits or fewer:\n",
        *claims.exceptions(found),
        "\nSources on which rotation makes the error of a grid larger by more than 1 %, and how many times:\n",
        *claims.unrotated(found),
        BOLD,
        _of_sources(found, found["sources"][:DISTRIBUTIONS], bounded=True),
        "The same on gradients:\n",
        _of_sources(found, found["sources"][DISTRIBUTIONS:], bounded=False),
    ]


def _of_sources(found: Found, sources: Sequence[Found], bounded: bool) -> str:
    rows = [["*kurtosis*", "", *[""] * bounded, *(f"{source['kurtosis']:.3g}" for source in sources)]]
    rows.append(["*zeros*", "", *[""] * bounded, *(f"{source['zeros']:.1%}" for source in sources)])
    rows.append(["*span*", "", *[""] * bounded, *(f"{source['span']:.2f}" for source in sources)])
    for format in found["formats"]:
        cells = [f"`{format['name']}`" if format["ours"] else format["name"], f"{format['bits']:.5g}"]
        if bounded:
            cells.append(f"{sources[0]['vnmse'][format['name']] / bound(format['bits']):.3g}")
        for source in sources:
            error = short(source["vnmse"][format["name"]])
            cells.append(f"**{error}**" if claims.leads(found, source, format) else error)
        rows.append(cells)
    return table(["format", "bits", *["over the bound"] * bounded, *(each["name"] for each in sources)], rows)


def _biases(found: Found) -> str:
    sources = [source for source in found["sources"] if source["bias"]]
    rows = []
    for name in sources[0]["bias"]:
        several = [source["bias"][name] for source in sources]
        rows.append([f"`{name}`", short(several[0][2]), *(f"{ratio:.3f} ± {error:.3f}" for ratio, error, _ in several)])
    head = ["drawn", f"vNMSE of a drawn rounding, {sources[0]['name']}", *(each["name"] for each in sources)]
    return table(head, rows)


def _groups(found: Found) -> str:
    rows = []
    gradients = found["sources"][DISTRIBUTIONS:]
    for early, late in zip(gradients[::2], gradients[1::2], strict=True):
        for group, one in early["groups"].items():
            both = [one, late["groups"][group]]
            errors = [short(each[of]) for of in ("four bits", "four bits, rotated") for each in both]
            kinds = [f"{each['kurtosis']:.3g}" for each in both]
            rows.append([early["name"].split(",")[0], f"`{group}`", f"{one['values']:,}", *kinds, *errors])
    pairs = [f"{what}{when}" for what in ("kurtosis", "4 bits", "4 bits rotated") for when in (", early", ", late")]
    return table(["training", "parameters", "values", *pairs], rows)


def _training(trained: Table) -> list[str]:
    if not len(trained):
        return []
    rows = []
    for way in ways.ways():
        named = "none, fp32" if way.bits == 32 else f"{way.bits} bits{', rotated' * way.rotate}"
        cells = [named + (", no EF" if way.bits < 32 and not way.feedback else "")]
        for task in TASKS:
            found, since = claims.losses(trained, task, way), claims.change(trained, task, way, Way())
            sent = {result["bytes"] for cell, result in trained if _is(cell, task, way)}
            if found and since is not None:
                told = f" ({since:+.2%})" if way.bits < 32 else ""
                cells += [f"{statistics.mean(found.values()):.4f}{told}", f"{max(sent):,.0f}"]
            else:
                cells += ["", ""]
        rows.append(cells)
    head = ["compression", *(each for task in TASKS for each in (f"{task}: loss", "bytes"))]
    seeds = {cell["seed"] for cell, _ in trained}
    tasks = "\n".join(
        f"* {name}: {(task.__doc__ or '').split(chr(10))[0]} {_sizes(trained, name)}" for name, task in TASKS.items()
    )
    on = "; ".join(map(machine, trained.machines))
    told = TRAINING.format(seeds=len(seeds), tasks=tasks, on=on, held="\n".join(claims.four_as_eight(trained)))
    return [told, table(head, rows)]


def _asked(wanted: Table) -> list[str]:
    if not len(wanted):
        return []
    rows = []
    for cell, result in wanted:
        beside = claims.fixed(result)
        steps = result["steps"]
        rows.append(
            [
                cell["task"],
                f"{cell['error']:g}",
                ", ".join(f"{share:.0%} in {bits}" for bits, share in result["bits"].items() if share),
                *(short(result[of]) for of in ("median", "worst")),
                f"{result['over']:.2%}",
                f"{result['range']:.0f} ×",
                f"{result['bytes'] / steps:,.0f}",
                f"{beside} bits, {result['fixed'][beside]['bytes'] / steps:,.0f}" if beside else "none",
                f"{result['loss']:.4f}",
            ]
        )
    head = [
        "training", "error asked", "flights in bits", "median", "worst", "over by 10 %", "gradients change by", "bytes",
        "beside it", "loss",
    ]  # fmt: skip
    first, on = next(iter(wanted))[0], "; ".join(map(machine, wanted.machines))
    equal = "bitwise equal" if all(result["equal"] for _, result in wanted) else "DIFFERENT"
    return [ASKED.format(**first, kib=first["bucket_bytes"] >> 10, equal=equal, on=on), table(head, rows)]


def _is(cell: Found, task: str, way: Way) -> bool:
    return (cell["task"], cell["bits"], cell["rotate"], cell["feedback"]) == (task, way.bits, way.rotate, way.feedback)


def _sizes(trained: Table, task: str) -> str:
    values = max((result["values"] for cell, result in trained if cell["task"] == task), default=0)
    return f"{values:,} values, {TASKS[task].steps} steps."


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:], ""])
