"""Gains of algorithms on slow networks, and their distance from the physical limit.

    python -m bench.network                  # steps of training: every algorithm, network and task; hours
    python -m bench.network --quick          # some of them; minutes
    python -m bench.network exchanges        # single exchanges of 16 and 64 MiB, against their ideal lines
    python -m bench.network collectives      # compressed collectives of 16 and 64 MiB, against their ideal lines
    python -m bench.network few              # compressed means of few values, beside plain ones
    python -m bench.network flows            # eight connections against one, capped and not, and one that is slow
    python -m bench.network backend          # DDP and FSDP2 over the backend of torch.distributed, beside gloo
    python -m bench.network staged           # steps of tensors that travel through the memory of the host; 4 minutes
    python -m bench.network versions         # weights that changed, beside a broadcast of all; 5 minutes
    python -m bench.network plan             # steps predicted by bk.tune, beside those measured
    python -m bench.network figures          # draw what has been measured so far, and write the page README.md

Hosts are namespaces of one machine (`bench.netlab`), which needs root; without, only the unshaped network is measured,
over loopback, and the tables say so. Results are lines of JSON in bench/results, one for each finished cell. A cell
that is there is not measured again, so an interrupted run goes on where it was; delete its line, or the file, to
measure anew.

What stands beside each measurement:

    formula     bytes that a rank must send for a step (`formulas`), from the shapes of the model and the algorithm
    sent        bytes that the interface of each host has counted, headers included, the mean over hosts
    payload     the same without headers: what the formula should be, and what is sent again after a loss
    line        formula / rate: no step that waits for its exchange can be faster
    compute     the same model, batch and optimizer on the same ranks at the same time, with nothing exchanged

All ranks share the cores of the machine. That is why throughput is compared to `compute`, measured likewise, and not
to one rank alone.
"""
