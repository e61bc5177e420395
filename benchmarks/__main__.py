"""Run the benches named on the command line (all without names), print one table, keep the rows as JSON."""

import importlib
import json
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE.parent / ".bench" / "results.json"
# Modules that only hold something for a bench.
HELPERS = frozenset({"__init__", "__main__", "field_repack", "stream_source", "timing"})


def bench_names() -> list[str]:
    """Every module of this folder that has ``rows()``."""
    return sorted(path.stem for path in HERE.glob("*.py") if path.stem not in HELPERS)


def run_bench(name: str) -> list[dict[str, object]]:
    """The rows of one bench: ``name``, ``ours``, ``theirs``, ``ratio``, and ``unit``, ``target`` where it has them."""
    module = importlib.import_module(f"benchmarks.{name}")
    return [{"bench": name, **row} for row in module.rows()]


def print_rows(rows: Sequence[dict[str, object]]) -> None:
    """The table, one row a measurement."""
    columns = ("bench", "name", "ours", "theirs", "unit", "ratio", "target")
    table = [columns, *(tuple(_cell(row.get(column, "")) for column in columns) for row in rows)]
    widths = [max(len(row[index]) for row in table) for index in range(len(columns))]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main(names: Sequence[str]) -> int:
    unknown = set(names) - set(bench_names())
    if unknown:
        print(f"no such bench: {', '.join(sorted(unknown))}; there are: {', '.join(bench_names())}", file=sys.stderr)
        return 2
    rows: list[dict[str, object]] = []
    for name in names or bench_names():
        print(f"[{name}]", file=sys.stderr)
        rows += run_bench(name)
    print_rows(rows)
    RESULTS.parent.mkdir(exist_ok=True)
    machine = {"machine": platform.processor() or platform.machine(), "python": platform.python_version()}
    RESULTS.write_text(json.dumps({"time": time.strftime("%FT%TZ", time.gmtime()), **machine, "rows": rows}, indent=2))
    return 0


sys.exit(main(sys.argv[1:]))
