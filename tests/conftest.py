from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.engines import parent


@pytest.fixture(scope="session", autouse=True)
def _warm_parent_ends_with_the_tests() -> Iterator[None]:
    """It would end with this process; pytest looks for what is left over before that."""
    yield
    parent.end()
