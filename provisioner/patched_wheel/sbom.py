"""What was done to a wheel, as a CycloneDX document in it (PEP 770). Pure.

The document has neither a time nor a random number, so that equal wheels have equal ones.
"""

import base64
import json
import uuid
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from provisioner import __version__
from provisioner.digests import Digest
from provisioner.documents.patched_wheel import PatchedWheel
from provisioner.documents.receipt import AppliedPatch
from provisioner.errors import InvalidReceiptError
from provisioner.loading import load_json
from provisioner.records import dataclass

SBOM_NAME = "sboms/provision.cdx.json"
"""In the dist-info folder."""
_PATCH = "provision:patch:"
_SHIPPED = "provision:shipped"


@dataclass(frozen=True, kw_only=True)
class Named:
    """A distribution and the version that the document is about."""

    distribution: str
    version: str


@dataclass(frozen=True, kw_only=True)
class Bill:
    """What a document says: the text of each patch by its id, and the digest of each file as patched."""

    texts: Mapping[str, bytes]
    files: Mapping[str, Digest]


def print_sbom(
    named: Named, wheel: PatchedWheel, texts: Mapping[str, bytes], upstream: Mapping[str, str | None]
) -> str:
    """CycloneDX 1.6: the patched distribution, with its pedigree, and each file that differs.

    ``texts`` has the text of each patch by its id, ``upstream`` the address of the same change where one is known.
    """
    component = {
        **_component(named),
        "pedigree": {
            "ancestors": [
                {**_component(Named(distribution=named.distribution, version=wheel.origin.version)),
                 "bom-ref": "origin", "hashes": _hashes(wheel.origin.sha256)}
            ],
            "patches": [_describe_patch(patch, texts[patch.id], upstream.get(patch.id)) for patch in wheel.patches],
        },
        "components": [
            _describe_file(file.path, file.before, file.after) for file in wheel.files if file.after
        ],
        "properties": [{"name": f"{_PATCH}{patch.id}", "value": f"sha256:{patch.text}"} for patch in wheel.patches],
    }  # fmt: skip
    document = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, f'{named.distribution} {wheel.series}')}",
        "version": 1,
        "metadata": {
            "tools": {"components": [{"type": "application", "name": "provisioner", "version": __version__}]},
            "component": component,
        },
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def parse_sbom(text: str, *, where: str) -> Bill:
    """What :func:`print_sbom` wrote. Raises InvalidReceiptError for a document of another form."""
    try:
        component = load_json(text)["metadata"]["component"]
        patches = component["pedigree"]["patches"]
        return Bill(
            texts={patch["resolves"][0]["id"]: _read_text(patch["diff"]["text"]) for patch in patches},
            files={file["name"]: file["hashes"][0]["content"] for file in component["components"]},
        )
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise InvalidReceiptError("the SBOM is not one that provision writes", where=where) from error


def _component(named: Named) -> dict[str, Any]:
    return {
        "type": "library",
        "bom-ref": "wheel",
        "name": named.distribution,
        "version": named.version,
        "purl": f"pkg:pypi/{named.distribution}@{quote(named.version, safe='')}",
    }


def _describe_patch(patch: AppliedPatch, text: bytes, upstream: str | None) -> dict[str, Any]:
    issue: dict[str, Any] = {"type": "defect", "id": patch.id}
    if upstream:
        issue |= {"source": {"name": "upstream", "url": upstream}, "references": [upstream]}
    return {"type": "unofficial", "diff": {"text": _describe_text(text)}, "resolves": [issue]}


def _describe_text(text: bytes) -> dict[str, str]:
    try:
        return {"contentType": "text/x-diff", "content": text.decode("utf-8")}
    except UnicodeDecodeError:
        content = base64.b64encode(text).decode("ascii")
        return {"contentType": "text/x-diff", "encoding": "base64", "content": content}


def _read_text(text: Mapping[str, str]) -> bytes:
    return base64.b64decode(text["content"]) if text.get("encoding") == "base64" else text["content"].encode()


def _describe_file(path: str, before: Digest | None, after: Digest) -> dict[str, Any]:
    shipped = f"sha256:{before}" if before else "none"
    return {
        "type": "file",
        "bom-ref": f"file:{path}",
        "name": path,
        "hashes": _hashes(after),
        "properties": [{"name": _SHIPPED, "value": shipped}],
    }


def _hashes(digest: Digest) -> list[dict[str, str]]:
    return [{"alg": "SHA-256", "content": digest}]
