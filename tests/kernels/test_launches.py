"""Every launcher gives its kernels what they take, and this Triton can translate what it asks for. No GPU is needed."""

import pytest
from tiers import slow_and_compiled
from variants import printed_by, without_errors

pytest.importorskip("triton")


def test_every_kernel_is_launched_bound_and_translated_once():
    assert without_errors(printed_by("launches.py", "cuda:90", "once"))


@pytest.mark.parametrize("target", slow_and_compiled(["cuda:90"]))  # two hundred translations
def test_every_kernel_is_launched_bound_and_translated(target):
    assert without_errors(printed_by("launches.py", target))
