"""`rl.train`, `rl.ppo`, `rl.plan`, `rl.check` and `rl.evaluate` in the process of the test, and what they refuse."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Mapping
from pathlib import Path

import gymnasium
import numpy as np
import pytest

import rl_platform as rl

pytestmark = pytest.mark.slow
CARTPOLE = {
    "runner": {"task_type": "embodied", "max_steps": 3, "logger_backends": []},
    "cluster": {"component_placement": {"actor_critic,env,rollout": "all"}},
    "algorithm": {"loss_type": "actor_critic", "ppo_epochs": 2},
    "data": {"mini_batch_size": 16},
    "actor": {"model": {"hidden_sizes": [8]}, "optim": {"lr": 1e-3}},
    "env": {"id": "CartPole-v1", "num_envs": 4, "rollout_steps": 16, "evaluation": {"episodes": 2}},
}


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def saved_steps(run: rl.Run | Path) -> list[str]:
    return sorted(path.name for path in (Path(run) / "checkpoints").glob("step-*"))


def test_a_dict_is_trained_and_evaluated(working_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[tuple[int, bool]] = []

    def look(step: int, metrics: Mapping[str, float]) -> None:
        seen.append((step, "val/return" in metrics))

    run = rl.train(CARTPOLE, {"runner.output_dir": "out", "runner.seed": 4}, [look], show=False)
    assert (run.folder, run.exit_reason) == (working_folder / "out", "max_steps")
    assert seen == [(1, False), (2, False), (3, True)]
    np.testing.assert_array_equal(run.metrics["step"], [0, 1, 2, 3])
    assert np.isfinite(run.metrics["actor/loss"][1:]).all()
    assert "seed: 4" in (run.folder / "config.yaml").read_text()

    again = rl.train(run.folder / "config.yaml", show=False)
    assert (again.exit_reason, len(again.metrics["step"])) == ("already finished", 4)
    longer = rl.train(run.folder / "config.yaml", {"runner.max_steps": 4}, show=False)
    assert (longer.exit_reason, len(longer.metrics["step"])) == ("max_steps", 5)

    rows = rl.evaluate(longer, {"env.evaluation.video": False, "env.evaluation.episodes": 3}, show=False)
    assert [(row["actions"], row["episodes"]) for row in rows] == [("deterministic", 3), ("sampled", 3)]
    assert rl.load_policy(longer).act(np.zeros(4)) in (0, 1)
    assert capsys.readouterr().out == ""


def test_a_callback_stops_a_run_and_its_error_ends_it_with_a_checkpoint() -> None:
    def broken(step: int, metrics: Mapping[str, float]) -> None:
        if step == 2:
            raise RuntimeError("my own mistake")

    stop = rl.callbacks.StopAt("episode/return", 1.0)
    run = rl.train(CARTPOLE, {"runner.output_dir": "stopped"}, [stop], show=False)
    assert run.exit_reason == "callback StopAt"
    assert len(run.metrics["step"]) < 4
    assert np.isfinite(run.metrics["val/return"][-1]), "the last step is validated, whatever ends the run"
    with pytest.raises(rl.errors.WorkerError, match=r"(?s)my own mistake.*in broken") as failed:
        rl.train(CARTPOLE, {"runner.output_dir": "broken"}, [broken], show=False)
    assert isinstance(failed.value.__cause__, RuntimeError)
    assert saved_steps(Path("broken")) == ["step-00000002"]
    with pytest.warns(UserWarning, match=r"no metric episode/retrun so far; did you mean episode/return\?"):
        assert not rl.callbacks.StopAt("episode/retrun", 1.0)(1, {"episode/return": 9.0})
    typo = rl.callbacks.StopAt("val/retrun", 1.0)
    with pytest.raises(rl.errors.ConfigError, match=r"(?s)no such metric.*did you mean val/return"):
        rl.train(CARTPOLE, {"runner.output_dir": "typo", "runner.val_check_interval": 1}, [typo], show=False)


def test_ctrl_c_saves_the_step_and_the_run_goes_on_later() -> None:
    def press(step: int, metrics: Mapping[str, float]) -> None:
        if step == 2:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        rl.train(CARTPOLE, {"runner.output_dir": "out"}, [press], show=False)
    assert saved_steps(Path("out")) == ["step-00000002"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    run = rl.train(CARTPOLE, {"runner.output_dir": "out"}, show=False)
    assert (run.exit_reason, list(run.metrics["step"])) == ("max_steps", [0, 1, 2, 3])


def test_a_second_call_of_a_process_is_refused_and_another_thread_may_train() -> None:
    refused: list[str] = []

    def nested(step: int, metrics: Mapping[str, float]) -> None:
        with pytest.raises(rl.errors.RunInProgress) as error:
            rl.check(CARTPOLE)
        refused.append(str(error.value))

    runs: list[rl.Run] = []

    def work() -> None:
        runs.append(rl.train(CARTPOLE, {"runner.max_steps": 1}, [nested], show=False))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert runs[0].exit_reason == "max_steps"
    assert len(refused) == 1


def test_plan_and_check_return_what_the_options_print(capsys: pytest.CaptureFixture[str]) -> None:
    plan = rl.plan(CARTPOLE, {"cluster.gpus_per_node": 1})
    assert "actor_critic" in str(plan)
    assert plan.data["version"] == 1
    assert plan._repr_svg_().startswith("<svg")
    outcomes = rl.check(CARTPOLE, show=False)
    assert {outcome.failed for outcome in outcomes} == {False}
    assert any(not outcome.not_asked for outcome in outcomes)
    assert capsys.readouterr().out == ""


class Blank(gymnasium.Env):
    """An environment without spaces."""


class Line(gymnasium.Env):  # type: ignore[type-arg]
    """A point on a line; the reward is its action. It cannot be closed, which costs nothing."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,))
    action_space = gymnasium.spaces.Box(-1, 1, (1,))

    def reset(self, *, seed: int | None = None, options: object = None) -> tuple[np.ndarray, dict[str, object]]:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, object]]:
        return np.zeros(1, np.float32), float(action[0]), False, False, {}

    def close(self) -> None:
        raise RuntimeError("its window is gone")


