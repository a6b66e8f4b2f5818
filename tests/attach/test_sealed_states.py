"""A state is refused if it is damaged, not finite, another rank's or not whole; wrappers of modules change no name."""

import contextlib
import copy
import logging
import re
import warnings

import pytest
import torch
import torch.distributed as dist
from everything import ALGORITHMS, averages_gradients, made, runs_free
from pool import ranks
from test_saved_states import unequal
from tiers import slow_after, slow_unless
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from training import flat, loss, net, net_and_sgd, run_steps, sgd

import baguakit as bk
from baguakit.flights.sealing import checksum, tensors_in

FEEDBACK = "bytegrad(MinMaxUInt8(block=64), error_feedback=True)"
DILOCO = "diloco(every=4, delay=2)"


@contextlib.contextmanager
def logged():
    """The lines of the log."""
    lines, logger = [], logging.getLogger("baguakit")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


@contextlib.contextmanager
def of(algorithm, how="attach"):
    """A network that is trained, its optimizer, and the attachment or the handle."""
    model, optimizer = net_and_sgd()
    if how == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
        with bk.interop.ddp(model, made(algorithm)) as handle:
            yield model, optimizer, handle
    else:
        with bk.attach(model, optimizer, made(algorithm)) as att:
            yield model, optimizer, att


def saved(algorithm, how="attach", steps=7):
    with of(algorithm, how) as (model, optimizer, held):
        run_steps(model, optimizer, range(steps))
        return held.state_dict()


def with_changed(state, place, change):
    """A copy of a state in which the tensor of a place is changed."""
    changed = copy.deepcopy(state)
    for where, _, x in tensors_in(changed):
        if where == place:
            change(x)
    return changed


def flip(x):
    if x.numel():
        x.view(-1).view(torch.uint8)[-1] ^= 64


def spoil(x):
    x.view(-1)[-1] = float("nan")


def signed_again(state):
    state["saved"]["sums"] = [[place, checksum(x)] for place, _, x in tensors_in(state)]
    return state


def refused(held, state, pattern):
    with pytest.raises(ValueError, match=pattern):
        held.load_state_dict(state)


CELLS = [(each, "attach") for each in ALGORITHMS] + [(FEEDBACK, "ddp"), ("qadam(3)", "ddp"), ("power_sgd()", "ddp")]


@pytest.mark.parametrize(
    "algorithm, how", slow_unless([("choco()", "attach"), (DILOCO, "attach"), (FEEDBACK, "ddp")], CELLS)
)
def test_what_is_damaged_or_not_finite_or_of_another_rank_is_refused(algorithm, how):
    def run():
        state = saved(algorithm, how)
        found = [(place, path, x) for place, path, x in tensors_in(state) if x.numel()]
        own = any(not (averages_gradients(made(algorithm)) and path.startswith("flight.")) for _, path, _ in found)
        others = [None, None]
        dist.all_gather_object(others, state)
        with of(algorithm, how) as (model, optimizer, held):
            fresh = held.state_dict()
            for place, path, x in found:
                refused(held, with_changed(state, place, flip), re.escape(place) + " is damaged")
                if x.is_floating_point() and not path.startswith("flight."):
                    bad = with_changed(state, place, spoil)
                    refused(held, signed_again(bad), re.escape(place) + " holds a value that is not finite")
                    bad.pop("saved")
                    refused(held, bad, re.escape(place) + " holds a value that is not finite")
            theirs = others[1 - dist.get_rank()]
            if own:
                refused(
                    held, theirs, f"is of rank {1 - dist.get_rank()}, and this is rank {dist.get_rank()}: each rank"
                )
            assert not list(unequal(fresh, held.state_dict()))  # nothing has been loaded
            bad = copy.deepcopy(state)
            for _, _, x in tensors_in(bad):
                flip(x)
            with logged() as lines:
                held.load_state_dict(bad, strict=False)
            assert all(any(f"{place} is damaged" in line for line in lines) for place, _, _ in found)
            held.load_state_dict(theirs, strict=not own)
            if not runs_free(made(algorithm)):
                run_steps(model, optimizer, range(7, 9))
            held.load_state_dict(state)
            assert how == "ddp" or not list(unequal(state, held.state_dict()))

    ranks(2, run)


def test_a_state_that_lacks_a_tensor_or_a_parameter_is_refused_by_name():
    def run():
        state = saved(FEEDBACK)
        lacking = copy.deepcopy(state)
        held = lacking["rules"]["0"]["parameters"]
        held.pop("2.weight")
        older = copy.deepcopy(lacking)
        older.pop("saved")
        with of(FEEDBACK) as (_, _, att):
            place = 'state["rules"]["0"]["parameters"]["2.weight"]["residual"]'
            refused(att, lacking, re.escape(place) + " is missing: it was saved")
            refused(
                att, older, r"has nothing of parameter 2\.weight, and during_backward\(ErrorFeedback\(.* needs what"
            )
            with logged() as lines:
                att.load_state_dict(older, strict=False)
            assert sum("has nothing of parameter 2.weight" in line for line in lines) == 1
            again = att.state_dict()["rules"]["0"]["parameters"]
            assert not again.pop("2.weight")["residual"].any()
            assert not list(unequal(again, held))

    ranks(2, run)


