"""Configs and overrides as Python values: what becomes of types, and all problems at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rl_platform.config import load_config
from rl_platform.errors import ConfigError

ROOT = Path(__file__).parents[3]
BASE = {"extends": str(ROOT / "configs" / "embodied" / "cartpole.yaml")}


def test_a_dict_is_a_config_and_extends_a_file() -> None:
    loaded = load_config(BASE | {"runner": {"seed": 5}, "actor": {"model": {"hidden_sizes": (8, 4)}}})
    assert (loaded.config.runner.seed, loaded.config.env.id) == (5, "CartPole-v1")
    assert loaded.config.actor.model.hidden_sizes == [8, 4]
    assert loaded.sources["runner.seed"] == "config"
    assert "cartpole.yaml:" in loaded.sources["env.id"]


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (np.int64(3), 3),
        (np.float32(0.5), 0.5),
        (1e-5, 1e-5),
        (float("inf"), float("inf")),
        (True, True),
        (None, None),
        ("yes", "yes"),
        ("1:0", "1:0"),
        ("", ""),
        ("a\tb: #", "a\tb: #"),
        (Path("a/b"), "a/b"),
        ((1, [2, {"c": 3}]), [1, [2, {"c": 3}]]),
        ({}, {}),
    ],
)
def test_values_arrive_as_they_are_written(value: object, read: object) -> None:
    nested = load_config(BASE | {"env": {"kwargs": {"x": value}}})
    override = load_config(BASE, {"env.kwargs.x": value})
    assert nested.config.env.kwargs == override.config.env.kwargs == {"x": read}


def test_all_problems_of_both_are_listed_with_their_origin() -> None:
    config = BASE | {"runner": {"max_steps": print, "seed": "x", ("a",): 1}}
    overrides = {"runner.sed": 3, 4: 4, "env.id": lambda: None, "~env.kwargs": 1, "data.mini_batch_size": "many"}
    with pytest.raises(ConfigError) as refused:
        load_config(config, overrides)  # type: ignore[arg-type]
    found = {(problem.where, problem.key) for problem in refused.value.problems}
    assert found >= {
        ("config", "runner.('a',)"),
        ("config", "runner.max_steps"),
        ("config", "runner.seed"),
        ("overrides", "runner.sed"),
        ("overrides", "overrides"),  # 4
        ("overrides", "env.id"),
        ("overrides", "~env.kwargs"),
        ("overrides", "data.mini_batch_size"),
    }
    hints = {problem.key: problem.hint for problem in refused.value.problems}
    assert hints["runner.max_steps"] == "name a function as module:function"


def test_a_dotted_name_in_a_dict_is_explained() -> None:
    with pytest.raises(ConfigError, match="names hold no dots: write seed inside the section runner"):
        load_config(BASE | {"runner.seed": 2})


def test_a_dict_that_contains_itself_is_refused() -> None:
    config: dict[str, object] = {**BASE}
    config["env"] = {"kwargs": config}
    with pytest.raises(ConfigError, match="more than 50 dicts and lists inside each other"):
        load_config(config)
