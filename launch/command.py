"""`platform-launch CONFIG [key=value ...]`: parses the command line and calls the part that does it.

Config and placement are checked without torch or another heavy library, so a typo is reported at once. Signals and exit
codes are in `cli`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from os import PathLike
from typing import NamedTuple

import typer

from rl_platform.config import Config, LoadedConfig, load_config
from rl_platform.config.layers import strings_of
from rl_platform.config.loader import EXPLANATIONS
from rl_platform.config.rollout_backend import chosen_backend
from rl_platform.config.schema.cluster import Cluster
from rl_platform.errors import ConfigError, PlacementError, Problem
from rl_platform.extras import find, required
from rl_platform.launch import options
from rl_platform.launch.options import PlanForm
from rl_platform.placement.decisions import ESTIMATES
from rl_platform.placement.inventory import Inventory, inventory_for
from rl_platform.placement.scheduler import Placement, schedule

START_CHECKS = "rl_platform.launch.start_checks"  # an extra

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


class PlacedConfig(NamedTuple):
    """A valid config, its placement, and the inventory it is placed on."""

    loaded: LoadedConfig
    placement: Placement
    inventory: Inventory

    @property
    def config(self) -> Config:
        """The config itself, without its origin."""
        return self.loaded.config


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
        with required("rl_platform.launch.saved", "--eval"):
            from rl_platform.launch.saved.saved_run import evaluate_run
        evaluate_run(arguments.config, arguments.overrides)
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
            from rl_platform.launch.jobs.written_job import written_job
        print(written_job(arguments, placed.config))
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


def load(
    config: str | PathLike[str] | Mapping[str, object],
    overrides: Sequence[str] | Mapping[str, object],
    *,
    stored: bool = False,
    starts: bool = False,
) -> PlacedConfig:
    """Returns a valid config, its placement and inventory. Raises ConfigError with the problems of all at once.

    stored: as in `load_config`. starts: a run follows on this machine, so missing files and models are listed too.
    """
    inventory: Inventory | None = None

    def check_cluster(cluster: Cluster) -> list[Problem]:
        nonlocal inventory
        inventory = inventory_for(cluster)
        try:
            schedule(cluster, inventory)
        except PlacementError as error:
            return error.problems
        if starts and cluster.reallocate != "off" and max(inventory.num_accelerators, len(inventory.nodes)) == 1:
            message = "this machine has one device, and so one placement"
            return [Problem("cluster.reallocate", message, value=cluster.reallocate, allowed="off")]
        return []

    missing = find(START_CHECKS, "missing.missing", None) if starts else find(START_CHECKS, "missing.unknown_env", None)
    loaded = load_config(config, overrides, check_cluster, missing, stored=stored)
    assert inventory is not None
    placement = schedule(loaded.config.cluster, inventory)
    on_gpus = bool(placement.accelerators.get("rollout")) and not placement.emulated
    grouped, _ = inventory.with_groups(loaded.config.cluster.node_groups)
    loaded = find(ESTIMATES, "compute_type.with_types", _as_written)(loaded, placement, inventory)
    chosen = chosen_backend(loaded.config.rollout.backend, on_gpus)
    return PlacedConfig(loaded.with_backend(*chosen), placement, grouped)


def _as_written(loaded: LoadedConfig, placement: Placement, inventory: Inventory) -> LoadedConfig:
    """Raises ConfigError for a `model.dtype` that only the estimates select."""
    for name in ("actor", "critic", "reference"):
        if (model := getattr(loaded.config, name).model) is not None and model.dtype == "auto":
            raise ConfigError([Problem(f"{name}.model.dtype", f"{ESTIMATES} is not installed", value="auto")])
    return loaded


@contextmanager
def located(loaded: LoadedConfig) -> Iterator[None]:
    """Adds the line of its key to each problem that a ConfigError of the block reports."""

    def with_place(problem: Problem) -> Problem:
        is_option = problem.key.startswith("--")
        return problem if problem.where or is_option else replace(problem, where=loaded.where(problem.key))

    try:
        named_paths = find(EXPLANATIONS, "refused_paths.named_paths", lambda _: nullcontext())
        with named_paths(lambda: strings_of(loaded.config.model_dump(mode="json"))):
            yield
    except ConfigError as error:
        placed = type(error)([with_place(problem) for problem in error.problems])
        for note in getattr(error, "__notes__", []):  # of a run that had begun
            placed.add_note(note)
        raise placed from error