def test_own_tensors_that_are_missing_begin_anew_without_strict():
    def run():
        state = saved("power_sgd(rank=1)")
        state["rules"]["0"]["own"].popitem()
        state.pop("saved")
        with of("power_sgd(rank=1)") as (_, _, att):
            refused(att, state, "this state holds nothing as 0.inner.q.2 of during_backward")
            att.load_state_dict(state, strict=False)

    ranks(2, run)


def test_states_that_were_not_saved_together_are_refused_by_the_rank_that_loads_second():
    def run():
        rank = dist.get_rank()
        states = [saved("choco()"), saved("choco()"), saved("choco()", steps=8)]
        assert states[0]["saved"]["run"] != states[1]["saved"]["run"]
        for other, words in (
            (1, r"of run \w+, step 7, and rank 0 has loaded one of run \w+, step 7: all ranks"),
            (2, "step 8"),
        ):
            with of("choco()") as (_, _, att):
                if rank == 0:
                    att.load_state_dict(states[0])
                dist.barrier()
                if rank == 1:
                    refused(att, states[other], words)
        return states[0]["saved"]["run"]

    one, other = ranks(2, run)
    assert one == other


# Wrappers


class Wrapped(nn.Module):
    """The network in wrappers of its modules."""

    def __init__(self):
        super().__init__()
        inner = net()
        inner[0] = checkpoint_wrapper(inner[0])
        inner[2] = torch.compile(inner[2], backend="eager")
        self.module = inner

    def forward(self, x):
        return self.module(x)


WRAPPERS = {
    "plain": net,
    "compiled": lambda: torch.compile(net(), backend="eager"),
    "data parallel": lambda: nn.parallel.DistributedDataParallel(net()),
    "parts": Wrapped,
    "all": lambda: nn.parallel.DistributedDataParallel(torch.compile(Wrapped(), backend="eager")),
}


ALL = tuple(WRAPPERS)


def resumed(algorithm, first, second):
    """The weights after some steps in one wrapper, and some more in another with what was saved."""
    model = WRAPPERS[first]()
    optimizer = sgd(model.parameters())
    with holding(model, optimizer, algorithm) as held:
        run_steps(model, optimizer, range(5))
        weights = [p.detach().clone() for p in model.parameters()]
        state = [optimizer.state_dict(), held.state_dict()]
        state = copy.deepcopy(state)
    model = WRAPPERS[second]()
    optimizer = sgd(model.parameters())
    with holding(model, optimizer, algorithm) as held:
        with torch.no_grad():
            for p, x in zip(model.parameters(), weights, strict=True):
                p.copy_(x)
        optimizer.load_state_dict(state[0])
        held.load_state_dict(state[1])
        run_steps(model, optimizer, range(5, 9))
    return flat(model)


def holding(model, optimizer, algorithm):
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return bk.interop.ddp(model, made(algorithm))
    return bk.attach(model, optimizer, made(algorithm))


@pytest.mark.parametrize(
    "algorithm, wrappers",
    slow_after(1, [("qadam(3)", ("compiled", "data parallel")), ("qadam(3)", ALL), ("choco()", ("compiled", "parts"))]),
)
def test_a_state_is_resumed_in_any_wrapper(algorithm, wrappers):
    def run():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the compiler
            right = resumed(algorithm, "plain", "plain")
            pairs = [pair for wrapper in wrappers for pair in (("plain", wrapper), (wrapper, "plain"))]
            return [pair for pair in pairs if not torch.equal(right, resumed(algorithm, *pair))]

    assert ranks(2, run) == [[], []]


def test_a_state_of_an_earlier_version_has_the_names_of_wrappers():
    def run():
        right = saved("choco()")
        text = copy.deepcopy(right)
        text.pop("saved")
        rule = text["rules"]["0"]
        rule["parameters"] = {f"_orig_mod.{name}": held for name, held in rule["parameters"].items()}
        rule["cut"] = [[f"_orig_mod.{name}" for name in bucket] for bucket in rule["cut"]]
        with of("choco()") as (_, _, att):
            att.load_state_dict(text)
            assert not list(unequal(right, att.state_dict()))

    ranks(2, run)


