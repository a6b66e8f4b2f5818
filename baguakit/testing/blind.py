"""A GPU for machines without one: tensors that hold no values, so that whatever reads one on the host raises.

They are torch's meta tensors, which say of themselves that they are on a GPU. A copy to one from memory that is not
pinned raises as well: on a GPU the host might wait for it.
"""

from typing import Any, ClassVar

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ..comm import Comm

GPU = torch.device("cuda", 0)
META = torch.device("meta")
FACTS = {"device": GPU, "is_cuda": True, "is_meta": False}
SAID = {vars(torch._C.TensorBase)[name].__get__: said for name, said in FACTS.items()}
COPIES = {"_to_copy", "copy_", "_foreach_copy_", "where"}  # of a number on the host `where` makes a copy
MAKERS = {torch.tensor, torch.as_tensor, torch.Tensor.new_tensor}  # of numbers in Python


class Waited(AssertionError):
    """The host would have waited for the GPU."""


class Blind(TorchFunctionMode):
    """Within it, tensors made on "cuda" hold no values; with `copies`, copies to them are looked at."""

    def __init__(self, copies: bool = True) -> None:
        super().__init__()
        self.copies = Copies(copies)
        self.places: dict[int, int] = {}  # of memory

    def __enter__(self) -> Any:
        self.copies.__enter__()  # type: ignore[no-untyped-call]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.copies.__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in SAID and args[0].is_meta:
            return SAID[func]
        if func is torch.Tensor.data_ptr and args[0].is_meta:  # which would be 0
            place = self.places.setdefault(args[0].untyped_storage()._cdata, len(self.places) + 1)
            return (place << 40) + args[0].storage_offset() * args[0].itemsize
        if func is torch.Tensor.pin_memory:
            self.copies.pinned.append(args[0])
            return args[0]
        if func is torch.device:
            return func(*args, **kwargs)
        args, kwargs = tree_map_only(torch.device, there, (args, kwargs))
        if isinstance(kwargs.get("device"), str):
            kwargs["device"] = there(torch.device(kwargs["device"]))
        try:
            out = func(*args, **kwargs)
            made = self.copies.seen and func in MAKERS and out.is_meta
            if made and not isinstance(args[func is torch.Tensor.new_tensor], torch.Tensor):
                raise Waited(f"{func.__name__} copies from memory that is not pinned")
            return out
        except RuntimeError as error:
            if "meta" in str(error):
                raise Waited(f"{func.__name__}: {error}") from None
            raise


def there(device: torch.device) -> torch.device:
    """Return the device of the tensors that stand for those on `device`."""
    return META if device.type == "cuda" else device


class Copies(TorchDispatchMode):
    """Raises at a copy from memory that is not pinned."""

    def __init__(self, seen: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = seen
        self.pinned: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given, made = ([x for x in tree_leaves(of) if isinstance(x, torch.Tensor)] for of in ((args, kwargs), out))
        there = func.overloadpacket.__name__ in COPIES and any(x.is_meta for x in (*given, *made))
        if self.seen and there and any(x.is_cpu and not any(x is y for y in self.pinned) for x in given):
            raise Waited(f"{func} copies from memory that is not pinned")
        return out


class Nowhere:
    """A group of two ranks over NCCL, its backend, and all its work: messages go nowhere, and are over at once."""

    facts: ClassVar = {"name": "nccl", "rank": 0, "size": 2}

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: self.facts.get(name, self)


class Two(Comm):
    """The first of two ranks, and of two nodes of two ranks; its messages go nowhere."""

    def __post_init__(self) -> None:
        nowhere = Nowhere()
        vars(self).update(group=nowhere, _parts=(nowhere, nowhere), rank=0, size=2)
