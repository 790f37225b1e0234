"""The entry points of `platform-launch` and `rl-platform`: signals, standard streams and exit codes.

They import little before the signal handlers are in place: a Ctrl-C during the seconds in which torch is imported ends
the command quietly. Exit codes are those of `rl_platform.errors` and `rl_platform.interrupts`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from rl_platform.interrupts import Interrupted, handle_signals
from rl_platform.standard_streams import never_fail


def main() -> None:
    """Runs the console script `platform-launch`."""
    _run(_launch, "platform-launch")


def tools() -> None:
    """Runs the console script `rl-platform`."""
    _run(_use_tool, "rl-platform")


def _launch(words: Sequence[str]) -> None:
    from rl_platform.launch.command import execute

    execute(words)


def _use_tool(words: Sequence[str]) -> None:
    from rl_platform.extras import required

    with required("rl_platform.launch.tools", "rl-platform"):
        from rl_platform.launch.tools.verbs import execute

    execute(words)


def _run(execute: Callable[[Sequence[str]], None], program: str) -> None:
    """Calls `execute` with the command line. Every error becomes a message and its exit code."""
    handle_signals()
    never_fail()
    from rl_platform.garbage import collect_as_usual, collect_rarely

    collect_rarely()
    try:
        _check_folder()
        execute(sys.argv[1:])
    except BaseException as error:
        from rl_platform.errors import RayLost

        code = _explain(error, program)
        at_once = isinstance(error, Interrupted | RayLost)
    else:
        code, at_once = 0, False
    sys.stdout.flush()
    sys.stderr.flush()
    if at_once:
        os._exit(code)  # threads that are still computing, or Ray, would hold up or crash the interpreter's end
    collect_as_usual()
    sys.exit(code)


def _check_folder() -> None:
    """Raises ConfigError if the working folder was removed: most imports and every relative path need it."""
    try:
        os.getcwd()
    except FileNotFoundError as error:
        from rl_platform.errors import ConfigError, Problem

        raise ConfigError([Problem("working folder", "it was removed", hint="cd to another folder")]) from error


def _explain(error: BaseException, program: str) -> int:
    """Prints the message of `error`; returns the exit code."""
    from rl_platform.errors import ConfigError, PlatformError

    notes: list[str] = getattr(error, "__notes__", [])
    if isinstance(error, Interrupted):
        _print(f"\n{error.word}", *notes)
        return error.exit_code
    if isinstance(error, PlatformError):
        name = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
        _print(f"{name}{error}".rstrip(), *notes)
        return error.exit_code
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # wrong usage of the command line
        context = getattr(error, "ctx", None)
        verb = f" {context.info_name}" if context is not None and context.parent is not None else ""
        if context is None and program == "rl-platform":  # an option lacks its value
            verb = f" {sys.argv[1]}"
        _print(error.format_message().replace("Value error, ", ""), f"try: {program}{verb} --help")
        return int(error.exit_code)
    import traceback

    _print("".join(traceback.format_exception(error)).rstrip())
    _print("This is a bug in rl-platform.")
    return PlatformError.exit_code


def _print(headline: str, *notes: str) -> None:
    """Prints to standard error, without secrets."""
    from rl_platform.redact import redacted

    print(redacted(headline), file=sys.stderr)
    for note in notes:
        print(redacted(f"    {note}"), file=sys.stderr)
