"""Two ranks with two loader workers each read a slow dataset: computed once, then fast."""

import pytest

pytest.importorskip("lmdb")

import slow_epochs

SAMPLES = 501  # not divisible by the ranks: in an epoch one sample is asked for twice


@pytest.mark.slow  # two ranks, and two loader workers for each
@pytest.mark.timeout(180)
def test_no_sample_is_computed_twice(tmp_path):
    epochs = 3
    seconds, computed, reports = slow_epochs.epochs(tmp_path, SAMPLES, epochs)
    print("seconds by epoch:", [f"{s:.3f}" for s in seconds], f"second epoch {seconds[0] / seconds[1]:.0f} × as fast")
    assert sorted(computed) == list(range(SAMPLES))
    assert sum(report["misses"] for report in reports) == SAMPLES
    assert sum(report["hits"] for report in reports) == epochs * (SAMPLES + 1) - SAMPLES
