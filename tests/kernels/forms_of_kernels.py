"""Print the forms of instructions that the kernels of the package have, a line each.

    TRITON_INTERPRET=0 PYTHONPATH=. python tests/kernels/forms_of_kernels.py 80 90 100 > tests/kernels/forms.txt

compiles all variants of all kernels as far as PTX.
"""

import importlib
import sys

from ahead_of_time import compile_for
from triton import knobs
from triton.backends.compiler import GPUTarget
from variants import FAMILIES

from ptx.driver import text_for_binary
from ptx.forms import lines


def compiled(arch: int):
    """Yield the PTX of every variant of every kernel."""
    for family in FAMILIES:
        for variant in importlib.import_module(f"variants_{family}").variants():
            yield compile_for(GPUTarget("cuda", arch, 32), variant).asm["ptx"]


if __name__ == "__main__":
    knobs.runtime.add_stages_inspection_hook = text_for_binary
    print("\n".join(lines((int(arch), text) for arch in sys.argv[1:] for text in compiled(int(arch)))))
