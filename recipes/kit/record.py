"""What a recipe leaves: a line for each step, a table, a curve."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from matplotlib.figure import Figure

Row = dict[str, float]


@dataclass
class Record:
    """Of one command: runs side by side that differ by seed."""

    module: str
    directory: Path
    argv: list[str]
    model: str
    rows: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / "metrics.jsonl").unlink(missing_ok=True)

    def add(self, seed: int, seconds: float, metrics: Mapping[str, float]) -> None:
        row = {"seed": seed, "seconds": round(seconds, 3), **metrics}
        self.rows.append(row)
        with (self.directory / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        said = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        print(f"seed {seed}  {said}", flush=True)

    def conclude(self) -> None:
        if not self.rows:
            return
        summary = {
            "command": shlex.join(["python", "-m", self.module, *self.argv]),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "model": self.model,
            "rows": self.rows,
        }
        (self.directory / "results.json").write_text(json.dumps(summary, indent=1) + "\n")
        plot(self.rows, self.directory / "curve.png")
        print(table(self.rows))
        print(f"\nIn {self.directory}/: metrics.jsonl, results.json, curve.png")


def series(rows: list[Row], name: str) -> dict[int, list[tuple[float, float]]]:
    """(step, value) of one number, by seed."""
    found: dict[int, list[tuple[float, float]]] = {}
    for row in rows:
        if name in row:
            found.setdefault(int(row["seed"]), []).append((row["step"], row[name]))
    return found


def names(rows: list[Row]) -> list[str]:
    """What was measured, in the order in which it was first seen."""
    seen = dict.fromkeys(name for row in rows for name in row)
    return [name for name in seen if name not in ("seed", "seconds", "step")]


def table(rows: list[Row]) -> str:
    """Markdown: the first and the last value of each number, by seed."""
    lines = ["", "| | seed | first | last |", "|---|---|---|---|"]
    for name in names(rows):
        for seed, points in sorted(series(rows, name).items()):
            lines.append(f"| {name} | {seed} | {points[0][1]:.3f} | {points[-1][1]:.3f} |")
    return "\n".join(lines)


def plot(rows: list[Row], file: Path) -> None:
    """A panel for each number, a line for each seed."""
    measured = names(rows)
    figure = Figure(figsize=(4.2 * len(measured), 3), layout="constrained")
    panels = figure.subplots(1, len(measured), squeeze=False)[0]
    for panel, name in zip(panels, measured, strict=True):
        for seed, points in sorted(series(rows, name).items()):
            panel.plot(*zip(*points, strict=True), label=f"seed {seed}", marker=".", linewidth=1)
        panel.set_title(name)
        panel.set_xlabel("step")
        panel.grid(alpha=0.3)
    panels[0].legend(fontsize=8)
    figure.savefig(file, dpi=80)
