"""A device for tests, "late": the host cannot touch its memory, and it works as late as it may.

It is a PrivateUse1 backend in Python. The addresses of its tensors belong to no memory: the host that reads or writes
there dies of a segmentation fault. Operations join the queue of the current stream and run when somebody waits for
them, on memory that only this module knows. So it is certain, without clocks, that

* a copy to the host arrives only when the host has waited for it; until then the host reads NaN,
* a copy from the host takes what the host's memory holds when somebody waits for it,
* what a stream reads before it has waited for the stream that writes it is old, or NaN,
* memory that was freed becomes NaN in the stream that allocated it, unless `record_stream` told of other streams.

`query` of an event or a stream answers first and works afterwards, so that who asks again gets on. The arithmetic is
that of CPUs: the same program has the same bits there. `waits` counts by thread how often the host waited.

`install()` makes the device of this process. `flavour(streams=False)` makes it one without streams, as MPS is: copies
are over when they return. `flavour(prompt=True)` makes one that works at once and spoils no memory, for measurements of
time.
"""

import contextlib
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_map, tree_map_only

NAME = "late"
TYPE = 20  # torch's number of PrivateUse1
FIRST, APART = 1 << 62, 1 << 32  # addresses that no process can have, one every 4 GiB
CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
NAN = 0xFF  # the byte that memory holds before anything is written: NaN in all floating dtypes
WITH_STREAMS = {"Stream", "Event", "current_stream", "stream"}

waits: Counter[str] = Counter()  # how often the host waited for the device, by the name of the thread
_lock = threading.RLock()  # of the queues: whoever waits runs them
_blocks: dict[int, "Block"] = {}  # by address
_queues: dict[int, deque[Callable[[], Any]]] = {0: deque()}  # by the number of the stream
_read_later: Counter[int] = Counter()  # copies from memory of the host that are still to come, by its address
_made = 0
_streams, _prompt = True, False
_here = threading.local()


class Block:
    """The hidden memory of a tensor."""

    def __init__(self, nbytes: int) -> None:
        self.bytes = torch.empty(nbytes, dtype=torch.uint8)
        if not _prompt:
            self.bytes.fill_(NAN)
        self.stream = _current()
        self.users: set[int] = set()  # other streams, told of by `record_stream`


class Mark:
    """A point in the queue of a stream."""

    def __init__(self, stream: int) -> None:
        self.stream = stream
        with _lock:
            self.passed = not _queues[stream]
            if not self.passed:
                _queues[stream].append(self)

    def __call__(self) -> None:
        self.passed = True

    def reach(self) -> None:
        """Run the stream as far as this point."""
        with _lock:
            while not self.passed:
                _queues[self.stream].popleft()()


class Stream(torch.Stream):
    """A queue of operations."""

    def __new__(cls, device: Any = None, priority: int = 0, *, stream_id: int | None = None) -> "Stream":
        if stream_id is None:
            with _lock:
                stream_id = len(_queues)
                _queues[stream_id] = deque()
        return super().__new__(cls, stream_id=stream_id, device_index=0, device_type=TYPE)  # type: ignore[no-any-return]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: "Event") -> None:
        if event.mark is not None:
            enqueue(event.mark.reach, self.stream_id)

    def wait_stream(self, stream: torch.Stream) -> None:
        enqueue(Mark(stream.stream_id).reach, self.stream_id)

    def synchronize(self) -> None:
        waited()
        Mark(self.stream_id).reach()

    def query(self) -> bool:
        return self.record_event().query()


class Event:
    """A point in a stream, once it is recorded."""

    def __init__(self, enable_timing: bool = False, **options: Any) -> None:
        self.mark: Mark | None = None

    def record(self, stream: torch.Stream | None = None) -> None:
        self.mark = Mark(_current() if stream is None else stream.stream_id)

    def synchronize(self) -> None:
        waited()
        if self.mark is not None:
            self.mark.reach()

    def query(self) -> bool:
        if self.mark is None:
            return True
        answer = self.mark.passed
        self.mark.reach()
        return answer


class Module:
    """`torch.late`, which torch asks for like `torch.cuda`."""

    Stream, Event = Stream, Event
    rest: torch.library.Library
    own: torch.library.Library

    def __getattribute__(self, name: str) -> Any:
        if name in WITH_STREAMS and not _streams:
            raise AttributeError(f"torch.{NAME} has no streams now")
        return super().__getattribute__(name)

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def synchronize(self, device: Any = None) -> None:
        waited()
        with _lock:
            for stream in list(_queues):
                Mark(stream).reach()

    def current_stream(self, device: Any = None) -> Stream:
        return Stream(stream_id=_current())

    @contextlib.contextmanager
    def stream(self, stream: torch.Stream | None) -> Iterator[None]:
        before = _current()
        _here.stream = before if stream is None else stream.stream_id
        try:
            yield
        finally:
            _here.stream = before


