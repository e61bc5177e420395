import json
from dataclasses import replace

import pytest

from provisioner.documents.receipt import (
    AppliedPatch,
    InstalledBuild,
    PatchedFile,
    Receipt,
    parse_receipt,
    print_receipt,
)
from provisioner.errors import InvalidReceiptError

RECEIPT = Receipt(
    created="2026-11-30T00:00:00+00:00",
    tool="0.1.0",
    build=InstalledBuild(
        distribution="vllm", version="0.27.1", commit="6e448d0ea", variant=None, wheel="w.whl", wheel_sha256="a" * 64
    ),
    patches=(
        AppliedPatch(
            id="p1",
            source="0.27.patch",
            text="b" * 64,
            policy="required",
            verdict="applied",
            files=(
                PatchedFile(path="vllm/a.py", before="1" * 64, after="2" * 64),
                PatchedFile(path="vllm/new.py", before=None, after="3" * 64),
            ),
        ),
        AppliedPatch(
            id="p2",
            source="x.patch",
            text="c" * 64,
            policy="required",
            verdict="applied",
            files=(PatchedFile(path="vllm/a.py", before="2" * 64, after="4" * 64),),
        ),
    ),
    recipe="hynix-stable",
)


def test_print_then_parse_is_identity():
    assert parse_receipt(print_receipt(RECEIPT), where="r") == RECEIPT


def test_final_digests_are_the_last_patchs():
    assert RECEIPT.final_digests() == {"vllm/a.py": "4" * 64, "vllm/new.py": "3" * 64}
    assert RECEIPT.created_files() == ("vllm/new.py",)


def test_a_file_that_a_later_patch_deletes_was_not_created():
    gone = replace(RECEIPT.patches[1], files=(PatchedFile(path="vllm/new.py", before="3" * 64, after=None),), id="p3")
    assert replace(RECEIPT, patches=(*RECEIPT.patches, gone)).created_files() == ()


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"schema": "provision/receipt/9"}, "r: schema"),
        ({"surprise": 1}, "r: surprise"),
        ({"build": {}}, "r: build.distribution"),
        ({"patches": [{}]}, "r: patches[0].id"),
    ],
)
def test_what_is_not_understood_is_refused(change, where):
    values = json.loads(print_receipt(RECEIPT)) | change
    with pytest.raises(InvalidReceiptError) as caught:
        parse_receipt(json.dumps(values), where="r")
    assert caught.value.where == where


def test_text_that_is_not_json_is_refused():
    with pytest.raises(InvalidReceiptError):
        parse_receipt("{", where="r")
