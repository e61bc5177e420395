"""``provision booster``."""

import typer


def booster(
    upstream: str = typer.Option("http://127.0.0.1:8012", "--upstream", help="Address of the server.", metavar="URL"),
    port: int = typer.Option(8013, "--port", min=0, max=65535, help="Port to listen on; 0: any free one."),
    host: str = typer.Option("127.0.0.1", "--host", help="Address to listen on."),
    threshold: int = typer.Option(20_000, "--threshold", min=0, help="Boost conversations of so many characters."),
    grace: float = typer.Option(30.0, "--grace", min=0.0, help="Seconds that answers have to end when it is stopped."),
) -> int:
    """Forward to a server, and between turns have it compute what the next turn starts with.

    A request with the header [bold]X-Booster: off[/bold] is only forwarded. Counters: /booster/stats, /booster/metrics.

    Example: [bold]provision booster --upstream http://127.0.0.1:8012 --port 8013[/bold]
    """
    import asyncio
    import gc
    import os

    from provisioner.booster.proxy import BoosterSettings
    from provisioner.booster.service import LOOPBACK, Listening, parse_upstream, run_until_stopped
    from provisioner.cli.shared import render
    from provisioner.serve.notify import Notifier

    def announce(listening: Listening) -> None:
        render.print_note(f"listening on {listening.url}, forwarding to {settings.upstream}")

    settings = BoosterSettings(upstream=parse_upstream(upstream, host=host, port=port), threshold=threshold)
    if host not in LOOPBACK:
        render.print_warning(f"{host} can be reached by others; whether they need a key is the server's decision alone")
    gc.set_threshold(700)
    asyncio.run(
        run_until_stopped(
            settings,
            host=host,
            port=port,
            grace_seconds=grace,
            notifier=Notifier.from_environment(os.environ),
            announce=announce,
        )
    )
    return 0
