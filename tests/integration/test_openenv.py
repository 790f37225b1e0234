"""Environments of OpenEnv servers through the real command, with a server of the library on loopback."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from child_forks import forked_children
from waiting import HANG_S, until

from rl_platform.metrics import read_metrics

pytest.importorskip("openenv.core", reason="pip install 'rl-platform[openenv]'")
SERVER = """
import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

class Said(Action):
    message: str

class Heard(Observation):
    text: str

class TwoTurns(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, length=6, **kwargs):
        self.turns, self.length, self._state = 0, length, State()
        return Heard(text=f"{seed % 10}:")

    def step(self, action, timeout_s=None, **kwargs):
        self.turns += 1
        reward = sum(letter.isascii() for letter in action.message) / self.length
        return Heard(text="<more>", reward=reward, done=self.turns == 2)

    @property
    def state(self):
        return self._state

uvicorn.run(create_fastapi_app(TwoTurns, Said, Heard, max_concurrent_envs=32), port=int(sys.argv[1]), log_level="error")
"""
KEYS = (
    "data.max_response_length=24",
    "rollout.sampling={max_new_tokens: 6}",
    "actor.model.random_init.max_positions=64",
)


def agent(url: str, more: str = "observation: text") -> str:
    environment = f"{{type: openenv, params: {{url: {url}, {more}}}, timeout_s: 60}}"
    return f"rollout.agent={{environment: {environment}, num_workers: 1}}"


@pytest.fixture(scope="module", autouse=True)
def imported() -> Iterator[None]:
    """Imports the library once, which takes four seconds of processor time, and not in each process of environments."""
    with forked_children("agents.tool_program", "import openenv.core, rl_platform.components.agents.tool_program"):
        yield


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server for all tests of this file."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = tmp_path_factory.mktemp("openenv") / "server.py"
    program.write_text(SERVER)
    server = subprocess.Popen([sys.executable, str(program), str(port)])
    try:

        def listens() -> bool:
            assert server.poll() is None
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        until(listens, 4 * HANG_S)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def test_the_reward_of_a_server_is_learned(command, url: str) -> None:
    steps = ("runner.max_steps=10", "data.train_batch_size=16", "data.mini_batch_size=8", "actor.optim.lr=1.0e-2")
    ended = command("reasoning.yaml", agent(url), *KEYS, *steps)
    assert ended.code == 0, ended.err
    rows = read_metrics(Path("out"))[1:]
    assert all((row["turns/mean"], row["tool/errors"]) == (2, 0) for row in rows)
    rewards = [row["reward/mean"] for row in rows]
    assert sum(rewards[-3:]) > 1.3 * sum(rewards[:3])


def test_all_fields_and_further_arguments(command, url: str) -> None:
    lengths = ("data.max_prompt_length=64", "data.max_response_length=200", "actor.model.random_init.max_positions=512")
    ended = command("reasoning.yaml", agent(url, "reset: {length: 1000}"), *KEYS, *lengths, "runner.max_steps=1")
    assert ended.code == 0, ended.err
    row = read_metrics(Path("out"))[1]
    assert row["len/prompt_mean"] == len('{"text": "7:", "metadata": {}}')
    assert row["reward/mean"] < 0.1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("observation: words", "the observation has no field words"),
        ("actions: message", "there is no parameter actions"),
        ("reset: {length: 1, metadata: {}, seed: 3}", "multiple values for keyword argument 'seed'"),
    ],
)
def test_wrong_parameters_are_told_before_anything_starts(command, url: str, more: str, message: str) -> None:
    ended = command("reasoning.yaml", agent(url, more))
    assert ended.code == 2
    assert message in ended.err
    assert "rollout.agent.environment.params" in ended.err


@pytest.mark.parametrize("server", ["http://127.0.0.1:9", "127.0.0.1", "''"])
def test_a_server_that_is_not_there_is_told_before_anything_starts(command, server: str) -> None:
    ended = command("reasoning.yaml", agent(server))
    assert ended.code == 2
    assert "openenv refuses them: " in ended.err


def test_an_action_that_the_environment_does_not_know_ends_the_run_with_its_error(command, url: str) -> None:
    ended = command("reasoning.yaml", agent(url, "observation: text, action: said"), *KEYS)
    assert ended.code == 70
    assert "Server error: Invalid message (code: VALIDATION_ERROR)" in ended.err
    assert "rollout.agent.environment openenv failed for all" in ended.err
