"""Directories that no store of samples should be in: others may write to them."""

import os

import pytest

from baguakit.data import LMDBStore, StoreError

pytest.importorskip("lmdb")

A = b"a" * 16


@pytest.fixture
def path(tmp_path):
    return tmp_path / "store"


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="files have no owners here")
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777, 0o702])
def test_a_directory_that_others_may_write_to_is_refused(path, mode):
    """They could put there what this process then reads or, with codec=Pickle(), runs."""
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(
        ValueError, match=rf"store can be written by others .* {mode:04o}\), .*; pass a directory of your own"
    ):
        LMDBStore(path)
    path.chmod(0o755)
    with LMDBStore(path) as store:
        assert store.put(A, b"x")
    (path / "data.mdb").chmod(0o666)
    with pytest.raises(ValueError, match=r"data\.mdb can be written by others"):
        LMDBStore(path)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only the superuser gives files away")
def test_a_directory_of_another_user_is_refused(path):
    path.mkdir(mode=0o700)
    os.chown(path, 12345, 12345)
    with pytest.raises(ValueError, match=r"\(it is user 12345's and its mode is 0700\)"):
        LMDBStore(path)


def test_a_directory_that_others_made_meanwhile_is_an_error_of_the_store(path):
    store = LMDBStore(path)
    path.mkdir()
    path.chmod(0o777)
    with pytest.raises(StoreError, match="can be written by others"):
        store.get(A)
