"""Which wheels are judged: specs to candidates, one a build."""

from collections.abc import Sequence
from dataclasses import dataclass

from packaging.version import Version

from provisioner.errors import NoSuchBuildError
from provisioner.index.settings import IndexSettings
from provisioner.index.source import find_builds as find_wheels
from provisioner.index.source import parse_spec
from provisioner.index.transport import Transport
from provisioner.wheels.names import Candidate, Target, choose_each


@dataclass(frozen=True, kw_only=True)
class Builds:
    """The best Linux x86_64 wheel of each build, oldest first, and commits without one, a line each with the reason."""

    found: tuple[Candidate, ...]
    missing: tuple[str, ...] = ()


def find_builds(
    specs: Sequence[str], settings: IndexSettings, *, last: int | None = None, variant: str | None = None
) -> Builds:
    """The builds that the specs name together, the newest ``last`` of them.

    Oldest first by version; those of one version keep the order in which they are listed.
    Raises UsageError for a spec that names nothing, NoSuchBuildError where no build is found, NetworkError.
    """
    found: list[Candidate] = []
    missing: list[str] = []
    with Transport(settings) as transport:
        for text in specs:
            listed = find_wheels(parse_spec(text), settings, transport=transport, variant=variant, target=Target())
            best = choose_each(listed.candidates, Target(), variant=variant)
            found += [item for item in best if item not in found]
            missing += [f"{item.commit}: {item.error.what}" for item in listed.missing]
    if not found:
        raise NoSuchBuildError(
            "no build has a wheel for Linux x86_64", where=", ".join(specs), found="\n".join(missing) or None
        )
    found.sort(key=lambda item: Version(item.version.public))
    return Builds(found=tuple(found[-last:] if last else found), missing=tuple(missing))


def find_one_build(spec: str, settings: IndexSettings) -> Candidate:
    """The newest build that one spec names.

    Raises as :func:`find_builds` does.
    """
    return find_builds([spec], settings, last=1).found[0]
