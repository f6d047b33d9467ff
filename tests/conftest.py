from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.engines import local, parent


@pytest.fixture(scope="session", autouse=True)
def _warm_parent_ends_with_the_tests() -> Iterator[None]:
    """It, and keepers, end with this process or soon after; pytest looks for what is left over before that."""
    yield
    parent.end()
    for keeper in local._left_services:
        keeper.wait(30)