def test_ppo_trains_in_what_a_function_makes() -> None:
    small = {"runner.logger_backends": [], "env.num_envs": 2, "env.rollout_steps": 32, "env.evaluation.episodes": 1}
    limit = 7
    run = rl.ppo(lambda: gymnasium.wrappers.TimeLimit(Line(), limit), 100, overrides=small, show=False)
    assert (run.folder.name, run.exit_reason, len(run.metrics["step"])) == ("ppo_lambda", "max_steps", 3)
    assert run.metrics["val/length"][-1] == limit
    rows = rl.evaluate(run, {"env.evaluation.video": False}, show=False)
    assert rows[0]["length"] == limit
    with pytest.raises(rl.errors.ConfigError, match=r"pass that as env=\.\.\. to rl\.evaluate"):
        rl.evaluate(run.folder, show=False)
    for folder, step in (("model", None), (".", None), (".", 1)):
        assert rl.load_policy(run.folder / folder, step).act(np.zeros(1)).shape == (1,)
    (run.folder / "model").rename(run.folder / "away")
    with pytest.raises(rl.errors.ConfigError, match=r"rl\.load_policy needs model/, which a finished run has"):
        rl.load_policy(run.folder)
    assert not [name for name in gymnasium.registry if name.startswith("function/")]
    again = rl.ppo("CartPole-v1", 1, folder="cart", overrides=small | {"data.mini_batch_size": 16}, show=False)
    assert (again.folder.name, len(again.metrics["step"])) == ("cart", 2)


