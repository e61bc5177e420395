"""``provision cache``."""

import os

import typer

from provisioner.cli.shared import render
from provisioner.cli.shared.options import AsJson
from provisioner.index.cache import clear_cache, summarize_cache
from provisioner.index.settings import cache_folder


def cache(
    clear: bool = typer.Option(False, "--clear", help="Remove everything in it; it fills itself again."),
    as_json: AsJson = False,
) -> int:
    """Show what was read of wheels and is kept on disk, or clear it.

    Example: [bold]provision cache --clear[/bold]
    """
    folder = cache_folder(os.environ)
    summary = clear_cache(folder) if clear else summarize_cache(folder)
    if as_json:
        kinds = {kind: {"bytes": size, "files": files} for kind, (size, files) in summary.kinds.items()}
        payload = {"path": str(folder), "bytes": summary.bytes, "files": summary.files, "kinds": kinds}
        render.print_json("cache", payload | {"cleared": clear})
        return 0
    rows = [(kind, str(files), render.size_text(size)) for kind, (size, files) in summary.kinds.items()]
    render.print_table(("KIND", "FILES", "SIZE"), [*rows, ("all", str(summary.files), render.size_text(summary.bytes))])
    render.print_note(f"{'cleared' if clear else 'in'} {folder}")
    return 0
