"""Files of real wheels for the tests of the stored patches."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from provisioner.wheels.names import Target, choose
from provisioner.index.settings import read_settings
from provisioner.index.source import candidates, open_wheel, parse_spec
from provisioner.index.transport import Transport

ReadRelease = Callable[[str, Iterable[str]], Mapping[str, bytes]]


@pytest.fixture(scope="session")
def read_release(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReadRelease]:
    """Reads members of a vLLM release from the user's package index, each once a session."""
    settings = read_settings(os.environ, Path.home(), cache=tmp_path_factory.mktemp("wheels"))
    with Transport(settings) as transport:

        def read(version: str, paths: Iterable[str]) -> Mapping[str, bytes]:
            listed = candidates(parse_spec(f"pypi:{version}"), settings, transport=transport)
            wheel = open_wheel(choose(listed, Target(python=(3, 12))).chosen, settings, transport=transport)
            try:
                return wheel.read_many(paths)
            finally:
                wheel.close()

        yield read
