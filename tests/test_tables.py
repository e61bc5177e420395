"""Texts that cannot be read are refused by the error that each reader has for them, however they are broken."""

import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from provisioner.documents.bundle_manifest import parse_manifest
from provisioner.documents.lock import parse_lock
from provisioner.documents.owner import FILE_NAME as OWNER_FILE
from provisioner.documents.receipt import FILE_NAME
from provisioner.documents.recipe import parse_recipe
from provisioner.environment.state import read_owner, read_receipt
from provisioner.errors import InvalidInputError, InvalidRecipeError
from provisioner.loading import load_json, load_toml
from provisioner.tables import Table
from provisioner.transaction.lockfile import LOCK_NAME, read_holder

DEEP = "[" * 200_000


def test_what_can_be_read_is_read() -> None:
    assert load_json(b'{"a": [1]}') == load_toml("a = [1]") == {"a": [1]}


def test_nesting_without_end_is_an_error_like_any_other() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        load_json(DEEP)
    with pytest.raises(tomllib.TOMLDecodeError, match="nested too deeply"):
        load_toml(f"a = {DEEP}")


@pytest.mark.parametrize("text", [DEEP, "[1]", "3"])
@pytest.mark.parametrize(("name", "read"), [(OWNER_FILE, read_owner), (FILE_NAME, read_receipt)])
def test_state_that_is_broken_is_named(tmp_path: Path, name: str, read: Callable[[Path], object], text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InvalidInputError) as caught:
        read(tmp_path)
    assert caught.value.where == str(tmp_path / name)


def test_a_lock_file_that_is_broken_names_nobody(tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).write_text(DEEP)
    assert read_holder(tmp_path) is None


def test_recipes_locks_and_bundles_are_refused_alike() -> None:
    with pytest.raises(InvalidInputError, match="nested too deeply"):
        parse_recipe(f"a = {DEEP}", name="a", where="a.toml")
    with pytest.raises(InvalidInputError, match="nested too deeply"):
        parse_lock(f"a = {DEEP}", "", where="a.toml")
    with pytest.raises(InvalidInputError, match="nested too deeply"):
        parse_manifest(DEEP, where="bundle.json")


def test_a_required_key_that_is_misspelt_is_named() -> None:
    table = Table({"titel": "A title"}, where="x.toml", error=InvalidRecipeError)
    with pytest.raises(InvalidRecipeError, match="title: a required key is missing") as caught:
        table.take("title", str)
    assert caught.value.hints == ("'titel' stands there; did you mean 'title'?",)


def test_a_missing_key_that_nothing_is_like_has_no_hint() -> None:
    table = Table({"zzz": 1}, where="x.toml", error=InvalidRecipeError)
    with pytest.raises(InvalidRecipeError) as caught:
        table.take("title", str)
    assert caught.value.hints == ()