WRONG = {
    "train": [
        (lambda: rl.train("nix.yaml"), "the file cannot be read"),
        (lambda: rl.train(None), "config: is no config"),
        (lambda: rl.train(CARTPOLE, {"runner.sed": 1}), "did you mean runner.seed"),
        (lambda: rl.train(CARTPOLE, "runner.seed=1"), "overrides: is no dict"),
        (lambda: rl.train(CARTPOLE, {"runner": {"seed": 1}}), "a value of runner replaces the whole section"),
        (lambda: rl.train(CARTPOLE, callbacks=print), "callbacks: is no list"),
        (lambda: rl.train(CARTPOLE, callbacks=[3, rl.callbacks.StopAt]), r"(?s)2 problems.*callbacks\[0\].*\[1\]"),
        (lambda: rl.train(CARTPOLE, callbacks=[lambda: True]), r"callbacks\[0\]: it is called with \(step, metrics\)"),
    ],
    "ppo": [
        (lambda: rl.ppo("CartPoel-v1"), "did you mean CartPole-v1"),
        (lambda: rl.ppo(gymnasium.make("CartPole-v1")), "env: is one environment, and a run makes several"),
        (lambda: rl.ppo(3, total_steps="many"), r"(?s)2 problems.*total_steps.*env: makes no environment"),
        (lambda: rl.ppo("CartPole-v1", total_steps=0), "total_steps"),
        (lambda: rl.ppo(Line), "env.max_episode_steps: .* declares no time limit"),
        (lambda: rl.ppo(Blank, folder="x"), "has no observation_space and no action_space"),
        (lambda: rl.ppo(lambda: 3, folder="x"), r"(?s)env: function/lambda cannot be built.*returns one Gymnasium env"),
        (lambda: rl.ppo("CartPole-v1", seed="x", overrides={"env.num_envs": -1}), r"(?s)runner.seed.*env.num_envs"),
    ],
    "plan": [
        (lambda: rl.plan("nix.yaml"), "the file cannot be read"),
        (lambda: rl.plan(3), "config: is no config"),
        (lambda: rl.plan({}), "cluster: this key is required"),
        (lambda: rl.plan(CARTPOLE, {"cluster.component_placement": {"env": "3-1"}}), "component_placement"),
        (lambda: rl.plan(CARTPOLE, ["runner.seed=1"]), "overrides: is no dict"),
    ],
    "check": [
        (lambda: rl.check("nix.yaml"), "the file cannot be read"),
        (lambda: rl.check(3), "config: is no config"),
        (lambda: rl.check({"runner": 3}), "runner"),
        (lambda: rl.check(CARTPOLE, {"algorithm.policy_loss": "nix:loss"}), "algorithm.policy_loss"),
        (lambda: rl.check(CARTPOLE, 3), "overrides: is no dict"),
    ],
    "evaluate": [
        (lambda: rl.evaluate("nix"), r"run: no such folder"),
        (lambda: rl.evaluate("."), r"run: contains neither a run nor a checkpoint"),
        (lambda: rl.evaluate(3), "run: names no folder"),
        (lambda: rl.evaluate("latest"), "run: no run in .* has a checkpoint"),
        (lambda: rl.evaluate("nix", 3), "overrides: is no dict"),
    ],
    "load_policy": [
        (lambda: rl.load_policy("nix"), "load_policy: no such folder"),
        (lambda: rl.load_policy(None, seed="x"), r"(?s)2 problems.*folder: names no folder.*seed: is no seed"),
        (lambda: rl.load_policy(".", seed=-1), "seed: is no seed"),
        (lambda: rl.load_policy("."), "contains neither a run nor a checkpoint"),
        (lambda: rl.load_policy("latest"), "no run in .* has a checkpoint"),
        (lambda: rl.load_policy(".", device="tpu7"), "no such device"),
    ],
    "load_run": [
        (lambda: rl.load_run("nix"), "there is no such folder"),
        (lambda: rl.load_run("."), "holds no run"),
        (lambda: rl.load_run(""), "holds no run"),
        (lambda: rl.load_run(["."]), "names no folder"),
        (lambda: rl.load_run(3), "names no folder"),
    ],
    "StopAt": [
        (lambda: rl.callbacks.StopAt(3, 4), "StopAt.metric: is no name"),
        (lambda: rl.callbacks.StopAt("val/return", "x"), "StopAt.value: is no number"),
        (lambda: rl.callbacks.StopAt("val/return", None), "StopAt.value: is no number"),
        (lambda: rl.callbacks.StopAt("val/return", float("nan")), "StopAt.value: is no number"),
        (lambda: rl.callbacks.StopAt("val/retrun", 1)(1, {"val/return": 1.0}), "did you mean val/return"),
    ],
}


