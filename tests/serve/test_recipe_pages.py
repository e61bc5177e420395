"""The recipe pages say what the recipes are."""

import re

import pytest

from provisioner.doctor.logs import SYMPTOMS
from provisioner.documents.recipe import CommitBuild, ReleaseBuild
from provisioner.resources import recipe_names
from tests.support.recipe_pages import PAGES, fill, load_recipe


@pytest.mark.parametrize("name", recipe_names())
def test_the_tables_are_those_of_the_recipe(name):
    page = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    assert "<!-- generated: serve -->" in page
    assert fill(page, load_recipe(name)) == page, "run: python -m tests.support.recipe_pages"


def test_an_old_table_is_noticed():
    page = (PAGES / "hynix.md").read_text(encoding="utf-8")
    spoilt = page.replace("`--prefix-match-unit 400`", "`--prefix-match-unit 512`")
    assert spoilt != page
    assert fill(spoilt, load_recipe("hynix")) == page


@pytest.mark.parametrize("name", recipe_names())
def test_the_pages_name_the_pinned_build_and_the_overview_every_page(name):
    recipe, page = load_recipe(name), (PAGES / f"{name}.md").read_text(encoding="utf-8")
    match recipe.build:
        case CommitBuild(commit=commit):
            assert commit in page
        case ReleaseBuild(version=version):
            assert str(version) in page
    if recipe.fork is not None:
        assert recipe.fork.commit in page
        assert recipe.fork.url in page
    assert f"[{name}.md]({name}.md)" in (PAGES / "README.md").read_text(encoding="utf-8")
    assert recipe.serve is not None
    assert f"| {recipe.serve.port} |" in (PAGES / "README.md").read_text(encoding="utf-8")


def test_links_between_the_pages_lead_somewhere():
    for path in PAGES.glob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_the_troubleshooting_table_and_doctor_know_the_same():
    text = (PAGES / "README.md").read_text(encoding="utf-8")
    assert {"working-directory", "gdn-patch", "load-fault", "weights-memory"} <= {symptom.id for symptom in SYMPTOMS}
    for words in ("failed to be inspected", "causal_conv1d", "Xid 31", "Xid 79", "wedged", "hit rate"):
        assert words in text
