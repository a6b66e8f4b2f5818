"""Every launcher gives its kernels what they take, and this Triton can translate what it asks for. No GPU is needed."""

import pytest
from variants import printed_by, without_errors

pytest.importorskip("triton")


def test_every_kernel_is_launched_bound_and_translated_once():
    assert without_errors(printed_by("launches.py", "cuda:90", "once"))


@pytest.mark.slow  # two hundred translations
@pytest.mark.parametrize("target", ["cuda:90"])
def test_every_kernel_is_launched_bound_and_translated(target):
    assert without_errors(printed_by("launches.py", target))
