"""Algorithms by seconds and bytes to the same loss, as `baguakit compare` and `bench.frontier` compare them.

`names` reads "MODULE:NAME" and expressions, `tasks` has what is trained (`language`: a GPT on Python's own sources;
`digits`: the task of `baguakit demo`), `contenders` who trains, `training` the training on a rank, `trials` the jobs of
a comparison, `table` its results, `compose` and `page` what they tell, and `pacing` slows sockets down without root.
"""
