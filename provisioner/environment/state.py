"""What the tool keeps inside an environment: whose it is, the receipt, and the bytes behind it."""

import json
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from provisioner.digests import digest_of
from provisioner.documents.patched_wheel import FACTS_NAME, PatchedWheel, parse_patched_wheel
from provisioner.documents.receipt import FILE_NAME, Receipt, parse_receipt, print_receipt
from provisioner.environment.site import STATE_FOLDER, Site
from provisioner.errors import InvalidReceiptError
from provisioner.records import dataclass
from provisioner.tables import Table, load_json
from provisioner.transaction.folders import OBJECTS_NAME, look_at, make_state_folder, read_file, state_file, write_whole
from provisioner.transaction.interrupted import is_interrupted
from provisioner.transaction.objects import ObjectStore

if TYPE_CHECKING:
    from provisioner.transaction.transaction import Recovery

OWNER_FILE = "environment.json"
OWNER_SCHEMA = "provision/environment/1"


@dataclass(frozen=True, kw_only=True)
class Owner:
    """Written before anything else, so that an interrupted first run leaves an environment that is known as ours.

    ``adopted`` tells that others made it: its packages are left as they are unless a run is told to bring them to the
    lock's, and only patches are ours.
    """

    recipe: str
    tool: str
    adopted: bool = False


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
    try:
        values = load_json(read_file(path).decode("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise InvalidReceiptError(f"unreadable: {error}", where=str(path)) from error
    if not isinstance(values, dict):
        raise InvalidReceiptError("not a JSON object", where=str(path))
    table = Table(values, where=str(path), error=InvalidReceiptError)
    if table.take("schema", str) != OWNER_SCHEMA:
        raise table.fail("unknown schema", "schema", expected=OWNER_SCHEMA)
    owner = Owner(
        recipe=table.take("recipe", str), tool=table.take("tool", str), adopted=table.take_or("adopted", bool, False)
    )
    table.close()
    return owner


def write_owner(state_dir: Path, owner: Owner) -> None:
    """Mark the environment as ours."""
    values = {"schema": OWNER_SCHEMA, "recipe": owner.recipe, "tool": owner.tool, "adopted": owner.adopted}
    write_whole(make_state_folder(state_dir) / OWNER_FILE, (json.dumps(values, indent=2) + "\n").encode())


def has_receipt(state_dir: Path) -> bool:
    """Whether the environment was proven once."""
    return look_at(state_file(state_dir, FILE_NAME)) is not None


def read_receipt(state_dir: Path) -> Receipt | None:
    """The receipt, or None where there is none.

    Raises InvalidReceiptError for one that is not understood.
    """
    path = state_file(state_dir, FILE_NAME)
    try:
        text = read_file(path).decode("utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidReceiptError(f"unreadable: {error}", where=str(path)) from error
    try:
        return _parse_receipt(text, where=str(path))
    except InvalidReceiptError as error:
        error.hints += (f"files are judged by their bytes, not by the receipt: rm {path}",)
        raise


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
