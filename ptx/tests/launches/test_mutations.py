"""Faults planted in the executor itself fail the tests of its instructions."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PTX = Path(__file__).parents[2]
ARITHMETIC = "instructions/arithmetic"
# In words: file, what is there, what is put there, the tests that must fail.
MUTATIONS = {
    "halves are cut off": ("numbers/types.py", "np.uint64(0x7FFF) +", "np.uint64(0) +", "test_conversion.py"),
    "a sum is not rounded to odd": ("numbers/rounding.py", "(bits & 1 == 0)", "(bits & 1 == 2)", "test_floating.py"),
    "down is up": ("numbers/rounding.py", '"rm": (False, True)', '"rm": (True, False)', "test_floating.py"),
    "NaN keeps its payload": (
        f"{ARITHMETIC}/floating.py", 'quiet(result, kind) if kind == "f32"', 'result if kind == "f32"',
        "test_floating.py",
    ),
    "zeros have no sign": (
        f"{ARITHMETIC}/floating.py", "np.where(zero, -0.0, 0.0)", "np.where(zero, 0.0, 0.0)", "test_signs.py"
    ),
    "results are not flushed": (
        f"{ARITHMETIC}/floating.py", "result = flushed(result) if flush else result", "pass", "test_floating.py"
    ),
    "quotients are floors": (
        f"{ARITHMETIC}/integer.py", "np.where((a < 0) != (b < 0), -quotient, quotient)", "a // b", "test_integer.py"
    ),
    "no carry to the high half": (f"{ARITHMETIC}/integer.py", "+ (other >> half)", "", "test_integer.py"),
    "shifts wrap": (
        f"{ARITHMETIC}/bits.py", "return np.where(count >= width, x.dtype.type(0), x <<", "return (x <<", "test_bits.py"
    ),
    "ordered is unordered": (f"{ARITHMETIC}/comparison.py", "(a < b) | (a > b)", "a != b", "test_comparison.py"),
    "a guard is dropped": ("machine.py", "on = frame.where(guard, on)", "frame.where(guard, on)", "test_memory.py"),
    "barriers wait for nobody": ("machine.py", "complete(instruction, self, here)", "here", "test_flow.py"),
    "the bound is one off": ("memory.py", "> self.stops[place]", "> self.stops[place] + 1", "test_memory.py"),
    "lanes are misnumbered": ("instructions/warps.py", "j = lane ^ b", "j = lane ^ b ^ 1", "test_warps.py"),
    "races are overlooked": ("watching/races.py", "who) & writes", "who) & False", "test_watching.py"),
    "every scope is wide": ("ranks/shadow.py", "scope >= SYS or", "True or", "test_memory_model.py"),
    "an acquire learns nothing": (
        "ranks/words.py", "self.clocks.learn(threads, each.clock)", "pass", "test_memory_model.py"
    ),
    "a release covers what follows it": (
        "ranks/words.py", "self.clocks.passed(np.unique(threads))", "pass", "test_memory_model.py"
    ),
    "a signal of many has what one of them knows": (
        "ranks/clocks.py", "np.minimum.reduce(parts)", "np.maximum.reduce(parts)", "test_memory_model.py"
    ),
    "threads meet and learn nothing": (
        "ranks/clocks.py", "joined[threads] = self.epoch[threads]", "pass", "test_memory_model.py"
    ),
    "reads are forgotten": (
        "ranks/shadow.py", "self.read if event.writes", "() if event.writes", "test_memory_model.py"
    ),
    "plain signals pass": ("ranks/watch.py", "if strength.scope == 0:", "if False:", "test_memory_model.py"),
    "an atomic operation passes nothing on": (
        "ranks/words.py", "released = [*word.released, *released]", "pass", "test_relation.py"
    ),
    "a fence acquires nothing": (
        "ranks/words.py", "released in self.read.pop", "released in {}.pop", "test_relation.py"
    ),
    "who sleeps never wakes": (
        "ranks/turns.py", "self.asleep = self.repeats = False\n        self._v", "self._v", "test_orders.py"
    ),
    "time stands still for ever": ("ranks/running.py", "self.now + self.jump", "self.now", "test_orders.py"),
    "preemptions are not counted": ("ranks/orders.py", "else self.left - 1", "else self.left", "test_orders.py"),
}  # fmt: skip


@pytest.mark.slow  # a process for each
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_fault_in_the_executor_fails_its_tests(name, tmp_path):
    shutil.copytree(PTX, tmp_path / "ptx", ignore=shutil.ignore_patterns("__pycache__"))
    file, old, new, tests = MUTATIONS[name]
    text = (tmp_path / "ptx" / file).read_text()
    assert text.count(old) == 1, f"{file} has changed: {old}"
    (tmp_path / "ptx" / file).write_text(text.replace(old, new))
    (chosen,) = (tmp_path / "ptx" / "tests").glob(f"*/{tests}")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-c", os.devnull]
    done = subprocess.run(
        [*command, "--rootdir", str(tmp_path), str(chosen)],
        cwd=tmp_path, env=environment | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
