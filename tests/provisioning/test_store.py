from packaging.version import Version

from provisioner.provisioning.store import OpenStore, open_series
from provisioner.recipe import parse_recipe
from provisioner.resources import patches_folder, recipes_folder


def test_a_store_reads_each_text_once() -> None:
    text = (recipes_folder() / "samsung.toml").read_text(encoding="utf-8")
    recipe = parse_recipe(text, name="samsung", where="samsung.toml")
    store = OpenStore(patches_folder())
    first, second, other = (store.series_of(recipe, Version(text)) for text in ("0.27.0", "0.27.1", "0.30.0"))
    assert [id(item) for item in first.patches] == [id(item) for item in second.patches]
    assert first == open_series(recipe, Version("0.27.1"))
    assert other == open_series(recipe, Version("0.30.0")) != first
