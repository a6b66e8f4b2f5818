"""Before an optimizer step: tables of where tensors lie, and refusals while nothing has changed."""

import copy

import pytest
import torch
from drawn import values

import baguakit as bk
from baguakit.kernels.steps import operators as steps_ops
from baguakit.primitives import adamw_step_, gradient_norm, sgd_step_

# Tables: of addresses, made once.


@pytest.fixture
def made(monkeypatch):
    """The tables that are made from here on; addresses of CPU tensors make as good tables as any."""
    tables, make = [], steps_ops.tables_of
    monkeypatch.setattr(steps_ops, "TABLES", steps_ops.TableCache())
    monkeypatch.setattr(steps_ops, "tables_of", lambda *args: tables.append(make(*args)) or tables[-1])
    return tables


def tables_for(p, g):
    columns = {"p": p, "g": g}
    return steps_ops.tables_for(columns, None, lambda: columns)


def records(tables):
    ((_, found),) = tables.by_kind.values()
    return found


def test_a_table_is_kept_while_addresses_hold_and_made_anew_when_they_change(made):
    p, g = values(), values(1)
    assert tables_for(p, g) is tables_for(list(p), list(g)) and len(made) == 1
    record = records(made[0])
    assert record[:, 0].tolist() == [x.data_ptr() for x in p] and record[:, 1].tolist() == [x.data_ptr() for x in g]
    p[1].data = torch.randn(p[1].shape)
    assert records(tables_for(p, g))[1, 0] == p[1].data_ptr() and len(made) == 2
    bucket = torch.randn(40)
    tables_for([p[0]], [bucket[:35].view(7, 5)])
    tables_for([p[0][:3]], [bucket[:15].view(3, 5)])  # the same addresses, and other lengths
    assert len(made) == 4 and records(made[3])[0, 5] == 15


def test_old_tables_are_forgotten_but_not_those_of_graphs(made, monkeypatch):
    tensors = [(torch.randn(4), torch.randn(4)) for _ in range(steps_ops.KEPT + 1)]
    kept = tables_for([tensors[0][0]], [tensors[0][1]])
    key = next(iter(steps_ops.TABLES.tables))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert steps_ops.TABLES.find(key, torch.device("cuda"), None) is kept
    with pytest.raises(RuntimeError, match="take one step"):
        steps_ops.TABLES.find("another", torch.device("cuda"), None)
    monkeypatch.undo()
    tables = steps_ops.TableCache()
    for i in range(steps_ops.KEPT + 1):
        assert tables.find(i, torch.device("cpu"), lambda: kept) is kept
    assert len(tables.tables) == steps_ops.KEPT and 0 not in tables.tables


# Refusals: before anything has changed, in one sentence.

X, Y = torch.ones(4), torch.zeros(4)


def wrong(**given):
    """AdamW with something wrong about it."""
    return {"p": torch.ones(4), "g": torch.ones(4), "m": torch.zeros(4), "v": torch.zeros(4), "step": 0, **given}


