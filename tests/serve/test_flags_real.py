"""Our reading of arguments against vLLM's own parser, taken from the real 0.27.1 wheel."""

import json
import logging
import os
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from provisioner.index.settings import read_settings
from provisioner.index.source import candidates, open_wheel, parse_spec
from provisioner.index.transport import Transport
from provisioner.serve import flags
from provisioner.serve.flags import Origin, parse_arguments
from provisioner.wheels.names import Target, choose

pytestmark = pytest.mark.network
PARSER = "vllm/utils/argparse_utils.py"
NUMBERS = ("--max-num-batched-tokens", "--max-num-scheduled-tokens", "--max-model-len", "--prefix-match-unit")
TEXTS = ("--kv-cache-dtype", "--mamba-ssm-cache-dtype")
SWITCHES = ("--enable-prefix-caching", "--async-scheduling")
BASE = '--speculative-config {"method":"mtp","num_speculative_tokens":3}'


@pytest.fixture(scope="module")
def parser_module(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """vLLM's module with stand-ins for what it imports beside argparse."""
    settings = read_settings(os.environ, Path.home(), cache=tmp_path_factory.mktemp("cache"))
    with Transport(settings) as transport:
        found = candidates(parse_spec("pypi:0.27.1"), settings, transport=transport)
        source = open_wheel(choose(found, Target()).chosen, settings, transport=transport).read(PARSER)
    logger = types.ModuleType("vllm.logger")
    quiet = logging.getLogger("quiet")
    quiet.warning_once = quiet.warning  # type: ignore[attr-defined]
    logger.init_logger = lambda name: quiet  # type: ignore[attr-defined]
    stubs = {"regex": re, "yaml": types.ModuleType("yaml"), "vllm": types.ModuleType("vllm"), "vllm.logger": logger}
    module = types.ModuleType("argparse_utils")
    before = {name: sys.modules.get(name) for name in stubs}
    sys.modules.update(stubs)
    try:
        exec(compile(source, PARSER, "exec"), module.__dict__)
    finally:
        for name, old in before.items():
            if old is None:
                del sys.modules[name]
            else:
                sys.modules[name] = old
    return module


def parse_as_vllm(module: Any, words: list[str]) -> dict[str, Any]:
    import argparse

    parser = module.FlexibleArgumentParser()
    for name in NUMBERS:
        parser.add_argument(name, type=module.human_readable_int)
    for name in TEXTS:
        parser.add_argument(name)
    for name in SWITCHES:
        parser.add_argument(name, action=argparse.BooleanOptionalAction)
    parser.add_argument("--speculative-config", "-sc", type=json.loads)
    return vars(parser.parse_args(words))


def parse_as_we(words: list[str]) -> dict[str, Any]:
    settings = flags.override((), parse_arguments(words, origin=Origin.EXTRA).settings)
    result: dict[str, Any] = {}
    for setting in settings:
        value: Any
        if setting.name in NUMBERS:
            value = flags.integer_of(setting)
        elif setting.name in SWITCHES:
            value = flags.is_on(settings, setting.name)
        elif setting.name in TEXTS:
            value = setting.value
        else:
            value = flags.object_of(setting)
        result[setting.name.removeprefix("--").replace("-", "_")] = value
    return result


@pytest.mark.parametrize(
    "line",
    [
        "--max-num-batched-tokens 32000",
        "--max-num-batched-tokens=32k",
        "--max_num_batched_tokens 32K",
        "--max_num_scheduled_tokens=8192 --max-num-scheduled-tokens 4096",
        "--max-num-b 9000",
        "--prefix-match 512",
        "--prefix_match_unit=512",
        "--enable-prefix-caching",
        "--enable_prefix_caching --no-enable-prefix-caching",
        "--no-async-scheduling",
        "--no_async_scheduling",
        "--kv-cache-dtype fp8_e4m3 --mamba-ssm-cache-dtype=fp8",
        BASE,
        BASE.replace("--speculative-config", "-sc"),
        "--speculative-config.num_speculative_tokens 7",
        "-sc.num_speculative_tokens 7",
        "--speculative-config.method=mtp --speculative-config.num_speculative_tokens=1k",
        "--speculative_config.inner.part 2",
        "--speculative-config.list+ a,b",
        "--max-model-len 1.5k --enable-prefix-caching --max-num-batched-tokens 8192",
    ],
)
def test_both_read_the_same(parser_module, line):
    theirs = {name: value for name, value in parse_as_vllm(parser_module, line.split()).items() if value is not None}
    assert parse_as_we(line.split()) == theirs


def test_a_dotted_part_keeps_what_vllm_would_drop(parser_module):
    """The one place where we differ, on purpose: the words that we hand on are whole."""
    line = f"{BASE} --speculative-config.num_speculative_tokens 7".split()
    settings = flags.override((), parse_arguments(line, origin=Origin.EXTRA).settings)
    assert parse_as_vllm(parser_module, line)["speculative_config"] == {"num_speculative_tokens": 7}
    handed_on = parse_as_vllm(parser_module, list(flags.to_words(settings)))
    assert handed_on["speculative_config"] == {"method": "mtp", "num_speculative_tokens": 7}
