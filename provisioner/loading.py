"""JSON and TOML texts as plain values; what cannot be read is one kind of error, however it is broken. Pure."""

import json
from typing import Any

_BYTE_ORDER_MARK = "\ufeff"


def load_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError for any that cannot be read, one nested too deeply among them."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def load_toml(text: str) -> dict[str, Any]:
    """The values of a TOML text. Raises tomllib.TOMLDecodeError for any that cannot be read, as :func:`load_json`.

    The mark that some editors put before a text in UTF-8 is passed over.
    """
    import tomllib  # some commands read none

    try:
        return tomllib.loads(text.removeprefix(_BYTE_ORDER_MARK))
    except RecursionError as error:
        raise tomllib.TOMLDecodeError("nested too deeply") from error
