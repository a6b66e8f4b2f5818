"""When the monitor has given up, nothing that may rest on half a sum is stepped with or saved."""

import pytest
import torch
from pool import ranks
from training import loss, net_and_sgd

import baguakit as bk


@pytest.mark.parametrize("name", ["gradient_allreduce", "bytegrad", "decentralized"])
def test_no_step_and_no_checkpoint_after_the_monitor_has_given_up(name):
    """On a GPU the host has passed the flights that an abort ends, and autograd raises nothing."""

    def run():
        model, optimizer = net_and_sgd()
        att = bk.attach(model, optimizer, getattr(bk.algorithms, name)())
        loss(model, 0, 0).backward()
        optimizer.step()
        loss(model, 0, 1).backward()
        att._engine.runtime.monitor.fail("rank 7 is dead")
        weights, said = [p.detach().clone() for p in model.parameters()], []
        for call in (optimizer.step, att.state_dict):
            with pytest.raises(bk.PeerError, match="rank 7 is dead"):
                call()
            said.append(all(map(torch.equal, weights, model.parameters())))
        str(att.report())
        with pytest.raises(bk.PeerError):
            att.detach()
        return said

    assert ranks(2, run) == [[True, True]] * 2
