"""What the tool keeps inside an environment: whose it is, the receipt, and the bytes behind it."""

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from provisioner.digests import digest_of
from provisioner.documents.codec import decode_json, encode_json
from provisioner.documents.owner import FILE_NAME as OWNER_FILE
from provisioner.documents.owner import Owner
from provisioner.documents.patched_wheel import FACTS_NAME, PatchedWheel, parse_patched_wheel
from provisioner.documents.receipt import FILE_NAME, Receipt, parse_receipt, print_receipt
from provisioner.environment.site import STATE_FOLDER, Site
from provisioner.errors import InvalidReceiptError
from provisioner.transaction.folders import OBJECTS_NAME, look_at, make_state_folder, read_file, state_file, write_whole
from provisioner.transaction.interrupted import is_interrupted
from provisioner.transaction.objects import ObjectStore

if TYPE_CHECKING:
    from provisioner.transaction.transaction import Recovery


def read_patched_wheel(site: Site) -> PatchedWheel | None:
    """What the installed wheel says of patches in it; None where it is as shipped.

    Raises InvalidReceiptError for a file that is not understood, or is not the one that RECORD names.
    """
    path = site.dist_info / FACTS_NAME
    recorded = site.record.digest(f"{site.dist_info.name}/{FACTS_NAME}")
    if recorded is None:
        return None
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InvalidReceiptError(f"the wheel's facts cannot be read: {error}", where=str(path)) from error
    if digest_of(data) != recorded:
        raise InvalidReceiptError("the wheel's facts are not those that RECORD names", where=str(path))
    return parse_patched_wheel(data.decode("utf-8"), where=str(path))


def read_owner(state_dir: Path) -> Owner | None:
    """Whose environment this is; None where it is not ours.

    Raises InvalidReceiptError for a file that is not understood.
    """
    path = state_file(state_dir, OWNER_FILE)
    text = _read_text(path)
    return None if text is None else decode_json(text, Owner, where=str(path), error=InvalidReceiptError)


def write_owner(state_dir: Path, owner: Owner) -> None:
    """Mark the environment as ours."""
    write_whole(make_state_folder(state_dir) / OWNER_FILE, encode_json(owner).encode())


def has_receipt(state_dir: Path) -> bool:
    """Whether the environment was proven once."""
    return look_at(state_file(state_dir, FILE_NAME)) is not None


def read_receipt(state_dir: Path) -> Receipt | None:
    """The receipt, or None where there is none.

    Raises InvalidReceiptError for one that is not understood.
    """
    path = state_file(state_dir, FILE_NAME)
    text = _read_text(path)
    if text is None:
        return None
    try:
        return _parse_receipt(text, where=str(path))
    except InvalidReceiptError as error:
        error.hints += (f"files are judged by their bytes, not by the receipt: rm {path}",)
        raise


def _read_text(path: Path) -> str | None:
    """The text of a file of the state folder; None where there is none. Raises InvalidReceiptError."""
    try:
        return read_file(path).decode("utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidReceiptError(f"unreadable: {error}", where=str(path)) from error


# A command looks several times, since the file may change until the environment is held; its text is parsed once.
_parse_receipt = lru_cache(maxsize=4)(parse_receipt)


def write_receipt(state_dir: Path, receipt: Receipt) -> None:
    """Write the receipt, whole or not at all."""
    write_whole(make_state_folder(state_dir) / FILE_NAME, print_receipt(receipt).encode())


def objects_of(state_dir: Path) -> ObjectStore:
    """The bytes kept with the environment."""
    return ObjectStore(folder=state_file(state_dir, OBJECTS_NAME))


def state_of(venv: Path) -> Path:
    """The state folder of a virtual environment."""
    return venv / STATE_FOLDER


def recover_site(site: Site) -> "Recovery | None":
    """Put an interrupted transaction of ``site`` right. The caller holds the environment.

    Raises what :func:`provisioner.transaction.transaction.recover` does; InvalidReceiptError.
    """
    if not is_interrupted(site.state_dir):
        return None
    from provisioner.transaction.transaction import recover

    receipt = read_receipt(site.state_dir)
    entries = [file for patch in receipt.patches for file in patch.files] if receipt is not None else []
    made = frozenset(file.path for file in entries if file.before is None)
    return recover(site.site_packages, site.state_dir, record=site.record, made=made)