module = Module()


def _current() -> int:
    """Return the number of this thread's current stream."""
    return getattr(_here, "stream", 0)


def enqueue(work: Callable[[], Any], stream: int | None = None) -> None:
    """Let a stream, by default the current one, do `work` when its turn comes."""
    with _lock:
        queue = _queues[_current() if stream is None else stream]
        queue.append(work)
        while _prompt and queue:
            queue.popleft()()


def waited() -> None:
    """Count a wait of the host for the device, on this thread."""
    waits[threading.current_thread().name] += 1


def wait_here() -> None:
    """Wait, as the host, for all that the current stream has been given."""
    waited()
    Mark(_current()).reach()


def made(size: Any, stride: Any, dtype: torch.dtype | None) -> Tensor:
    """Return a new tensor on the device, which holds NaN."""
    global _made
    dtype = dtype or torch.get_default_dtype()
    extent = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if 0 not in size else 0
    nbytes = extent * dtype.itemsize
    with _lock:
        _made += 1
        address = FIRST + _made * APART
        _blocks[address] = Block(nbytes)
    storage = torch._C._construct_storage_from_data_pointer(address, torch.device(NAME, 0), nbytes)
    weakref.finalize(storage, free, address).atexit = False
    empty = torch._C._acc.create_empty_tensor([0], dtype)
    return torch.ops.aten.set_.source_Storage_storage_offset.redispatch(CPU, empty, storage, 0, size, stride)


def free(address: int) -> None:
    """Spoil memory that nobody holds, in the stream that allocated it, after the streams that were told of."""
    with _lock:
        block = _blocks.pop(address)
        if _prompt:
            return
        for stream in block.users - {block.stream}:
            enqueue(Mark(stream).reach, block.stream)
        enqueue(lambda: block.bytes.fill_(NAN), block.stream)


def hidden(x: Tensor) -> Tensor:
    """Return a CPU tensor of the memory of `x`."""
    storage = _blocks[x.untyped_storage().data_ptr()].bytes.untyped_storage()
    return torch.empty(0, dtype=x.dtype).set_(storage, x.storage_offset(), x.size(), x.stride())


def is_late(x: Any) -> bool:
    return isinstance(x, Tensor) and x.device.type == NAME


# Operations


def empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **options: Any) -> Tensor:
    like = torch.empty(size, dtype=dtype, device="meta", memory_format=memory_format or torch.contiguous_format)
    return made(size, like.stride(), dtype)


def empty_strided(size: Any, stride: Any, *, dtype: Any = None, **options: Any) -> Tensor:
    return made(size, stride, dtype)


