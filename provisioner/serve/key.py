"""The API key: read from the environment or a private file, made on request, never in arguments or logs."""

import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from provisioner.errors import EnvironmentConflictError
from provisioner.serve.launch import KEY_VARIABLE, Key

_PRIVATE = stat.S_IRUSR | stat.S_IWUSR
_RANDOM_BYTES = 32


@dataclass(frozen=True, kw_only=True)
class FoundKey:
    """A key with its source. The secret stays out of every printed form of this object."""

    key: Key
    secret: str = field(repr=False)


def find_key(environ: Mapping[str, str], *, file: Path | None, fallbacks: tuple[Path, ...] = ()) -> FoundKey | None:
    """The key in ``file`` if one is named, else in ``VLLM_API_KEY``, else in the first of ``fallbacks`` that exists.

    Raises EnvironmentConflictError as :func:`read_key_file` does.
    """
    if file is not None:
        return read_key_file(file)
    if secret := environ.get(KEY_VARIABLE, "").strip():
        return FoundKey(key=Key(file=None), secret=secret)
    present = next((path for path in fallbacks if path.is_file()), None)
    return read_key_file(present) if present else None


def read_key_file(path: Path) -> FoundKey:
    """The key in ``path``.

    Raises EnvironmentConflictError for a file that is missing, readable by others, or does not hold exactly one word.
    """
    try:
        mode = path.stat().st_mode
        secret = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise EnvironmentConflictError(
            "the key file cannot be read", where=str(path), found=str(error), hints=("--generate-key",)
        ) from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise EnvironmentConflictError(
            "the key file is open to other users",
            where=str(path),
            expected="mode 0600",
            found=f"mode {stat.S_IMODE(mode):04o}",
            hints=(f"chmod 600 {path}",),
        )
    if len(secret.split()) != 1:
        raise EnvironmentConflictError("a key file holds one word", where=str(path), hints=("--generate-key",))
    return FoundKey(key=Key(file=path), secret=secret)


def obtain_key(path: Path) -> FoundKey:
    """The key in ``path``, made there (mode 0600) if there is none yet.

    Raises EnvironmentConflictError where the file cannot be written, or as :func:`read_key_file` does.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, _PRIVATE)
    except FileExistsError:
        return read_key_file(path)
    except OSError as error:
        raise EnvironmentConflictError(
            "the key file cannot be written", where=str(path), found=str(error), hints=("--key-file FILE",)
        ) from error
    with os.fdopen(handle, "w", encoding="utf-8") as stream:
        os.fchmod(stream.fileno(), _PRIVATE)
        stream.write(secrets.token_urlsafe(_RANDOM_BYTES) + "\n")
    return read_key_file(path)
