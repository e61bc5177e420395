"""What a patched wheel is called. Pure."""

import re

from packaging.version import Version

from provisioner.digests import Digest
from provisioner.records import dataclass
from provisioner.wheels.names import parse_wheel_name

_SERIES_DIGITS = 8
_NO_LOCAL_TEXT = re.compile(r"[^a-z0-9]+")


def patched_version(version: Version, label: str, series: Digest) -> Version:
    """``version`` with a local part that names the series (PEP 440); a local part that it has stays in front.

    Written as packaging writes it: there a part of digits alone has no leading zeros.
    """
    words = _NO_LOCAL_TEXT.sub(".", label.lower()).strip(".")
    parts = (version.local, words, series[:_SERIES_DIGITS])
    return Version(f"{version.public}+{'.'.join(part for part in parts if part)}")


def patched_filename(filename: str, version: Version) -> str:
    """The origin's file name with another version; build number and tags stay. Raises InvalidInputError."""
    project, _, *rest = parse_wheel_name(filename).filename.split("-")
    return "-".join([project, str(version), *rest])


@dataclass(frozen=True, kw_only=True)
class Folders:
    """The two folders of a wheel that carry its version in their names."""

    dist_info: str
    data: str

    def moved(self, path: str, target: "Folders") -> str:
        """``path`` in the wheel that has ``target`` for its folders."""
        for old, new in ((self.dist_info, target.dist_info), (self.data, target.data)):
            if path.startswith(f"{old}/"):
                return new + path.removeprefix(old)
        return path


def folders_of(dist_info: str) -> Folders:
    """The folders of the wheel whose dist-info folder this is."""
    return Folders(dist_info=dist_info, data=dist_info.removesuffix(".dist-info") + ".data")


def patched_folders(dist_info: str, version: Version) -> Folders:
    """The folders of a wheel whose origin has ``dist_info``."""
    return folders_of(f"{dist_info.partition('-')[0]}-{version}.dist-info")
