from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.provisioning.shop import Shop
from tests.support.index_server import IndexServer


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    with IndexServer() as server:
        made = Shop(server=server, folder=tmp_path)
        made.stock()
        yield made
