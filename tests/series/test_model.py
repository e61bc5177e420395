"""Patches left out of a recipe's series, and what is said of those that are in each other's way."""

import pytest

from provisioner.documents.policy import LeftOut, Omission, PatchPolicy
from provisioner.errors import ConflictError, UsageError
from provisioner.patching.series import judge_series
from provisioner.series.model import (
    NamedPatch,
    Series,
    judge_by_policy,
    refuse_blocked,
    refuse_merged,
    require_left_out,
)
from tests.support.small import OPS, PRISTINE, change, facts_of, patch_of, series_of

ONE = change(PRISTINE, OPS, "load_4 = x + 4", "load_4 = x + 40")
SAME_LINE = change(PRISTINE, OPS, "load_4 = x + 4", "load_4 = x + 41")
PATCHES = series_of(patch_of("theirs", PRISTINE, ONE), patch_of("ours", PRISTINE, SAME_LINE))
SERIES = Series(patches=tuple(NamedPatch(patch=item, policy=PatchPolicy.REQUIRED) for item in PATCHES))


def test_a_patch_on_the_lines_of_an_earlier_one_names_it_and_the_way_out() -> None:
    verdict = judge_by_policy(SERIES, facts_of(PATCHES, PRISTINE), None)
    assert [patch.displaced_by for patch in verdict.patches] == [(), ("theirs",)]
    with pytest.raises(ConflictError) as caught:
        refuse_blocked(verdict, SERIES, where="venv")
    assert "theirs comes before it and changes these lines" in str(caught.value.found)
    assert caught.value.hints == ("run again with --without-patch theirs, which leaves it out",)


def test_a_conflict_with_the_build_itself_names_no_patch() -> None:
    elsewhere = change(PRISTINE, OPS, "load_4 = x + 4", "load_4 = x + 99")
    verdict = judge_series(PATCHES[1:], facts_of(PATCHES[1:], elsewhere, elsewhere))
    assert [patch.displaced_by for patch in verdict.patches] == [()]
    assert verdict.blocking


def test_what_is_left_out_is_remembered_and_left_out_again() -> None:
    asked = LeftOut(id="theirs", omission=Omission.ASKED)
    rest = SERIES.without([asked])
    assert rest.ids == ("ours",)
    assert rest.left_out == (asked,)
    assert SERIES.without(rest.left_out) == rest
    assert not judge_by_policy(rest, facts_of(PATCHES, PRISTINE), None).blocking


@pytest.mark.parametrize(
    ("omission", "said"),
    [
        (Omission.REPLACED, "theirs: replaced by ours"),
        (Omission.ASKED, "theirs: left out by --without-patch"),
        (Omission.NO_OVERLAY, "theirs: left out by --without-overlay"),
    ],
)
def test_each_reason_is_said(omission: Omission, said: str) -> None:
    assert str(LeftOut(id="theirs", omission=omission, by="ours")) == said


def test_leaving_out_what_is_not_there_is_refused() -> None:
    rest = SERIES.without([LeftOut(id=name, omission=Omission.ASKED) for name in ("theirs", "nobodys")])
    require_left_out(rest, ["theirs"])
    with pytest.raises(UsageError, match="no patch 'nobodys'") as caught:
        require_left_out(rest, ["theirs", "nobodys"])
    assert caught.value.expected == "ours, theirs"


def test_a_patch_that_the_build_has_is_refused_only_where_that_is_asked() -> None:
    patches = series_of(patch_of("merged", PRISTINE, ONE))
    series = Series(patches=tuple(NamedPatch(patch=item) for item in patches))
    verdict = judge_by_policy(series, facts_of(patches, ONE, ONE), None)
    refuse_blocked(verdict, series, where="venv")
    with pytest.raises(ConflictError, match="the build has some of the patches already"):
        refuse_merged(verdict, where="venv")
