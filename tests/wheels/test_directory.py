"""The directory against zipfile, which is right but slow."""

import io
import zipfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from provisioner.wheels.directory import BeforeTailError, Directory, read_directory
from provisioner.wheels.zipped import unpack_member

PATHS = st.from_regex(r"[ab._é]{1,4}(/[ab._é]{1,4}){0,2}", fullmatch=True)
TREES = st.dictionaries(PATHS, st.tuples(st.binary(max_size=60), st.booleans()), max_size=8)


def archive(tree: dict[str, tuple[bytes, bool]], *, comment: bytes = b"", extra: bytes = b"") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as target:
        for name, (data, deflated) in tree.items():
            info = zipfile.ZipInfo(name)
            info.compress_type = zipfile.ZIP_DEFLATED if deflated else zipfile.ZIP_STORED
            info.extra = extra
            target.writestr(info, data)
        target.comment = comment
    return buffer.getvalue()


def check_against_zipfile(data: bytes, directory: Directory) -> None:
    with zipfile.ZipFile(io.BytesIO(data)) as known:
        infos = [info for info in known.infolist() if not info.is_dir()]
        assert list(directory.names()) == [info.filename for info in infos]
        for info in infos:
            member = directory.member(info.filename)
            assert member is not None
            assert (member.start, member.packed, member.size, member.crc, member.method) == (
                info.header_offset,
                info.compress_size,
                info.file_size,
                info.CRC,
                info.compress_type,
            )
            raw = data[member.start : member.stop]
            assert unpack_member(info.filename, member, raw, where="here") == known.read(info)


@settings(max_examples=40)
@given(TREES, st.binary(max_size=30).filter(lambda comment: b"PK" not in comment))
def test_it_tells_what_zipfile_tells(tree: dict[str, tuple[bytes, bool]], comment: bytes) -> None:
    data = archive(tree, comment=comment)
    directory = read_directory(len(data), data)
    check_against_zipfile(data, directory)
    assert read_directory(len(data), data[directory.start :]) == directory
    assert directory.member("not there") is None


@settings(max_examples=40)
@given(TREES.filter(bool))
def test_large_archives(tree: dict[str, tuple[bytes, bool]]) -> None:
    stored = {name: (data, False) for name, (data, _) in tree.items()}
    limit, zipfile.ZIP64_LIMIT = zipfile.ZIP64_LIMIT, 20  # every number over it is written the large way
    try:
        data = archive(stored)
    finally:
        zipfile.ZIP64_LIMIT = limit
    check_against_zipfile(data, read_directory(len(data), data))


def test_extra_fields_are_passed_over() -> None:
    tree = {name: (name.encode() * 9, True) for name in ("a/b.py", "b.py", "a/b.pyi", "z/a/b.py")}
    data = archive(tree, extra=b"\x99\x99\x04\x00b.py")
    check_against_zipfile(data, read_directory(len(data), data))


def test_what_lies_before_the_tail_is_told() -> None:
    data = archive({f"{number}.py": (b"x", False) for number in range(40)})
    start = read_directory(len(data), data).start
    with pytest.raises(BeforeTailError) as caught:
        read_directory(len(data), data[start + 1 :])
    assert caught.value.place == start


DATA = archive({"a.py": (b"one", True), "b.py": (b"two", True)})
END = DATA.index(b"PK\x05\x06")


def changed(place: int, *values: int) -> bytes:
    return DATA[:place] + bytes(values) + DATA[place + len(values) :]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no end of a directory"),
        (DATA[:-1], "no end of a directory"),
        (DATA + b"x", "bytes behind the end"),
        (b"glued" + DATA, "the directory does not end where it should"),
        (changed(END + 4, 1), "an archive split over disks"),
        (changed(END + 10, 3), "not the number of entries"),
        (changed(END + 10, 255, 255), "no large end record"),
        (changed(DATA.index(b"PK\x01\x02"), 0), "a broken entry"),
    ],
)
def test_what_is_no_whole_archive(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_directory(len(data), data)


def test_an_encrypted_member_is_refused() -> None:
    data = changed(DATA.index(b"PK\x01\x02") + 8, 1)
    with pytest.raises(ValueError, match="an encrypted member"):
        read_directory(len(data), data).member("a.py")
