"""A value that is not finite is passed on and never kept; see also the checks of algorithms in test_parts.py."""

import pytest
from everything import ALGORITHMS, averages_gradients, delayed, made, others_slow, runs_free
from pool import ranks

from baguakit.testing.training import Course

AVERAGED = [each for each in ALGORITHMS if averages_gradients(made(each)) and not delayed(made(each))]
AT = (0, 5)


def run(algorithm, **options):
    return Course(bucket_bytes=(25 << 20,), scale=1024.0, passed=False, **options).run(made(algorithm))


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", others_slow(AVERAGED))
def test_one_overflow_leaves_no_trace_in_a_stage_that_sees_the_scale(algorithm):
    """It is given no scaler. The run equals one in which those batches never were, in all that is remembered."""
    for found, wanted in ranks(2, lambda: (run(algorithm, overflows=AT), run(algorithm, without=AT))):
        assert found.keys() == wanted.keys() and all(found[name].equal(wanted[name]) for name in found)
        assert found["the number of steps"] == 6 and all(x.isfinite().all() for x in found.values())


@pytest.mark.parametrize("algorithm", [each for each in ALGORITHMS if runs_free(made(each))])
def test_free_running_ranks_skip_alone(algorithm):
    found = ranks(3, lambda: Course(overflows=(4,), scale=1024.0).run(made(algorithm)))
    assert [each["the number of steps"] for each in found] == [8, 7, 8]
    assert all(x.isfinite().all() for each in found for x in each.values())
