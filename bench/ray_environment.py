"""Ray in a virtual environment of its own, so that what it installs does not change what we measure.

`python -m bench.ray_environment` makes it and prints its interpreter; HOLDFAST_BENCH_RAY_PYTHON names another one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

DIRECTORY = Path(__file__).resolve().parent.parent / ".venv-ray"
REQUIREMENTS = ("ray[train]==2.60.0", "torch==2.13.0", "numpy")


def ray_python() -> Path:
    """Returns the interpreter that has Ray; makes its environment when there is none (some minutes)."""
    named = os.environ.get("HOLDFAST_BENCH_RAY_PYTHON")
    if named:
        return Path(named)
    python, ready = DIRECTORY / "bin" / "python", DIRECTORY / "ready"
    if not ready.exists():
        _make(python)
        ready.touch()
    return python


def _make(python: Path) -> None:
    print(f"bench: installing {' '.join(REQUIREMENTS)} into {DIRECTORY}", file=sys.stderr)
    venv.create(DIRECTORY, with_pip=True, clear=True)
    (DIRECTORY / ".gitignore").write_text("*\n")
    subprocess.run([python, "-m", "pip", "install", "--quiet", *REQUIREMENTS], check=True, stdout=sys.stderr)


if __name__ == "__main__":
    print(ray_python())
