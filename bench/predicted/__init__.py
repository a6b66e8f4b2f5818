"""The speed of kernels on a GPU that is not here, predicted from what they execute.

work     every operation that has a kernel, to be executed and compared with its definition
model    how long a GPU takes for what was counted
table    the predictions as JSON, a table and a picture
reasons  why some kernels stay below the target
"""
