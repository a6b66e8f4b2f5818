"""The demo: ranks on this machine learn printed digits, of which each sees only some, with one algorithm after another.

Files: `digits` is the task, `contenders` the ways to train, `training` the code of a rank, `ranks` starts the ranks or
joins those of torchrun, `outcome` and `picture` show the results, `running` is the subcommand.
"""
