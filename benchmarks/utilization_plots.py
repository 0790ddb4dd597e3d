"""The timelines of one, two and three jobs, and goodput over jobs, as one picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from utilization_runs import Ran

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

COLOURS = {"sample": "#4477aa", "train": "#ee6677", "optim": "#ccbb44", "control": "#228833"}
LINES = {"fused": "-", "separate": "--", "in_turn": ":", "given": "-"}
SHOWN_SECONDS = 6.0


def draw(report: dict[str, Any], runs: Sequence[Ran], path: Path) -> None:
    timelines = [r for r in runs if _is_shown(r, runs)]
    ratios = sorted({c["ratio"] for c in report["cells"] if c["name"] == "grid"})
    layout = [[f"t{i}"] * max(len(ratios), 1) for i in range(len(timelines))]
    layout.append([f"u{i}" for i in range(len(ratios))] or ["none"])
    heights = [0.5] * len(timelines) + [2.0]
    figure, axes = plt.subplot_mosaic(
        layout, figsize=(11, 1.0 * len(timelines) + 4), height_ratios=heights, layout="constrained"
    )
    for index, ran in enumerate(timelines):
        _timeline(axes[f"t{index}"], ran, report)
    for index, ratio in enumerate(ratios):
        _goodput(axes[f"u{index}"], report, ratio)
    if timelines:
        patches = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items()]
        axes["t0"].legend(handles=patches, ncols=4, loc="lower right", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _is_shown(ran: Ran, runs: Sequence[Ran]) -> bool:
    """One, two and three jobs that think as long as the engine works; without them, whatever."""
    grid = [r.cell.ratio for r in runs if r.cell.name == "grid"]
    ratio = 1.0 if 1.0 in grid else min(grid, default=0.0)
    cell = ran.cell
    first = cell.mode == runs[0].cell.mode and cell.name == "grid" and cell.ratio == ratio
    return first and cell.jobs <= 3 and ran.passes is not None


def _timeline(axes: Axes, ran: Ran, report: dict[str, Any]) -> None:
    for kind, colour in COLOURS.items():
        bars = [
            (p.end - p.seconds - ran.begin, p.seconds) for p in ran.passes or () if p.kind == kind
        ]
        axes.broken_barh(bars, (0, 1), facecolors=colour)
    axes.set_xlim(0, min(SHOWN_SECONDS, ran.wall))
    axes.set_yticks([])
    found = ran.figures
    assert found is not None
    jobs = "1 job" if ran.cell.jobs == 1 else f"{ran.cell.jobs} jobs"
    rates = report["calibration"]
    u = ran.goodput((rates["sampled_per_second"], rates["trained_per_second"]))
    axes.set_title(
        f"{jobs}: engine busy {found.busy_fraction:.0%}, goodput {u:.2f}", loc="left", fontsize=9
    )
    axes.tick_params(labelsize=8)


def _goodput(axes: Axes, report: dict[str, Any], ratio: float) -> None:
    mine = [c for c in report["cells"] if c["name"] == "grid" and c["ratio"] == ratio]
    solo = [c for c in mine if c["jobs"] == 1]
    for mode in dict.fromkeys(c["mode"] for c in mine):
        # One job alone is alike in all modes and measured in the first.
        points = {c["jobs"]: c["goodput"] for c in (*solo, *mine) if c["mode"] == mode or c in solo}
        axes.plot(
            sorted(points), [points[n] for n in sorted(points)], "o" + LINES[mode], label=mode
        )
    if ideals := {c["jobs"]: c["ideal"] for c in mine if "ideal" in c}:
        for kind, style in (("simulated", "k-"), ("formula", "k:")):
            axes.plot(
                sorted(ideals),
                [ideals[n][kind] for n in sorted(ideals)],
                style,
                linewidth=0.8,
                label=f"ideal ({kind})",
            )
    axes.set_title(f"Z/G = {ratio:g}", fontsize=9)
    axes.set_xlabel("jobs")
    axes.set_ylabel("goodput U")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7)
