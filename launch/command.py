"""`platform-launch CONFIG [key=value ...]`: parses the command line and calls the part that does it.

Config and placement are checked without torch or another heavy library, so a typo is reported at once. Signals and exit
codes are in `cli`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING, NamedTuple

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

if TYPE_CHECKING:
    from rl_platform.launch.jobs.kuberay import KubeRayOptions
    from rl_platform.launch.jobs.slurm import SlurmOptions

START_CHECKS = "rl_platform.launch.start_checks"  # an extra

app = typer.Typer(
    add_completion=False, pretty_exceptions_enable=False, context_settings={"help_option_names": ["--help", "-h"]}
)


@dataclass(frozen=True)
class Arguments:
    """The parsed command line."""

    config: str
    overrides: list[str]
    print_config: bool
    plan: PlanForm | None
    calibrate: str | None
    write: str | None
    slurm: SlurmOptions | None
    submit: bool
    check: bool
    evaluate: bool
    rehearse: bool
    rehearse_in: str | None
    kuberay: KubeRayOptions | None

    @property
    def only_shows(self) -> bool:
        """True if the command prints or writes something and runs nothing."""
        return self.print_config or self.plan is not None or self.slurm is not None or self.kuberay is not None


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
    if nodes is not None:
        overrides = [*(overrides or []), f"cluster.num_nodes={nodes}"]
    batch = _slurm_options(sbatch or [], setup) if slurm else None
    pods = _kuberay_options(image, claim, limit or []) if kuberay else None
    others = print_config or plan is not None or check or slurm or kuberay
    refusals = {  # the first that holds is printed
        "--calibrate belongs to --plan or --plan=search": calibrate is not None and plan in (None, "calibrate"),
        "--write belongs to --plan=search": write is not None and plan != "search",
        "--sbatch, --setup and --submit belong to --slurm": (sbatch or setup or submit) and not slurm,
        "--image, --claim and --limit belong to --kuberay": (image is not None or claim is not None or limit)
        and not kuberay,
        "--nodes belongs to --slurm or --kuberay": nodes is not None and not (slurm or kuberay),
        "--slurm and --kuberay exclude each other": slurm and kuberay,
        "--eval takes a checkpoint and nothing but KEY=VALUE beside it": evaluate and others,
        "--rehearse takes a config, KEY=VALUE and --rehearse-in, and no other option": rehearse
        and (others or evaluate),
        "--rehearse-in belongs to --rehearse": rehearse_in is not None and not rehearse,
    }
    for message, holds in refusals.items():
        if holds:
            raise typer.BadParameter(message)
    return Arguments(
        config=config,
        overrides=overrides or [],
        print_config=print_config,
        plan=plan,
        calibrate=calibrate,
        write=write,
        slurm=batch,
        submit=submit,
        check=check,
        evaluate=evaluate,
        rehearse=rehearse,
        rehearse_in=rehearse_in,
        kuberay=pods,
    )


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
    config, writes_job = placed.config, arguments.slurm is not None or arguments.kuberay is not None
    if arguments.plan is not None or writes_job:
        with required(START_CHECKS, "--plan" if arguments.plan is not None else "--slurm or --kuberay"):
            from rl_platform.launch.start_checks.env_check import check_env

        check_env(config)
    if arguments.plan is not None:
        with required("rl_platform.launch.plans", "--plan"), required("rl_platform.planner", "--plan"):
            from rl_platform.launch.plans.plan_forms import planned

        print(planned(arguments, placed), end="")
    if arguments.slurm is not None:
        from rl_platform.launch.jobs.slurm import sbatch_script, submit, write_script

        path = write_script(config, sbatch_script(config, arguments.config, arguments.overrides, arguments.slurm))
        print(submit(path) if arguments.submit else f"{path}: submit it with sbatch {path}")
    if arguments.kuberay is not None:
        from rl_platform.launch.jobs.kuberay import manifest, write_manifest

        path = write_manifest(config, manifest(config, arguments.config, arguments.overrides, arguments.kuberay))
        print(f"{path}: submit it with kubectl create -f {path}")
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


def evaluate_run(name: str, overrides: Sequence[str]) -> None:
    """Evaluates a checkpoint with the config that it was written with (`--eval`). `name`: as of `find_run`."""
    with required("rl_platform.launch.saved", "--eval"):
        from rl_platform.launch.saved.saved_run import find_run
    run = find_run(name, "--eval")
    loaded = run.load(overrides)
    import torch

    from rl_platform.launch.saved.evaluation import evaluate_checkpoint
    from rl_platform.runtime.cpu import keep_freed_memory

    if not torch.cuda.is_available():
        keep_freed_memory()
    evaluate_checkpoint(run, loaded, overrides)


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
        if starts and cluster.reallocate != "off" and max(inventory.accelerators, len(inventory.nodes)) == 1:
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


def _slurm_options(sbatch: Sequence[str], setup: str) -> SlurmOptions:
    with required("rl_platform.launch.jobs", "--slurm"):
        from rl_platform.launch.jobs.slurm import SlurmOptions

    return SlurmOptions(sbatch, setup)


def _kuberay_options(image: str | None, claim: str | None, limits: Sequence[str]) -> KubeRayOptions:
    if image is None:
        raise typer.BadParameter("--kuberay needs --image: the container image of the pods (docs/containers.md)")
    with required("rl_platform.launch.jobs", "--kuberay"):
        from rl_platform.launch.jobs.kuberay import KubeRayOptions

    return KubeRayOptions(image, limits=limits) if claim is None else KubeRayOptions(image, claim, limits)


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
