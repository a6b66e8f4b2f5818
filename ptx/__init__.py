"""An executor of PTX, the code that Triton generates for NVIDIA's GPUs, in NumPy: kernels run without a GPU.

    text            the text as instructions                    PTX ISA, chapters 4 to 6
    flow            blocks, and the order in which they run     chapter 3, "Independent thread scheduling"
    machine         threads, their registers, and a launch
    memory          global, shared and parameter memory         section 5.1, "State Spaces"
    numbers/        types, and what is rounded once             sections 5.2 and 9.7.3
    instructions/   one file for each group of instructions     chapter 9
    watching/       races, reads of memory that nothing was written to (chapter 8), counts of instructions and sectors
    driver          Triton's driver of a GPU that is executed here
    plugin          pytest's option --ptx
    ranks/          launches of several ranks at once, whose memory is ordered by signals (chapter 8)
    forms           the forms of instructions that kernels have
    tests/          corners/: instructions; launches/: control flow, memory, launches; kernels of tutorials

All threads of a launch are lanes of one vector: a register is an array with a value for each. Names of sections are
those of NVIDIA's manual "Parallel Thread Execution ISA", version 8.7.
"""
