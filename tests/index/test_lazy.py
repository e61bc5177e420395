import random
import zipfile
from pathlib import Path

import pytest

from provisioner.errors import CannotObtainError, HashMismatchError, InvalidWheelError
from provisioner.index.lazy import LocalWheel
from tests.support.wheels import wheel_bytes, wheel_filename, write_wheel

FILES = {
    "vllm/__init__.py": b"x = 1\n",
    "vllm/model.py": b"import torch\n" * 400,
    "vllm/odd,name.py": b"",
    "vllm/_C.so": random.Random(3).randbytes(300_000),
    "vllm/late.py": b"y = 2\n",
}


@pytest.mark.parametrize("compression", [zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED])
def test_members_of_a_file(tmp_path: Path, compression: int) -> None:
    path = write_wheel(tmp_path, wheel_bytes(FILES, version="0.27.1", compression=compression), "0.27.1")
    with LocalWheel(path) as wheel:
        assert wheel.filename == path.name
        assert set(wheel.names()) == {*FILES, *(f"vllm-0.27.1.dist-info/{n}" for n in ("METADATA", "WHEEL", "RECORD"))}
        assert dict(wheel.read_many(FILES)) == FILES
        assert wheel.read("vllm-0.27.1.dist-info/RECORD").decode() == wheel.record_text()
        assert wheel.metadata_text().startswith("Metadata-Version: 2.4\nName: vllm\nVersion: 0.27.1\n")
        assert len(wheel.record()) == len(FILES) + 3


def test_a_missing_member_is_a_key_error(tmp_path: Path) -> None:
    with (
        LocalWheel(write_wheel(tmp_path, wheel_bytes(FILES, version="1.0"), "1.0")) as wheel,
        pytest.raises(KeyError, match=r"vllm/no\.py"),
    ):
        wheel.read_many(["vllm/model.py", "vllm/no.py"])


def test_a_flipped_byte_of_a_member_is_found(tmp_path: Path) -> None:
    data = bytearray(wheel_bytes(FILES, version="1.0", compression=zipfile.ZIP_STORED))
    place = data.index(b"import torch")
    data[place] ^= 1
    with LocalWheel(write_wheel(tmp_path, bytes(data), "1.0")) as wheel:
        assert wheel.read("vllm/late.py") == b"y = 2\n"
        with pytest.raises(HashMismatchError, match=r"vllm/model\.py arrived broken"):
            wheel.read("vllm/model.py")


def test_a_member_that_is_not_what_record_says_is_found(tmp_path: Path) -> None:
    row = f"vllm/model.py,sha256={'A' * 43},5200"
    with LocalWheel(
        write_wheel(tmp_path, wheel_bytes(FILES, version="1.0", records={"vllm/model.py": row}), "1.0")
    ) as wheel:
        with pytest.raises(HashMismatchError, match=r"vllm/model\.py is not what RECORD says") as caught:
            wheel.read("vllm/model.py")
        assert caught.value.expected == f"sha256 {'0' * 64}"


def test_a_member_without_a_digest_is_not_trusted(tmp_path: Path) -> None:
    data = wheel_bytes(FILES, version="1.0", records={"vllm/model.py": "vllm/model.py,,"})
    with (
        LocalWheel(write_wheel(tmp_path, data, "1.0")) as wheel,
        pytest.raises(HashMismatchError, match="vouches for no digest"),
    ):
        wheel.read("vllm/model.py")


@pytest.mark.parametrize("data", [b"", b"not a zip", b"PK\x05\x06" + b"\xff" * 18])
def test_other_files_are_no_wheels(tmp_path: Path, data: bytes) -> None:
    with (
        LocalWheel(write_wheel(tmp_path, data, "1.0")) as wheel,
        pytest.raises(InvalidWheelError, match="not a whole wheel"),
    ):
        wheel.names()


def test_a_cut_wheel_is_no_whole_wheel(tmp_path: Path) -> None:
    data = wheel_bytes(FILES, version="1.0")
    with (
        LocalWheel(write_wheel(tmp_path, data[:-40], "1.0")) as wheel,
        pytest.raises(InvalidWheelError, match="not a whole wheel"),
    ):
        wheel.names()


def test_a_wheel_must_hold_its_own_dist_info(tmp_path: Path) -> None:
    path = write_wheel(tmp_path, wheel_bytes({}, version="1.0", project="other"), "1.0")
    with LocalWheel(path) as wheel, pytest.raises(InvalidWheelError, match="one dist-info folder of its own"):
        wheel.record()


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CannotObtainError, match="the wheel cannot be read"):
        LocalWheel(tmp_path / wheel_filename("1.0"))
