"""Temporaries of a lane: kept from flight to flight, apart from each other, and no thread else keeps any."""

import pytest
import torch

from baguakit.lanes import lane, temporaries

LIKE = torch.zeros(3, 5)


@pytest.fixture
def way():
    way = lane(torch.device("cpu"))
    yield way
    way.close()


def places(*likes):
    """Return the addresses of temporaries like these."""
    with temporaries() as new:
        return [new(like).data_ptr() for like in likes]


def test_the_next_flight_finds_them_where_they_were(way):
    first, second = (way.run(lambda: places(LIKE, LIKE)).result() for _ in range(2))
    assert first == second and len(set(first)) == 2


def test_they_are_shaped_as_asked(way):
    def made():
        with temporaries() as new:
            return [(x.shape, x.dtype, x.is_contiguous()) for x in (new(LIKE.t()), new(LIKE.bfloat16()))]

    assert way.run(made).result() == [((5, 3), torch.float32, True), ((3, 5), torch.bfloat16, True)]


def test_those_of_a_block_within_are_others(way):
    def nested():
        with temporaries() as new:
            x = new(LIKE).fill_(1)
            with temporaries() as inner:
                inner(LIKE).fill_(2)
            after = new(LIKE).fill_(3)
            return x.clone(), after.clone()

    x, after = way.run(nested).result()
    assert (x == 1).all() and (after == 3).all()


def test_they_grow_and_serve_any_dtype(way):
    def filled(like, value):
        with temporaries() as new:
            return new(like).fill_(value).clone()

    for like in (LIKE, torch.zeros(1000, dtype=torch.float64), torch.zeros((), dtype=torch.int64), LIKE.bfloat16()):
        assert torch.equal(way.run(lambda like=like: filled(like, 7)).result(), torch.full_like(like, 7))


def test_an_error_gives_them_back(way):
    def broken():
        with temporaries() as new:
            new(LIKE)
            raise ArithmeticError

    before = way.run(lambda: places(LIKE)).result()
    with pytest.raises(ArithmeticError):
        way.run(broken).result()
    assert way.run(lambda: places(LIKE)).result() == before


def test_threads_that_are_no_lanes_keep_none():
    with temporaries() as new:
        kept = new(LIKE).fill_(1)
    with temporaries() as new:
        new(LIKE).fill_(2)
    assert (kept == 1).all()
