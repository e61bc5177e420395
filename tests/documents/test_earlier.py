"""Files that earlier versions wrote are read, wholly: what is written again says the same."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from provisioner.documents.bundle_manifest import Manifest, parse_manifest
from provisioner.documents.codec import decode_json, encode_json
from provisioner.documents.owner import Owner
from provisioner.errors import InvalidReceiptError

EARLIER = Path(__file__).parent / "earlier"


def owner(text: str) -> Owner:
    return decode_json(text, Owner, where="x", error=InvalidReceiptError)


def manifest(text: str) -> Manifest:
    return parse_manifest(text, where="x")


@pytest.mark.parametrize(
    ("name", "read"), [("environment.json", owner), ("bundle.json", manifest), ("bundle-without-tool.json", manifest)]
)
def test_a_document_is_read_and_written_again(name: str, read: Callable[[str], Any]) -> None:
    text = (EARLIER / name).read_text(encoding="utf-8")
    assert json.loads(encode_json(read(text))) == json.loads(text)
