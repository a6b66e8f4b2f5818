"""Arguments: the checks one by one, and then every public callable with odd values in every argument.

Whatever is odd either works, or is one sentence of ours that names the argument and shows the value; what can never
work is not accepted; nothing hangs and nothing crashes. The callables are read off the package.
"""

import faulthandler
import hashlib
import logging
import math
import os
from fractions import Fraction

import numpy as np
import odd_calls
import pytest
import torch
from torch import nn

import baguakit as bk
from baguakit import arguments
from baguakit.ranks import RankError, Ranks

LONGEST = 20  # seconds that one call may take
CHUNK = 500  # calls that a process makes
PARTS = 6  # of all 90,000 calls


# The checks.


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_whole_numbers_become_ints(value):
    assert type(arguments.integer("k", value, 1)) is int and arguments.integer("k", value, 3, 3) == 3


@pytest.mark.parametrize("value", [True, 1.0, "1", None, math.nan, torch.tensor(1), np.array(1), np.float32(1)])
def test_what_is_no_whole_number_is_a_type_error(value):
    with pytest.raises(TypeError, match=r"^k is a whole number, 1 or more, not "):
        arguments.integer("k", value, 1)


def test_ranges_are_said():
    with pytest.raises(ValueError, match=r"^k is a whole number, 1 to 64, not 65$"):
        arguments.integer("k", 65, 1, 64)
    with pytest.raises(ValueError, match=r"^x is a finite number, greater than 0 and less than 1, not 1.0$"):
        arguments.real("x", 1.0, above=0, below=1)
    for value in (math.nan, math.inf, -math.inf, 10**400):
        with pytest.raises(ValueError, match=r"^x is a finite number, not "):
            arguments.real("x", value)
    for value in (True, "1", None, torch.tensor(1.0), Fraction(1)):
        with pytest.raises(TypeError, match=r"^x is a finite number, not "):
            arguments.real("x", value)
    assert arguments.real("x", np.float32(0.5)) == 0.5 and type(arguments.real("x", 1)) is float


def test_ranges_of_annotations_are_said():
    @arguments.checked
    def function(k: arguments.Positive | None = None, x: arguments.Decay = 0):
        return k, x

    assert function(np.int64(1), 0) == (1, 0) and function() == (None, 0)
    for wrong, kind, words in [
        (lambda: function(0), ValueError, "k is a whole number, 1 or more, not 0"),
        (lambda: function("1"), TypeError, "k is a whole number, 1 or more or None, not '1'"),
        (lambda: function(x=1.0), ValueError, "x is a finite number, 0 or more and less than 1, not 1.0"),
    ]:
        with pytest.raises(kind, match=f"^{words}$"):
            wrong()


def test_what_has_passed_once_passes_by_its_type_only_where_that_decides():
    looked = []

    @arguments.checked
    def function(k: int, x: float, y: torch.Tensor | None = None, **options: int):
        looked.append((k, x, y, options))
        return k

    y = torch.ones(2)
    for _ in range(3):
        assert function(1, 0.5, y) == 1 and function(1, 0.5, y=y) == 1 and type(function(np.int64(1), 1)) is int
        with pytest.raises(ValueError, match="x is a finite number, not inf"):
            function(1, math.inf, y)
        with pytest.raises(TypeError, match="y is a tensor or None, not 'y'"):
            function(1, 0.5, "y")
        with pytest.raises(TypeError, match="k is a whole number, not True"):
            function(True, 0.5)
    assert len(looked) == 9


def test_more_arguments_than_names_are_not_taken_for_the_last_of_them():
    @arguments.checked
    def two(x: torch.Tensor, k: int):
        return k

    @arguments.checked
    def many(*k: int):
        return k

    def three(x, k, extra=None):
        return k

    one = torch.ones(1)
    with pytest.raises(TypeError, match="takes 2 positional arguments but 3 were given"):
        two(one, 1, None)
    assert arguments.checked(three, like=two)(one, 1, None) == 1  # as a subclass with one argument more
    with pytest.raises(TypeError, match="k is a whole number, not None"):
        many(1, 2, None)


