"""The methods that torch's Python and C++ code calls on a process group, under their old and new names.

If a method were missing in `Methods`, torch would call the inner group's backend instead, without an error.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from struct import pack, unpack_from
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..comm import TAGS, Comm
from ..compressors import Compressor
from ..lanes.base import tensors_in
from ..monitor import Monitor, differing
from ..primitives import compressed_all_gather, compressed_all_to_all, compressed_mean_, compressed_reduce_scatter
from ..tensors import sharing
from .policy import name_of

Group: Any = dist.ProcessGroup
Tensors = Tensor | Sequence[Tensor]
# torch 2.13 renamed these three methods; older versions have only the old names.
GATHER = "all_gather_single" if hasattr(Group, "all_gather_single") else "_allgather_base"
SCATTER = "reduce_scatter_single" if hasattr(Group, "reduce_scatter_single") else "_reduce_scatter_base"
ALL_TO_ALL = "all_to_all_single" if hasattr(Group, "all_to_all_single") else "alltoall_base"
SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG
UNEQUAL = "unequal sizes"  # why tensors cannot be gathered, scattered or exchanged as one


@dataclass(frozen=True)
class Call:
    operation: str  # its name in a policy, or the name of a method that is always exact
    outs: Sequence[Tensor]  # the tensors that it fills
    whole: Sequence[Tensor]  # all tensors that are reduced, scattered or gathered; of equal shapes on all ranks
    # The methods of the inner group that run the collective exactly, with their positional and named arguments.
    passed: Sequence[tuple[str, Sequence[Any], dict[str, Any]]]
    pieces: Sequence[tuple[Any, ...]] = ()  # the arguments of each of its `EXCHANGES`, without compressor and `Comm`
    op: Any = None  # of a reduction
    unlike: str = ""  # why it must be exact, if its tensors do not fit; the inner group raises errors
    root: int | None = None  # the root of a broadcast, reduce, gather or scatter
    splits: tuple[list[int], list[int]] | None = None  # of an all-to-all: values for each rank, and from each

    def described(self, exact: bool) -> str:
        """Return the call in words. The words are equal on all ranks that make the same call."""
        method = self.passed[0][0] if exact and self.passed else ""
        same = method.replace("_", "") in ("", self.operation.replace("_", ""))
        said = [self.operation] + ["exact" if same else f"exact by {method}"] * exact
        values, kinds, forms = 0, dict[str, None](), dict[str, None]()  # in order, each once
        for x in self.whole:
            values += x.numel()
            kinds[str(x.dtype).removeprefix("torch.")] = None
            layout = "" if x.layout is not torch.strided or x.is_contiguous() else f" with strides {x.stride()}"
            if x.layout is not torch.strided:
                forms[f"{x.layout} {tuple(x.shape)}".removeprefix("torch.")] = None
            elif layout or x.dim() > 1:
                forms[f"shape {tuple(x.shape)}{layout}"] = None
        if self.splits is not None:
            said += [f"of {kind}" for kind in sorted(kinds)]
        elif kinds:
            said += [f"of {values:,} values of {' and '.join(kinds)}", *forms]
        if self.op is not None:
            said.append(name_of(self.op))
        if self.root is not None:
            said.append(f"root {self.root}")
        return ", ".join(said) if exact else ", ".join(said).replace(", of ", " of ", 1)

    def on_host(self) -> "Call":
        """Return the same call of copies on the CPU. Tensors that share memory do so there, too."""
        hosts: dict[int, Any] = {}

        def host(x: Tensor) -> Tensor:
            storage = x.untyped_storage()
            if storage._cdata not in hosts:
                hosts[storage._cdata] = torch.empty(storage.nbytes(), dtype=torch.uint8).untyped_storage()
            return x.new_empty(0, device="cpu").set_(hosts[storage._cdata], x.storage_offset(), x.size(), x.stride())

        fields = {name: tree_map_only(Tensor, host, getattr(self, name)) for name in ("outs", "whole", "pieces")}
        return replace(self, **fields, passed=tree_map_only(Tensor, lambda x: host(x).copy_(x), self.passed))


class Methods(Group):  # type: ignore[misc]
    """A process group whose methods describe each collective as a `Call`, and pass the call to `_launch`."""

    _launch: Callable[[Call], Any]

    def allreduce(self, tensors: Any, opts: Any = SUM, timeout: Any = None, op: Any = None) -> Any:
        xs = [tensors] if isinstance(tensors, Tensor) else tensors
        return self._reduced("allreduce", xs, opts if op is None else op, timeout, "no one tensor" * (len(xs) != 1))

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        shared = any(len(group) > 1 for group in sharing([x for x in tensors if x.layout is torch.strided]))
        return self._reduced("allreduce_coalesced", tensors, opts, None, "shared memory" * shared)

    def _reduced(self, name: str, xs: Sequence[Tensor], opts: Any, timeout: Any, unlike: str) -> Any:
        op = SUM if opts is None else getattr(opts, "reduceOp", opts)
        pieces = list(zip(xs, [op == AVG] * len(xs), strict=True))
        return self._launch(Call("all_reduce", xs, xs, [to(name, xs, opts, timeout=timeout)], pieces, op, unlike))

    def reduce_scatter_single(self, out: Any, x: Any, opts: Any = None) -> Any:
        outs, xs = ([out], [x]) if isinstance(out, Tensor) else (out, x)
        op, pairs = getattr(opts, "reduceOp", SUM), list(zip(outs, xs, strict=True))
        passed = [to(SCATTER, out, x, opts) for out, x in pairs]
        pieces = [(*pair, op == AVG) for pair in pairs]
        why = UNEQUAL * any(x.numel() != out.numel() * self.size() for out, x in pairs)
        return self._launch(Call("reduce_scatter", outs, xs, passed, pieces, op, why))

    def reduce_scatter(self, outs: Any, ins: Any, opts: Any = SUM, timeout: Any = None, op: Any = None) -> Any:
        opts = opts if op is None else op
        op = getattr(opts, "reduceOp", opts)
        out, parts = (outs, ins) if isinstance(outs, Tensor) else (outs[0], ins[0])
        passed, why = [to("reduce_scatter", outs, ins, opts, timeout=timeout)], self._uneven([out], [parts])
        return self._launch(Call("reduce_scatter", [out], parts, passed, [(out, parts, op == AVG)], op, why))

    def all_gather_single(self, out: Any, x: Any, opts: Any = None) -> Any:
        outs, xs = ([out], [x]) if isinstance(out, Tensor) else (out, x)
        pairs = list(zip(outs, xs, strict=True))
        passed = [to(GATHER, out, x, opts) for out, x in pairs]  # gloo has no coalesced one
        why = UNEQUAL * any(out.numel() != x.numel() * self.size() for out, x in pairs)
        return self._launch(Call("all_gather", outs, outs, passed, pairs, unlike=why))

    def allgather(self, outs: Any, ins: Any, opts: Any = None, timeout: Any = None) -> Any:
        rows, xs = ([outs], [ins]) if isinstance(ins, Tensor) else (outs, ins)
        return self._gathered(rows, xs, [to("allgather", outs, ins, opts, timeout=timeout)])

    def allgather_coalesced(self, outs: list[list[Tensor]], ins: list[Tensor], opts: Any = None) -> Any:
        rows = [list(row) for row in zip(*outs, strict=False)]
        passed = [to("allgather_coalesced", outs, ins, opts)]
        if any(x.is_cuda for x in ins):  # NCCL has no coalesced one
            passed = [to("allgather", [row], [x], opts) for row, x in zip(rows, ins, strict=True)]
        return self._gathered(rows, ins, passed)

    def _gathered(self, rows: Sequence[Sequence[Tensor]], xs: Sequence[Tensor], passed: Any) -> Any:
        filled, pieces = [x for row in rows for x in row], list(zip(rows, xs, strict=False))
        return self._launch(Call("all_gather", filled, filled, passed, pieces, unlike=self._uneven(xs, rows)))

    def all_to_all_single(self, out: Any, x: Any, there: Any, here: Any, opts: Any = None, timeout: Any = None) -> Any:
        passed = [to(ALL_TO_ALL, out, x, there, here, opts, timeout=timeout)]
        return self._exchange(parts(out, there, self.size()), parts(x, here, self.size()), [out], [x], passed)

    def alltoall(self, outs: list[Tensor], ins: list[Tensor], opts: Any = None) -> Any:
        return self._exchange(outs, ins, outs, ins, [to("alltoall", outs, ins, opts)])

    def _exchange(self, outs: Any, ins: Any, filled: Any, whole: Any, passed: Any) -> Any:
        splits = [x.numel() for x in ins], [x.numel() for x in outs]
        why = "" if len(outs) == len(ins) == self.size() else UNEQUAL
        return self._launch(Call("all_to_all", filled, whole, passed, [(outs, ins)], unlike=why, splits=splits))

    def _uneven(self, parts: Sequence[Tensor], rows: Sequence[Sequence[Tensor]]) -> str:
        """Return "" if each `rows[i]` has one tensor per rank, all as large as `parts[i]`; else return the reason."""
        pairs = zip(parts, rows, strict=False)
        fit = all(len(row) == self.size() and {x.numel() for x in row} == {part.numel()} for part, row in pairs)
        return "" if fit and len(parts) == len(rows) else UNEQUAL

    # Torch calls these methods by other names for several tensors, and before torch 2.13.
    _allgather_base = all_gather_single_coalesced = allgather_into_tensor_coalesced = all_gather_single
    _reduce_scatter_base = reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced = reduce_scatter_single
    alltoall_base = all_to_all_single


def _exact(name: str) -> Callable[..., Any]:
    """Return a method that launches the collective `name`, which is always exact."""

    def method(self: Methods, *args: Any, **named: Any) -> Any:
        tensors = tensors_in(args[0]) if args and name != "barrier" else []
        passed = [to(name, *args, **named)]
        options = next((each for each in (*args, named.get("opts")) if hasattr(each, "timeout")), None)
        root, op = (getattr(options, a, named.get(b)) for a, b in (("rootRank", "root"), ("reduceOp", "op")))
        whole = tensors_in(args[1]) if name.startswith("gather") else tensors  # only the root has tensors to fill
        fit = (root is None or 0 <= root < self.size()) and getattr(options, "rootTensor", 0) == 0
        why = "" if name == "barrier" or (len(whole) == 1 and fit) else UNEQUAL
        return self._launch(Call(name, tensors, whole, passed, op=op, root=root, unlike=why))

    return method


for _name in ("broadcast", "reduce", "gather", "gather_single", "gather_into_tensor", "scatter", "barrier"):
    setattr(Methods, _name, _exact(_name))


def to(name: str, *arguments: Any, **named: Any) -> tuple[str, Sequence[Any], dict[str, Any]]:
    """Return (name, arguments, named), a call of the inner group. Drop trailing and named arguments that are None."""
    while arguments and arguments[-1] is None:
        arguments = arguments[:-1]
    return name, arguments, {key: value for key, value in named.items() if value is not None}


def parts(x: Tensor, sizes: Sequence[int], n: int) -> Sequence[Tensor]:
    """Split the rows of `x` among n ranks by `sizes`, equally if `sizes` is empty. Raise ValueError if impossible."""
    if len(sizes) not in (0, n) or sum(sizes) != len(x) * bool(sizes) or (not sizes and len(x) % n):
        rows = f"{len(x)} rows cannot be split among {n} ranks" + f" as {list(sizes)}" * bool(sizes)
        what = "output_split_sizes and input_split_sizes"
        raise ValueError(f"all_to_all_single: {rows}; give {what} that add up to them")
    return x.split(list(sizes)) if sizes else x.split(len(x) // n) if len(x) else [x] * n


# These exchanges compress values, or use flows without a compressor. A value has equal bits on all ranks that get it.


def all_reduce(x: Tensor, average: bool, compressor: Compressor | None, comm: Comm) -> None:
    """Replace `x` by its sum or mean over n ranks. A compressed sum is n times the mean, in fp32 to avoid underflow."""
    y = x.float() if compressor is not None and x.itemsize < 4 else x.contiguous()
    if compressor is None:
        comm.all_reduce(y.view(-1))
        y.mul_(1 / comm.size if average else 1)
    else:
        compressed_mean_(y, compressor, comm).mul_(1 if average else comm.size)
    x.copy_(y)  # nothing, if it is x


def reduce_scatter(out: Tensor, x: Tensors, average: bool, compressor: Compressor | None, comm: Comm) -> None:
    """Sum or average `x` over all ranks, and set `out` to this rank's part of the result. `x` has a part per rank."""
    flat = x.reshape(-1) if isinstance(x, Tensor) else torch.cat([part.reshape(-1) for part in x])
    spread(compressed_reduce_scatter(flat, compressor, comm, average=average, out=room(out, flat)), [out])


