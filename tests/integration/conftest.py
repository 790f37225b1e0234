"""What an integration test compares: everything that two runs left behind."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import run_results
import torch
from launcher_forks import Launcher
from process_groups import end_process_groups
from tiny_configs import GAME, OPENAI_AGENT
from waiting import HANG_S, assert_gone, until

from rl_platform.checkpoint.verify import Checkpoint
from rl_platform.metrics import read_metrics


@pytest.fixture(autouse=True)
def no_process_group(one_thread: None) -> Iterator[None]:
    """A run with Megatron in this process leaves a group of one rank behind, which ends with the process."""
    yield
    end_process_groups()


@pytest.fixture
def killed(start: Callable[..., Launcher]) -> Callable[..., Checkpoint]:
    """killed("reasoning.yaml", folder="out"): SIGKILL as soon as the run has a checkpoint, which is returned.

    `at="step-00000002"` waits for that one. The run stops itself there, so that it does not go on until it is killed.
    No process of it is left.
    """

    def kill(*arguments: str, folder: str = "out", at: str = "step-*", **options: Any) -> Checkpoint:
        output = Path("output").absolute()
        run = start(*arguments, f"runner.output_dir={folder}", output=output, stops_at=at, **options)
        launcher = psutil.Process(run.pid)

        def stopped() -> bool:
            with suppress(psutil.NoSuchProcess):
                return bool(launcher.status() == psutil.STATUS_STOPPED)
            pytest.fail(output.read_text())

        until(stopped, 4 * HANG_S)
        (checkpoint,) = Path(folder, "checkpoints").glob(at)
        started = launcher.children(recursive=True)
        launcher.kill()
        assert run.wait() == -signal.SIGKILL
        assert_gone(started)
        return Checkpoint.open(checkpoint)

    return kill


@pytest.fixture
def assert_ends_the_same_if_stopped(command, final_state, logged, differences) -> Callable[..., None]:
    """assert_ends_the_same_if_stopped("embodied.yaml"): four steps, and two and two, bit for bit."""

    def check(*arguments: str) -> None:
        arguments = (*arguments, "runner.save_interval=2", "runner.val_check_interval=2")
        assert command(*arguments, "runner.output_dir=whole").code == 0
        assert command(*arguments, "runner.output_dir=parts", "runner.max_steps=2").code == 0
        assert "resumed from step 2" in command(*arguments, "runner.output_dir=parts").out
        assert differences(final_state("whole", 4), final_state("parts", 4)) == []
        assert differences(logged("whole"), logged("parts")) == []

    return check


@pytest.fixture
def experts(folder: Path) -> None:
    """A folder with a mixture of four experts, random."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes: dict[str, Any] = {"vocab_size": 259, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "tie_word_embeddings": False}
    sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)).save_pretrained(folder / "experts")


@pytest.fixture
def final_state() -> Callable[[str | Path, int], dict[str, Any]]:
    """final_state("out", 4): see `run_results`."""
    return run_results.final_state


@pytest.fixture
def logged() -> Callable[[str | Path], list[dict[str, Any]]]:
    """logged("out"): see `run_results`."""
    return run_results.logged


@pytest.fixture(scope="module")
def finished_runs() -> dict[tuple[str | int, ...], tuple[dict[str, Any], list[dict[str, Any]]]]:
    """What `learned` returned, by its arguments."""
    return {}


@pytest.fixture
def learned(command, final_state, logged, finished_runs):
    """learned("embodied.yaml", "key=value", steps=2): (checkpoint, log). Equal runs of a file of tests run once."""

    def run(*arguments: str, steps: int = 2) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        key = (*arguments, steps)
        if key not in finished_runs:
            folder = f"run{len(finished_runs)}"
            ended = command(*arguments, f"runner.max_steps={steps}", f"runner.output_dir={folder}")
            assert ended.code == 0, ended.err
            finished_runs[key] = final_state(folder, steps), logged(folder)
        return finished_runs[key]

    return run


@pytest.fixture
def differences() -> Callable[[Any, Any], list[str]]:
    """differences(a, b): see `run_results`."""
    return run_results.differences


AGENTS = {
    "a text environment": "{environment: {type: 'game.py:Game'}, tools: [{type: 'game.py:Echo'}], tool_format: hermes, "
    "num_workers: 1}",
    "an openai client": "{function: 'my_agent.py:solve'}",
}


@pytest.fixture(params=AGENTS.values(), ids=AGENTS)
def agents_train_as_torch(request, command, folder: Path, final_state) -> Callable[[list[str], list[str]], None]:
    """Compares two steps of an agent of several calls under an inference engine with those under the torch engine."""

    def check(both: list[str], engine: list[str]) -> None:
        (folder / "game.py").write_text(GAME)
        (folder / "my_agent.py").write_text(OPENAI_AGENT)
        lengths = "data.max_prompt_length=400", "data.max_response_length=16"
        likeliest = "rollout.sampling={max_new_tokens: 2, top_k: 1}"
        room = "actor.model.random_init.max_positions=512"
        steps = ["reasoning.yaml", "runner.max_steps=2", f"rollout.agent={request.param}", *lengths, likeliest, room]
        ended = command(*steps, *both, "rollout.backend=torch", "runner.output_dir=torch")
        assert ended.code == 0, ended.err
        ended = command(*steps, *both, *engine)
        assert ended.code == 0, ended.err
        torch.testing.assert_close(final_state("out", 2)["actor"], final_state("torch", 2)["actor"], rtol=0, atol=1e-6)
        for expected, found in zip(read_metrics("torch")[1:], read_metrics("out")[1:], strict=True):
            assert found["reward/mean"] == expected["reward/mean"]
            assert (found["turns/mean"], found["tool/errors"]) == (2, 0)
            assert found["mismatch/abs_logp"] < 1e-4
            assert found["actor/grad_norm"] > 0, "else nothing is learned and nothing compared"

    return check


@pytest.fixture
def learns_as_torch(command, folder: Path, final_state, scored: str) -> Callable[[list[str], list[str], str], None]:
    """Compares three steps with an inference engine, whose log file is `log`, with those of the torch engine.

    The trainer's numbers depend only on the engine's tokens. Separate processes round differently.
    """

    def check(both: list[str], engine: list[str], log: str) -> None:
        likeliest = "rollout.sampling={top_k: 1}"  # drawn from one token: both engines draw the same
        steps = ["reasoning.yaml", "runner.max_steps=3", scored, likeliest, *both]
        assert command(*steps, "rollout.backend=torch", "runner.output_dir=torch").code == 0
        ended = command(*steps, *engine)
        assert ended.code == 0, ended.err
        expected, actual = final_state("torch", 3), final_state("out", 3)
        for learner in ("actor", "critic"):
            torch.testing.assert_close(actual[learner], expected[learner], rtol=0, atol=1e-6)
        rows = read_metrics("out")[1:]
        assert [row["step"] for row in rows] == [1, 2, 3]
        for row in rows:  # the trainer's log-probs of these tokens, under the weights of this very step
            assert row["mismatch/abs_logp"] < 1e-4
            assert row["staleness/max"] == 0
            assert row["actor/grad_norm"] > 0, "else nothing is learned and nothing compared"
        assert (folder / "out" / "logs" / log).exists()

    return check
