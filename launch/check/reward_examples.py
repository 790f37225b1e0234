"""`--check` on reward functions of the user: each scores the expected answer and an empty response of a question.

Not covered: built-in rewards, servers and models, and questions that are not on this machine.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

from rl_platform.components.reward import process_scorer
from rl_platform.config.schema import Config
from rl_platform.config.schema.reward import Scoring
from rl_platform.envs.reasoning import verifiers
from rl_platform.envs.reasoning.question import Question
from rl_platform.envs.reasoning.score import Score
from rl_platform.envs.reasoning.tasks import build_questions
from rl_platform.envs.reasoning.verifiers import REWARD, ScoreItem
from rl_platform.errors import ConfigError, DataError, PlatformError, Problem
from rl_platform.user_code import is_named, is_of_user, relative

SCORING = str(Path(verifiers.__file__).parent)  # frames of a scoring process around the function
_FRAME = re.compile(r'^ *File "(.+)", line (\d+), in ', re.MULTILINE)


def reward_examples(config: Config) -> Iterator[str]:
    """Yields a line with the scores of each reward function of the user, or the reason why none was called.

    Raises ConfigError for the first function that gives no score.
    """
    own = [(key, part) for key, part in config.reward.parts if is_named(part.type)]
    if config.runner.task_type != "reasoning" or not own:
        return
    try:
        items = [item for question in example_questions(config) for item in _items(question)]
    except PlatformError as error:  # a start refuses it
        yield f"the reward functions were not called: {error}"
        return
    for key, part in own:
        with closing(process_scorer(config.data, part.model_copy(update={"num_workers": 1}))) as pool:
            scores = [future.result() for future in pool.submit(items)]
        for item, score in zip(items, scores, strict=True):
            if not score.valid:
                message = f"{_failure(part, score)}, for {shown_response(item.response, item.answer)}"
                hint = "such a response is left out of training: return a number for every response"
                raise ConfigError([Problem(f"{key}.type", message, value=part.type, hint=hint)])
        shown = [
            f"{score.value:g} for {shown_response(item.response, item.answer)}"
            for item, score in zip(items, scores, strict=True)
        ]
        yield f"{key}.type {part.type} returned {', '.join(shown)}"


def example_questions(config: Config) -> list[Question]:
    """Returns a question of each source. Raises PlatformError if they cannot be read here."""
    for _, task in config.data.tasks:
        if task.type == "dataset" and not Path(task.path or "").is_dir():
            raise DataError(f"{task.path} is no folder on this machine, and --check downloads nothing")
    few = {"train_size": 1, "val_size": 1}
    split = build_questions(config.data.model_copy(update=few), config.runner.seed)
    return [*{question.source: question for question in [*split.validation, *reversed(split.train)]}.values()]


def _items(question: Question) -> Iterator[ScoreItem]:
    for response in dict.fromkeys((question.answer, "")):
        yield ScoreItem(response, question.text, question.answer, question.metadata, None, question.messages)


def shown_response(response: str, answer: str) -> str:
    return f"the expected answer {answer!r:.60}" if response else "an empty response"


def _failure(part: Scoring, score: Score) -> str:
    """Returns the error of the function without its traceback, and its place: the line that raised, or the function."""
    function: object = inspect.unwrap(REWARD.load(part.type))
    return error_with_line(
        score.detail, (SCORING,), function if inspect.isroutine(function) else type(function).__call__
    )


def error_with_line(traceback: str, around: tuple[str, ...], code: object) -> str:
    """Returns the last line of a traceback's text, with the place in the user's code that raised.

    around: the folders whose frames call the user's code; code: the function or class to name if the error comes from
    them, because it returned something wrong.
    """
    error = traceback.strip().splitlines()[-1]
    places = [(path, line) for path, line in _FRAME.findall(traceback) if not path.startswith(around)]
    places = [place for place in places if is_of_user(place[0])] or places
    if places:
        return f"raised {error} (at {relative(places[-1][0])}:{places[-1][1]})"
    with suppress(OSError, TypeError):  # the source of a built-in function
        return f"{error} (of {relative(inspect.getsourcefile(code) or '')}:{inspect.getsourcelines(code)[1]})"  # type: ignore[arg-type]
    return error