@pytest.mark.parametrize("call", WRONG)
def test_wrong_arguments_are_refused_with_what_is_allowed(call: str) -> None:
    for action, message in WRONG[call]:
        with pytest.raises(rl.errors.ConfigError, match=message) as refused:
            action()
        assert refused.value.exit_code == 2
    assert not list(Path.cwd().rglob("metrics.jsonl"))


# As a file without `if __name__ == "__main__"`: children that import it would train again.
PROGRAM = """
import asyncio, faulthandler, gc, locale, logging, os, random, signal, sys, threading, time, warnings
import gymnasium, numpy, torch
import rich.style, sympy, torch._dynamo  # imports that draw a random number, filter warnings, set a variable
import rl_platform as rl

def settings():
    return {
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)],
        "mask": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "environment": dict(os.environ),
        "streams": (sys.stdout, sys.stderr, sys.displayhook, sys.excepthook, sys.unraisablehook, threading.excepthook),
        "paths": (os.getcwd(), list(sys.path)),
        "warnings": list(warnings.filters),
        "logging": [(l.level, list(l.handlers)) for l in (logging.getLogger(), logging.getLogger("rl_platform"))],
        "torch": (torch.get_num_threads(), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()),
        "precision": (torch.get_float32_matmul_precision(), torch.is_grad_enabled(), torch.get_default_device()),
        "random": [hash(str(state)) for state in (
            torch.get_rng_state().tolist(), numpy.random.get_state()[1].tolist(), random.getstate())],
        "garbage": (gc.get_threshold(), gc.isenabled(), gc.get_freeze_count()),
        "interpreter": (faulthandler.is_enabled(), sys.getswitchinterval(), locale.setlocale(locale.LC_ALL)),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "registry": sorted(gymnasium.registry),
    }

async def cell():
    small = {"runner.logger_backends": [], "env.num_envs": 4, "env.rollout_steps": 16, "env.num_workers": 2,
             "env.evaluation.episodes": 2, "data.mini_batch_size": 16, "runner.trace_steps": 1}
    return rl.ppo(lambda: gymnasium.make("CartPole-v1"), 128, overrides=small)

print("program")
gymnasium.make("CartPole-v1").reset()
before = settings()
run = asyncio.run(cell())
rl.evaluate(run, {"env.evaluation.video": False})
try:
    rl.train(run.folder / "config.yaml", {"runner.max_steps": 3, "env.id": "nix"})
except rl.errors.ConfigError:
    pass
end = time.monotonic() + 60
while sorted(thread.name for thread in threading.enumerate()) != before["threads"] and time.monotonic() < end:
    time.sleep(0.01)
after = settings()
print("changed:", {name: (before[name], after[name]) for name in before if before[name] != after[name]})
print(run.exit_reason, len(run.metrics["step"]))
"""


def test_nothing_is_left_behind_and_a_program_without_a_guard_is_not_repeated(working_folder: Path) -> None:
    (working_folder / "program.py").write_text(textwrap.dedent(PROGRAM))
    environment = os.environ | {"OMP_NUM_THREADS": "2", "PYTHONHASHSEED": "0"}
    done = subprocess.run(
        [sys.executable, "program.py"], env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    lines = done.stdout.splitlines()
    assert lines.count("program") == 1, done.stdout + done.stderr
    assert lines[-2:] == ["changed: {}", "max_steps 3"], done.stdout + done.stderr
