"""One thing has no s."""

import re
from pathlib import Path

import pytest

import provisioner
from provisioner.counts import count_text


@pytest.mark.parametrize(
    ("number", "words", "text"),
    [
        (0, ("file",), "0 files"),
        (1, ("file",), "1 file"),
        (2, ("file",), "2 files"),
        (1, ("patch is", "patches are"), "1 patch is"),
        (3, ("patch is", "patches are"), "3 patches are"),
    ],
)
def test_a_number_and_its_noun_agree(number, words, text):
    assert count_text(number, *words) == text


COUNTED = re.compile(
    r"\{(?:len\([^{}]*\)|[^{}]*count[^{}(]*)\} "
    r"(?:\w+ )?(?:files|hunks|builds|findings|checks|patches|packages|wheels|cases|requests|points|drifts|lines)\b"
)


def test_no_text_counts_without_the_helper():
    assert COUNTED.search('f"{len(files)} files"')
    folder = Path(provisioner.__file__).parent
    found = [
        f"{path.relative_to(folder)}: {match.group()}"
        for path in sorted(folder.rglob("*.py"))
        for match in COUNTED.finditer(path.read_text(encoding="utf-8"))
    ]
    # "K of N lines agree" counts the K, and N is more than one there.
    assert [text for text in found if not text.startswith("drift/explain.py")] == []
