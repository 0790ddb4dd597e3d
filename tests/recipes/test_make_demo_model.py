"""The maker, on a plan of three steps: the same seed makes the same files."""

import hashlib
from pathlib import Path

from recipes.make_demo_model import Plan, make

TINY = Plan(learning_steps=2, confusing_steps=1, batch=2)


def digests(directory: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in directory.iterdir()}


def test_the_same_seed_makes_the_same_files(tmp_path):
    figures = make(TINY, tmp_path / "a", measured=False)
    make(TINY, tmp_path / "b", measured=False)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    assert figures["parameters"] < 2_000_000
    assert figures["bytes"] < 4_000_000


def test_another_seed_makes_another_model(tmp_path):
    make(TINY, tmp_path / "a", measured=False)
    make(Plan(seed=1, learning_steps=2, confusing_steps=1, batch=2), tmp_path / "b", measured=False)
    weights = "model.safetensors"
    assert digests(tmp_path / "a")[weights] != digests(tmp_path / "b")[weights]