def test_values_are_shown_in_a_line():
    with pytest.raises(TypeError, match=r"^x is a finite number, not a tensor \(2, 3\) of torch.float32 on cpu$"):
        arguments.real("x", torch.zeros(2, 3))
    with pytest.raises(TypeError) as caught:
        arguments.integer("k", "a" * 1000, 1)
    assert len(str(caught.value)) < 150


def test_annotations_are_what_is_asked_for():
    @arguments.checked
    def function(k: int, x: float = 0.0, *others: bool, name: str | None = None, sizes: tuple[int, float] = (1, 1.0)):
        return k, x, others, name, sizes

    assert function(np.int64(1), 2, True, name="a", sizes=[1, 2]) == (1, 2, (True,), "a", (1, 2))
    for wrong, words in [
        (lambda: function("a"), "k is a whole number, not 'a'"),
        (lambda: function(1, math.nan), "x is a finite number, not nan"),
        (lambda: function(1, 1.0, 1), "others is True or False, not 1"),
        (lambda: function(1, name=1), "name is a string or None, not 1"),
        (lambda: function(1, sizes=(1,)), "sizes is a tuple"),
    ]:
        with pytest.raises((TypeError, ValueError), match=words):
            wrong()


# Arguments that used to be accepted in silence.


def test_a_typo_never_overwrites_weights():
    p = nn.Parameter(torch.ones(3))
    bucket = bk.Bucket([p])
    for method in (bucket.load, bucket.store):
        for what in ("Data", "weights", "", None, 3):
            with pytest.raises((ValueError, TypeError), match="what is 'grad' or 'data', not"):
                method(what)
    assert p.grad is None and torch.equal(p.detach(), torch.ones(3))


def test_a_bucket_holds_tensors_that_lie_apart():
    x = torch.zeros(6)
    for params in ([x, x], [x[:4], x[3:]], [x, x.view(2, 3)], [torch.zeros(1).expand(4)]):
        with pytest.raises(ValueError, match="params have separate memory"):
            bk.Bucket(params)
    bk.Bucket([x[:3], x[3:], torch.zeros(0), torch.zeros(0)])
    with pytest.raises(ValueError, match="multiple_of is a whole number, 1 to 1099511627776, not 0"):
        bk.Bucket([x], multiple_of=0)


@pytest.mark.parametrize(
    "declare",
    [
        lambda: bk.algorithms.qadam(eps=-1),
        lambda: bk.algorithms.qadam(eps=math.nan),
        lambda: bk.algorithms.qadam(eps="a"),
        lambda: bk.algorithms.qadam(betas=(0.9,)),
        lambda: bk.algorithms.diloco(lr=math.nan),
        lambda: bk.algorithms.async_model_average(interval=math.inf),
        lambda: bk.topology.Star().weights(0, 2**63, 0),
        lambda: bk.topology.Ring().weights(0, 4.0, 0),
        lambda: bk.topology.Ring().matrix(4, 0.5),
        lambda: bk.compressors.MinMaxUInt8().row_bytes(-1),
        lambda: bk.compressors.TopK(0.5).row_bytes(-1),
        lambda: bk.primitives.adamw_step_(*torch.ones(4, 3).unbind(), 0, lr=math.nan),
        lambda: bk.primitives.sgd_step_(*torch.ones(2, 3).unbind(), lr=-1.0),
    ],
)
def test_what_cannot_work_is_refused_at_once(declare):
    with pytest.raises((ValueError, TypeError), match=r"^[a-z_ ]+ is .*, not "):
        declare()


