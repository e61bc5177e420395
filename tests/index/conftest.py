from collections.abc import Iterator
from dataclasses import replace

import pytest

from provisioner.index.settings import IndexSettings
from provisioner.index.transport import Transport
from tests.support.index_server import IndexServer


@pytest.fixture
def index() -> Iterator[IndexServer]:
    with IndexServer() as server:
        yield server


@pytest.fixture
def settings(index: IndexServer) -> IndexSettings:
    return IndexSettings(
        vllm_index=index.url,
        pypi=index.simple_url,
        github_api=index.github_url,
        timeout=2.0,
        deadline=5.0,
        retries=2,
        backoff=0.001,
        index_age=0.0,
    )


@pytest.fixture
def transport(settings: IndexSettings) -> Iterator[Transport]:
    with Transport(settings) as opened:
        yield opened


@pytest.fixture
def hasty(settings: IndexSettings) -> Iterator[Transport]:
    """Gives up after a fraction of a second and does not try again."""
    with Transport(replace(settings, timeout=0.3, deadline=0.6, retries=0)) as opened:
        yield opened
