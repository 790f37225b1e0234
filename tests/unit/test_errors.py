"""Messages of problems: each part stands in its own place."""

from __future__ import annotations

import pytest

from rl_platform.config.schema.data import Data
from rl_platform.envs.reasoning.digits import digit_questions
from rl_platform.errors import ConfigError, Problem
from rl_platform.models.tokenizer import no_template


def test_a_value_cannot_take_the_place_of_the_file() -> None:
    with pytest.raises(TypeError, match="positional"):
        Problem("env.id", "no such environment", "Hoper-v5")  # type: ignore[misc]


def test_problems_found_after_the_config_is_read_have_a_value_and_no_file() -> None:
    data = Data.model_validate({"task": {"type": "digits", "params": {"length": 1}}, "train_size": 900, "val_size": 1})
    with pytest.raises(ConfigError) as error:
        digit_questions(data, data.tasks[0][1], seed=1)
    (problem,) = error.value.problems
    assert (problem.where, problem.value) == ("", "train_size 900 + val_size 1 = 901")
    (problem,) = no_template("tiny").problems
    assert (problem.where, problem.value) == ("", "tiny")
