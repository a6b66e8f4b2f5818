"""A tensor that consists of others, like the quantized states of some optimizers."""

import torch


class Quantized(torch.Tensor):
    """A tensor of codes and a scale."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(parts, context, size, stride):
        return Quantized(parts["codes"], parts["scale"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func.name() == "aten::detach":
            return Quantized(args[0].codes, args[0].scale)
        raise NotImplementedError(f"{func} on a quantized tensor")
