"""The timeline as it is shown: as a trace, as a picture, and as the ranges that a profiler sees."""

import json
import math

import pytest
import torch
from pool import ranks
from timelines import STEPS, every_rule, of
from training import net_and_sgd, run_steps

import baguakit as bk
from baguakit.lanes.base import in_profile


@every_rule
def test_a_trace_names_all_that_it_shows(name, tmp_path):
    timeline = of(name)[0][0]
    timeline.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    shown = [e for e in events if e["ph"] == "X"]
    assert len(shown) == len(timeline.spans) and all(e["dur"] >= 0 for e in shown)
    processes = {e["pid"] for e in events if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in shown} == threads and {e["pid"] for e in shown} <= processes
    arrows = {}
    for e in events:
        if e["ph"] in "stf":
            arrows.setdefault(e["id"], []).append(e)
    assert len(arrows) == len(timeline.flights)
    for launch, lane, landing in arrows.values():
        assert [e["ph"] for e in (launch, lane, landing)] == ["s", "t", "f"]
        assert launch["ts"] <= lane["ts"] <= landing["ts"]
        assert launch["tid"] == landing["tid"] == 0 < lane["tid"] and launch["pid"] == lane["pid"] == landing["pid"]
        held = [x for x in shown if x["tid"] == lane["tid"] and x["pid"] == lane["pid"] and x["ts"] == lane["ts"]]
        assert launch["name"] in [x["name"] for x in held]


@pytest.mark.parametrize("name", ["delayed, with gradients", "free"])
def test_a_picture_has_a_row_for_every_thread(name, tmp_path):
    pytest.importorskip("matplotlib")
    timeline = of(name)[0][0]
    figure = timeline.draw(slice(None))
    rows = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert len(rows) == len({(s.rank, s.thread) for s in timeline.spans})
    hidden = timeline.overlap()
    share = "" if math.isnan(hidden) else f"; {100 * hidden:.0f} % of communication hidden"
    assert figure.get_suptitle() == f"2 ranks{share}"
    assert rows[0] == "rank 0  training" and "rank 1  training" in rows
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert {f.rule for f in timeline.flights} <= set(legend)
    figure.savefig(tmp_path / "timeline.png", dpi=40)
    assert (tmp_path / "timeline.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="have been recorded"):
        timeline.draw(slice(STEPS, None))


@pytest.mark.parametrize("all_threads", [False, True])
def test_a_profiler_is_shown_launches_and_waits_and_on_request_the_lane(all_threads):
    def run():
        from torch.profiler import ProfilerActivity, profile

        model, optimizer = net_and_sgd()
        config = torch._C._profiler._ExperimentalConfig(profile_all_threads=all_threads)
        with bk.attach(model, optimizer, bk.algorithms.gradient_allreduce(), bucket_bytes=300) as att:
            run_steps(model, optimizer, range(1))  # the first: ranks compare the order of gradients after it
            with profile(activities=[ProfilerActivity.CPU], experimental_config=config, acc_events=True) as seen:
                run_steps(model, optimizer, range(3))
            buckets = len(att.report().rows)
        return {e.key: e.count for e in seen.key_averages() if e.key.startswith("baguakit: ")}, buckets

    for seen, buckets in ranks(2, run):
        what = ["launch ", "wait for ", *([""] if all_threads else [])]
        assert buckets > 1 and seen == {f"baguakit: {w}Mean, bucket {i}": 3 for w in what for i in range(buckets)}


def test_without_a_profiler_no_range_is_opened():
    assert in_profile("launch", "Mean, bucket 0") is in_profile("", "Mean, bucket 1") is in_profile("", "")
