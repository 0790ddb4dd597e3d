"""The benchmark of utilisation in its smallest form, end to end: figures, raw samples, picture."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "utilization.py"
SMALL = ["--quick", "--prompts", "1", "--samples", "2", "--prompt", "8", "--answer", "8"]


def test_it_measures_three_ways_of_sharing_beside_the_ideal(tmp_path: Path) -> None:
    output = tmp_path / "found.json"
    engine = ["--serve=--engine fake", "--model", "fake/tiny", "--json", str(output)]
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), *SMALL, *engine],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    report = json.loads(output.read_text())
    cells = {(c["name"], c["mode"], c["jobs"]): c for c in report["cells"]}
    assert {mode for _, mode, _ in cells} == {"fused", "separate", "in_turn"}
    for cell in cells.values():
        assert (
            cell["timeline"]["busy_fraction"] > 0.0
        )  # of made-up seconds: they may exceed the wall
        assert 0.0 <= cell["idle_runnable"] < 1.0
        assert cell["goodput"] > 0.0
        assert len(cell["step_seconds_by_job"]) == cell["jobs"]
        assert all(job["steps"] for job in cell["step_seconds_by_job"].values())
        if cell["mode"] != "fused":
            assert set(cell["timeline"]["jobs"].values()) == {1.0}, "passes of one job"
    solo = cells["grid", "fused", 1]
    assert solo["ideal"]["formula"] == 0.5
    assert 0.0 < solo["ideal"]["with_latency"] <= solo["ideal"]["simulated"]
    raw = json.loads(gzip.decompress((tmp_path / "found-raw.json.gz").read_bytes()))
    assert len(raw) == len(cells)
    assert all(one["steps"] and one["passes"] for one in raw)
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")
