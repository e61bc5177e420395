"""Which wheels are judged: specs to candidates, one a build."""

from collections.abc import Sequence

from provisioner.errors import NoSuchBuildError
from provisioner.wheels.names import Candidate, Target, choose_each
from provisioner.wheels.settings import IndexSettings
from provisioner.wheels.source import candidates, parse_spec
from provisioner.wheels.transport import Transport


def find_builds(
    specs: Sequence[str], settings: IndexSettings, *, last: int | None = None, variant: str | None = None
) -> tuple[Candidate, ...]:
    """The best Linux x86_64 wheel of each build that the specs name, oldest first; the newest ``last`` of them.

    Raises UsageError for a spec that names nothing, NoSuchBuildError where none is found, NetworkError.
    """
    found: list[Candidate] = []
    with Transport(settings) as transport:
        for text in specs:
            listed = candidates(parse_spec(text), settings, transport=transport, variant=variant)
            found += [item for item in choose_each(listed, Target(), variant=variant) if item not in found]
    if not found:
        raise NoSuchBuildError("no build has a wheel for Linux x86_64", where=", ".join(specs))
    return tuple(found[-last:] if last else found)
