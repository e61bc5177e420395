"""``provision probe``: one command for each probe, ``all`` of them, and ``compare``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from provisioner.cli.probe.options import DEFAULT_TOKENS, Asked, read_text
from provisioner.cli.probe.run import run_and_print
from provisioner.cli.probe.tables import print_spread
from provisioner.cli.shared import render
from provisioner.cli.shared.options import AsJson
from provisioner.counts import count_text
from provisioner.errors import UsageError

if TYPE_CHECKING:
    from provisioner.probes.compare import Comparison


Url = Annotated[str, typer.Option("--url", help="Address of the server.", metavar="URL")]
DirectUrl = Annotated[str, typer.Option("--direct", help="Address of the server.", metavar="URL")]
BoosterUrl = Annotated[str, typer.Option("--via", help="Address of the booster.", metavar="URL")]
Model = Annotated[str | None, typer.Option("--model", help="Which of the server's models to ask; default: the first.")]
KeyFile = Annotated[
    Path | None,
    typer.Option("--key-file", help="File that holds the server's API key; default: the variable VLLM_API_KEY."),
]
Context = Annotated[
    str, typer.Option("--context", help="Prompt lengths in tokens, comma separated; K is a thousand.", metavar="LIST")
]
Repeats = Annotated[int, typer.Option("--repeats", min=1, help="How often to measure each point.")]
Tokens = Annotated[int, typer.Option("--tokens", min=2, help="Tokens of each measured answer.")]
WorkloadName = Annotated[str, typer.Option("--workload", help="What to have written: prose or structured.")]
Temperature = Annotated[float, typer.Option("--temperature", min=0.0, help="Sampling temperature.")]
MethodName = Annotated[
    str, typer.Option("--method", help="stream: first to last token; difference: long answer less an answer of one.")
]
Streams = Annotated[str, typer.Option("--streams", help="Numbers of streams, comma separated.", metavar="LIST")]
StreamContext = Annotated[str, typer.Option("--stream-context", help="Prompt length of each stream.", metavar="TOKENS")]
Seed = Annotated[
    int | None, typer.Option("--seed", help="Make the documents of an earlier run again; default: new ones.")
]
Extra = Annotated[
    str, typer.Option("--extra", help="JSON object of further request fields, such as '{\"ignore_eos\": true}'.")
]
Timeout = Annotated[float, typer.Option("--timeout", min=1.0, help="Seconds allowed for one answer.")]
Venv = Annotated[
    Path | None, typer.Option("--venv", help="Environment that the server runs in, for recipe and receipt.")
]
Card = Annotated[str | None, typer.Option("--card", help="Card that the server runs on: index, PCI address or UUID.")]

Plot = Annotated[Path | None, typer.Option("--plot", help="Draw the run into this .svg or .png file.")]

DEFAULT_URL: Final = "http://127.0.0.1:8012"
DEFAULT_CONTEXTS: Final = "6K,20K,40K,80K"
DEFAULT_STREAMS: Final = "1,2,4,8"
DEFAULT_TIMEOUT: Final = 1800.0


def build_group() -> typer.Typer:
    """The group with its commands."""
    group = typer.Typer(
        help="Measure a live server, and compare two measurements.", no_args_is_help=True, add_completion=False
    )
    for function in (decode, cache_cliff, grown_prefix, concurrency, booster_ab, compare):
        group.command(function.__name__.replace("_", "-"))(function)
    group.command("all")(measure_all)
    return group


def decode(
    url: Url = DEFAULT_URL,
    model: Model = None,
    key_file: KeyFile = None,
    context: Context = DEFAULT_CONTEXTS,
    repeats: Repeats = 3,
    tokens: Tokens = DEFAULT_TOKENS,
    workload: WorkloadName = "prose",
    temperature: Temperature = 0.0,
    method: MethodName = "stream",
    seed: Seed = None,
    extra: Extra = "{}",
    timeout: Timeout = DEFAULT_TIMEOUT,
    venv: Venv = None,
    card: Card = None,
    as_json: AsJson = False,
    plot: Plot = None,
) -> int:
    """Decode speed and time to first token against context.

    Example: [bold]provision probe decode --url http://127.0.0.1:8012 --context 6K,40K --json > run.json[/bold]
    """
    return run_and_print(("decode",), Asked(**locals()))


def cache_cliff(
    url: Url = DEFAULT_URL,
    model: Model = None,
    key_file: KeyFile = None,
    context: Context = DEFAULT_CONTEXTS,
    repeats: Repeats = 3,
    seed: Seed = None,
    extra: Extra = "{}",
    timeout: Timeout = DEFAULT_TIMEOUT,
    venv: Venv = None,
    card: Card = None,
    as_json: AsJson = False,
    plot: Plot = None,
) -> int:
    """At which sighting of the same document the prefix cache hits.

    Example: [bold]provision probe cache-cliff --context 40K[/bold]
    """
    return run_and_print(("cache-cliff",), Asked(**locals()))


def grown_prefix(
    url: Url = DEFAULT_URL,
    model: Model = None,
    key_file: KeyFile = None,
    context: Context = DEFAULT_CONTEXTS,
    repeats: Repeats = 3,
    seed: Seed = None,
    extra: Extra = "{}",
    timeout: Timeout = DEFAULT_TIMEOUT,
    venv: Venv = None,
    card: Card = None,
    as_json: AsJson = False,
    plot: Plot = None,
) -> int:
    """Time of a second turn after zero, one and two re-sends of the first.

    Example: [bold]provision probe grown-prefix --context 40K[/bold]
    """
    return run_and_print(("grown-prefix",), Asked(**locals()))


def concurrency(
    url: Url = DEFAULT_URL,
    model: Model = None,
    key_file: KeyFile = None,
    streams: Streams = DEFAULT_STREAMS,
    stream_context: StreamContext = "1K",
    repeats: Repeats = 3,
    tokens: Tokens = DEFAULT_TOKENS,
    workload: WorkloadName = "prose",
    temperature: Temperature = 0.0,
    seed: Seed = None,
    extra: Extra = "{}",
    timeout: Timeout = DEFAULT_TIMEOUT,
    venv: Venv = None,
    card: Card = None,
    as_json: AsJson = False,
    plot: Plot = None,
) -> int:
    """Rates and time to first token of several streams at once.

    Example: [bold]provision probe concurrency --streams 1,8[/bold]
    """
    return run_and_print(("concurrency",), Asked(**locals()))


def booster_ab(
    url: DirectUrl = DEFAULT_URL,
    via: BoosterUrl = "http://127.0.0.1:8013",
    model: Model = None,
    key_file: KeyFile = None,
    context: Context = DEFAULT_CONTEXTS,
    repeats: Repeats = 3,
    seed: Seed = None,
    extra: Extra = "{}",
    timeout: Timeout = DEFAULT_TIMEOUT,
    venv: Venv = None,
    card: Card = None,
    as_json: AsJson = False,
    plot: Plot = None,
) -> int:
    """Second turns with and without the booster, interleaved.

    Example: [bold]provision probe booster-ab --direct http://127.0.0.1:8012 --via http://127.0.0.1:8013[/bold]
    """
    return run_and_print(("booster-ab",), Asked(**locals()))


def measure_all(
    url: Url = DEFAULT_URL,
    via: Annotated[
        str | None, typer.Option("--via", help="Address of a booster, to measure it too.", metavar="URL")
    ] = None,
    model: Model = None,
    key_file: KeyFile = None,
    context: Context = DEFAULT_CONTEXTS,
    streams: Streams = DEFAULT_STREAMS,
    stream_context: StreamContext = "1K",
    repeats: Repeats = 3,
    tokens: Tokens = DEFAULT_TOKENS,
    workload: WorkloadName = "prose",
    temperature: Temperature = 0.0,
    method: MethodName = "stream",
    seed: Seed = None,
    extra: Extra = "{}",
    timeout: Timeout = DEFAULT_TIMEOUT,
    venv: Venv = None,
    card: Card = None,
    as_json: AsJson = False,
    plot: Plot = None,
) -> int:
    """Every probe in one run; the booster's too, if --via says where one listens.

    Example: [bold]provision probe all --url http://127.0.0.1:8012 --context 6K,20K --plot run.svg[/bold]
    """
    asked = Asked(**locals())
    probes = ("decode", "cache-cliff", "grown-prefix", "concurrency")
    return run_and_print((*probes, "booster-ab") if asked.via else probes, asked)


def compare(
    first: Annotated[Path, typer.Argument(help="Record of a run, as --json printed it.")],
    second: Annotated[Path, typer.Argument(help="Record of the run to compare with it.")],
    as_json: AsJson = False,
) -> int:
    """Two runs side by side: ratios, and which differences exceed the spread.

    Example: [bold]provision probe compare before.json after.json[/bold]
    """
    from provisioner.probes.compare import compare_runs, to_json
    from provisioner.probes.record import read_run

    runs = [read_run(read_text(path), where=str(path)) for path in (first, second)]
    comparison = compare_runs(*runs)
    if not comparison.rows:
        raise UsageError(
            "the runs have no point in common, so nothing can be compared",
            expected=f"the probes and settings of {first}",
            found=f"those of {second}",
            hints=("measure both with the same --context, --streams and probes",),
        )
    if as_json:
        render.print_json("probe-compare", to_json(comparison))
    else:
        _print_comparison(comparison)
    return 0


def _print_comparison(comparison: "Comparison") -> None:
    for difference in comparison.differences:
        render.print_warning(f"the runs differ in {difference.name}: {difference.first} and {difference.second}")
    for count, which in ((len(comparison.only_first), "first"), (len(comparison.only_second), "second")):
        if count:
            render.print_note(f"{count_text(count, 'point is', 'points are')} in the {which} run alone")
    render.print_table(
        ("PROBE", "AT", "QUANTITY", "FIRST", "SECOND", "RATIO", "FINDING"),
        (
            (
                row.probe,
                str(row.setting),
                f"{row.quantity.name}, {row.quantity.unit}",
                print_spread(row.first),
                print_spread(row.second),
                "-" if row.ratio is None else f"{row.ratio:.3f}",
                row.finding,
            )
            for row in comparison.rows
        ),
    )
