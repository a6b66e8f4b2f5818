"""`python -m bench.netlab --hosts 4 --rate 500mbit -- command …`: see `bench.netlab`."""

import argparse
import sys

from . import Lab
from .ranks import say


def main(words: list[str] | None = None) -> int:
    """Run a command in a laboratory; the exit status is the worst of the hosts'."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.netlab",
        description="Run a command on several hosts of a network made for it on this machine. Needs root.",
    )
    parser.add_argument("--hosts", type=int, default=4, help="how many (%(default)s)")
    parser.add_argument("--rate", help='of each host\'s link, each way, such as "500mbit"; not given: unshaped')
    parser.add_argument("--nodes", type=int, help="divide the hosts into so many nodes")
    parser.add_argument("--between", metavar="RATE", help="the rate of each node's way to the others")
    parser.add_argument("--flow-cap", metavar="RATE", help="what no TCP connection exceeds")
    parser.add_argument("--delay", metavar="TIME", help='one way between nodes, such as "25ms"; or "10ms,40ms"')
    parser.add_argument("--jitter", metavar="TIME", default="0ms", help="added to each frame at random; with --delay")
    parser.add_argument(
        "--loss", metavar="SHARE", type=float, default=0.0, help="of frames, such as 0.001; with --delay"
    )
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="stop all after so long, with status 124")
    parser.add_argument("--keep-going", action="store_true", help="do not stop the others when one fails")
    parser.add_argument("command", nargs="+", help="after --")
    o = parser.parse_args(words)
    try:
        delay = tuple(o.delay.split(",")) if o.delay and "," in o.delay else o.delay
        lab = Lab(
            o.hosts,
            o.rate,
            nodes=o.nodes,
            between=o.between,
            flow_cap=o.flow_cap,
            delay=delay,
            jitter=o.jitter,
            loss=o.loss,
        )
        with lab:
            ended = lab.run(o.command, timeout=o.timeout, keep_going=o.keep_going, echo=sys.stdout)
            counted = lab.bytes()
    except (ValueError, PermissionError, RuntimeError) as error:
        say(str(error))
        return 2
    except KeyboardInterrupt:
        return 130
    for host, (status, bytes_) in enumerate(zip(ended.statuses, counted, strict=True)):
        say(f"host {host}: status {status}, {bytes_.sent:,} bytes sent, {bytes_.received:,} received")
    return ended.status


if __name__ == "__main__":
    sys.exit(main())
