"""The real wheel of vllm 0.27.1, read from the user's package index."""

import os
from pathlib import Path

import pytest

from provisioner.digests import digest_of
from provisioner.index.settings import IndexSettings, read_settings
from provisioner.index.source import candidates, open_wheel, parse_spec
from provisioner.index.transport import Transport
from provisioner.wheels.names import Target, choose, choose_each

pytestmark = pytest.mark.network

SHA256 = "98e9fc2a1ed8549a733c9d1b242e2002b82367da9e29e37801761438cb3a2670"
SIZE = 312_887_766
TOUCHED = (
    "vllm/third_party/flash_linear_attention/ops/fused_recurrent.py",
    "vllm/model_executor/layers/mamba/ops/causal_conv1d.py",
    "vllm/model_executor/layers/mamba/ops/mamba_ssm.py",
    "vllm/model_executor/layers/quantization/utils/marlin_utils.py",
    "vllm/v1/attention/backends/gdn_attn.py",
    "vllm/v1/worker/mamba_utils.py",
    "vllm/_custom_ops.py",
    "vllm/_version.py",
)


@pytest.fixture
def user_settings(tmp_path: Path) -> IndexSettings:
    return read_settings(os.environ, Path.home(), cache=tmp_path)


def test_a_check_of_one_release_stays_within_its_limits(user_settings: IndexSettings) -> None:
    with Transport(user_settings) as transport:
        chosen = choose(
            candidates(parse_spec("pypi:0.27.1"), user_settings, transport=transport), Target(python=(3, 12))
        ).chosen
        assert (chosen.sha256, chosen.size) == (SHA256, SIZE)
        wheel = open_wheel(chosen, user_settings, transport=transport)
        contents = wheel.read_many(TOUCHED)
        assert b'__version__ = version = "0.27.1"' in contents["vllm/_version.py"].replace(b"'", b'"')
        assert {path: digest_of(data) for path, data in contents.items()} == wheel.digests(TOUCHED)
        assert len(wheel.names()) == len(wheel.record()) == 4735
        assert "Requires-Dist: torch==2.13.0" in wheel.metadata_text()
        first = transport.traffic
        assert first.requests <= 3 + len(TOUCHED)
        assert first.received < 2_000_000

        again = open_wheel(chosen, user_settings, transport=transport)
        assert again.read_many(TOUCHED) == contents
        assert transport.traffic == first, "the second check asks nothing"


def test_the_heads_of_twelve_releases(user_settings: IndexSettings) -> None:
    with Transport(user_settings) as transport:
        listed = choose_each(candidates(parse_spec("pypi:>=0.24"), user_settings, transport=transport), Target())
        for candidate in listed[:12]:
            wheel = open_wheel(candidate, user_settings, transport=transport)
            (digest,) = wheel.digests(["vllm/v1/worker/mamba_utils.py"]).values()
            assert digest is None or len(digest) == 64
        assert transport.traffic.received < 14_000_000
        assert transport.traffic.requests <= 1 + 2 * 12
