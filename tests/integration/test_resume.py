"""A run that is stopped and started again ends in the state of one that was never stopped, bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rl_platform.metrics import read_metrics

STEPS = 8
INTERVALS = (
    f"runner.max_steps={STEPS}",
    "runner.save_interval=2",
    "runner.val_check_interval=4",
    "runner.keep_checkpoints=10",
)
RUNS = {
    "reasoning": (
        "reasoning.yaml",
        "cluster.component_placement={'actor,critic,reference,rollout,reward': all}",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl={type: adaptive, kl_coef: 0.1, target_kl: 0.01, horizon: 100}",
    ),
    "dynamic sampling": (
        "reasoning.yaml",
        "reward.type=length_score:score",
        "algorithm.group_size=2",
        "algorithm.dynamic_sampling={}",
    ),
    "megatron": ("reasoning.yaml", "actor.training_backend=megatron", "critic.training_backend=megatron"),
    "CartPole": ("embodied.yaml",),
    "HalfCheetah": (
        "embodied.yaml",
        "env.id=HalfCheetah-v5",
        "env.max_episode_steps=20",  # so that episodes end, and not at the end of a rollout
    ),
}
pytestmark = pytest.mark.usefixtures("scored")  # the reward of dynamic sampling


@pytest.fixture(scope="module")
def finished() -> dict[str, Path]:
    """The output folders of whole runs, by the name of the run."""
    return {}


@pytest.fixture
def whole(command, finished: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """whole("CartPole"): the output folder of a run that was never stopped; the tests of this file share it."""

    def run(name: str) -> Path:
        if name not in finished:
            output_dir = tmp_path_factory.mktemp("whole") / "out"
            ended = command(*RUNS[name], *INTERVALS, f"runner.output_dir={output_dir}")
            assert ended.code == 0, ended.err
            finished[name] = output_dir
        return finished[name]

    return run


@pytest.fixture
def assert_equal(final_state, logged, differences) -> Callable[..., None]:
    def check(first: str | Path, second: str | Path) -> None:
        states = [final_state(output_dir, STEPS) for output_dir in (first, second)]
        assert "run" in states[0]
        assert differences(*states) == []
        assert differences(logged(first), logged(second)) == []

    return check


@pytest.mark.parametrize("name", [pytest.param("reasoning", marks=pytest.mark.release), "CartPole"])
def test_stopped_by_max_steps(command, whole: Callable[[str], Path], name: str, assert_equal):
    """Two runs of one seed are equal, too, or this one could not end as the whole one."""
    parts = (*RUNS[name], *INTERVALS, "runner.output_dir=parts")
    assert command(*parts, f"runner.max_steps={STEPS // 2}").code == 0
    ended = command(*parts)
    assert ended.code == 0
    assert f"resumed from step {STEPS // 2}" in ended.out
    assert_equal(whole(name), "parts")


@pytest.mark.parametrize("name", RUNS)
def test_stopped_by_sigkill(command, killed, whole: Callable[[str], Path], name: str, assert_equal):
    arguments = (*RUNS[name], *INTERVALS)
    killed(*arguments, folder="killed")
    ended = command(*arguments, "runner.output_dir=killed")
    assert ended.code == 0
    assert "resumed from step" in ended.out
    assert_equal(whole(name), "killed")


@pytest.mark.parametrize(("task", "ahead"), [("reasoning.yaml", 4), ("embodied.yaml", 2)])
def test_rollouts_collected_ahead_and_a_schedule_survive_sigkill(command, killed, assert_equal, task: str, ahead: int):
    ages = f"runner.max_staleness={ahead}", "algorithm.rollout_is={}"
    if task == "embodied.yaml":
        ages = (*ages, "env.normalize_observations=true")
    arguments = (task, *INTERVALS, *ages, "actor.optim.lr_schedule=cosine")
    assert command(*arguments, "runner.output_dir=whole").code == 0
    killed(*arguments, folder="killed")
    assert command(*arguments, "runner.output_dir=killed").code == 0
    assert_equal("whole", "killed")
    rows = read_metrics(Path("whole"))[1:]
    assert [row["staleness/mean"] for row in rows] == [min(step, ahead) for step in range(STEPS)]
    assert [row["staleness/max"] for row in rows] == [min(step, ahead) for step in range(STEPS)]
    per_step = 8 if task == "reasoning.yaml" else 4
    assert all(row["perf/samples_in_flight"] <= ahead * per_step for row in rows)


@pytest.mark.parametrize("name", ["reasoning", "CartPole"])
def test_a_run_of_another_seed_learns_something_else(
    command, whole: Callable[[str], Path], name: str, final_state, differences
):
    assert command(*RUNS[name], *INTERVALS, "runner.max_steps=2", "runner.seed=2").code == 0
    actors = [final_state(output_dir, 2)["actor"] for output_dir in (whole(name), "out")]
    assert differences(*actors)


def test_surplus_groups_are_part_of_a_checkpoint(whole: Callable[[str], Path], final_state):
    output_dir = whole("dynamic sampling")
    steps = [row for row in read_metrics(output_dir) if "dynamic_sampling/kept" in row]
    assert len(steps) == STEPS
    carried = 0.0
    for row in steps:  # issued = trained + surplus
        assert carried + row["dynamic_sampling/kept"] == 8 + row["dynamic_sampling/surplus"]
        carried = row["dynamic_sampling/surplus"]
        assert row["perf/samples"] == 16
    halfway = steps[STEPS // 2 - 1]["dynamic_sampling/surplus"]
    assert halfway > 0, "without surplus at the point of resumption nothing would be proven"
    assert max(row["dynamic_sampling/rounds"] for row in steps) > 1
    assert len(final_state(output_dir, STEPS)["run"]["task"]["dynamic_sampling"]["carried"]) == carried


def test_an_older_checkpoint_at_an_explicit_path(command, whole: Callable[[str], Path], assert_equal):
    shutil.copytree(whole("CartPole"), "back")
    back = ("runner.output_dir=back", "runner.resume=back/checkpoints/step-00000004")
    ended = command(*RUNS["CartPole"], *INTERVALS, *back)
    assert ended.code == 0
    assert "resumed from step 4" in ended.out
    assert_equal(whole("CartPole"), "back")


def test_worker_processes_may_come_and_go(command, whole: Callable[[str], Path], assert_equal):
    parts = (*RUNS["HalfCheetah"], *INTERVALS, "runner.output_dir=parts")
    assert command(*parts, "runner.max_steps=4", "env.num_workers=2").code == 0
    assert command(*parts).code == 0
    assert_equal(whole("HalfCheetah"), "parts")


def test_env_ranks_may_come_and_go(command, assert_equal):
    arguments = (*RUNS["HalfCheetah"], *INTERVALS, "env.pipeline_stages=2")
    two = "cluster.component_placement={'actor_critic,rollout': all, env: 'all:0-1'}"
    assert command(*arguments, "runner.output_dir=whole").code == 0
    assert command(*arguments, "runner.output_dir=parts", "runner.max_steps=4", two).code == 0
    assert command(*arguments, "runner.output_dir=parts").code == 0
    assert_equal("whole", "parts")


def test_the_same_command_again_after_the_end_does_nothing(command):
    assert command("reasoning.yaml", "runner.max_steps=2").code == 0
    before = {path: path.stat().st_mtime_ns for path in Path("out").rglob("*")}
    ended = command("reasoning.yaml", "runner.max_steps=2")
    assert ended.code == 0
    assert "out holds a finished run of 2 steps" in ended.out
    assert "raise runner.max_steps" in ended.out
    assert {path: path.stat().st_mtime_ns for path in Path("out").rglob("*")} == before


def test_the_config_of_a_moved_run_begins_another_one_and_says_so(command):
    assert command("reasoning.yaml", "runner.max_steps=1").code == 0
    shutil.move("out", "moved")
    told = (
        f"a new run begins in {Path('out').absolute()}; that of moved/config.yaml goes on with runner.output_dir=moved"
    )
    for overrides, expected in ((("runner.output_dir=other",), False), ((), True), ((), False)):
        ended = command("moved/config.yaml", *overrides)
        assert (ended.code, told in ended.out) == (0, expected), ended.err
    assert "holds a finished run of 1 steps" in command("moved/config.yaml", "runner.output_dir=moved").out


def test_a_resume_that_is_refused_is_not_said_to_go_on(command):
    """The same command would be refused again."""
    assert command("reasoning.yaml", "runner.max_steps=1").code == 0
    ended = command("reasoning.yaml", "runner.max_steps=2", "data.train_size=59")
    assert ended.code == 65
    assert "is of other prompts" in ended.err
    assert "goes on" not in ended.err


def test_a_run_killed_between_its_last_checkpoint_and_its_export_is_completed(command):
    assert command("reasoning.yaml", "runner.max_steps=2").code == 0
    shutil.rmtree("out/model")
    Path("out/finished").unlink()
    assert command("reasoning.yaml", "runner.max_steps=2").code == 0
    assert Path("out/model/model.safetensors").exists()
    assert [row["step"] for row in read_metrics("out")] == [0, 1, 2]


def test_data_that_is_used_up_ends_the_run_for_good(command):
    arguments = ("reasoning.yaml", "runner.max_steps=100", "runner.max_epochs=1", "data.train_size=24")
    ended = command(*arguments)
    assert ended.code == 0
    assert "step 3/3" in ended.out
    assert [row["step"] for row in read_metrics("out")] == [0, 1, 2, 3]
    again = command(*arguments)
    assert (again.code, "To continue, raise runner.max_epochs" in again.out) == (0, True), again.out
    assert [row["step"] for row in read_metrics("out")] == [0, 1, 2, 3]
    longer = command(*arguments, "runner.max_epochs=2")
    assert (longer.code, "step 6/6" in longer.out) == (0, True), longer.out
    earlier = command(*arguments, "runner.max_epochs=2", "runner.resume=out/checkpoints/step-00000003")
    assert "step 6/6" in earlier.out, "the checkpoint is not that of the last step"


def test_a_model_that_was_moved_is_the_same_and_a_changed_one_is_not(command, experts: None):
    def run(folder: str, steps: int):
        model = f"actor.model={{path: {folder}, tokenizer: bytes}}"
        return command("reasoning.yaml", model, f"runner.max_steps={steps}", "runner.save_interval=1")

    assert run("experts", 1).code == 0
    Path("experts").rename("moved")
    ended = run("moved", 2)
    assert (ended.code, "resumed from step 1" in ended.out) == (0, True), ended.err
    weights = Path("moved/model.safetensors")
    stored = bytearray(weights.read_bytes())
    stored[-1] ^= 1
    weights.write_bytes(stored)
    for ended in (run("moved", 3), command("--eval", "out")):
        assert "it has files of actor.model.path: " in ended.err
        assert ended.code in (2, 65)
    Path("moved").rename("experts")
    stored[-1] ^= 1
    Path("experts/model.safetensors").write_bytes(stored)
    assert run("experts", 3).code == 0
