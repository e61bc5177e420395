"""What a probe run is asked for: options as they were typed, and what they mean."""

import hashlib
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from provisioner.documents.receipt import FILE_NAME, parse_receipt
from provisioner.environment.state import state_of
from provisioner.errors import CardError, UsageError
from provisioner.loading import load_json
from provisioner.probes.model import Method, Probe, Provenance, RunSettings, Workload
from provisioner.records import dataclass
from provisioner.transaction.folders import state_file

if TYPE_CHECKING:
    from provisioner.probes.measure import Targets


DEFAULT_TOKENS: Final = 257


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The options of a run as they were typed."""

    url: str
    via: str | None = None
    model: str | None
    key_file: Path | None
    context: str = ""
    streams: str = ""
    stream_context: str = "1K"
    repeats: int
    tokens: int = DEFAULT_TOKENS
    workload: str = "prose"
    temperature: float = 0.0
    method: str = "stream"
    seed: int | None
    extra: str
    timeout: float
    venv: Path | None
    card: str | None
    as_json: bool
    plot: Path | None


def read_text(path: Path) -> str:
    """The text of a file that the user named. Raises UsageError where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot be read: {error}", where=str(path)) from error


def read_targets(asked: Asked) -> "Targets":
    from provisioner.probes.client import Endpoint
    from provisioner.probes.measure import Targets

    key = read_key(asked.key_file)
    server = Endpoint.parse(asked.url, api_key=key, answer_seconds=asked.timeout)
    booster = None if asked.via is None else Endpoint.parse(asked.via, api_key=key, answer_seconds=asked.timeout)
    return Targets(server=server, booster=booster, model=asked.model)


def read_key(key_file: Path | None) -> str | None:
    """The key in ``key_file``, else in the environment. Raises UsageError for a file that is empty or not readable."""
    if key_file is None:
        return os.environ.get("VLLM_API_KEY") or None
    key = read_text(key_file).strip()
    if not key:
        raise UsageError("the key file is empty", where=str(key_file))
    return key


def read_settings(names: tuple[str, ...], asked: Asked) -> RunSettings:
    return RunSettings(
        probes=tuple(Probe(name) for name in names),
        contexts=parse_counts(asked.context, option="--context"),
        streams=parse_counts(asked.streams, option="--streams"),
        stream_context=parse_counts(asked.stream_context, option="--stream-context")[0],
        repeats=asked.repeats,
        completion_tokens=asked.tokens,
        workload=_choose(Workload, asked.workload, option="--workload"),
        temperature=asked.temperature,
        method=_choose(Method, asked.method, option="--method"),
        seed=secrets.randbits(48) if asked.seed is None else asked.seed,
    )


def parse_counts(text: str, *, option: str) -> tuple[int, ...]:
    """``6K,20480`` as (6000, 20480). Raises UsageError for anything but positive whole numbers."""
    counts = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        digits, scale = (part[:-1], 1000) if part[-1] in "kK" else (part, 1)
        if not digits.isascii() or not digits.isdigit() or int(digits) == 0:
            raise UsageError(f"not a number of tokens or streams: {part!r}", where=option, hints=(f"{option} 6K,20K",))
        counts.append(int(digits) * scale)
    if text and not counts:
        raise UsageError("no number at all", where=option, found=repr(text), hints=(f"{option} 6K,20K",))
    return tuple(counts)


def _choose(kind: Any, text: str, *, option: str) -> Any:
    try:
        return kind(text)
    except ValueError as error:
        known = ", ".join(kind)
        raise UsageError("no such choice", where=option, expected=f"one of {known}", found=text) from error


def read_extra(text: str) -> dict[str, Any]:
    try:
        extra = load_json(text)
    except ValueError as error:
        raise UsageError(f"not JSON: {error}", where="--extra") from error
    if not isinstance(extra, dict):
        raise UsageError("must be a JSON object", where="--extra")
    return extra


def find_provenance(asked: Asked) -> Provenance:
    """Recipe and receipt of the environment that was named, and the card, where the server runs on this machine."""
    recipe, digest = _read_receipt(asked.venv)
    card, driver = _read_card(asked)
    return Provenance(recipe=recipe, receipt_digest=digest, card=card, driver=driver)


def _read_receipt(venv: Path | None) -> tuple[str | None, str | None]:
    if venv is None:
        return None, None
    path = state_file(state_of(venv), FILE_NAME)
    text = read_text(path)
    receipt = parse_receipt(text, where=str(path))
    return receipt.recipe, hashlib.sha256(text.encode()).hexdigest()


def _read_card(asked: Asked) -> tuple[str | None, str | None]:
    """Name and driver of the card. Unless one is named, only the single card of this machine is the server's."""
    from provisioner.gpu.devices import read_inventory, select_card

    if asked.card is None and urlsplit(asked.url).hostname not in {"127.0.0.1", "localhost", "::1"}:
        return None, None
    try:
        inventory = read_inventory()
        if asked.card is None and len(inventory.cards) != 1:
            return None, inventory.driver
        card = select_card(inventory, asked.card, environ={})
    except CardError:
        if asked.card is not None:
            raise
        return None, None
    return f"{card.name} ({card.uuid}, {card.memory_total >> 20} MiB)", card.driver
