"""Nodes found by the hosts that ranks run on, and the warning where ranks of a host share a network card."""

import importlib
import warnings

import pytest
import torch
from pool import ranks

import baguakit as bk
from baguakit.comm.groups import host, ranks_by_host


def on_hosts(names):
    """Let each rank say that it runs on the host of its name."""
    mine = names[torch.distributed.get_rank()]
    for module in ("baguakit.comm.groups", "baguakit.runtime.runtime"):
        importlib.import_module(module).host = lambda: mine


def off_hosts(work):
    """Do `work` and take `on_hosts` back: ranks are used by other tests, too."""
    try:
        return work()
    finally:
        for module in ("baguakit.comm.groups", "baguakit.runtime.runtime"):
            importlib.import_module(module).host = host


def test_ranks_of_a_process_tree_are_on_one_host():
    assert ranks_by_host(ranks(2, host)) == [[0, 1]]
    assert ranks_by_host(["b", "a", "b", "a"]) == [[0, 2], [1, 3]]


def warned(work):
    """The warnings that some work raises."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        work()
    return [str(each.message) for each in found]


@pytest.mark.parametrize("names", ["aabb", "abab", "abba", "aaaa", "abcd"])
def test_nodes_are_hosts_whatever_the_order_of_ranks(names):
    """The hierarchical mean equals the flat one."""

    def work():
        def done():
            on_hosts(names)
            comm = bk.Comm(mesh="hosts")
            r = comm.rank
            x = torch.arange(10.0) + r
            stage = bk.stages.Hierarchical(bk.stages.Mean())
            bk.primitives.launch(stage, x, comm).land_(x)
            return names[r], comm.intra.gather_objects(names[r]), comm.inter.gather_objects(names[r]), x.tolist()

        return off_hosts(done)

    for name, within, across, x in ranks(4, work):
        assert within == [name] * names.count(name)
        assert sorted(across) == sorted(set(names))
        assert x == [i + 1.5 for i in range(10)]


def test_hosts_with_unlike_numbers_of_ranks_are_refused():
    def work():
        def done():
            on_hosts("abb")
            with pytest.raises(ValueError, match="that of rank 0 has 1, and that of rank 1 has 2"):
                bk.Comm(mesh="hosts")

        return off_hosts(done)

    ranks(3, work)


def test_a_flat_compressed_mean_warns_where_ranks_share_a_card():
    """Once, on rank 0, with the shares of the packed bucket: 2 · ½ + ¾ beside 2 · ½."""

    def work():
        def said(algorithm, mesh=None):
            model = torch.nn.Linear(4, 4)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

            def steps():
                with bk.attach(model, optimizer, algorithm, comm=bk.Comm(mesh=mesh)):
                    optimizer.zero_grad()
                    model(torch.ones(1, 4)).sum().backward()
                    optimizer.step()

            return warned(steps)

        def done():
            a = bk.algorithms
            on_hosts("aabb")
            quiet = [said(bk.hierarchical(a.bytegrad()), "hosts"), said(a.gradient_allreduce()), said(a.local_sgd())]
            two = said(a.bytegrad())
            for one_a_host_or_one_host in ("abcd", "aaaa"):
                on_hosts(one_a_host_or_one_host)
                quiet.append(said(a.bytegrad()))
            return two, quiet

        return off_hosts(done)

    told = ranks(4, work)
    assert [quiet for _, quiet in told] == [[[]] * 5] * 4
    (sentence,) = told[0][0]
    assert "4 ranks share the network cards of 2 hosts" in sentence
    assert "1.75 times over each card, and bk.hierarchical(…) 1.00 times" in sentence
    assert [two for two, _ in told[1:]] == [[]] * 3
