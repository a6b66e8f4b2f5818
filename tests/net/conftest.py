"""The plugin, compiled once, and processes that use it."""

import shutil

import pytest
from net_pair import Pair, Peer

from baguakit.compiling import COMPILERS
from baguakit.net import build


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    if not any(map(shutil.which, COMPILERS)):
        pytest.skip("no C compiler is here, and the plugin is a C file")
    return build(tmp_path_factory.mktemp("baguanet"), flags=["-Werror"])


@pytest.fixture
def peers(library):
    """Makes processes that have the plugin loaded, and ends them."""
    made = []

    def make(version=11, environment=None, inside=()):
        made.append(Peer(library, version, environment or {}, inside))
        return made[-1]

    yield make
    for peer in made:
        peer.end()


@pytest.fixture(scope="module")
def blank(library):
    """A process that has not initialised the plugin, and never does: copies of it do."""
    peer = Peer(library, 11, {})
    yield peer
    peer.end()


@pytest.fixture
def pairs(library):
    """Makes connected pairs of processes, and ends them."""
    made = []

    def make(version=11, sender=None, receiver=None):
        made.append(Pair(library, version, sender or {}, receiver or {}))
        return made[-1].connect()

    yield make
    for pair in made:
        pair.end()