def broken_states():
    """Check that a state, and arguments of attach, that are missing or of the wrong kind are refused."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for wrong, words in [
        ({"comm": 3}, "comm is a bk.Comm"),
        ({"timeout": math.inf}, "timeout is a timedelta or a number of seconds, greater than 0"),
        ({"timeout": "1"}, "timeout is a timedelta or a number of seconds, not '1'"),
        ({"bucket_bytes": 0}, "bucket_bytes is a whole number, 1 or more, not 0"),
        ({"broadcast": "no"}, "broadcast is True or False, not 'no'"),
    ]:
        with pytest.raises((ValueError, TypeError), match=words):
            bk.attach(model, optimizer, bk.algorithms.bytegrad(), **wrong)
    for wrong, words in [({"group": 3}, "group is a ProcessGroup"), ({"mesh": 1}, "mesh"), ({"flows": True}, "flows")]:
        with pytest.raises(TypeError, match=words):
            bk.Comm(**wrong)
    with bk.attach(model, optimizer, bk.algorithms.qadam()) as att:
        state = att.state_dict()
        for key in ("version", "ranks", "step", "rules"):
            with pytest.raises(ValueError, match=f'state is a dict with "{key}" in it'):
                att.load_state_dict({k: v for k, v in state.items() if k != key})
        for key in ("rule", "round", "cut", "parameters", "own"):
            rule = {k: v for k, v in state["rules"]["0"].items() if k != key}
            with pytest.raises(ValueError, match=f'"{key}" in it'):
                att.load_state_dict({**state, "rules": {"0": rule}})
        for key in ("rank", "world", "run", "frozen", "sums"):
            with pytest.raises(ValueError, match=rf'state\["saved"\] is a dict with "{key}" in it'):
                att.load_state_dict({**state, "saved": {k: v for k, v in state["saved"].items() if k != key}})
        for key, value in [("version", 99), ("step", -7), ("ranks", 0), ("rules", []), ("step", "3")]:
            with pytest.raises((ValueError, TypeError), match=rf'state\["{key}"\] is .*, not '):
                att.load_state_dict({**state, key: value})
        for wrong in (None, [], "a", torch.zeros(3)):
            with pytest.raises(TypeError, match="state is a dict"):
                att.load_state_dict(wrong)
        att.load_state_dict(state)


def test_what_attach_and_a_saved_state_lack_is_said():
    with Ranks(1) as live:
        live.run(broken_states)


# The property.


def faults(numbers, note, chosen):
    """The faults of some odd calls, by their numbers; `note` says at any moment which is under way."""
    logging.disable(logging.CRITICAL)
    os.chdir(note.parent)  # where files are written that have odd names
    calls, found = chosen(), {}
    for number in numbers:
        note.write_text(str(number))
        faulthandler.dump_traceback_later(LONGEST, exit=True)
        fault = calls[number].fault()
        faulthandler.cancel_dump_traceback_later()
        if fault:
            found[f"{calls[number]}"] = fault
    return found


def chosen():
    """All odd calls in an order of chance, the same in every process, in which a new one moves no others."""
    calls = list(odd_calls.odd_calls(odd_calls.targets()))
    return sorted(calls, key=lambda call: hashlib.sha1(f"{call}".encode()).digest())


def chosen_collectives():
    """Odd calls that two ranks make alike."""
    return odd_calls.odd_calls(odd_calls.collectives())


def number_of_calls(chosen):
    return len(chosen())


def all_faults(size, numbers, tmp_path, chosen=chosen):
    """The faults of these calls, each made on all of `size` live ranks; one that ends a rank is a fault."""
    found, numbers, note = {}, list(numbers), tmp_path / "number"
    while numbers:
        now = numbers[:CHUNK]
        try:
            with Ranks(size) as live:
                for each in live.run(faults, now, note, chosen, limit=600):
                    found |= each
            numbers = numbers[CHUNK:]
        except RankError as error:
            if not note.exists():  # no call has been made
                raise
            at = int(note.read_text())
            found[f"call {at}"] = f"hung, or ended the process: {str(error)[:300]}"
            numbers = numbers[numbers.index(at) + 1 :]
    return found


def in_words(found):
    return "\n".join(f"{call}: {fault}" for call, fault in found.items())


@pytest.mark.timeout(300)
def test_some_odd_calls_work_or_are_refused_in_a_sentence(tmp_path):
    found = all_faults(1, range(CHUNK), tmp_path)
    assert not found, in_words(found)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(PARTS))
def test_odd_calls_work_or_are_refused_in_a_sentence(tmp_path, part):
    with Ranks(1) as live:
        (count,) = live.run(number_of_calls, chosen)
    found = all_faults(1, range(part, count, PARTS), tmp_path)
    assert not found, in_words(found)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_odd_calls_on_two_ranks(tmp_path):
    """With one rank nothing is sent, so that faults of messages do not show."""
    found = all_faults(2, range(number_of_calls(chosen_collectives)), tmp_path, chosen_collectives)
    assert not found, in_words(found)