REFUSED = [
    (wrong(p=torch.ones(4, dtype=torch.float64)), TypeError, r"p\[0\] is torch.float64, and must be float32 or"),
    (wrong(g=torch.ones(4, dtype=torch.int32)), TypeError, r"g\[0\] is torch.int32"),
    (wrong(m=torch.ones(4).bfloat16()), TypeError, r"m\[0\] is torch.bfloat16, and must be float32"),
    (wrong(g=[None]), TypeError, "leave out parameters without a gradient"),
    (wrong(g=torch.ones(8)[::2]), TypeError, "has gaps"),
    (wrong(g=torch.ones(4).to_sparse()), TypeError, "to_dense"),
    (wrong(v=torch.ones(5)), ValueError, r"v\[0\] has 5 values and that in p 4"),
    (wrong(g=[torch.ones(4)] * 2), ValueError, "g has 2 tensors for 1 parameters"),
    (wrong(g=torch.ones(4, device="meta")), ValueError, "on meta and its parameter on cpu"),
    (wrong(p=X, g=X), ValueError, r"share memory"),
    (wrong(m=Y, v=Y), ValueError, r"share memory"),
    (wrong(p=[X, X[2:]], g=[Y, torch.ones(2)], m=[torch.ones(4), torch.ones(2)], v=[torch.ones(4), torch.ones(2)]),
     ValueError, "share memory"),
    (wrong(betas=(1.0, 0.9)), ValueError, r"betas is a finite number, 0 or more and less than 1, not 1.0"),
    (wrong(eps=-1.0), ValueError, "eps is a finite number, 0 or more, not -1.0"),
    (wrong(step=-1), ValueError, "step is a whole number, 0 to 2147483646, not -1"),
    (wrong(step=torch.zeros(2)), ValueError, "step is a number or a tensor with one value"),
    (wrong(lr="0.1"), TypeError, "lr is a finite number"),
    (wrong(clip=torch.ones(3)), ValueError, "clip is a floating tensor with one value"),
    (wrong(found_inf=torch.zeros(())), ValueError, "where a skipped step would be counted"),
    (wrong(master=torch.ones(4)), ValueError, "needs no master"),
    (wrong(p=torch.ones(4).bfloat16(), master=torch.ones(4), key=1), ValueError, "leave key= out"),
    (wrong(p=torch.ones(4).half(), key=1), TypeError, "only bfloat16 is rounded at random"),
    (wrong(g=None), ValueError, "one of g and packed="),
    (wrong(packed=torch.zeros(32, dtype=torch.uint8)), ValueError, "one of g and packed="),
    (wrong(g=None, packed=torch.zeros(31, dtype=torch.uint8)), ValueError, "one contiguous row of 32 bytes"),
    (wrong(g=None, packed=torch.zeros(32)), TypeError, "packed gradients are uint8"),
    (wrong(p=[X, X], g=None, packed=torch.zeros(32, dtype=torch.uint8)), ValueError, "those of one contiguous tensor"),
    (wrong(g=None, packed=torch.zeros(32, dtype=torch.uint8), compressor=bk.compressors.UInt4()),
     TypeError, "the only one whose bytes a step reads, not UInt4"),
]  # fmt: skip


@pytest.mark.parametrize("given, error, text", REFUSED, ids=[text for _, _, text in REFUSED])
def test_refusals(given, error, text):
    before = copy.deepcopy(given)
    with pytest.raises(error, match=text):
        adamw_step_(**given)
    same = [torch.equal(given[name], before[name]) for name in "pmv" if isinstance(given[name], torch.Tensor)]
    assert all(same)


def test_refusals_of_sgd_and_the_norm():
    p, g = torch.ones(4), torch.ones(4)
    with pytest.raises(ValueError, match="the one needs the other"):
        sgd_step_(p, g, lr=0.1, momentum=0.9)
    with pytest.raises(ValueError, match="the one needs the other"):
        sgd_step_(p, g, torch.zeros(4), lr=0.1)
    with pytest.raises(ValueError, match="needs a momentum and no dampening"):
        sgd_step_(p, g, torch.zeros(4), lr=0.1, momentum=0.9, dampening=0.5, nesterov=True)
    with pytest.raises(ValueError, match="how many went before"):
        sgd_step_(p, g, torch.zeros(4), lr=0.1, momentum=0.9, dampening=0.5)
    with pytest.raises(ValueError, match="no grads"):
        gradient_norm([])
    with pytest.raises(TypeError, match=r"grads\[0\] is torch.int64"):
        gradient_norm([torch.ones(3, dtype=torch.int64)])
    with pytest.raises(TypeError, match="found_inf is a tensor"):
        gradient_norm([torch.ones(3)], found_inf=1.0)
    assert torch.equal(p, torch.ones(4))
