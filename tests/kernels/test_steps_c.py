"""Optimizer steps in C: the definition's bits, one call for any number of tensors, and tables that fit tensors."""

import copy
import itertools
import math
from unittest.mock import patch

import pytest
import torch
from hostile import KINDS, difference, hostile
from tiers import slow
from torch import nn

from baguakit.kernels import cpu
from baguakit.kernels.steps import cpu as steps_cpu
from baguakit.kernels.steps import definition, operators
from baguakit.kernels.steps.definition import SGD, Adam, Conditions, Lion
from baguakit.primitives import adamw_step_, gradient_norm, sgd_step_

RULES = [
    SGD(),
    SGD(weight_decay=0.01),
    SGD(0.9),
    SGD(0.9, 0.1, 0.01),
    SGD(0.9, 0.0, 0.01, nesterov=True),
    Adam(),
    Adam(weight_decay=0.1),
    Adam(0.8, 0.95, 1e-5, 0.1, decoupled=True),
    Adam(decoupled=True),
    Lion(weight_decay=0.1),
]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FORMS = [(p, g, False, None) for p, g in itertools.product(FLOATS, FLOATS)]  # p, g, master, key
FORMS += [(p, g, True, None) for p, g in itertools.product(FLOATS[1:], FLOATS)]
FORMS += [(torch.bfloat16, g, False, -3) for g in FLOATS]
LENGTHS = (2048, 1100, 0, 1, 15, 1030)  # a tile is 1024
CONDITIONS = [
    {"lr": 0.1},
    {"lr": 1e-3, "taken": 6, "grad_scale": 3.0, "clip": 0.7},
    {"lr": 1e-38, "taken": 999, "clip": math.inf},
    {"lr": torch.tensor(0.25), "taken": torch.tensor(3.0), "grad_scale": torch.tensor(1024.0)},
]


@pytest.fixture(autouse=True)
def library():
    if cpu.functions("steps") is None:
        pytest.skip("there is no C compiler")


def column(dtype, call, shift):
    return [hostile(KINDS[(call + i + shift) % len(KINDS)], max(n, 1), dtype, i)[:n] for i, n in enumerate(LENGTHS)]


def columns(rule, form, call):
    p, g, mastered, _ = form
    made = {"p": column(p, call, 0), "g": column(g, call, 1)}
    made |= {name: column(torch.float32, call, 3 + i) for i, name in enumerate("uv"[: rule.states])}
    return made | ({"master": [x.float() * 1.001 for x in made["p"]]} if mastered else {})


def copied(x):
    return {name: [each.clone() for each in tensors] for name, tensors in x.items()}


def steps_alike(rule, x, conditions):
    """Assert that the library steps these tensors as the definition does, and counts the step as it does."""
    ours, theirs = copied(x), copied(x)
    mine, other = (Conditions(**copy.deepcopy(conditions)) for _ in range(2))
    steps_cpu.step_(rule, operators.tables_of(ours), mine)
    definition.step_(rule, theirs, other)
    assert mine.taken == other.taken
    for name in ours:
        for a, b in zip(ours[name], theirs[name], strict=True):
            assert not difference(a, b), (name, len(a))


@pytest.mark.parametrize("calls", [1, slow(len(KINDS))])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_c_equals_the_definition_on_hostile_values(rule, calls):
    """Each form with as many kinds of values as there are calls, beginning with another one."""
    for number, form in enumerate(FORMS):
        for call in range(number, number + calls):
            steps_alike(rule, columns(rule, form, call), CONDITIONS[call % len(CONDITIONS)] | {"key": form[3]})


def test_c_equals_the_definition_on_several_threads(monkeypatch):
    monkeypatch.setattr(cpu, "threads", lambda values: 3)
    for rule in RULES:
        steps_alike(rule, columns(rule, FORMS[0], 0), CONDITIONS[1])


def test_c_equals_the_definition_for_kinds_of_tensors_in_one_list():
    forms = (FORMS[0], FORMS[4], FORMS[0], FORMS[-1])
    made = [columns(RULES[7], form, i) for i, form in enumerate(forms)]
    both = {name: [x for each in made for x in each[name]] for name in ("p", "g", "u", "v")}
    steps_alike(RULES[7], both, CONDITIONS[0] | {"key": 5})


