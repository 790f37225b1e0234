"""`rl-platform VERB ...`: pictures and reports of finished runs, questions of known datasets, and all config keys.

Signals, standard streams and exit codes are in `rl_platform.launch.cli`. Starting a run is `platform-launch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from rl_platform.config.explanations.given_words import given_words
from rl_platform.config.explanations.refused_paths import named_paths
from rl_platform.errors import ConfigError, Problem
from rl_platform.extras import required
from rl_platform.launch.tools.named_runs import run_path

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
    help="Pictures and reports of runs, and data for them.",
)

_RUN = partial(typer.Argument, metavar="RUN", parser=run_path)
Run = Annotated[Path, _RUN(help="output folder of a run, or latest")]
Traced = Annotated[Path, _RUN(help="output folder of a run, its trace.json, or latest")]
Measured = Annotated[list[Path], _RUN(help="output folders, files metrics.jsonl, or latest")]
Output = Annotated[Path, typer.Option("--output", "-o", help="file to write")]
Title = Annotated[str, typer.Option("--title")]


@app.command()
def plot(
    runs: Measured,
    output: Output = Path("curves.png"),
    metric: Annotated[
        list[str] | None, typer.Option("--metric", "-m", help="may be repeated; default: objective and validation")
    ] = None,
    x: Annotated[Literal["step", "env_steps", "minutes"], typer.Option("-x", help="the x axis")] = "step",
    title: Title = "",
    band: Annotated[
        Literal["std", "minmax", "none"] | None,
        typer.Option("--band", help="the mean of several runs, with one standard deviation, their range or nothing"),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="a colour per config, whatever the seed is; as --band std")
    ] = False,
) -> None:
    """Draw learning curves as a PNG: thin lines for several runs (seeds), a thick one for their median.

    Needs matplotlib, the package's extra `plot`.
    """
    from rl_platform.launch.tools import plot as curves

    curves.plot(runs, output, metric, x, title, band, compare)
    print(output)


@app.command()
def sweep(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="YAML file")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE,VALUE...]...", help="as runner.seed=1,2,3; one value is set for all points"),
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, max=256, help="points that run at the same time")] = 1,
    optuna: Annotated[
        str | None, typer.Option("--optuna", metavar="SPEC", help="search as this YAML file says")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="folder; default: <runner.output_dir>-sweep")
    ] = None,
    metric: Annotated[str, typer.Option("--metric", "-m", help="default: the validation metric of the task")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands of all points and stop.")] = False,
) -> Callable[[], None]:
    """Run CONFIG with every combination of the listed values, and compare. Repeat the command to continue.

    --optuna needs the package optuna, the extra `optuna`; the picture needs the extra `plot`.
    """
    from rl_platform.launch.tools.sweep import sweep as points

    return partial(points.sweep, config, arguments or [], jobs, optuna, output, metric, dry_run)


@app.command()
def timeline(
    run: Traced,
    output: Output = Path("timeline.png"),
    steps: Annotated[int, typer.Option("--steps", min=1, help="steps shown, the last ones recorded")] = 2,
    title: Title = "",
) -> None:
    """Draw the timeline of a run as a PNG and print the shares of its time.

    Needs matplotlib, the package's extra `plot`. Runs record it with runner.trace_steps above 0.
    """
    from rl_platform.launch.tools import timeline as spans

    spans.draw(run, output, steps, title)
    print(output)
    if shares := spans.as_text(spans.work_shares(spans.read_lanes(run))):
        print(shares)


@app.command()
def work_shares(run: Traced) -> None:
    """Print the shares of physics, inference and optimizer steps in the time of an embodied run."""
    from rl_platform.launch.tools import timeline as spans

    spans.check_traced(run)
    if not (text := spans.as_text(spans.work_shares(spans.read_lanes(run)))):
        hint = "runs with task_type: embodied have it"
        raise ConfigError([Problem("RUN", "the timeline holds no physics", value=str(run), hint=hint)])
    print(text)


@app.command()
def snapshot(run: Run, output: Output = Path("view.svg"), title: Title = "platform-launch") -> None:
    """Draw the terminal view after the last step of a run as an SVG."""
    from rl_platform.launch.tools import snapshot as view
    from rl_platform.launch.written import check_output, writing

    check_output(output, endings := (".svg",))
    svg = view.snapshot(run, title)
    with writing(output, endings) as stage:
        stage.write_text(svg, encoding="utf-8", errors="backslashreplace")  # names of files may be other bytes
    print(output)


@app.command()
def rrd(run: Run, output: Output = Path("episode.rrd")) -> None:
    """Write the drawn evaluation episode of an embodied run as a file of the Rerun viewer.

    Needs the package rerun-sdk, the extra `rerun`.
    """
    from rl_platform.launch.tools import rrd as viewer

    viewer.write(run, output)
    print(output)


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False) -> None:
    """Report machine, GPUs, packages, network and folders, what is missing for what, and how to get it."""
    from rl_platform.launch.tools import doctor as findings

    findings.show(as_json)


@app.command()
def environment(name: Annotated[str, typer.Argument(metavar="NAME", help="as manipulation")]) -> None:
    """Make a virtual environment for simulators that need other packages than the platform; env.python=NAME uses it.

    manipulation: robosuite, Meta-World, Gymnasium-Robotics and dm-control with MuJoCo 3.
    """
    from rl_platform.launch.tools import simulators

    for line in simulators.make(name):
        print(line, flush=True)


@app.command()
def environment_server(
    output: Annotated[Path, typer.Argument(metavar="FILE", help="file to write, as server.pyz")],
) -> None:
    """Write an environment server as one file: `python server.pyz --env ID` serves environments to env.address.

    The machine of the environments needs Python 3.11 or later, numpy, gymnasium and the simulator.
    """
    from rl_platform.envs.embodied.remote import single_file
    from rl_platform.launch.written import writing

    with writing(output, (".pyz",), "FILE") as stage:
        single_file.write(stage)
    print(output)


@app.command()
def report(
    runs: Measured,
    output: Output = Path("report.html"),
    show: Annotated[bool, typer.Option("--open", help="open it in the browser")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="write it again every 10 s while a run goes on")] = False,
) -> None:
    """Write one HTML file that shows what happened in a run, with a verdict; several runs are compared."""
    from rl_platform.launch.tools.report.live_report import report as lines

    for line in lines(runs, output, show, follow):
        print(line, flush=True)


@app.command()
def metrics() -> None:
    """Print the definitions of all metrics, as Markdown (docs/metrics.md)."""
    from rl_platform.launch.tools.report.definitions import render

    print(render(), end="")


@app.command()
def keys() -> None:
    """Print all config keys with types, defaults and meanings, as Markdown (docs/configuration.md)."""
    from rl_platform.launch.tools.key_reference import render

    print(render(), end="")


@app.command()
def export(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="output folder of a run, one of its checkpoints, or latest")
    ],
    step: Annotated[int | None, typer.Option("--step", help="step of the checkpoint; default: the newest")] = None,
    format: Annotated[
        Literal["hf", "torch", "onnx", "lerobot"] | None,
        typer.Option("--format", help="default: hf for language models, torch for embodied policies"),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="new or empty folder; default: RUN/export/FORMAT-step-N")
    ] = None,
) -> None:
    """Write the trained model of a run as a folder that other programs load.

    onnx needs the packages onnx and onnxscript, the extra `onnx`.
    """
    from rl_platform.launch.tools import export as formats

    for line in formats.export(run, step, format, output):
        print(line)


@app.command()
def data(
    kind: Annotated[
        Literal["gsm8k", "math", "dapo-math", "aime24", "hh-rlhf"], typer.Argument(metavar="KIND", help="which dataset")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="folder of the files")] = Path("data"),
    source: Annotated[
        Path | None, typer.Option("--from", help="folder with a copy of the dataset; default: the Hugging Face hub")
    ] = None,
) -> None:
    """Write the questions of a known dataset as JSON Lines, and print the config that reads them.

    Needs the package datasets, the extra `data`.
    """
    from rl_platform.launch.tools import known_datasets as known

    for line in known.prepare(kind, output, source):
        print(line)


@app.command()
def record(
    run: Run,
    step: Annotated[int, typer.Option("--step", help="PPO step, from 1, as in metrics.jsonl")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="new folder; default: RUN/recordings/step-N")
    ] = None,
    from_start: Annotated[
        bool, typer.Option("--from-start", help="begin again at step 0 instead of at a checkpoint")
    ] = False,
) -> Callable[[], None]:
    """Run a run again up to step N, from its newest checkpoint before it, and keep that step for replay."""
    with required("rl_platform.launch.replay", "record"):
        from rl_platform.launch.replay import recordings

    def action() -> None:
        for line in recordings.record(run, step, output, from_start):
            print(line)

    return action


@app.command()
def replay(
    recording: Annotated[Path, typer.Argument(metavar="RECORDING", help="folder that rl-platform record printed")],
    phase: Annotated[
        Literal["reference", "log-probs", "values", "advantages", "critic", "actor"] | None,
        typer.Option("--phase", help="only this one, from the recorded results of the phases before it"),
    ] = None,
    tolerance: Annotated[float, typer.Option("--tolerance", min=0, help="largest difference that is accepted")] = 0.0,
) -> Callable[[], None]:
    """Run a recorded step again on this machine's CPU; print where its numbers part from the recorded ones.

    The exit code is 0 if they are equal and 1 if they are not.
    """
    with required("rl_platform.launch.replay", "replay"):
        from rl_platform.launch.replay import replayed_step

    def action() -> None:
        for line in replayed_step.replay(recording, phase, tolerance):
            print(line)

    return action


@app.command()
def convert(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="config, script or saved model of the other system")],
    system: Annotated[
        Literal["rlinf", "verl", "nemo-rl", "trl", "sb3"] | None,
        typer.Option("--from", help="the other system; default: the one that FILE looks like"),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="file to write; default: standard output")
    ] = None,
    env: Annotated[
        str | None, typer.Option("--env", help="sb3: block of a zoo file, or environment of a saved model")
    ] = None,
) -> None:
    """Write a config of this platform from one of another system, and report what became of each key."""
    from rl_platform.launch.tools.convert.converted_file import run

    run(file, system, output, env)


def execute(words: Sequence[str]) -> None:
    """Runs one verb. Errors are raised as they are: `rl_platform.launch.cli` prints them."""
    with named_paths(partial(_given, words)):
        action = app(list(words), prog_name="rl-platform", standalone_mode=False)
        if callable(action):  # a verb that starts runs: within typer, Ctrl-C would not arrive as Interrupted
            action()


def _given(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    verbs = typer.main.get_command(app)
    assert isinstance(verbs, typer.core.TyperGroup)
    if isinstance(verb := verbs.commands.get(words[0]), typer.core.TyperCommand):
        yield from given_words(verb, words[1:])
