from dataclasses import replace

import pytest

from provisioner.documents.recipe import CommitBuild, PatchPolicy, ReleaseBuild, parse_recipe
from provisioner.errors import InvalidRecipeError
from provisioner.resources import recipe_names, recipes_folder

MINIMAL = """
schema = 1
title = "T"
[build]
release = "1.0"
"""


def parse(text: str, name: str = "mine"):
    return parse_recipe(text, name=name, where="mine.toml")


def test_built_in_recipes_parse():
    recipes = {name: parse((recipes_folder() / f"{name}.toml").read_text(), name) for name in recipe_names()}
    assert set(recipes) == {"hynix", "hynix-stable", "samsung"}
    assert isinstance(recipes["hynix"].build, CommitBuild)
    assert recipes["hynix"].build.commit == "1fe3a1571ac67581478a11743e55a306de1d136f"
    assert isinstance(recipes["hynix-stable"].build, ReleaseBuild)
    assert {use.id: use.policy for use in recipes["samsung"].patches} == {
        "pr50021-gdn-spec-bounds": PatchPolicy.REQUIRED,
        "sm80-cpu-repack": PatchPolicy.REQUIRED,
    }
    assert all(flag.why for recipe in recipes.values() if recipe.serve for flag in recipe.serve.flags)


def test_a_byte_order_mark_is_passed_over():
    plain, marked = parse(MINIMAL), parse("\ufeff" + MINIMAL)
    assert replace(marked, digest=plain.digest) == plain


def test_defaults_of_a_minimal_recipe():
    recipe = parse(MINIMAL)
    assert recipe.distribution == "vllm"
    assert recipe.python.preferred == "3.12"
    assert recipe.patches == ()
    assert recipe.serve is None


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("schema = 1", "mine.toml: title", "a required key is missing"),
        ("schema = 2", "mine.toml: schema", "unknown recipe schema"),
        ("schema = ", "mine.toml", "not TOML: Invalid value (at end of document)"),
        (MINIMAL + "comit = 'x'", "mine.toml: build.comit", "unknown key 'comit'"),
        (MINIMAL.replace('"1.0"', '"one"'), "mine.toml: build.release", "not a version"),
        (MINIMAL.replace('"1.0"', "1"), "mine.toml: build.release", "a value of the wrong type"),
        (
            MINIMAL.replace('release = "1.0"', 'version = "1.0"\ncommit = "abc"'),
            "mine.toml: build.commit",
            "a commit is given in full",
        ),
        (MINIMAL + "[[patch]]\nid = 'a'\npolicy = 'maybe'\nwhy = 'w'", "mine.toml: patch[0].policy", "unknown policy"),
        (
            MINIMAL + "[[patch]]\nid='a'\npolicy='required'\nwhy='w'\n" * 2,
            "mine.toml: patch",
            "patch 'a' stands twice",
        ),
        (MINIMAL + "[serve]\nport = 70000", "mine.toml: serve.port", "not a port"),
        (
            MINIMAL + "[serve]\nport = 1\nlauncher = 'fork'",
            "mine.toml: serve.launcher",
            "the launcher is the fork's, and no fork is named",
        ),
        (
            MINIMAL + "[serve]\nport = 1\n[[serve.flag]]\nname = 'x'\nwhy = 'w'",
            "mine.toml: serve.flag[0].name",
            "a flag begins with two hyphens",
        ),
        (MINIMAL + "[drift]\nconflict = 'explode'", "mine.toml: drift.conflict", "unknown response"),
        (
            MINIMAL + "[python]\npreferred = '3.9'",
            "mine.toml: python.preferred",
            "the preferred Python is not a supported one",
        ),
    ],
)
def test_refusals_carry_an_address(text, where, what):
    with pytest.raises(InvalidRecipeError) as caught:
        parse(text)
    assert (caught.value.where, caught.value.what) == (where, what)


def test_an_unknown_key_names_the_nearest_known_one():
    with pytest.raises(InvalidRecipeError) as caught:
        parse(MINIMAL.replace('title = "T"', 'title = "T"\nsumary = "s"'))
    assert caught.value.hints == ("did you mean 'summary'?",)


def test_a_name_that_could_not_be_a_command_is_refused():
    with pytest.raises(InvalidRecipeError):
        parse(MINIMAL, name="../x")
