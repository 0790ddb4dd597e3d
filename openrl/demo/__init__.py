"""The small model that ships with the package, so that a first try needs no download.

`openrl serve` without a model serves it under `NAME`. How it was made, and how well it does,
stands in this directory's README.
"""

from __future__ import annotations

from pathlib import Path

NAME = "openrl/sql-demo"


def model_directory() -> Path:
    """Where its files are: an ordinary model directory, for transformers and the server alike."""
    return Path(__file__).parent / "model"
