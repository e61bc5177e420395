import csv
import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from provisioner.digests import digest_of, digest_to_record
from provisioner.errors import InvalidInputError
from provisioner.wheels.record import Record, RecordEntry, parse_record

HASH = digest_to_record(digest_of(b"x"))
ROW = f"vllm/a.py,{digest_to_record(digest_of(b'a'))},1\n"


def test_rows_with_and_without_a_hash():
    record = parse_record(ROW + 'x.dist-info/RECORD,,\n"odd,name.py",,\n')
    assert record.digest("vllm/a.py") == digest_of(b"a")
    assert record.digest("x.dist-info/RECORD") is None
    assert "odd,name.py" in record
    assert record.digest("missing") is None
    assert len(record) == 3


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("a,b\n", "RECORD, row 1"),
        (ROW + "vllm/b.py,md5=zz,1\n", "RECORD, row 2"),
        ("vllm/b.py,,many\n", "RECORD, row 1"),
        (ROW + ROW.replace(",1", ",2"), "RECORD, row 2"),
    ],
)
def test_refusals_carry_the_row(text, where):
    with pytest.raises(InvalidInputError) as caught:
        parse_record(text)
    assert caught.value.where == where


def test_the_same_row_twice_is_one_row():
    assert len(parse_record(ROW + ROW)) == 1


PATHS = st.text(st.characters(codec="utf-8", exclude_characters="\r\n\x00"), min_size=1, max_size=20)


@settings(max_examples=60)
@given(st.dictionaries(PATHS, st.one_of(st.none(), st.binary(max_size=20)), max_size=8))
def test_what_is_written_is_read(files: dict[str, bytes | None]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for path, data in files.items():
        writer.writerow([path] + (["", ""] if data is None else [digest_to_record(digest_of(data)), len(data)]))
    record = parse_record(text.getvalue())
    assert len(record) == len(files)
    assert {entry.path: (entry.digest, entry.size) for entry in record} == {
        path: (None, None) if data is None else (digest_of(data), len(data)) for path, data in files.items()
    }
    assert all(path in record for path in files)
    assert record.digest("not there") is None


def test_quoted_paths_blank_rows_and_repeats() -> None:
    record = parse_record(f'"a,b.py",{HASH},1\r\n\r\na.py,{HASH},1\na.py,{HASH},1\n')
    assert list(record) == [RecordEntry(path=path, digest=digest_of(b"x"), size=1) for path in ("a,b.py", "a.py")]


@pytest.mark.parametrize(
    ("text", "what", "where"),
    [
        (f"a,{HASH},1\nb,{HASH}\n", "a row must have a path, a hash and a size", "RECORD, row 2"),
        ("a,md5=abc,1\n", "RECORD hash algorithm 'md5' is not sha256", "RECORD, row 1"),
        ("a,sha256=abc,1\n", "RECORD hash 'abc' is not a SHA-256", "RECORD, row 1"),
        (f"a,{HASH},many\n", "invalid literal for int() with base 10: 'many'", "RECORD, row 1"),
        (f"a,{HASH},1\na,{HASH},2\n", "a stands twice with different contents", "RECORD, row 2"),
    ],
)
def test_what_cannot_be_read(text: str, what: str, where: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        parse_record(text)
    assert (caught.value.what, caught.value.where) == (what, where)


def test_files_are_found_by_their_bytes() -> None:
    other = digest_to_record(digest_of(b"y"))
    record = parse_record(f'vllm/a.py,{HASH},1\n"vllm/a,b.py",{HASH},1\nvllm/c.py,{other},1\nvllm/d.py,,\n')
    assert record.paths_of(digest_of(b"x")) == ("vllm/a.py", "vllm/a,b.py")
    assert record.paths_of(digest_of(b"z")) == ()
    assert Record(entries=dict(record.entries)).paths_of(digest_of(b"y")) == ("vllm/c.py",)


def test_the_shipped_rows_have_the_same_digest_whatever_an_installer_adds():
    def text(*paths: str) -> str:
        return "".join(f"{path},{digest_to_record(digest_of(path.encode()))},1\n" for path in paths)

    shipped = parse_record(text("v/a.py", "v/RECORD", "v-1.dist-info/METADATA") + "v-1.dist-info/RECORD,,\n")
    rows = text("v-1.dist-info/METADATA", "v-1.dist-info/INSTALLER", "../../bin/v", "v/RECORD", "v/a.py")
    installed = parse_record(rows + "v-1.dist-info/RECORD,,\nv/__pycache__/a.pyc,,\n")
    assert installed.shipped_digest == shipped.shipped_digest
    assert Record(entries=dict(shipped.entries)).shipped_digest == shipped.shipped_digest
    for edited in ("v/a.py,,\n", text("v/b.py"), ""):
        other = parse_record(text("v/RECORD", "v-1.dist-info/METADATA") + edited)
        assert other.shipped_digest != shipped.shipped_digest
