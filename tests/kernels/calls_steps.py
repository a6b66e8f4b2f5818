"""The same as calls.py for the kernels of optimizer steps."""

import torch
from formats import FORMATS, KEY
from hostile import KINDS, hostile

from baguakit.kernels.blockwise import definition as blockwise
from baguakit.kernels.gpu import signed
from baguakit.kernels.steps import definition as steps
from baguakit.kernels.steps import gpu as steps_launch
from baguakit.kernels.steps import operators as steps_table
from baguakit.kernels.steps.definition import SGD, Adam, Conditions, Lion
from baguakit.kernels.steps.gpu import FACTOR, SEED, SKIP

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
RULES = {
    "SGD": SGD(weight_decay=0.01),
    "SGD with momentum": SGD(0.9, 0.1, 0.01, nesterov=True),
    "Adam": Adam(weight_decay=0.1),
    "AdamW": Adam(0.8, 0.95, 1e-5, 0.1, decoupled=True),
    "Lion": Lion(weight_decay=0.1),
}
LENGTHS = (2048, 1100, 0, 1, 1030)  # tiles are 1024; the gradients of the last begin at an odd address
HOST = ({"lr": 0.1, "taken": 0}, {"lr": 1e-3, "taken": 6, "grad_scale": 3.0, "clip": 0.7}, {"lr": 1e-38, "taken": 999})
MINMAX = FORMATS["minmax_uint8"][0]


CONDITIONS = {  # the arguments of the kernel for them
    "lr": "lr_ptr",
    "taken": "taken_ptr",
    "grad_scale": "scale_ptr",
    "clip": "clip_ptr",
    "found_inf": "found_ptr",
}


def on_device(conditions, aligned=True, only=tuple(CONDITIONS)):
    """Return conditions, some of them as tensors with one value, at multiples of sixteen bytes or just behind one."""
    whole = {"lr": 0.1, "taken": 1, "grad_scale": 1.0, "clip": 1.0, "found_inf": 0.0} | conditions
    return whole | {name: place(aligned).fill_(whole[name]) for name in only}


def place(aligned):
    """A tensor with one value at a multiple of sixteen bytes, or just behind one."""
    return torch.empty(()) if aligned else torch.empty(2)[1]


def values(call, dtype, shift, lengths=LENGTHS):
    """Tensors of a column, whose kinds change from call to call; those of other columns are shifted against them."""
    made = [hostile(KINDS[(call + i + shift) % len(KINDS)], max(n, 1), dtype, i)[:n] for i, n in enumerate(lengths)]
    return [each.clone() for each in made]


def step(variant):
    facts, rule = variant.facts, RULES[variant.facts["rule"]]
    for call in range(len(KINDS)):
        theirs = {"p": values(call, DTYPES[facts["p"]], 0)}
        theirs |= {name: values(call, torch.float32, 3 + i) for i, name in enumerate("uv"[: rule.states])}
        theirs |= {"master": [x.float() for x in theirs["p"]]} if facts["master"] else {}
        ours = {name: [*map(torch.clone, column)] for name, column in theirs.items()}
        gradients, given = gradients_of(facts, call)
        host = HOST[call % len(HOST)] | {"key": KEY if facts["drawn"] else None, "found_inf": float(call == 3)}
        conditions = [Conditions(**on_device(host, only=CONDITIONS if facts["held"] else ())) for _ in range(2)]
        steps_launch.step_(rule, steps_table.tables_of(ours | {"g": given}), conditions[0], facts["block"])
        steps.step_(rule, theirs | {"g": gradients}, conditions[1])
        for name in ours:
            yield from zip(ours[name], theirs[name], strict=True)


def gradients_of(facts, call):
    """Return the gradients, and what the kernel is given: the same, or packed. The last ones begin at an odd place."""
    if not facts["block"]:
        plain = values(call, DTYPES[facts["g"]], 1)
        room = torch.zeros(LENGTHS[-1] + 1, dtype=plain[-1].dtype)
        return plain, [*plain[:-1], room[1:].copy_(plain[-1])]
    packed = [blockwise.compress(MINMAX, x[None], facts["block"]) for x in values(call, torch.float32, 1)]
    plain = [torch.empty(1, n) for n in LENGTHS]
    for x, sent in zip(plain, packed, strict=True):
        blockwise.decompress_(MINMAX, x, sent, facts["block"])
    return [x[0] for x in plain], [x[0] for x in packed]


# Numbers on the device.


def numbers(variant):
    """Compare the numbers that a step leaves on the device with those of the host, and the count of steps."""
    only = [each for each in CONDITIONS if CONDITIONS[each] in variant.signature]
    aligned = CONDITIONS["taken"] in variant.aligned
    for call, host in enumerate((*HOST, {"lr": 1.0, "taken": 3, "clip": float("inf")}, {"found_inf": float("nan")})):
        rule = rule_of(variant)
        host = host | {"key": KEY if call % 2 else None}
        if "found_inf" not in only:
            host = host | {"found_inf": 0.0}
        ours, theirs = (Conditions(**on_device(host, aligned, only)) for _ in range(2))
        x = torch.zeros(1)
        tables = steps_table.tables_of({"p": [x], "g": [x], "u": [x], "v": [x]})
        steps_launch.step_(rule, tables, ours)
        skipped = bool(theirs.found_inf != 0)
        words = tables.numbers.view(torch.int32)
        yield words[SKIP.value], torch.tensor(int(skipped), dtype=torch.int32)
        if skipped:
            yield ours.taken, theirs.taken
            continue
        expected, factor, seed = steps.numbers_of(rule, theirs)
        yield ours.taken, theirs.taken + 1
        yield tables.numbers[: len(expected)], torch.tensor(expected)
        yield tables.numbers[FACTOR.value], torch.tensor(factor)
        if theirs.key is not None:
            yield words[SEED.value : SEED.value + 2], torch.tensor(signed(seed), dtype=torch.int32)


def rule_of(variant):
    """Return the rule that has the constants of a variant."""
    constants = {"RULE": variant.constants["RULE"], "DECAY": variant.constants["DECAY"]}
    return next(
        rule
        for rule in RULES.values()
        if constants == {"RULE": type(rule).__name__, "DECAY": steps_launch.decay_of(rule)}
    )


# Norms.


def norm(variant):
    """Whole numbers, whose squares any order adds exactly, and what is not finite."""
    dtype = DTYPES[variant.facts.get("g", "fp32")]
    aligned = "norm_ptr" in variant.aligned or "norm_ptr" not in variant.signature
    for call, special in enumerate((None, torch.nan, -torch.inf, torch.finfo(dtype).tiny, torch.finfo(dtype).max)):
        g = [torch.randint(-9, 10, (n,), generator=torch.Generator().manual_seed(call)).to(dtype) for n in NORMED]
        if special is not None:
            g[1][-1] = special
        ours, theirs = ((place(aligned), place(aligned)) for _ in range(2))
        tables = steps_table.tables_of({"g": g})
        steps_launch.gradient_norm_(ours[0], tables, ours[1])
        steps.gradient_norm_(theirs[0], g, theirs[1])
        yield from zip(ours, theirs, strict=True)


NORMED = (16384 + 5, 1030, 0, 1)  # a tile is 16384


CALLS = {"step_kernel": step, "numbers_kernel": numbers, "partials_kernel": norm, "norm_kernel": norm}