def test_shards_have_names_without_wrappers():
    def run():
        from torch.distributed.fsdp import fully_shard

        model = net()
        model[2] = checkpoint_wrapper(model[2])
        fully_shard(model)
        optimizer = sgd(model.parameters())
        with bk.interop.fsdp(model, made("bytegrad(error_feedback=True)")) as handle:
            run_steps(model, optimizer, range(1))
            state = handle.state_dict()
            handle.load_state_dict(state)
        return set(state["rules"]["0"]["parameters"])

    right = {f"{name}[{r}/2]" for name, _ in net().named_parameters() for r in range(2)}
    assert ranks(2, run) == [right, right]


def test_two_parameters_that_differ_by_a_wrapper_keep_their_states():
    def run():
        def make():
            torch.manual_seed(0)
            return nn.ModuleDict({"a": nn.Linear(6, 1), "module": nn.ModuleDict({"a": nn.Linear(6, 1)})})

        def steps(model, optimizer):
            for step in range(3):
                optimizer.zero_grad()
                x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step + 9 * dist.get_rank()))
                (model["a"](x) * model["module"]["a"](x)).square().mean().backward()
                optimizer.step()

        model = make()
        with bk.attach(model, sgd(model.parameters()), made("choco()")) as att:
            steps(model, att._life.setup.optimizers[0])
            state = att.state_dict()
        model = make()
        with bk.attach(model, sgd(model.parameters()), made("choco()")) as att:
            att.load_state_dict(state)
            assert not list(unequal(state, att.state_dict()))
        assert set(state["rules"]["0"]["parameters"]) == set(dict(make().named_parameters()))

    ranks(2, run)


# Frozen layers


def trained(algorithm, frozen, resume):
    """The weights after 12 steps: layers 0 and 2 are frozen in those of `frozen`; the 6th is the first of a new run.

    Resumed, layers that are frozen at that step are so before the attachment is made.
    """
    model, optimizer = net_and_sgd()
    with contextlib.ExitStack() as stack:
        set_frozen(model, frozen, 0)
        att = stack.enter_context(bk.attach(model, optimizer, made(algorithm)))
        for step in range(12):
            if step == 6 and resume:
                state = copy.deepcopy([each.state_dict() for each in (model, optimizer, att)])
                stack.close()
                model, optimizer = net_and_sgd()
                set_frozen(model, frozen, step)
                att = stack.enter_context(bk.attach(model, optimizer, made(algorithm)))
                for held, its in zip((model, optimizer, att), state, strict=True):
                    held.load_state_dict(its)
            set_frozen(model, frozen, step)
            optimizer.zero_grad()
            att._life.follow_parameters()  # else the first gradients of a new parameter are averaged by themselves
            loss(model, dist.get_rank(), step).backward()
            optimizer.step()
    return flat(model)


def set_frozen(model, frozen, step):
    for layer, steps in frozen.items():
        model[layer].requires_grad_(step not in steps)


FROZEN = {
    "from the start, thawed by the resume": {0: range(6)},
    "on the way, thawed by the resume": {0: range(3, 6), 2: range(2, 6)},
    "by the resume": {0: range(6, 9)},
    "one for the other": {0: range(6), 2: range(6, 12)},
    "from the start, thawed later": {0: range(8)},
}
SPARE = "diloco(every=4, fragments=3, delay=1)"  # with a frozen layer a fragment has none
REPEATABLE = [each for each in ALGORITHMS if not runs_free(made(each)) and each != SPARE]


@pytest.mark.parametrize("algorithm", slow_unless([FEEDBACK, DILOCO], REPEATABLE))
def test_a_run_resumes_with_other_layers_frozen(algorithm):
    def run():
        return [[trained(algorithm, frozen, resume) for resume in (False, True)] for frozen in FROZEN.values()]

    for found in ranks(2, run):
        for (whole, resumed), how in zip(found, FROZEN, strict=True):
            assert torch.equal(whole, resumed), how


@pytest.mark.parametrize("algorithm", slow_after(1, ["choco()", "low_precision_decentralized()", "exact_diffusion()"]))
def test_other_weights_of_ranks_are_refused_where_a_state_has_sums_over_them(algorithm):
    def run():
        rank, states = dist.get_rank(), {}
        for name, weight in (("equal", None), ("two", 1.0 + rank), ("four", 2 + 2 * rank), ("other", 3.0 - rank)):
            model, optimizer = net_and_sgd()
            with bk.attach(model, optimizer, made(algorithm), weight=weight) as att:
                run_steps(model, optimizer, range(2))
                if name == "four":  # which are the shares of "two"
                    att.load_state_dict(states["two"])
                elif name == "other":
                    refused(
                        att, states["two"], r"sums over ranks of the weights \[0.33.*here they have the weights \[0.6"
                    )
                    refused(att, states["equal"], "of equal weights, and here they have the weights")
                    att.load_state_dict(states["two"], strict=False)
                states[name] = att.state_dict()

    ranks(2, run)
