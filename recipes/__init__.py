"""Loops to start from. Run them from the root of a checkout: `python -m recipes.pig_latin`."""
