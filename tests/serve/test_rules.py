"""Known-bad combinations: each is found in every form, and what is right is left alone."""

import pytest
from packaging.version import Version

from provisioner.documents.recipe import parse_recipe
from provisioner.resources import recipe_names, recipes_folder
from provisioner.serve import flags, rules
from provisioner.serve.findings import Severity
from provisioner.serve.flags import Origin, parse_arguments
from provisioner.serve.rules import Situation, judge

TRIO = "--enable-prefix-caching --async-scheduling --max-num-batched-tokens 8192 --max-num-scheduled-tokens 8192"


def judge_words(words: str, **situation):
    settings = flags.override((), parse_arguments(words.split(), origin=Origin.EXTRA).settings)
    situation.setdefault("environment", {})
    return {finding.id: finding for finding in judge(Situation(settings=settings, **situation))}


@pytest.mark.parametrize(
    ("words", "id_"),
    [
        ("--max-num-batched-tokens 8193", "batched-tokens"),
        ("--max_num_scheduled_tokens=32k", "batched-tokens"),
        ("--prefix-match-unit 512", "prefix-match-unit"),
        ("--prefix-match-unit 0", "prefix-match-unit"),
        ("--prefix-match-unit few", "prefix-match-unit"),
        ("--enable-prefix-caching", "prefix-trio"),
        (TRIO + " --no-async-scheduling", "prefix-trio"),
        ("--enable-prefix-caching --async-scheduling --max-num-batched-tokens 8192", "prefix-trio"),
        ("--speculative-config {mtp}", "json-argument"),
        ("--mamba-ssm-cache-dtype fp8_e4m3", "ssm-dtype"),
        ("--gpu-memory-utilization 1.2", "memory-utilization"),
        ("--gpu-memory-utilization 0", "memory-utilization"),
        ("--api-key abc", "key-in-arguments"),
        ("--api_k abc", "key-in-arguments"),
    ],
)
def test_what_is_known_to_fail_is_an_error(words, id_):
    assert judge_words(words)[id_].severity is Severity.ERROR


@pytest.mark.parametrize(
    ("words", "id_"),
    [
        ('--speculative-config {"method":"mtp","num_speculative_tokens":4}', "draft-tokens"),
        ("--max-num-batched-tokens auto", "batched-tokens"),
        (TRIO.replace("8192", "4096"), "prefix-trio"),
        (TRIO + " --no-enable-chunked-prefill", "chunked-prefill"),
        ("--gpu-memory-utilization 0.98", "memory-utilization"),
        ("--config server.yaml", "config-file"),
    ],
)
def test_what_costs_is_a_warning(words, id_):
    assert judge_words(words)[id_].severity is Severity.WARNING


@pytest.mark.parametrize(
    "words",
    [
        TRIO,
        "--prefix-match-unit 400",
        "--prefix-match-unit 1600",
        "--no-enable-prefix-caching",
        '--speculative-config {"method":"mtp","num_speculative_tokens":3}',
        '--speculative-config {"method":"dflash","num_speculative_tokens":7}',
        "--max-num-batched-tokens 8K",
        "--gpu-memory-utilization 0.96",
    ],
)
def test_what_is_right_is_left_alone(words):
    assert judge_words(words) == {}


@pytest.mark.parametrize(
    ("vendor", "allocator", "severity"),
    [
        ("samsung", "", Severity.ERROR),
        ("samsung", "expandable_segments:True", Severity.ERROR),
        ("samsung", "expandable_segments:False,expandable_segments:true", Severity.ERROR),
        ("samsung", "max_split_size_mb:64,expandable_segments:False", None),
        ("hynix", "", Severity.WARNING),
        ("hynix", "expandable_segments:True", None),
        (None, "", None),
    ],
)
def test_the_allocator_must_fit_the_card(vendor, allocator, severity):
    environment = {"PYTORCH_CUDA_ALLOC_CONF": allocator} if allocator else {}
    found = judge_words("", memory_vendor=vendor, environment=environment)
    assert (found["expandable-segments"].severity if found else None) == severity


MTP = '--speculative-config {"method":"mtp","num_speculative_tokens":3}'


@pytest.mark.parametrize(
    ("version", "patches", "refused"),
    [
        ("0.27.1", frozenset(), True),
        ("0.27.1", frozenset({rules.GDN_PATCH}), False),
        ("0.27.1", None, False),
        ("0.26.1rc1.dev1024+g1fe3a1571", frozenset(), False),
        ("0.32.0", frozenset(), False),
    ],
)
def test_speculation_on_0_27_needs_the_bounds_patch(version, patches, refused):
    found = judge_words(MTP, version=Version(version), patches=patches)
    assert ("gdn-patch" in found) is refused


@pytest.mark.parametrize("name", recipe_names())
def test_the_recipes_keep_the_rules(name):
    path = recipes_folder() / f"{name}.toml"
    recipe = parse_recipe(path.read_text(encoding="utf-8"), name=name, where=path.name)
    for serve in filter(None, (recipe.serve, recipe.serve_without_fork)):
        words = [word for flag in serve.flags for word in (flag.name, flag.value) if word is not None]
        found = judge(
            Situation(
                settings=parse_arguments(words, origin=Origin.RECIPE).settings,
                environment={variable.name: variable.value for variable in serve.variables},
                memory_vendor=recipe.card.memory_vendor if recipe.card else None,
            )
        )
        assert found == ()
