"""The one error boundary: an exit code for every way in which a command can end."""

import sys
from collections.abc import Sequence

from provisioner.cli.app import build_command
from provisioner.errors import ProvisionError

INTERRUPTED = 130
BUG = 70


def main(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code; nothing escapes."""
    try:
        build_command(argv).main(args=list(argv), prog_name="provision")
    except SystemExit as stop:
        return _end(stop.code if isinstance(stop.code, int) else int(stop.code is not None))
    except ProvisionError as error:
        return _report(error, argv)
    except KeyboardInterrupt:
        return _end(INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output went away (`provision … | head`); there is nobody left to tell.
        sys.stderr.close()
        return 0
    except Exception as error:  # noqa: BLE001 - the boundary turns a bug into its exit code
        return _report_bug(error)
    return 0


def run() -> None:
    """Entry point of the ``provision`` script."""
    sys.exit(main(sys.argv[1:]))


def _end(code: int) -> int:
    # typer turns Ctrl-C into its own exit without a word.
    if code == INTERRUPTED:
        print("interrupted; run the same command again to go on", file=sys.stderr)  # noqa: T201
    return code


def _report(error: ProvisionError, argv: Sequence[str]) -> int:
    from provisioner.cli.render import print_error, print_error_json

    if "--json" in argv:
        print_error_json(error)
    print_error(error)
    return error.exit_code


def _report_bug(error: Exception) -> int:
    import traceback

    traceback.print_exception(error, file=sys.stderr)
    print(f"error[bug]: {type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201
    print("hint: this is a defect of provision; please report it with the lines above", file=sys.stderr)  # noqa: T201
    return BUG
