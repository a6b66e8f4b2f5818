"""Algorithms by seconds and bytes to the same loss, as `baguakit compare` and `bench.frontier` compare them.

`names` reads "MODULE:NAME" and expressions, `contenders` has who trains, `training` the tasks (`language`: a GPT on
Python's own sources; `digits`: the task of `baguakit demo`) and the training on a rank, `trials` the jobs of a
comparison, `table` its results, `compose` what they tell, and `pacing` slows sockets down without root.
"""
