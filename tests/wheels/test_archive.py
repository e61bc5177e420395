"""Archives as bytes, read by zipfile, which is not ours."""

import io
import zipfile
import zlib
from pathlib import Path

from provisioner.wheels.archive import PackedMember, print_directory, print_local_header
from provisioner.wheels.directory import read_directory

GIB = 1 << 30


def stored(path: str, data: bytes, *, mode: int = 0o100644) -> PackedMember:
    return PackedMember(
        path=path, packed=len(data), size=len(data), crc=zlib.crc32(data), method=zipfile.ZIP_STORED, mode=mode
    )


def archive(members: dict[str, bytes]) -> bytes:
    out, entries = b"", []
    for path, data in members.items():
        member = stored(path, data)
        entries.append((member, len(out)))
        out += print_local_header(member) + data
    return out + print_directory(entries)


def test_zipfile_reads_names_data_and_modes() -> None:
    program = stored("run.sh", b"#!/bin/sh\n", mode=0o100755)
    data = print_local_header(program) + b"#!/bin/sh\n"
    with zipfile.ZipFile(io.BytesIO(data + print_directory([(program, 0)]))) as found:
        assert found.testzip() is None
        info = found.getinfo("run.sh")
        assert (info.external_attr >> 16, info.create_system, info.date_time) == (0o100755, 3, (1980, 1, 1, 0, 0, 0))
        assert found.read("run.sh") == b"#!/bin/sh\n"


def test_names_beyond_ascii_are_marked_as_utf8() -> None:
    with zipfile.ZipFile(io.BytesIO(archive({"größe.py": b"x", "plain.py": b"y"}))) as found:
        assert found.namelist() == ["größe.py", "plain.py"]
        assert found.read("größe.py") == b"x"


def test_more_members_than_sixteen_bits_can_count() -> None:
    count = 66_000
    members = [(stored(f"m{number}", b""), 0) for number in range(count)]
    local, entries, place = [], [], 0
    for member, _ in members:
        header = print_local_header(member)
        entries.append((member, place))
        local.append(header)
        place += len(header)
    data = b"".join(local) + print_directory(entries)
    with zipfile.ZipFile(io.BytesIO(data)) as found:
        assert len(found.namelist()) == count
    assert len(read_directory(len(data), data).names()) == count


def test_members_behind_four_gigabytes_and_larger_than_that(tmp_path: Path) -> None:
    """A sparse file: the large member is a hole, whose directory entry is what counts."""
    large = PackedMember(path="large", packed=5 * GIB, size=5 * GIB, crc=0, method=zipfile.ZIP_STORED, mode=0o100644)
    small = stored("small", b"behind it")
    path = tmp_path / "large.zip"
    with path.open("wb") as stream:
        stream.write(print_local_header(large))
        place = stream.seek(5 * GIB, io.SEEK_CUR)
        stream.write(print_local_header(small) + b"behind it" + print_directory([(large, 0), (small, place)]))
    with zipfile.ZipFile(path) as found:
        assert found.getinfo("large").file_size == 5 * GIB
        assert found.getinfo("small").header_offset == place > 5 * GIB
        assert found.read("small") == b"behind it"
        with found.open("large") as stream:
            assert stream.read(8) == bytes(8)  # its local header is understood, too
    size = path.stat().st_size
    with path.open("rb") as stream:
        stream.seek(place)
        directory = read_directory(size, stream.read())
    assert directory.members()["large"].packed == 5 * GIB
    assert directory.members()["small"].start == place
