"""What an integration test compares: everything that two runs left behind."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from process_groups import end_process_groups

from rl_platform.checkpoint.verify import Checkpoint
from rl_platform.engines.training.state_files import read_whole
from rl_platform.envs.embodied.spaces import EnvDescription
from rl_platform.envs.embodied.vector import VectorEnv


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums of several threads depend on how many there are; runs in other processes have one too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def no_process_group() -> Iterator[None]:
    """A run with Megatron in this process leaves a group of one rank behind, which ends with the process."""
    yield
    end_process_groups()


@pytest.fixture
def killed(start) -> Callable[..., Checkpoint]:
    """killed("reasoning.yaml", folder="out"): SIGKILL as soon as the run has a checkpoint, which is returned.

    `at="step-00000002"` waits for that one. No process of the run is left.
    """

    def run(*arguments: str, folder: str = "out", at: str = "step-*") -> Checkpoint:
        process: subprocess.Popen[str] = start(*arguments, f"runner.output_dir={folder}")
        until = time.monotonic() + 240
        while not (checkpoints := sorted(Path(folder, "checkpoints").glob(at))):
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < until
            time.sleep(0.002)
        started = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        assert process.wait() == -9
        assert not psutil.wait_procs(started, timeout=10)[1]
        return Checkpoint.open(checkpoints[-1])

    return run


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
def final_state():
    """final_state("out", 4): the parts of the checkpoint of step 4, by name, with environments as their future.

    What a learner saved is under "model" and "optimizer".
    """

    def load(output_dir: str | Path, step: int) -> dict[str, Any]:
        checkpoint = Checkpoint.open(Path(output_dir) / "checkpoints" / f"step-{step:08d}")
        parts = {
            name: _grouped(read_whole(checkpoint.file(name)))
            if checkpoint.file(name).is_dir()
            else checkpoint.load(name)
            for name in checkpoint.parts
        }
        if "env" in parts:
            parts["env"]["envs"]["envs"] = _future(parts["env"]["envs"])
        return parts

    return load


def _grouped(tensors: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """`model.NAME` and `optimizer.NAME.KEY` as dicts of their first word."""
    groups: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        group, _, rest = name.partition(".")
        groups.setdefault(group, {})[rest] = tensor
    return groups


def _future(state: dict[str, Any]) -> list[torch.Tensor]:
    """What the environments answer to fixed actions from `state` on, through ends of episodes and resets.

    Their saved bytes are no fit comparison: equal simulations may be written in different ways.
    """
    envs = VectorEnv(EnvDescription(state["id"], max_episode_steps=20), state["num_envs"])
    envs.load_state_dict(state)
    draw = np.random.default_rng(0)
    answers = []
    for _ in range(50):
        if envs.action_space.kind == "discrete":
            actions = draw.integers(envs.action_space.size, size=envs.num_envs)
        else:
            actions = draw.normal(size=(envs.num_envs, envs.action_space.size)).astype(np.float32)
        result = envs.step(actions)
        answers += [torch.from_numpy(result.observations), torch.from_numpy(result.rewards)]
    envs.close()
    return answers


@pytest.fixture
def logged():
    """logged("out"): the lines of metrics and samples, without what depends on the clock."""

    def read(output_dir: str | Path) -> list[dict[str, Any]]:
        texts = [(Path(output_dir) / name).read_text() for name in ("metrics.jsonl", "samples.jsonl")]
        rows = [json.loads(line) for text in texts for line in text.splitlines()]
        return [{name: row[name] for name in row if not name.startswith(("time/", "perf/"))} for row in rows]

    return read


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
def differences():
    """differences(a, b): paths at which two nested states are not equal bit for bit."""

    def compare(first: Any, second: Any, path: str = "") -> list[str]:
        if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
            return [] if first.dtype == second.dtype and torch.equal(first, second) else [path]
        if isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys():
            return [place for key in first for place in compare(first[key], second[key], f"{path}/{key}")]
        if isinstance(first, list | tuple) and isinstance(second, list | tuple) and len(first) == len(second):
            pairs = enumerate(zip(first, second, strict=True))
            return [place for index, (a, b) in pairs for place in compare(a, b, f"{path}/{index}")]
        return [] if type(first) is type(second) and first == second else [path]

    return compare
