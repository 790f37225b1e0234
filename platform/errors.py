"""Errors that a user may see, each with the exit code of `platform-launch`.

Exit codes: 2 bad config or placement, 65 bad data or checkpoint, 70 diverged or bug, 75 try again later.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace

from rl_platform.redact import MARK, is_secret, redacted


class PlatformError(Exception):
    """Base of every error with a message meant for the user. Anything else that reaches the top is a bug (exit 70)."""

    exit_code = 70


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a config or placement.

    key: dotted path; where: `file:line` or "command line"; value: the given one; allowed: the possible ones; hint: the
    nearest name or the next action. Empty strings are left out of the message. All but key and message are keywords, as
    a value in the place of `where` would be printed as a file.
    """

    key: str
    message: str
    _: KW_ONLY
    where: str = ""
    value: str = ""
    allowed: str = ""
    hint: str = ""

    def __str__(self) -> str:
        """Returns the message without secrets."""
        place = f"{self.where}: " if self.where else ""
        lines = [redacted(f"{place}{self.key}: {self.message}")]
        value = MARK if self.value and is_secret(self.key) else redacted(self.value)
        lines += [
            f"    {label}: {text}"
            for label, text in (("value", value), ("allowed", self.allowed), ("hint", self.hint))
            if text
        ]
        return "\n".join(lines)


def message_of(error: BaseException) -> str:
    """Returns the text of an error, also of one of the user whose `__str__` raises."""
    try:
        return str(error)
    except Exception as failure:
        return f"(without text: its __str__ raised {type(failure).__name__})"


def shortened(text: str) -> str:
    """Returns a value for a message, cut after 80 characters."""
    return text if len(text) <= 80 else f"{text[:77]}..."


def shown(value: object) -> str:
    """Returns a value as YAML could write it, with text in quotes, cut after 80 characters."""
    return shortened(json.dumps(value, ensure_ascii=False, default=str))


def ranges(numbers: Iterable[int]) -> list[str]:
    """Returns ascending numbers as texts, as `1` and `4-6`."""
    runs: list[list[int]] = []
    if isinstance(numbers, range) and numbers.step == 1:  # maybe of thousands of GPUs
        numbers, runs = (), [[numbers.start, numbers.stop - 1]] if numbers else []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return [str(first) if first == last else f"{first}-{last}" for first, last in runs]


class ConfigError(PlatformError):
    """All problems of one config at once."""

    exit_code = 2

    def __init__(self, problems: Sequence[Problem] | str) -> None:
        if isinstance(problems, str):
            problems = [Problem(key="config", message=problems)]
        self.problems = list(problems)
        count = f"{len(self.problems)} problem{'s' if len(self.problems) != 1 else ''}"
        super().__init__(f"{count}:\n" + "\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[Problem]]]:
        return type(self), (self.problems,)


@contextmanager
def problems_of(key: str, section: str) -> Iterator[None]:
    """Turns problems of keys of `section` into those of the same keys below `key`, as for an entry of a list."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError([replace(each, key=each.key.replace(section, key, 1)) for each in error.problems]) from error


def check_all(*checks: Callable[[], object]) -> None:
    """Runs the checks, then raises ConfigError with the distinct problems of all.

    Another error ends the checks, because those that follow may take long or fail by it. It is raised unless there are
    problems.
    """
    problems: dict[str, Problem] = {}
    for check in checks:
        try:
            check()
        except ConfigError as error:
            problems.update({str(problem): problem for problem in error.problems})
        except Exception:
            if not problems:
                raise
            break
    if problems:
        raise ConfigError([*problems.values()])


class PlacementError(ConfigError):
    """A placement that cannot be parsed, or that the cluster cannot satisfy."""


class DataError(PlatformError):
    """Bad data: an empty file, a line without its column, a checkpoint that does not match its manifest."""

    exit_code = 65


class CheckpointError(DataError):
    """A checkpoint that is damaged, incomplete or of another model."""


class Diverged(PlatformError):
    """Training repeatedly produced losses or gradients that are not finite."""

    exit_code = 70


class WorkerError(PlatformError):
    """A component raised an exception of its own. The message carries its traceback, `__cause__` the original."""

    exit_code = 70


class RunInProgress(PlatformError):
    """This process already trains, checks or evaluates: a process does one of these at a time."""

    exit_code = 75


class FolderInUse(PlatformError):
    """Another run writes to the output folder."""

    exit_code = 75


class WorkerDied(PlatformError):
    """A worker process or node is gone."""

    exit_code = 75


class HostDied(WorkerDied):
    """The process of a host is gone, or its node. If the run is started again, it continues without it."""


class RayLost(HostDied):
    """Ray's own processes are gone. Calls to Ray would hang, so a command that ends with it exits at once."""


class Unreachable(PlatformError):
    """A server that the run needs does not answer."""

    exit_code = 75


class Deadline(PlatformError):
    """A wait took longer than allowed. The message names the waiting rank, what it waits for, and since when."""

    exit_code = 75


class ChannelClosed(PlatformError):
    """`put` on a closed channel, or `get` on a closed and empty one."""
