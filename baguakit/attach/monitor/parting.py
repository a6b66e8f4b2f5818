"""The comparison of launches: which ranks have parted from the others."""

from collections.abc import Mapping

from .records import History, LaunchCount, Record


def parted(rank: int, size: int, history: History, records: Mapping[int, Record], sure: bool) -> str:
    """Return a sentence that names the ranks whose launches differ from the others'; "" if none differ.

    The ranks that more than half of all ranks contradict are at fault. Without such a majority the sentence names both
    sides, and only if the caller is `sure` that waiting longer will not show a majority.
    """
    for lane in history.latest():
        here = {r: (record.on(lane), history.at(lane, record.on(lane).count)) for r, record in records.items()}
        known = {r: (theirs, ours) for r, (theirs, ours) in here.items() if ours is not None and theirs.count}
        others = [r for r, (theirs, ours) in known.items() if theirs.digest != ours.digest]
        if not others:
            continue
        first = min(known[r][0].count for r in others)  # an older record, which still agrees, says nothing
        alike = sorted([rank, *(r for r, (theirs, _) in known.items() if r not in others and theirs.count >= first)])
        theirs, ours = known[others[0]]
        few, many = (
            ((others, theirs), (alike, ours)) if len(others) <= len(alike) else ((alike, ours), (others, theirs))
        )
        if 2 * len(many[0]) <= size and not sure and size > 2:
            continue
        return _sentence(*few, *many, alone=len(few[0]) < len(many[0]))
    return ""


def differing(count: int, calls: Mapping[int, str]) -> str:
    """Return a sentence that names the ranks whose `count`-th call differs from that of most."""
    alike: dict[str, list[int]] = {}
    for rank, call in sorted(calls.items()):
        alike.setdefault(call, []).append(rank)
    many, few, *_ = sorted(alike, key=lambda call: (-len(alike[call]), alike[call]))
    a, b = LaunchCount(count, few), LaunchCount(count, many)
    return _sentence(alike[few], a, alike[many], b, alone=len(alike[few]) < len(alike[many]))


def _sentence(few: list[int], a: LaunchCount, many: list[int], b: LaunchCount, alone: bool) -> str:
    have = "has" if len(few) == 1 and alone else "have"
    head = (
        f"{_ranks(few)} {have} parted from {_ranks(many)}" if alone else f"{_ranks(few)} and {_ranks(many)} have parted"
    )
    late = ", in another step or after other launches" if a.what == b.what else ""
    return (
        f"{head}: as launch {a.count}, {_ranks(few)} made {a.what}, and {_ranks(many)} {b.what}{late}; "
        "all ranks must make the same calls, backward passes and steps in the same order, from the same state"
    )


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (" …" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
