"""The pool of live ranks takes warnings for errors, all but one."""

import warnings

import pytest
import torch
from pool import never_waiting, strictly

PROTOTYPE = "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations"


@pytest.fixture
def modes(monkeypatch):
    """The modes that are set; the first call in a process warns, as torch's own does."""
    seen = []

    def set_sync_debug_mode(mode):
        if not seen:
            warnings.warn(PROTOTYPE, UserWarning, stacklevel=2)
        seen.append(mode)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_sync_debug_mode)
    return seen


def test_that_a_mode_is_a_prototype_is_no_error(modes):
    def run():
        with never_waiting():
            return [*modes]

    assert (strictly(run), modes) == (["error"], ["error", "default"])


def test_all_else_that_warns_is_an_error_while_waiting_is_one(modes):
    def run():
        with never_waiting():
            warnings.warn("something else", UserWarning, stacklevel=1)

    with pytest.raises(UserWarning, match="something else"):
        strictly(run)
    assert modes == ["error", "default"]
