"""`platform-launch CONFIG [key=value ...]`: parses the command line and calls the part that does it.

Signals and exit codes are in `cli`, the config that all parts begin with in `placed_config`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import typer

from rl_platform.config.extends import EXPLANATIONS
from rl_platform.extras import find, required
from rl_platform.launch import options
from rl_platform.launch.options import PlanForm
from rl_platform.launch.placed_config import START_CHECKS, PlacedConfig, load, located

app = typer.Typer(
    add_completion=False, pretty_exceptions_enable=False, context_settings={"help_option_names": ["--help", "-h"]}
)


@dataclass(frozen=True)
class Arguments:
    """The parsed command line: the arguments and options of `parse`, by their names."""

    config: str
    overrides: list[str]
    print_config: bool
    plan: PlanForm | None
    calibrate: str | None
    write: str | None
    check: bool
    rehearse: bool
    rehearse_in: str | None
    evaluate: bool
    slurm: bool
    nodes: int | None
    sbatch: list[str] | None
    setup: str
    submit: bool
    kuberay: bool
    image: str | None
    claim: str | None
    limit: list[str] | None

    @property
    def only_shows(self) -> bool:
        """True if the command prints or writes something and runs nothing."""
        return self.print_config or self.plan is not None or self.slurm or self.kuberay

    @property
    def refusals(self) -> Iterator[str]:
        """The problems of the combination of options."""
        others, of_pods = self.only_shows or self.check, self.image is not None or self.claim is not None or self.limit
        if self.kuberay and self.image is None:
            yield "--kuberay needs --image: the container image of the pods (docs/containers.md)"
        if self.calibrate is not None and self.plan in (None, "calibrate"):
            yield "--calibrate belongs to --plan or --plan=search"
        if self.write is not None and self.plan != "search":
            yield "--write belongs to --plan=search"
        if (self.sbatch or self.setup or self.submit) and not self.slurm:
            yield "--sbatch, --setup and --submit belong to --slurm"
        if of_pods and not self.kuberay:
            yield "--image, --claim and --limit belong to --kuberay"
        if self.nodes is not None and not (self.slurm or self.kuberay):
            yield "--nodes belongs to --slurm or --kuberay"
        if self.slurm and self.kuberay:
            yield "--slurm and --kuberay exclude each other"
        if self.evaluate and others:
            yield "--eval takes a checkpoint and nothing but KEY=VALUE beside it"
        if self.rehearse and (others or self.evaluate):
            yield "--rehearse takes a config, KEY=VALUE and --rehearse-in, and no other option"
        if self.rehearse_in is not None and not self.rehearse:
            yield "--rehearse-in belongs to --rehearse"


@app.command()
def parse(
    config: options.Config,
    overrides: options.Overrides = None,
    print_config: options.PrintConfig = False,
    plan: options.Plan = None,
    calibrate: options.Calibrate = None,
    write: options.Write = None,
    check: options.Check = False,
    rehearse: options.Rehearse = False,
    rehearse_in: options.RehearseIn = None,
    evaluate: options.Evaluate = False,
    slurm: options.Slurm = False,
    nodes: options.Nodes = None,
    sbatch: options.Sbatch = None,
    setup: options.Setup = "",
    submit: options.Submit = False,
    kuberay: options.Kuberay = False,
    image: options.Image = None,
    claim: options.Claim = None,
    limit: options.Limit = None,
) -> Arguments:
    """Train a policy as CONFIG says.

    The same file runs on a laptop, a GPU or a cluster; only its section `cluster` differs.
    """
    overrides = [*(overrides or []), *([] if nodes is None else [f"cluster.num_nodes={nodes}"])]
    arguments = Arguments(**locals())
    for refusal in arguments.refusals:
        raise typer.BadParameter(refusal)
    return arguments


def execute(words: Sequence[str]) -> None:
    """Runs the command line `words`. Errors are raised as they are; `cli` prints them."""
    # an option with an optional value would take CONFIG as that value
    words = ["--plan=text" if word == "--plan" else word for word in words]
    try:
        arguments = app(words, standalone_mode=False)
    except Exception as error:
        if (option := getattr(error, "option_name", None)) and (instead := _key_instead(option)):
            raise typer.BadParameter(f"no such option: {option}. Write {instead}") from error
        raise
    if isinstance(arguments, Arguments):  # --help gives a number
        command, argument = typer.main.get_command(app), "--eval" if arguments.evaluate else "config"
        with find(EXPLANATIONS, "given_words.named_words", lambda *_: nullcontext())(command, words, argument):
            launch(arguments)


def _key_instead(option: str) -> str:
    """Returns the argument that replaces an option that does not exist; "" if none is known."""
    if option == "--resume":
        return "runner.resume=auto, or runner.resume=CHECKPOINT"
    if option == "--set":
        return "KEY=VALUE without --set, as runner.max_steps=10"
    return f"{option.lstrip('-')}=VALUE" if "." in option else ""


def launch(arguments: Arguments) -> None:
    """Runs the parsed command line, outside typer, which would turn Ctrl-C into a success."""
    if arguments.evaluate:
        _evaluate(arguments)
        return
    starts = not (arguments.only_shows or arguments.check or arguments.rehearse)
    placed = load(arguments.config, arguments.overrides, starts=starts)
    if arguments.print_config:
        print(placed.loaded.resolved_yaml(), end="")
    with located(placed.loaded):
        _carry_out(arguments, placed)


def _carry_out(arguments: Arguments, placed: PlacedConfig) -> None:
    """Prints, writes or runs what the arguments select."""
    writes_job = arguments.slurm or arguments.kuberay
    if arguments.plan is not None or writes_job:
        with required(START_CHECKS, "--plan" if arguments.plan is not None else "--slurm or --kuberay"):
            from rl_platform.launch.start_checks.env_check import check_env

        check_env(placed.config)
    if arguments.plan is not None:
        with required("rl_platform.launch.plans", "--plan"), required("rl_platform.planner", "--plan"):
            from rl_platform.launch.plans.plan_forms import planned

        print(planned(arguments, placed), end="")
    if writes_job:
        with required("rl_platform.launch.jobs", "--slurm" if arguments.slurm else "--kuberay"):
            from rl_platform.launch.jobs import kuberay, slurm
        write = slurm.write if arguments.slurm else kuberay.write
        print(write(arguments, placed.config))
    if arguments.only_shows and not arguments.check:
        return
    if arguments.check:
        with required("rl_platform.launch.check", "--check"):
            from rl_platform.launch.check.property_check import check  # loads torch

        check(placed.loaded)
    elif arguments.rehearse:
        with required("rl_platform.launch.rehearse", "--rehearse"):
            from rl_platform.launch.rehearse.rehearsal import rehearse  # loads torch

        rehearse(placed.loaded, placed.placement, arguments.rehearse_in)
    else:
        from rl_platform.launch.session import run  # loads torch
        from rl_platform.runtime.cpu import keep_freed_memory

        if not placed.placement.on_accelerators:  # a GPU leaves the CPU little to compute, and its states are large
            keep_freed_memory()
        run(placed, arguments.config)


def _evaluate(arguments: Arguments) -> None:
    """Evaluates a checkpoint with the config that it was written with."""
    with required("rl_platform.launch.saved", "--eval"):
        from rl_platform.launch.saved.saved_run import find_run

    run = find_run(arguments.config, "--eval")
    loaded = run.load(arguments.overrides)
    import torch

    from rl_platform.launch.saved.evaluation import evaluate_checkpoint
    from rl_platform.runtime.cpu import keep_freed_memory

    if not torch.cuda.is_available():
        keep_freed_memory()
    evaluate_checkpoint(run, loaded, arguments.overrides)