def all_gather(out: Tensors, x: Tensor, compressor: Compressor | None, comm: Comm) -> None:
    """Write the `x` of every rank to `out`, in the order of ranks. `out` is one tensor, or has a tensor per rank."""
    landed = compressed_all_gather(x.reshape(-1), compressor, comm, room(out, x))
    spread(landed, [out] if isinstance(out, Tensor) else out)


def all_to_all(outs: Sequence[Tensor], ins: Sequence[Tensor], compressor: Compressor | None, comm: Comm) -> None:
    """Send `ins[r]` to rank r, and receive `outs[r]` from rank r. Compress a message only if it becomes smaller."""
    there, here = ([x.numel() for x in parts] for parts in (outs, ins))
    spread(compressed_all_to_all(torch.cat([x.reshape(-1) for x in ins]), compressor, comm, there, here), outs)


def room(out: Tensors, x: Tensor) -> Tensor | None:
    """Return `out` if it can receive values directly (a contiguous tensor of the dtype of `x`), or None otherwise."""
    return out if isinstance(out, Tensor) and out.is_contiguous() and out.dtype == x.dtype else None


def spread(landed: Tensor, outs: Sequence[Tensor]) -> None:
    """Copy the received values `landed` to the tensors `outs`, in order. Skip tensors that received them directly."""
    for out, values in zip(outs, landed.view(-1).split([out.numel() for out in outs]), strict=True):
        if out.data_ptr() != values.data_ptr():
            out.copy_(values.view(out.shape))


