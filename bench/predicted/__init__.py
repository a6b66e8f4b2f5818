"""The speed of kernels on a GPU that is not here, predicted from what they execute.

    python -m bench.predicted "average 8 rows, fp32"     some rows, with their machine code by opcode

work         every operation that has a kernel, to be executed and compared with its definition
assembly     the machine code of a kernel, each instruction with the line of PTX from which it comes
simulation   a multiprocessor that runs it, clock by clock
model        how long a GPU takes for what was counted
table        the predictions as JSON, a table and a picture
reasons      why some kernels stay below the target
"""
