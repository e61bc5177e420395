import pytest

from provisioner.digests import digest_of, digest_to_record
from provisioner.errors import InvalidInputError
from provisioner.wheels.record import parse_record

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
