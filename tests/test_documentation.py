"""What documents show, works: programs marked `<!-- runs: name -->`, commands, links, examples in docstrings."""

from __future__ import annotations

import doctest
import importlib
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast

ROOT = Path(__file__).parent.parent
PAGES = sorted(ROOT.glob("*.md"))
MARKED = re.compile(r"<!-- runs: (\w+) -->\n+```python\n(.*?)```", re.DOTALL)
PROGRAMS = {name: program for page in PAGES for name, program in MARKED.findall(page.read_text())}
MODULES = [found.name for found in pkgutil.walk_packages(holdfast.__path__, "holdfast.")]


def run_program(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(program)
    env = {**os.environ, "HOLDFAST_STORAGE": str(folder / "results"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "program.py"]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=50)


def test_the_readme_has_a_program_to_run():
    assert "first_program" in PROGRAMS


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_of_the_documents_runs_and_runs_again(name, tmp_path):
    first = run_program(PROGRAMS[name], tmp_path)
    assert first.returncode == 0, first.stdout + first.stderr
    again = run_program(PROGRAMS[name], tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_make_command_and_link_of_a_page_exists(page):
    text = page.read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`?make ([a-z]+(?:-[a-z]+)*)`", text)) <= targets
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.parametrize("module", MODULES)
def test_the_examples_in_docstrings_are_true(module):
    assert doctest.testmod(importlib.import_module(module)).failed == 0
