"""Bytes kept under their own digest: pristine files and patch texts that later commands need without a network."""

from pathlib import Path

from provisioner.digests import Digest, digest_of
from provisioner.records import dataclass
from provisioner.transaction.folders import read_file, write_whole


@dataclass(frozen=True, kw_only=True)
class ObjectStore:
    """Files named by their SHA-256, at a canonical path. What does not match its name is treated as absent."""

    folder: Path

    def get(self, digest: Digest) -> bytes | None:
        """The bytes with this digest, or None."""
        try:
            data = read_file(self.folder / digest)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return data if digest_of(data) == digest else None

    def put(self, data: bytes) -> Digest:
        """Keep ``data``; its digest."""
        digest = digest_of(data)
        if self.get(digest) is None:
            write_whole(self.folder / digest, data)
        return digest
