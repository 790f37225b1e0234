"""`platform-launch --check`: tries the invariances of a config and of a user's own functions. Starts nothing else.

The unit tests check that the built-in functions compute their formulas.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import mkdtemp

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rl_platform.acceleration import accelerating
from rl_platform.config import LoadedConfig
from rl_platform.config.schema import Config
from rl_platform.config.schema.algorithm import ESTIMATORS, POLICY_LOSSES
from rl_platform.errors import ConfigError, PlatformError, WorkerError, check_all
from rl_platform.launch.card.run_card import run_card
from rl_platform.launch.check import invariance, updates
from rl_platform.launch.check.credit import credit, not_asked
from rl_platform.launch.check.episode_examples import episode_examples
from rl_platform.launch.check.property import Property, PropertyOutcome
from rl_platform.launch.check.reward_examples import reward_examples
from rl_platform.launch.check.samples import CheckedConfig
from rl_platform.launch.start_checks.env_check import check_env_and_code
from rl_platform.launch.start_checks.extensions import check_extensions
from rl_platform.launch.start_checks.missing import missing
from rl_platform.launch.start_checks.user_code_checks import check_reward
from rl_platform.launch.views.console import run_console
from rl_platform.launch.views.panels import print_lines, print_panel
from rl_platform.runtime.cpu import one_thread
from rl_platform.user_code import is_named, raised

PROPERTIES = [
    *invariance.PROPERTIES,
    Property("credit", "advantages: follow own and later rewards, not earlier", credit, not_asked),
    *updates.PROPERTIES,
]


NOTHING = "no number of this batch depends on it"
_STYLES = {"passed": "green", "failed": "bold red", "not asked": "dim"}


class PropertyFailed(PlatformError):
    """The result of a config depends on the batch layout, or a function of the user raised."""

    exit_code = 70


def check(loaded: LoadedConfig, console: Console | None = None) -> list[PropertyOutcome]:
    """Returns the outcome of each property; prints them and the algorithm card. Raises PropertyFailed if one does not
    hold, ConfigError for code of the user that cannot be used or a reward function that gives no score."""
    config, console, began = loaded.config, console or run_console(), time.monotonic()
    reasons: list[str] = []
    check_all(
        partial(check_extensions, config),
        partial(check_reward, config, only_functions=True),
        lambda: reasons.append(check_env_and_code(config)),
    )
    print_lines(console, f"{config.runner.experiment_name}: algorithm", run_card(config))
    with console.status("checking"), _own_folder(config) as apart:
        outcomes = outcomes_of(apart)
    print_outcomes(console, outcomes, config.runner.seed, time.monotonic() - began)
    for reason in filter(None, reasons):
        console.print(Text(f"the environment was not checked: {reason}"), soft_wrap=True)
    for problem in missing(config):
        if not problem.key.startswith("env."):  # those are `reasons`, or were raised
            console.print(Text(f"missing here, so that a start is refused: {problem}"), soft_wrap=True)
    failed = [outcome for outcome in outcomes if outcome.failed]
    if failed:
        raise PropertyFailed(_explanation(config, failed))
    for line in chain(reward_examples(config), episode_examples(config)):
        console.print(Text(line), soft_wrap=True)
    return outcomes


def outcomes_of(config: Config, properties: Sequence[Property] = PROPERTIES) -> list[PropertyOutcome]:
    """Tries every property on a valid config, with numbers that follow from `runner.seed`."""
    with accelerating(config.runner.accelerate), one_thread():
        case = CheckedConfig(config)
        return [_tried(each, case) for each in properties]


def _tried(each: Property, case: CheckedConfig) -> PropertyOutcome:
    reason = each.not_asked(case.config)
    if reason is not None:
        return PropertyOutcome(each.name, each.compared, not_asked=reason)
    try:
        differences = list(each.differences(case))
    except Exception as error:  # such as one of a user's function: the other properties are still tried
        return PropertyOutcome(each.name, each.compared, error=_raised(error))
    if not differences:  # such as an estimator that only compares rewards with a threshold
        return PropertyOutcome(each.name, each.compared, not_asked=NOTHING)
    most = max(differences, key=lambda difference: (not difference.holds, difference.apart))
    return PropertyOutcome(each.name, each.compared, most)


def _raised(error: Exception) -> str:
    if isinstance(error, WorkerError) and error.__cause__ is not None:  # of `Extension.running`, with the key
        return str(error).partition("\nTraceback")[0]
    if isinstance(error, ConfigError):
        return "; ".join(f"{problem.key} ({problem.value}): {problem.message}" for problem in error.problems)
    return raised(error)


def _explanation(config: Config, failed: Sequence[PropertyOutcome]) -> str:
    lines = [f"{len(failed)} {'property does' if len(failed) == 1 else 'properties do'} not hold"]
    lines += [str(outcome) for outcome in failed if not outcome.error]
    for error in dict.fromkeys(outcome.error for outcome in failed if outcome.error):
        names = [outcome.name for outcome in failed if outcome.error == error]
        lines.append(f"{', '.join(names)}: {error}")
    algorithm = config.algorithm
    chosen = (("adv_type", algorithm.adv_type, ESTIMATORS), ("policy_loss", algorithm.policy_loss, POLICY_LOSSES))
    own = [f"algorithm.{key} is a function of your own, {name}" for key, name, known in chosen if name not in known]
    if is_named(config.actor.model.type):
        own.append(f"actor.model.type is a network of your own, {config.actor.model.type}")
    lines += [f"{each}: look there first" for each in own]
    if not own:
        lines.append("no function of your own takes part: this is a bug in rl-platform")
    lines.append(f"all numbers follow from runner.seed={config.runner.seed}")
    return "\n    ".join(lines)


@contextmanager
def _own_folder(config: Config) -> Iterator[Config]:
    """Yields the config with a temporary folder, which stays if it holds mini-batches without a finite gradient."""
    folder = mkdtemp(prefix="rl-check-")
    try:
        yield config.changed({"runner.output_dir": folder})
    finally:
        with suppress(OSError):
            Path(folder).rmdir()


def print_outcomes(console: Console, outcomes: Sequence[PropertyOutcome], seed: int, seconds: float) -> None:
    """Prints one line per property and the number that passed."""
    verdicts = [_verdict(outcome) for outcome in outcomes]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in _STYLES)
    summary = f"{counts}; seed {seed}, {seconds:.1f} s"
    if not console.is_terminal:
        for outcome, verdict in zip(outcomes, verdicts, strict=True):
            console.print(Text(f"{outcome.name}: {_line(outcome, verdict)}"), soft_wrap=True)
        console.print(Text(f"properties: {summary}"), soft_wrap=True)
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    for outcome, verdict in zip(outcomes, verdicts, strict=True):
        style = _STYLES[verdict]
        text = Text(outcome.not_asked or outcome.compared, "dim" if outcome.not_asked else "")
        table.add_row(Text(outcome.name), text, Text(_size(outcome)), Text(verdict, style))
    print_panel(console, "properties: left = right, largest difference", table)
    console.print(Text(summary))


def _verdict(outcome: PropertyOutcome) -> str:
    return "not asked" if outcome.not_asked else "failed" if outcome.failed else "passed"


def _line(outcome: PropertyOutcome, verdict: str) -> str:
    if outcome.not_asked:
        return f"does not apply to this config ({outcome.not_asked})"
    difference = outcome.difference
    size = "" if difference is None else f", largest difference {_size(outcome)} ({difference.allowed:g} allowed)"
    return f"{verdict}{size}: {outcome.compared}"


def _size(outcome: PropertyOutcome) -> str:
    return "" if outcome.difference is None else f"{outcome.difference.apart:.1g}"
