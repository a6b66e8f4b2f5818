"""docs/trainers/diffusers.md: its program, the loop of train_unconditional.py, runs on two ranks as DDP does."""

import pytest
from programs import needs, program_of, theorems

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_the_page_holds(tmp_path):
    needs("diffusers", "accelerate")
    found = theorems(tmp_path, program_of("diffusers"), "found_ema = [p.flatten() for p in ema.shadow_params]\n")
    assert {each["steps"] for name in ("exact", "bytegrad") for each in found[name]} == {3}
