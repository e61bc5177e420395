"""The one error boundary: an exit code for every way in which a command can end."""

import gc
import os
import sys
from collections.abc import Sequence

from provisioner.cli.shared.argv import refuse_empty, wants_json
from provisioner.errors import InterruptedRunError, ProvisionError


def main(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code; nothing escapes."""
    from provisioner.cli.shared.render import flush_output

    code = _run(argv)
    try:
        flush_output()
    except ProvisionError as error:
        return _report(error, as_json=False)
    return code


def run() -> None:
    """Entry point of the ``provision`` script."""
    # A series is many small objects and next to no cycles: at its usual 700 the collector takes a twentieth of a short
    # command's time. The booster, which lives long, goes back to that.
    gc.set_threshold(200_000)
    # A stream that the caller closed is None here.
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # noqa: PTH123, SIM115
    for stream in (sys.stdout, sys.stderr):
        # A path may hold bytes, and a terminal an encoding, that the text of an answer does not go into.
        getattr(stream, "reconfigure", lambda **_: None)(errors="backslashreplace")
    code = main(sys.argv[1:])
    # Everything that was opened is closed; the interpreter's last collections would only walk through what is left, and
    # that takes an eighth of a short command's time.
    gc.freeze()
    sys.exit(code)


def _run(argv: Sequence[str]) -> int:
    as_json = wants_json(argv)
    try:
        # Here, since it takes a moment in which Ctrl-C may come.
        from provisioner.cli.app import build_command

        refuse_empty(argv)
        # typer itself prints a wrong command line, in a box; a machine gets it as it gets every other error.
        code = build_command().main(args=list(argv), prog_name="provision", standalone_mode=not as_json)
        return int(code or 0)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except ProvisionError as error:
        error.hints = _complete(error, argv)
        return _report(error, as_json=as_json)
    except KeyboardInterrupt:
        return _report(InterruptedRunError(), as_json=as_json)
    except Exception as error:  # noqa: BLE001 - the boundary turns a bug into its exit code
        return _report_other(error, as_json=as_json)


def _complete(error: ProvisionError, argv: Sequence[str]) -> tuple[str, ...]:
    from provisioner.cli.shared.hints import complete_hint, fallback_hints, read_given
    from provisioner.resources import recipe_names

    given = read_given(argv, recipe_names())
    return tuple(complete_hint(hint, given) for hint in fallback_hints(error, list(argv)))


def _report(error: ProvisionError, *, as_json: bool) -> int:
    from provisioner.cli.shared.render import print_error, print_error_json

    if as_json:
        print_error_json(error)
    print_error(error)
    return error.exit_code


def _report_other(error: Exception, *, as_json: bool) -> int:
    from provisioner.cli.shared.argv import usage_error_of

    usage = usage_error_of(error)
    return _report(usage, as_json=as_json) if usage is not None else _report_bug(error, as_json=as_json)


def _report_bug(error: Exception, *, as_json: bool) -> int:
    import traceback

    traceback.print_exception(error, file=sys.stderr)
    hint = "this is a defect of provision; please report it with the lines above"
    return _report(ProvisionError(f"{type(error).__name__}: {error}", hints=(hint,)), as_json=as_json)
