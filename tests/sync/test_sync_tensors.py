"""Which tensors are published and followed: tied ones, those that share memory, and those that were replaced."""

import pytest
import torch
from torch import nn

import baguakit as bk


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(40, 30, bias=False), nn.Linear(40, 30, bias=False)
        self.last.weight = self.first.weight


@pytest.mark.parametrize("early", [False, True])
def test_tied_weights_are_followed_by_each_of_their_names(early, tmp_path):
    """A module, or what its state_dict returns, on either side, and tensors apart on the other."""
    untied = {name: torch.zeros(30, 40) for name in ("first.weight", "last.weight")}
    for i, published in enumerate((Tied(), Tied().state_dict())):
        publisher, where = bk.sync.Publisher(published, tmp_path / str(i)), tmp_path / str(i)
        weight = published.first.weight if i == 0 else published["last.weight"]
        followed = [Tied(), Tied().state_dict()] + [{name: x.clone() for name, x in untied.items()}] * i
        followers = [bk.sync.Subscriber(each, where, early=early) for each in followed]
        for _ in range(3):
            publisher.publish()
            for follower in followers:
                follower.update()
                assert all(torch.equal(x, weight) for x in follower.tensors.values())
            with torch.no_grad():
                weight[3:5] += torch.randn(2, 40)


@pytest.mark.parametrize("early", [False, True])
def test_tensors_that_are_one_here_and_differ_where_published_are_refused(early, tmp_path):
    published, x = {"a": torch.ones(50), "b": torch.ones(50)}, torch.zeros(50)
    publisher, follower = (
        bk.sync.Publisher(published, tmp_path),
        bk.sync.Subscriber({"a": x, "b": x}, tmp_path, early=early),
    )
    publisher.publish()
    follower.update()
    assert torch.equal(x, torch.ones(50))
    published["a"][3], published["b"][3] = 2, 3
    publisher.publish()
    with pytest.raises(ValueError, match="'a' and 'b' are one tensor here, and differ where they are published"):
        follower.update()
    assert torch.equal(x, torch.ones(50))


def test_tensors_that_share_memory_in_part_are_refused(tmp_path):
    x = torch.zeros(6, 8)
    for others in ({"row": x[0]}, {"all": x.view(-1)}, {"left": x[:, :5], "right": x[:, 4:]}):
        tensors = {"x": x, **others} if "left" not in others else others
        with pytest.raises(ValueError, match=r"' and '.*' share memory, so that they cannot be written apart"):
            bk.sync.Subscriber(tensors, tmp_path)
    with pytest.raises(ValueError, match="values of 'x' share memory"):
        bk.sync.Subscriber({"x": x[:1].expand(6, 8)}, tmp_path)
    halves = {"left": torch.ones(6, 4), "right": torch.ones(6, 4)}
    bk.sync.Publisher(halves, tmp_path).publish()
    bk.sync.Subscriber({"left": x[:, :4], "right": x[:, 4:]}, tmp_path).update()
    assert torch.equal(x, torch.ones(6, 8))


@pytest.mark.parametrize("early", [False, True])
def test_tensors_that_were_replaced_are_published_and_are_not_lost_in_silence(early, tmp_path):
    """As `x.data = …`, `load_state_dict(assign=True)`, or a new value of the mapping does."""
    trained, served, mapping = nn.Linear(5, 4), nn.Linear(5, 4), {"weight": torch.zeros(4, 5), "bias": torch.zeros(4)}
    publisher = bk.sync.Publisher(trained, tmp_path)
    module, by_name = (bk.sync.Subscriber(each, tmp_path, early=early) for each in (served, mapping))
    publisher.publish()
    trained.load_state_dict({name: x + 1 for name, x in trained.state_dict().items()}, assign=True)
    publisher.publish()
    assert module.update() == by_name.update() == 1
    for name, x in trained.state_dict().items():
        assert torch.equal(served.state_dict()[name], x)
        assert torch.equal(mapping[name], x)
    served.weight.data, mapping["bias"] = torch.zeros(4, 5), torch.zeros(4)
    trained.weight.data.add_(1)
    publisher.publish()
    for follower in (module, by_name):
        with pytest.raises(RuntimeError, match="changed or moved since the last update"):
            follower.update()
    assert not served.weight.any()
    assert not mapping["bias"].any()


def test_after_other_names_or_dtypes_comes_a_whole_copy(tmp_path):
    published = {"x": torch.ones(70), "y": torch.ones(3)}
    publisher, follower = (
        bk.sync.Publisher(published, tmp_path),
        bk.sync.Subscriber({"x": torch.zeros(70)}, tmp_path, some=True),
    )
    publisher.publish()
    follower.update()
    published["x"] = torch.ones(70).bfloat16()
    publisher.publish()
    with pytest.raises(
        ValueError, match=r"'x' is a tensor \(70,\) of torch.float32 on cpu; published is bfloat16 \(70,\)"
    ):
        follower.update()
    published.update({"x": torch.full((70,), 2.0), "z": published.pop("y")})
    assert publisher.publish() == follower.update() == 2
    assert torch.equal(follower.tensors["x"], torch.full((70,), 2.0))
