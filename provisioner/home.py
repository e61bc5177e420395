"""Where the tool keeps what is the user's: environments, locks, caches."""

from collections.abc import Mapping
from pathlib import Path

from provisioner.records import dataclass


@dataclass(frozen=True, kw_only=True)
class Home:
    """The folders of one user. Nothing is created by asking for a path."""

    data: Path
    cache: Path

    def venv(self, recipe: str) -> Path:
        """The default environment of a recipe."""
        return self.data / "venvs" / recipe

    def fork(self, recipe: str) -> Path:
        """Where a recipe's fork is checked out; its environment lies inside."""
        return self.data / "forks" / recipe

    def key_file(self, recipe: str) -> Path:
        """The API key of a recipe's server, outside the environment, so that a rebuilt one keeps its clients."""
        return self.data / "keys" / recipe

    @property
    def locks(self) -> Path:
        """Locks that the user made."""
        return self.data / "locks"


def find_home(environ: Mapping[str, str]) -> Home:
    """``PROVISION_HOME`` if it is set, else the platform's user data and cache folders."""
    root = environ.get("PROVISION_HOME")
    if root:
        folder = Path(root).expanduser().absolute()
        return Home(data=folder, cache=folder / "cache")
    import platformdirs

    return Home(
        data=Path(platformdirs.user_data_dir("provision")), cache=Path(platformdirs.user_cache_dir("provision"))
    )
