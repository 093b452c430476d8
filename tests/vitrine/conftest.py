from __future__ import annotations

from collections.abc import Iterator

import pytest

import vitrine


@pytest.fixture(scope="session")
def server(served) -> Iterator[vitrine.Server]:
    """A client of the shipped model's server."""
    with vitrine.connect(served.base_url) as server:
        yield server
