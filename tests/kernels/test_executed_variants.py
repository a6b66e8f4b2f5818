"""Every variant that is compiled ahead of time, executed as PTX on hostile values: run with `--ptx ARCH`.

A variant that its calls do not launch fails: its list then names code that the launchers never ask for.
"""

import importlib

import pytest
from hostile import difference
from variants import FAMILIES, key_of, key_of_launch, name_of

pytest.importorskip("triton")


def pytest_generate_tests(metafunc):
    if not metafunc.config.getoption("ptx"):
        metafunc.parametrize("variant", [])  # skipped
        return
    every = [each for name in FAMILIES for each in importlib.import_module(f"variants_{name}").variants()]
    names = [name_of({"kernel": each.kernel.__name__} | dict(each.facts)) for each in every]
    metafunc.parametrize("variant", every, ids=names)


@pytest.mark.timeout(600)
def test_every_variant_equals_the_definition(variant, executed_gpu):
    import calls
    import calls_steps

    wanted, of_all = key_of(variant), calls.CALLS | calls_steps.CALLS
    assert wanted[0] in of_all, f"CALLS in calls.py has no calls of {wanted[0]}"
    calls_of = of_all[wanted[0]]
    compared = 0
    for ours, theirs in calls_of(variant):
        assert not difference(ours, theirs), f"result {compared}: {difference(ours, theirs)}"
        compared += 1
    launched = {key_of_launch(each) for each in executed_gpu.launches if each.name == wanted[0]}
    assert compared and wanted in launched, "\n".join(map(str, [wanted, "is not among", *sorted(launched)]))
