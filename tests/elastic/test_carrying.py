"""The state that a rank takes from a peer: reading it runs no code that the peer has chosen."""

import io
import json
import pickle
from types import SimpleNamespace

import pytest
import torch

from baguakit.comm import Comm, sending
from baguakit.elastic.carrying import packed, unpacked


class Planted:
    """Code that runs where a pickle of this is read."""

    def __reduce__(self):
        return print, ("planted",)


def engine():
    """An engine with a model, an optimizer that has a state, and no more than `packed` reads."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    scaler = torch.amp.GradScaler("cpu")
    return SimpleNamespace(setup=SimpleNamespace(model=model, optimizers=[optimizer], scaler=scaler))


def test_a_state_arrives_as_it_was_sent():
    one, other, kept = (
        engine(),
        engine(),
        {"step": 3, "made": 2, "rules": {"0": {"own": {"x": torch.ones(2)}, "cut": []}}},
    )
    other.setup.model.bias.data.copy_(one.setup.model.bias)
    came = unpacked(other, packed(one, kept, ["weight"]))  # the bias is there already
    assert came["rules"]["0"]["own"].pop("x").tolist() == [1, 1]
    assert came == {"step": 3, "made": 2, "rules": {"0": {"own": {}, "cut": []}}}
    for a, b in zip(one.setup.model.parameters(), other.setup.model.parameters(), strict=True):
        assert torch.equal(a, b)
    a, b = (each.setup.optimizers[0].state_dict()["state"][0] for each in (one, other))
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_code_in_a_state_is_refused(capsys):
    content, there = io.BytesIO(), engine()
    torch.save({"model": {}, "optimizers": [], "scaler": None, "kept": Planted()}, content)
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        unpacked(there, torch.frombuffer(bytearray(content.getvalue()), dtype=torch.uint8))
    assert capsys.readouterr().out == ""


def test_plain_values_are_gathered_without_pickle(monkeypatch, capsys):
    sent = []

    def gather(out, x, group):
        sent.append(x)
        out.copy_(x.repeat(2))

    monkeypatch.setattr(sending, "all_gather_single", gather)
    group = SimpleNamespace(_device_types=[torch.device("cpu")], size=lambda: 2)
    comm = SimpleNamespace(size=2, group=group)
    assert Comm.gather_objects(comm, [3, None, "x"], plain=True) == [[3, None, "x"]] * 2
    assert json.loads(bytes(sent[1].tolist())) == [3, None, "x"]
    monkeypatch.setattr(json, "dumps", lambda value: pickle.dumps(value).decode("latin-1"))
    with pytest.raises(ValueError):
        Comm.gather_objects(comm, Planted(), plain=True)
    assert capsys.readouterr().out == ""
