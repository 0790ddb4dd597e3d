"""The whole flow with every version of the SDK that changed the wire: `make sdk-matrix`.

    python tests/sdk/matrix.py [VERSION ...]

Each version is installed by pip into a directory of its own under build/sdk, without what it
depends on: that is this environment's. Each runs `flow.py` in a process of its own, against one
server with the fake engine, and real numbers are checked. Ends with a table, and with 1 when a
version failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from support.node import MODEL, serving_in_a_thread  # noqa: E402 - found by the line above

VERSIONS = (
    "0.12.0", "0.16.1", "0.18.2", "0.20.0", "0.24.1", "0.25.0",
    "0.26.2", "0.28.1", "0.30.4", "0.34.0", "0.36.0", "0.38.0",
)  # fmt: skip
CACHE = ROOT / "build" / "sdk"
FLOW = Path(__file__).with_name("flow.py")
SECONDS = 240


def installed(version: str) -> Path:
    """Raises `CalledProcessError` with pip's own words on the screen."""
    target = CACHE / version
    if not (target / f"tinker-{version}.dist-info").is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--target", str(target), f"tinker=={version}"], check=True)
    return target


def problem(url: str, version: str) -> str | None:
    """The last line of what went wrong; None when nothing did."""
    path = f"{installed(version)}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = os.environ | {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
    try:
        run = subprocess.run(
            [sys.executable, str(FLOW), url, MODEL, version],
            env=environment, capture_output=True, text=True, timeout=SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"not done after {SECONDS} s"
    if run.returncode == 0 and "the flow is whole" in run.stdout:
        return None
    return (run.stderr.strip().splitlines() or ["it said nothing"])[-1]


def main(versions: tuple[str, ...]) -> int:
    failed = 0
    with tempfile.TemporaryDirectory() as data, serving_in_a_thread(Path(data)) as url:
        for version in versions:
            found = problem(url, version)
            failed += found is not None
            print(f"tinker {version:8} {'whole' if found is None else found}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(tuple(sys.argv[1:]) or VERSIONS))
