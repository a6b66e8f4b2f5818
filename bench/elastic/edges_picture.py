"""The picture of `bench.elastic.edges`: loss and distance between ranks against time, a column for each event."""

from matplotlib.figure import Figure

from baguakit.pictures import PALE, blank, set_frame, style_of
from bench.network.table import RESULTS, Table

from .edges import ALGORITHMS, AT, BRIEF, EDGE, ENDS, EVENTS, KILLED, RANK, STANDS, STILL, cells

PICTURE = RESULTS / "elastic-edges.png"
UNTIL = {EDGE: ENDS, RANK: ENDS, STILL: AT + STANDS, KILLED: AT, BRIEF: AT}
EQUAL = "gradient_allreduce()"  # whose ranks are equal, so that it has no distance
DISTINCT = {"decentralized(Ring())": {"linestyle": "-"}, "decentralized(OnePeerExact())": {"linestyle": "--"},
            "async_gossip(Ring())": {"linestyle": "-"}, "async_push_sum(Ring())": {"linestyle": "--"}}  # fmt: skip


def draw(found: Table) -> Figure:
    """Return the picture of what has been measured under `bk.elastic`."""
    figure = blank(12, 4.6)
    panels = figure.subplots(2, len(EVENTS), sharex=True, sharey="row")
    for (losses, distances), event in zip(panels.T, EVENTS, strict=True):
        losses.set_title(event, fontsize=9, loc="left")
        distances.set_xlabel("seconds", fontsize=8)
        for axes in (losses, distances):
            axes.axvspan(AT, UNTIL[event], color=PALE, alpha=0.15, linewidth=0)
            axes.axvline(AT, color=PALE, linewidth=0.8, linestyle=":")
            set_frame(axes)
        for cell in cells():
            if cell["event"] == event and cell in found and "elastic" not in cell:
                name = cell["algorithm"]
                style = {"linewidth": 1.3} | style_of(name) | DISTINCT.get(name, {})
                seconds, loss, distance = zip(*found[cell]["curve"], strict=True)
                losses.plot(seconds, loss, label=ALGORITHMS[name], **style)
                if name != EQUAL:
                    distances.plot(seconds, distance, **style)
    panels[0, 0].set_ylabel("bits of loss, held out", fontsize=8)
    panels[1, 0].set_ylabel("distance between ranks", fontsize=8)
    panels[1, 0].set_ylim(bottom=0)
    lines = panels[0, 0].get_legend_handles_labels()
    figure.legend(*lines, loc="outside upper right", frameon=False, fontsize=8, ncols=len(ALGORITHMS))
    return figure
