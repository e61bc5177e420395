"""What must be done so that an environment is as its recipe says: wanted against found. Pure."""

from collections.abc import Iterable
from dataclasses import field, replace

from provisioner.counts import count_text
from provisioner.digests import Digest
from provisioner.documents.receipt import Receipt
from provisioner.patching.model import SeriesVerdict
from provisioner.patching.steps import FileStep
from provisioner.records import dataclass


@dataclass(frozen=True, kw_only=True)
class RecoverTransaction:
    """Put an interrupted change of files right."""


@dataclass(frozen=True, kw_only=True)
class CreateEnvironment:
    """Make the virtual environment with this Python."""

    venv: str
    python: str


@dataclass(frozen=True, kw_only=True)
class AdoptEnvironment:
    """Take over an environment that others made. ``differing`` names the packages that are not the lock's, with the
    version that is there and the locked one; they stay unless the plan installs packages, too."""

    venv: str
    differing: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class InstallPackages:
    """Make the environment hold the lock's packages; ``reasons`` names those that differ now."""

    count: int
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CheckRecord:
    """Compare every installed file of the distribution with RECORD."""

    files: int


@dataclass(frozen=True, kw_only=True)
class TakeOutPatches:
    """Take out patches that were applied here beside the recipe's."""

    ids: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ChangeFiles:
    """Bring the files of the series to their final bytes in one transaction."""

    steps: tuple[FileStep, ...] = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class WriteReceipt:
    """Record what was done and proven."""


Action = (
    RecoverTransaction
    | CreateEnvironment
    | AdoptEnvironment
    | InstallPackages
    | CheckRecord
    | TakeOutPatches
    | ChangeFiles
    | WriteReceipt
)


@dataclass(frozen=True, kw_only=True)
class EnvironmentPlan:
    """Actions in order, empty when everything is already true, and the verdict on the series that they lead to.

    ``final`` holds the digest that each touched file will have; None where it will not exist.
    """

    actions: tuple[Action, ...]
    verdict: SeriesVerdict
    final: dict[str, Digest | None]

    def __bool__(self) -> bool:
        return bool(self.actions)


def describe_action(action: Action) -> str:
    """One action in a line."""
    match action:
        case RecoverTransaction():
            return "recover an interrupted change"
        case CreateEnvironment(venv=venv, python=python):
            return f"create {venv} with Python {python}"
        case AdoptEnvironment(venv=venv, differing=differing):
            count = count_text(len(differing), "package is", "packages are")
            listed = "\n  ".join(("", *differing))
            return f"take over {venv} with its packages" + (f"; {count} not the lock's:{listed}" if differing else "")
        case InstallPackages(count=count, reasons=reasons):
            shown = ", ".join(reasons[:5]) + (f" and {len(reasons) - 5} more" if len(reasons) > 5 else "")
            return f"install {count_text(count, 'package')} from the lock" + (
                f" (differing: {shown})" if reasons else ""
            )
        case CheckRecord(files=files):
            return f"check {count_text(files, 'file') if files else 'all files'} against RECORD"
        case TakeOutPatches(ids=ids):
            return f"take out {', '.join(ids)}: applied here, and not the recipe's"
        case ChangeFiles(steps=steps):
            return f"change {count_text(len({step.path for step in steps}), 'file')} in one transaction"
        case WriteReceipt():
            return "write the receipt"


def taken_out(actions: Iterable[Action]) -> tuple[str, ...]:
    """The ids of the patches that the actions take out."""
    return tuple(patch_id for action in actions if isinstance(action, TakeOutPatches) for patch_id in action.ids)


def is_receipt_current(old: Receipt | None, new: Receipt) -> bool:
    """Whether a receipt already says all that a new one would. Its time, the tool's version and the scopes of hunks,
    which are an aid and not a state, do not count."""
    if old is None:
        return False
    same = replace(old, created=new.created, tool=new.tool, verification=new.verification)
    return _without_scopes(new) == _without_scopes(same)


def _without_scopes(receipt: Receipt) -> Receipt:
    patches = [
        replace(patch, files=tuple(replace(file, scopes=()) for file in patch.files)) for patch in receipt.patches
    ]
    return replace(receipt, patches=tuple(patches))
