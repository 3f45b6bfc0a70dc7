"""What holds for all fuzz tests: a bound on memory, and on time by the examples asked for."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from mutations import EXAMPLES

ADDRESS_SPACE_NBYTES = 16 << 30  # what asks for more gets a MemoryError, and not the machine's all


@pytest.fixture(autouse=True)
def bound_memory() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_NBYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if EXAMPLES:
        for item in items:
            if "/fuzz/" in str(item.path):
                item.add_marker(pytest.mark.timeout(300 + EXAMPLES))
