"""When, from what and on what a benchmark was run: the head of every file of results."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results"


def facts() -> dict[str, Any]:
    """`commit` ends in + when files of the package or of the benchmarks were changed since."""
    changed = _said("git", "status", "--porcelain", "--untracked-files=no", "--", "openrl", ".")
    script = Path(sys.argv[0]).name
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _said("git", "rev-parse", "--short", "HEAD") + ("+" if changed else ""),
        "command": " ".join(("python", f"benchmarks/{script}", *sys.argv[1:])),
        "machine": {
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "system": platform.system(),
        },
        "load_at_start": round(os.getloadavg()[0], 2),
    }


def _said(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, cwd=HERE).stdout.strip()
    except OSError:  # no git
        return ""


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
