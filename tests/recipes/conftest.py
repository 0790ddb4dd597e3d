"""Recipes are scripts that import one another from their own folder; so do their tests."""

import sys
from pathlib import Path

RECIPES = Path(__file__).parents[2] / "recipes"
sys.path.insert(0, str(RECIPES))