EXCHANGES: dict[str, Any] = {each.__name__: each for each in (all_reduce, reduce_scatter, all_gather, all_to_all)}


# The comparison of calls

LINE, HEAD, TAIL = 128, 8, 16  # bytes; the begin of the counts, and of the words
WRAP = 1 << 32  # counts are sent modulo this


@lru_cache(1 << 10)
def parts_of(label: str) -> tuple[int, bytes, bytes]:
    """Return a number for the tags of a call's messages, and the digest and words of the call's line in `compare`."""
    digest, words = blake2b(label.encode(), digest_size=HEAD).digest(), label.encode().ljust(LINE - TAIL)
    if len(words) > LINE - TAIL:
        words = words[: LINE - TAIL - 20] + b" ... " + digest.hex()[:15].encode()
    return int.from_bytes(digest, "little") % TAGS, digest, words


def compare(
    group: Any, monitor: Monitor, label: str, number: int, splits: tuple[list[int], list[int]] | None
) -> Callable[[], None]:
    """Send each rank a line that describes a call, and return a function that waits for the lines of all ranks.

    All ranks call this in the order of their collectives; `number` counts the collectives of a gloo group. If a rank's
    call differs, the returned function raises an error that names this rank, before values are mixed. A line has a
    digest of the call, the numbers of values that an all-to-all sends its receiver and expects, and the call in words.

    An exact collective of gloo begins when the lines of all ranks agree. If calls differed, gloo could read the bits of
    one dtype as another, add the values of two reductions, or end a process that receives too many bytes. A compressed
    collective begins earlier: the tags of its messages contain the digest, so that no other call receives them.
    """
    rank, n = group.rank(), group.size()
    here, there = splits or ([0] * n, [0] * n)
    _, head, tail = parts_of(label)
    mine, expected = b"", b""
    for sends, receives in zip(here, there, strict=True):
        mine += head + pack("II", sends % WRAP, receives % WRAP) + tail
        expected += head + pack("II", receives % WRAP, sends % WRAP) + tail
    sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    arriving = torch.empty_like(sent)
    works = [getattr(group, ALL_TO_ALL)(arriving, sent, [], [])]

    def meet() -> None:
        if not works:
            return
        works.pop().wait()
        if (came := arriving.numpy().tobytes()) == expected:
            return
        lines = [came[i : i + LINE] for i in range(0, len(came), LINE)]
        if len({line[:HEAD] for line in lines}) > 1:
            calls = {r: line[TAIL:].rstrip().decode(errors="replace") for r, line in enumerate(lines)}
            raise monitor.fail(differing(number, calls))
        counts = [unpack_from("II", line, HEAD) for line in lines]
        odd = next(r for r, each in enumerate(counts) if each != (there[r] % WRAP, here[r] % WRAP))
        theirs, awaited = counts[odd]
        told = (odd, theirs, rank, there[odd]) if theirs != there[odd] % WRAP else (rank, here[odd], odd, awaited)
        raise monitor.fail(
            f"rank {told[0]} sends {told[1]:,} values to rank {told[2]} in {label}, as launch {number}, and rank "
            f"{told[2]} waits for {told[3]:,}; the output splits of a rank must be the input splits of the others"
        )

    return meet
