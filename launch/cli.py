"""`platform-launch CONFIG [key=value ...]`: the command line. Exit codes are those of `rl_platform.errors`."""

from __future__ import annotations

import sys
import traceback
from typing import Annotated

import typer

from rl_platform.config import load_config
from rl_platform.errors import PlatformError
from rl_platform.placement.inventory import inventory_for
from rl_platform.placement.plan import render
from rl_platform.placement.scheduler import schedule

INTERRUPTED = 130

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def launch(
    config: Annotated[str, typer.Argument(help="YAML file, for example configs/reasoning/ppo.yaml")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="for example runner.max_steps=10")
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the config with all defaults and stop.")
    ] = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="Print who sits on which GPU and stop; nothing is started.")
    ] = False,
) -> None:
    """Train a policy as CONFIG says. The same file runs on a laptop, a GPU or a cluster; only its section `cluster` differs."""
    loaded = load_config(config, overrides or [])
    inventory = inventory_for(loaded.config.cluster)
    exclusive = ("rollout",) if loaded.config.rollout.backend == "sglang" else ()
    placement = schedule(loaded.config.cluster, inventory, exclusive=exclusive)
    if print_config:
        print(loaded.resolved_yaml(), end="")
    elif plan:
        print(render(placement, inventory))
    else:
        from rl_platform.launch.session import run  # only here: it loads torch

        run(loaded, config, placement, inventory)


def main() -> None:
    """Entry point of the console script: every error becomes a message and its exit code."""
    try:
        app(standalone_mode=False)
    except typer.Exit as stop:
        code = stop.exit_code
    except typer.Abort:
        code = INTERRUPTED
    except KeyboardInterrupt:
        print("\ninterrupted. The same command goes on from the newest checkpoint.", file=sys.stderr)
        code = INTERRUPTED
    except PlatformError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        for note in getattr(error, "__notes__", ()):
            print(f"    {note}", file=sys.stderr)
        code = error.exit_code
    except Exception as error:
        if hasattr(error, "exit_code") and hasattr(error, "format_message"):  # wrong usage of the command line
            print(f"{error.format_message()}\nTry: platform-launch --help", file=sys.stderr)
            code = error.exit_code
        else:
            traceback.print_exc()
            print(
                "This is a bug in rl-platform. Checkpoints are intact: the same command goes on from the newest.",
                file=sys.stderr,
            )
            code = PlatformError.exit_code
    else:
        code = 0
    sys.exit(code)
