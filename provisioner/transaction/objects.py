"""Bytes kept under their own digest: pristine files and patch texts that later commands need without a network."""

from pathlib import Path

from provisioner.digests import Digest, digest_of
from provisioner.files import write_whole
from provisioner.records import dataclass


@dataclass(frozen=True, kw_only=True)
class ObjectStore:
    """A folder of files named by their SHA-256. What does not match its name is treated as absent."""

    folder: Path

    def get(self, digest: Digest) -> bytes | None:
        """The bytes with this digest, or None."""
        try:
            data = (self.folder / digest).read_bytes()
        except FileNotFoundError:
            return None
        return data if digest_of(data) == digest else None

    def put(self, data: bytes) -> Digest:
        """Keep ``data``; its digest."""
        digest = digest_of(data)
        if self.get(digest) is None:
            write_whole(self.folder / digest, data)
        return digest