@pytest.mark.parametrize("dtype", FLOATS)
def test_c_equals_the_definition_of_a_norm(dtype, monkeypatch):
    """Whole numbers, whose squares any order adds exactly, and what is not finite."""
    for threads, special in itertools.product((1, 3), (None, math.nan, -math.inf, 1e-7, torch.finfo(dtype).max)):
        monkeypatch.setattr(cpu, "threads", lambda values, threads=threads: threads)
        grads = [torch.arange(n).remainder(19).sub(9).to(dtype) for n in (3 * 16384 + 5, 1030, 0, 1)]
        if special is not None:
            grads[1][-1] = special
        norms, found = torch.empty(2).unbind(), torch.empty(2).unbind()
        steps_cpu.gradient_norm_(norms[0], operators.tables_of({"g": grads}), found[0])
        definition.gradient_norm_(norms[1], grads, found[1])
        assert not difference(norms[0], norms[1]) and found[0] == found[1]


def test_what_is_not_finite_leaves_everything_as_it_was():
    x = columns(RULES[5], FORMS[0], 0)
    before, taken = copied(x), torch.tensor(6)
    steps_cpu.step_(RULES[5], operators.tables_of(x), Conditions(0.1, taken, found_inf=torch.tensor(math.nan)))
    assert taken == 6
    assert not any(difference(a, b) for name in x for a, b in zip(x[name], before[name], strict=True))


# Tables.


@pytest.fixture
def made(monkeypatch):
    """The number of records of each table made from here on."""
    sizes, make = [], operators.tables_of
    monkeypatch.setattr(operators, "tables_of", lambda x: sizes.append(len(x["g"])) or make(x))
    return sizes


def test_a_thousand_tensors_are_one_call_and_one_table(made, monkeypatch):
    p, g, m, v = ([torch.full((7,), i / 9) for i in range(1000)] for _ in range(4))
    calls, library = [], cpu.functions("steps")

    class Counted:
        def step(self, words):
            calls.append(words[2])
            library.step(words)

    monkeypatch.setattr(cpu, "functions", lambda family: Counted())
    for step in range(3):
        adamw_step_(p, list(g), m, v, step)
    assert calls == [1000] * 3 and made == [1000]


def test_what_an_address_does_not_tell_is_seen(made):
    """Memory of earlier tensors in other dtypes, lengths and layouts: nothing is stepped by a table that is wrong."""
    room, p, m = torch.ones(24), torch.ones(4), torch.zeros(4)
    sgd_step_(p, room[:4], m, lr=0.1, momentum=0.9)
    refused = {
        "has gaps": room[:8:2], "has 5 values": room[:5], "is torch.int32": room.view(torch.int32)[:4],
        "to_dense": room[:4].to_sparse(),
    }  # fmt: skip
    for text, g in refused.items():
        with pytest.raises((TypeError, ValueError), match=text):
            sgd_step_(p, g, m, lr=0.1, momentum=0.9)
    square = torch.ones(2, 2)
    sgd_step_(square, room[:4].view(2, 2), lr=0.1)
    with pytest.raises(ValueError, match=r"has strides .*, its parameter"):
        sgd_step_(square, room[:4].view(2, 2).t(), lr=0.1)
    sgd_step_(p, room[:4].view(torch.bfloat16)[:4], lr=0.1)
    assert len(made) == 3 and room.eq(1).all()


def test_the_norm_of_new_memory_is_new():
    room = torch.arange(8.0)
    assert gradient_norm(room[:4]) == torch.tensor(14.0).sqrt()
    assert gradient_norm(room[:2]) == 1
    with pytest.raises(TypeError, match="has gaps"):
        gradient_norm(room[:4:2])


def test_a_tensor_without_memory_is_refused():
    """FSDP frees the memory of a tensor that it shards."""
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    with pytest.raises(TypeError, match="a Tensor has no memory of its own"):
        sgd_step_(torch.ones(4), freed, lr=0.1)


def test_layouts_of_parameters_are_kept():
    """Channels-last weights are stepped value by value, as their gradients lie."""
    p = torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last)
    weights, expected = nn.Parameter(p.clone()), p - 0.5 * (p * 2)
    sgd_step_(weights, p * 2, lr=0.5)
    assert torch.equal(weights, expected) and weights.stride() == p.stride()


def test_without_a_library_the_definition_steps(made):
    x = columns(RULES[8], FORMS[0], 0)
    ours, theirs = copied(x), copied(x)
    adamw_step_(ours["p"], x["g"], ours["u"], ours["v"], 0, weight_decay=0.0)
    with patch.object(cpu, "functions", return_value=None):
        adamw_step_(theirs["p"], x["g"], theirs["u"], theirs["v"], 0, weight_decay=0.0)
    assert made == [len(LENGTHS)]
    assert not any(difference(a, b) for name in "puv" for a, b in zip(ours[name], theirs[name], strict=True))
