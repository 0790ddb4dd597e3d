"""The ledger, for people: a table, a curve, and whether anything was gained."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from recipes.autoresearch.judging import interval, p_value
from recipes.autoresearch.ledger import KEPT, Experiment, Ledger

_HEAD = (
    "| | change | search | validation | p | bar | engine-seconds | decision |\n"
    "|---|---|---|---|---|---|---|---|"
)


def progress(ledger: Ledger) -> str:
    """A Markdown table of all experiments so far."""
    return "\n".join((_HEAD, *map(_row, ledger.experiments())))


def _row(each: Experiment) -> str:
    validation = ""
    if each.mean is not None:
        low, high = interval(each.validation)
        validation = f"{each.mean:.3f} ({low:.3f}–{high:.3f})"
    decision = f"{each.decision}: {_short(each.because)}" if each.because else each.decision
    cells = (
        str(each.number),
        each.change,
        f"{each.search[-1]:.3f}" if each.search else "",
        validation,
        "" if each.p_value is None else f"{each.p_value:.4f}",
        "" if each.bar is None else f"{each.bar:.4f}",
        "" if each.engine_seconds is None else f"{each.engine_seconds:.0f}",
        decision,
    )
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _short(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:120] if lines else ""


def write(ledger: Ledger, directory: Path, command: str) -> str:
    """`report.md` and `report.png`; what stands on top is returned."""
    best = ledger.best()
    top = [f"# Research on {ledger.fact('recipe')}", ""]
    if best is not None:
        settings = ", ".join(f"{name} {value}" for name, value in best.settings.items())
        top += [f"Best: experiment {best.number} ({best.change}): {settings}.", ""]
    if (said := ledger.fact("test")) is not None:
        top += [tested(**json.loads(said)), ""]
    top += [f"{ledger.spent():.0f} engine-seconds. Again: `{command}`", ""]
    plot(ledger.experiments(), directory / "report.png")
    text = "\n".join((*top, "![Scores by experiment](report.png)", "", progress(ledger), ""))
    (directory / "report.md").write_text(text)
    return "\n".join(top)


def tested(defaults: Sequence[float], best: Sequence[float]) -> str:
    """The gain over the defaults, paired by question, with an interval."""
    gains = np.subtract(best, defaults)
    low, high = interval(list(gains))
    return (
        f"Test split, used once, {len(gains)} questions: defaults {np.mean(defaults):.3f}, best "
        f"{np.mean(best):.3f}; gain {gains.mean():+.3f} (95%: {low:+.3f} to {high:+.3f}; "
        f"p {p_value(best, defaults):.4f})."
    )


def plot(experiments: Sequence[Experiment], file: Path) -> None:
    """Search scores as dots; the best validation score so far as steps."""
    figure = Figure(figsize=(7, 3), layout="constrained")
    axis = figure.subplots()
    searched = [each for each in experiments if each.search]
    axis.plot([e.number for e in searched], [e.search[-1] for e in searched], "o", ms=4,
              label="search split")  # fmt: skip
    kept = [each for each in searched if each.decision == KEPT]
    if kept:
        ends = [*(e.number for e in kept), max(e.number for e in searched)]
        means = [e.mean or 0.0 for e in kept]
        axis.step(ends, [*means, means[-1]], where="post", label="kept, validation split")
    axis.set_xlabel("experiment")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(file, dpi=90)
