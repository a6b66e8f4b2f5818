"""The picture of the page: error against bits a value, a point for each format."""

from typing import Any

from .claims import Found, bound

SHOWN = ("normal", "Student-t(3)", "transformer, step 600")
LIMITS, LOWEST = (0.7, 8.9), 1.5e-5
FAMILIES = {  # by the end of a name: the colour and marker of a curve, and the words for it
    "rotate=True)": ("#0072B2", "o", "Uniform, rotated"),
    "rotate=False)": ("#56B4E9", "s", "Uniform, not rotated"),
}
OTHERS = ("#0072B2", "D", "Sign, Float8")
THEIRS = ("#D55E00", "^", "MX and NVFP4")
BESIDE = {  # where the name of a point stands: to the right of it, above or below
    "MXFP4": (-4, 5, "right"),
    "NVFP4": (5, 3, "left"),
    "MXFP6 e3m2": (0, 6, "center"),
    "MXFP6 e2m3": (0, 6, "center"),
    "MXFP8 e5m2": (0, 6, "center"),
    "MXFP8 e4m3": (0, 6, "center"),
    "MXINT8": (6, -3, "left"),
    "Sign()": (5, 3, "left"),
    'Float8("e4m3")': (0, -11, "center"),
    'Float8("e5m2")': (0, -11, "center"),
}


def draw(found: Found) -> Any:
    """Return a figure with a panel for each of three sources."""
    from baguakit.pictures.style import blank

    figure = blank(11, 4.6)
    panels = figure.subplots(1, len(SHOWN), sharey=True)
    by_name = {source["name"]: source for source in found["sources"]}
    for axes, name in zip(panels, SHOWN, strict=True):
        _panel(axes, found["formats"], by_name[name])
    panels[0].set_ylabel("vNMSE,  Σ (Q(x) − x)² / Σ x²", fontsize=9)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    return figure


def _panel(axes: Any, formats: list[Found], source: Found) -> None:
    from baguakit.pictures.style import PALE, set_frame

    left = [each for each in formats if each["bits"] <= LIMITS[1]]
    axes.plot(LIMITS, [bound(bits) for bits in LIMITS], color=PALE, linestyle="--", linewidth=1, label="2^(−2 bits)")
    for ending, (colour, marker, words) in FAMILIES.items():
        some = [each for each in left if each["name"].endswith(ending)]
        left = [each for each in left if each not in some]
        _points(axes, some, source, colour=colour, marker=marker, label=words, linestyle="-")
    for ours, (colour, marker, words) in ((True, OTHERS), (False, THEIRS)):
        some = [each for each in left if each["ours"] == ours]
        _points(axes, some, source, colour=colour, marker=marker, label=words, linestyle="")
        for each in some:
            x, y, side = BESIDE[each["name"]]
            at, name = (each["bits"], source["vnmse"][each["name"]]), each["name"].replace("()", "")
            axes.annotate(name, at, (x, y), textcoords="offset points", ha=side, fontsize=6.5, color=colour)
    axes.set(yscale="log", xlim=LIMITS, ylim=(LOWEST, 1), xticks=range(1, 9))
    axes.set_title(source["name"], fontsize=9)
    axes.set_xlabel("bits a value", fontsize=9)
    set_frame(axes)


def _points(
    axes: Any, formats: list[Found], source: Found, colour: str, marker: str, label: str, linestyle: str
) -> None:
    places = [each["bits"] for each in formats], [source["vnmse"][each["name"]] for each in formats]
    face = "white" if marker == "s" else colour
    axes.plot(
        *places, color=colour, marker=marker, label=label, linestyle=linestyle, linewidth=1, markersize=4.5, mfc=face
    )
