"""Training while ranks are killed and replaced: `python -m bench.elastic [run | page]`.

Eight hosts of a shaped network train, and a store stands on a ninth. At first nobody is disturbed; then one process
is killed (SIGKILL) every 60 or 20 seconds, and another begins in its place at once; or one stands still (SIGSTOP)
until the others have given it up. With four hosts, one is killed once, at several rates. Each process sends a line for
every step to the one that kills, which measures:

* goodput: steps of all ranks ÷ (undisturbed steps per rank and second × seconds for which each rank was present).
  Undisturbed are the seconds before the first kill and those after the last newcomer's first step, of the same run: the
  speed of the machine differs from run to run. A new process counts as present from its first line of Python on: the
  packages have been imported in the one that it is forked from, since all hosts share the processors of one machine.
* simulated: the goodput that `bk.tune.simulate` gives, of the undisturbed speed of the same run and its default for the
  seconds in which ranks meet again, 2.2.
* survivors: from a kill to the first step that the last survivor completes.
* newcomers: from their first line of Python to their first step.
* loss: of the mean of all ranks' weights, on examples that nobody trained on.
* replicas: after each change of the group, weights of all ranks are compared, bit for bit, where the algorithm keeps
  them equal.

torchft 0.2.0 runs in the same experiment, each rank a replica group of its own, with its lighthouse in the store's
place, a join timeout of 1 s, and collectives that time out after 10 s (its default is 60). Over gloo, ranks that have
lost no connection of their own wait for that.
"""
