"""A GPU that is not there, for Triton's launcher."""


class AbsentGPU:
    """Triton's driver of a GPU of the kind `target`: kernels are compiled for it, and a launch calls `note`.

    Args:
        note: called with the name of the kernel and the number of programs.
    """

    def __init__(self, target, note=None):
        self.target, self.note, self.utils = target, note, self

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_device_properties(self, device):
        return {"max_shared_mem": 232448}

    def load_binary(self, name, kernel, shared, device):
        return 1, 1, 32, 0, 1024  # a module, a function, registers, spills, threads

    def launcher_cls(self, src, metadata):
        return lambda *arguments: self.note(metadata.name, arguments[0])
