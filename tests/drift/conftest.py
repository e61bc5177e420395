from collections.abc import Iterator

import pytest

from provisioner.index.settings import IndexSettings
from tests.support.drift_builds import HISTORY, build
from tests.support.index_server import IndexServer
from tests.support.wheels import wheel_filename


@pytest.fixture
def index() -> Iterator[IndexServer]:
    with IndexServer() as server:
        server.add_package("vllm", {wheel_filename(version): build(version, ops) for version, ops in HISTORY.items()})
        yield server


@pytest.fixture
def settings(index: IndexServer, tmp_path) -> IndexSettings:
    return IndexSettings(
        pypi=index.simple_url, timeout=5.0, retries=1, backoff=0.001, index_age=0.0, cache=tmp_path / "cache"
    )
