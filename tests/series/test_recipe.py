import pytest
from packaging.version import Version

from provisioner.documents.recipe import parse_recipe
from provisioner.errors import InvalidRecipeError
from provisioner.resources import patches_folder, recipes_folder
from provisioner.series.recipe import OpenStore, nearest_variant, open_series
from provisioner.series.store import open_stored_patch


def test_a_store_reads_each_text_once() -> None:
    text = (recipes_folder() / "samsung.toml").read_text(encoding="utf-8")
    recipe = parse_recipe(text, name="samsung", where="samsung.toml")
    store = OpenStore(patches_folder())
    first, second, other = (store.series_of(recipe, Version(text)) for text in ("0.27.0", "0.27.1", "0.30.0"))
    assert [id(item) for item in first.texts] == [id(item) for item in second.texts]
    assert first == open_series(recipe, Version("0.27.1"))
    assert other == open_series(recipe, Version("0.30.0")) != first


@pytest.mark.parametrize(
    ("version", "file"),
    [
        ("0.24.0", "0.25.patch"),
        ("0.26.0", "0.26.patch"),
        ("0.26.1rc1.dev1024+g1fe3a1571", "0.27.patch"),
        ("0.29.1rc1.dev7+g1fe3a1571", "0.28.patch"),
        ("0.33.1rc1.dev7+g1fe3a1571", "0.30.patch"),
        ("0.40.0", "0.30.patch"),
    ],
)
def test_a_build_of_main_takes_the_text_of_the_release_that_it_leads_to(version: str, file: str) -> None:
    patch = open_stored_patch(patches_folder(), "pr50021-gdn-spec-bounds")
    assert nearest_variant(patch, Version(version)).file == file


def test_an_unknown_patch_in_a_recipe_is_the_recipes_fault() -> None:
    text = (recipes_folder() / "hynix-stable.toml").read_text(encoding="utf-8")
    known = parse_recipe(text, name="hynix-stable", where="hynix-stable.toml").patches[0].id
    recipe = parse_recipe(text.replace(known, f"{known}x"), name="hynix-stable", where="hynix-stable.toml")
    with pytest.raises(InvalidRecipeError, match=f"no patch is called '{known}x'") as caught:
        open_series(recipe, Version("0.27.1"))
    assert (caught.value.exit_code, caught.value.where) == (3, "hynix-stable.toml: patches")
    assert caught.value.hints == (f"did you mean {known!r}?", "provision patches")
