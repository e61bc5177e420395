"""Reports of earlier runs, from files."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from provisioner.drift.merge import Part
from provisioner.drift.reports.parse import parse_report
from provisioner.errors import InvalidReportError, UsageError


def read_parts(places: Sequence[Path]) -> tuple[Part, ...]:
    """The reports in these files, and in every ``.json`` file of these folders and below.

    Raises InvalidReportError, naming every file that is no report; UsageError for a folder without one.
    """
    parts: list[Part] = []
    failures: list[InvalidReportError] = []
    for file in (file for place in places for file in _files_of(place)):
        try:
            parts.append(_read(file))
        except InvalidReportError as error:
            failures.append(error)
    if failures:
        raise InvalidReportError(
            "what is to be merged must be reports of provision drift",
            where=", ".join(dict.fromkeys(str(error.where).partition(": ")[0] for error in failures)),
            found="\n".join(map(str, failures)),
            hints=("provision drift --format json --output FILE",),
        )
    return tuple(parts)


def _files_of(place: Path) -> Iterator[Path]:
    if not place.is_dir():
        yield place
        return
    files = sorted(path for path in place.rglob("*.json") if path.is_file())
    if not files:
        raise UsageError("the folder has no .json file", where=str(place))
    yield from files


def _read(path: Path) -> Part:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidReportError(f"cannot be read: {error.strerror}", where=str(path)) from error
    except UnicodeDecodeError as error:
        raise InvalidReportError("not a text in UTF-8", where=str(path)) from error
    return Part(name=str(path), report=parse_report(text, where=str(path)))
