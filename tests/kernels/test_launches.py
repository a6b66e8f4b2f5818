"""Every launcher gives its kernels what they take, and this Triton can translate what it asks for. No GPU is needed."""

import pytest
from variants import printed_by, without_errors

pytest.importorskip("triton")


def test_every_kernel_is_launched_bound_and_translated():
    """Two hundred translations take Triton some seconds."""
    assert without_errors(printed_by("launches.py", "cuda:90"))