def _copy_from(x: Tensor, out: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy `x` to `out`; between the device and the host, wait unless `non_blocking`."""
    source, target = (hidden(each) if is_late(each) else each.detach() for each in (x, out))
    read, written = source.untyped_storage().data_ptr(), target.untyped_storage().data_ptr()
    with _lock:
        if is_late(out):
            _read_later[read] += 1
        elif not (_prompt or _read_later[written]):
            target.fill_(float("nan") if target.dtype.is_floating_point else NAN // 2)

    def work() -> None:
        _read_later[read] -= is_late(out)
        target.copy_(source)

    enqueue(work)
    if is_late(x) != is_late(out) and not (non_blocking and _streams):
        wait_here()
    return out


def resize_(x: Tensor, size: Any, *, memory_format: Any = None) -> Tensor:
    """Give `x` another size, and memory of its own if it must grow; it keeps no values then."""
    if tuple(x.shape) != tuple(size):
        new = empty(size, dtype=x.dtype, memory_format=memory_format)
        grows = new.untyped_storage().nbytes() > x.untyped_storage().nbytes()
        storage = (new if grows else x).untyped_storage()
        torch.ops.aten.set_.source_Storage_storage_offset.redispatch(CPU, x, storage, 0, size, new.stride())
    return x


def record_stream(x: Tensor, stream: torch.Stream) -> None:
    _blocks[x.untyped_storage().data_ptr()].users.add(stream.stream_id)


OPERATIONS = {f"aten::{each.__name__}": each for each in (empty, empty_strided, _copy_from, resize_, record_stream)}


class Kind(NamedTuple):
    """The facts of an operation, from its schema."""

    own: Callable[..., Any] | None  # the function of this module that does it
    names: tuple[str, ...]  # of the arguments
    written: tuple[str, ...]  # those that it writes to
    is_view: bool
    may_view: bool
    in_place: bool  # all results are arguments
    has_out: bool
    of_tensors: bool  # all results are tensors


@cache
def kind_of(op: Any) -> Kind:
    schema = op._schema
    aliases = [each.alias_info is not None for each in schema.returns]
    return Kind(
        own=OPERATIONS.get(schema.name),
        names=tuple(each.name for each in schema.arguments),
        written=tuple(each.name for each in schema.arguments if each.alias_info and each.alias_info.is_write),
        is_view=schema.name == "aten::set_",
        may_view=any(aliases),
        in_place=bool(aliases) and all(aliases),
        has_out=bool(schema.arguments) and schema.arguments[-1].is_out,
        of_tensors=all("Tensor" in str(each.type) for each in schema.returns),
    )


def operate(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Enqueue an operation of torch; its result has its shape, and its values later."""
    kind = kind_of(op)
    if kind.own is not None:
        return kind.own(*args, **kwargs)
    given = {**dict(zip(kind.names, args, strict=False)), **kwargs}
    written = [given[name] for name in kind.written if name in given]
    if kind.is_view or (kind.may_view and not written):
        return op.redispatch(CPU, *args, **kwargs)
    if kind.in_place:
        if kind.has_out and not all(each.numel() for each in written):
            sizes = op(*mapped(described, args), **mapped(described, kwargs))
            for x, like in zip(written, [sizes] if isinstance(sizes, Tensor) else sizes, strict=True):
                resize_(x, like.size())
        inside = mapped(taken, (args, kwargs))
        enqueue(lambda: run(op, inside))
        return written[0] if len(written) == 1 else tuple(written)
    inside = mapped(taken, (args, kwargs))
    try:
        if not kind.of_tensors:
            raise NotImplementedError
        args, kwargs = mapped(described, (args, kwargs))
        out = tree_map_only(Tensor, lambda x: made(x.size(), x.stride(), x.dtype), op(*args, **kwargs))
    except NotImplementedError:  # the values decide what the result is
        wait_here()
        out = run(op, inside)
        return tree_map_only(Tensor, lambda x: x.to(NAME), out)
    places = tree_map_only(Tensor, hidden, out)

    def work() -> None:
        tree_map(lambda place, x: place.copy_(x) if isinstance(x, Tensor) else None, places, run(op, inside))

    enqueue(work)
    return out


def mapped(stands_for: Callable[[Any], Any], x: Any) -> Any:
    """Return arguments of an operation with what stands for each: like torch's `tree_map`, in a fifth of the time."""
    if isinstance(x, dict):
        return {key: mapped(stands_for, each) for key, each in x.items()}
    if type(x) in (list, tuple):
        return type(x)([mapped(stands_for, each) for each in x])
    return stands_for(x)


def run(op: Any, inside: Any) -> Any:
    """Do an operation on hidden memory, whatever autocast says where somebody waits."""
    with torch.no_grad(), torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
        try:
            return op(*inside[0], **inside[1])
        except RuntimeError as error:
            if "to Tensor" not in str(error):
                raise
        numbers = zip(op._schema.arguments, inside[0], strict=False)  # which stand for tensors
        tensors = [torch.tensor(x) if isinstance(x, int | float) and str(a.type) == "Tensor" else x for a, x in numbers]
        return op(*tensors, **inside[1])


def taken(x: Any) -> Any:
    """Return what stands for an argument when the operation runs: numbers are taken now, tensors then."""
    if isinstance(x, torch.device):
        return torch.device("cpu")
    if not isinstance(x, Tensor):
        return x
    if is_late(x):
        return hidden(x)
    if x.dim():
        raise RuntimeError(f"all tensors must be on one device, not {NAME} and {x.device}")
    return x.detach().clone()


def described(x: Any) -> Any:
    """Return what stands for an argument when only shapes are computed."""
    if isinstance(x, torch.device):
        return torch.device("meta")
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta") if is_late(x) else x


@contextlib.contextmanager
def flavour(streams: bool = True, prompt: bool = False) -> Iterator[None]:
    """Within this block the device has streams, or has none; and works at once, or late."""
    global _streams, _prompt
    before, (_streams, _prompt) = (_streams, _prompt), (streams, prompt)
    try:
        yield
    finally:
        _streams, _prompt = before


def supported() -> bool:
    """Return True if this torch can have a device in Python."""
    return hasattr(backend_registration, "_setup_privateuseone_for_python_backend")


def install() -> torch.device:
    """Make the device of this process; again is nothing. Return it."""
    if not hasattr(torch, NAME):
        backend_registration._setup_privateuseone_for_python_backend(NAME, module)
        module.rest, module.own = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
        module.rest.fallback(operate, "PrivateUse1")
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        for name in torch._C._dispatch_get_all_op_names():
            if name.startswith("aten::") and has(name, "CPU") and has(name, "CompositeExplicitAutograd"):
                packet, _, overload = name.removeprefix("aten::").partition(".")
                op = getattr(getattr(torch.ops.aten, packet), overload or "default")
                module.own.impl(op, partial(operate, op), "PrivateUse1")  # the bits of CPUs
    return torch.device(NAME, 0)


def with_device(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function in a process that has the device."""
    install()
    return function(*args)
