"""Measures Holdfast against the physical limit of the machine and against Ray 2.60. `python -m bench --help`."""
