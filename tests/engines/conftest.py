from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.engines.local import LocalEngine


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalEngine]:
    monkeypatch.setenv("HOLDFAST_CPUS", "8")
    started = LocalEngine()
    yield started
    started.close()
