"""The table of the SDK's methods in docs/compatibility.md: `python tests/sdk/table.py` writes it.

It is made by calling every method (`surface.py`) against a server with the fake engine.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from support.node import CONFIG, MODEL, serving_in_a_thread  # noqa: E402 - found by the line above

PAGE = ROOT / "docs" / "compatibility.md"
SURFACE = Path(__file__).with_name("surface.py")
TOKENIZER = ROOT / "openrl" / "demo" / "model"
BEGIN, END = "<!-- methods: written by tests/sdk/table.py -->\n", "<!-- /methods -->\n"
SECONDS = 240

REFUSED: Mapping[str, str] = {}
"""Why, in words that the refusal holds."""

NOTES: Mapping[str, str] = {
    "ServiceClient.create_custom_loss": "yes; the SDK runs the loss itself",
    "ServiceClient.get_console_url": "made by the SDK: a page of Tinker's, not of this server",
    "TrainingClient.get_console_url": "made by the SDK: a page of Tinker's, not of this server",
    "RestClient.export_session_trace": "yes: as far back as the server remembers",
    "RestClient.whoami": "yes, with `server.issue_jwts` on",
}


def outcomes() -> dict[str, str]:
    """By method: "works", or the text that it is refused with."""
    with tempfile.TemporaryDirectory() as directory:
        data = Path(directory)
        (data / MODEL).parent.mkdir()
        (data / MODEL).symlink_to(TOKENIZER)  # where the SDK looks for the model's tokenizer
        with serving_in_a_thread(data / "node", replace(CONFIG, issue_jwts=True)) as url:
            offline = {"HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0", "TINKER_BASE_URL": url}
            run = subprocess.run(
                [sys.executable, str(SURFACE), url, MODEL],
                cwd=data,
                env=os.environ | offline,
                capture_output=True,
                text=True,
                timeout=SECONDS,
            )
    if run.returncode:
        raise SystemExit(run.stderr)
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    return {line["method"]: line["outcome"] for line in lines}


def undocumented(found: Mapping[str, str]) -> list[str]:
    """Methods that neither work nor are refused with the reason that is written down."""
    return [
        f"{method}: {outcome}"
        for method, outcome in found.items()
        if outcome != "works" and not _refused_as_said(method, outcome)
    ]


def _refused_as_said(method: str, outcome: str) -> bool:
    reason = REFUSED.get(method.removesuffix("_async"))
    return reason is not None and outcome.startswith("refused: ") and reason in outcome


def table(found: Mapping[str, str]) -> str:
    return "\n".join(["| method | |", "|---|---|", *_rows(found)]) + "\n"


def _rows(found: Mapping[str, str]) -> Iterator[str]:
    for method in found:
        base = method.removesuffix("_async")
        if method != base and base in found:
            continue
        twin = " (and `_async`)" if f"{base}_async" in found else ""
        said = NOTES.get(base, "yes") if found[method] == "works" else f"no: {REFUSED[base]}"
        yield f"| `{method}`{twin} | {said} |"


def page_with(block: str) -> str:
    text = PAGE.read_text(encoding="utf-8")
    return re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}{block}{END}", text, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(page_with(table(outcomes())), encoding="utf-8")
