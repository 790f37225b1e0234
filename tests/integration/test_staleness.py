"""Runs whose generation or simulation is two updates ahead, with everything else that a run may do beside it.

Each resumes from a checkpoint in its middle and ends as the run that was not stopped: nothing is lost or doubled, and
the age of the weights does not depend on timing.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from reward_parts import reward_server, scores
from tiny_configs import GAME

from rl_platform.metrics import read_metrics

STEPS, HALF, AHEAD = 5, 2, 2
TOOLS = """
def answer(conversation, metadata):
    return "=7"

def score(response, answer, metadata):
    return float(len(response.encode()) % 3 == 0)
"""
REFERENCE = "cluster.component_placement={'actor,critic,reference,rollout,reward': all}"
WITH = {
    "nothing else": (),
    "dynamic sampling": ("algorithm.group_size=2", "algorithm.dynamic_sampling={}"),
    "dynamic sampling without old surplus": (
        "algorithm.group_size=2",
        "algorithm.dynamic_sampling={prompts_per_round: 12}",
        "runner.stale=drop",
    ),
    "partial rollouts": ("rollout.partial_rollout={}", "rollout.max_running_requests=5", "data.max_response_length=8"),
    "turns with a tool": (
        "rollout={multi_turn: {tool: 'my_tools:answer', max_turns: 2, max_observation_tokens: 2, num_workers: 1}}",
        "rollout.sampling={max_new_tokens: 2}",
        "data.max_response_length=6",
    ),
    "an agent in a text environment": (
        "rollout={agent: {environment: {type: 'my_game.py:Game'}, num_workers: 1}, sampling: {max_new_tokens: 2}}",
        "data.max_prompt_length=24",
        "data.max_response_length=14",
        "actor.model.random_init.max_positions=64",
    ),
    "shaped rewards": (
        REFERENCE,
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl={type: adaptive, kl_coef: 0.1, target_kl: 0.01, horizon: 100}",
        "algorithm.reward_whitening=true",
        "algorithm.overlong={buffer_length: 1, penalty: 0.5}",
    ),
    "a reward server": ("reward={type: http, url: 'URL', num_workers: 1}",),
    "PF-PPO after a critic warm-up": ("algorithm.use_pf_ppo=true", "algorithm.policy_training_start_step=3"),
    "greedy baselines": (
        "cluster={component_placement: {'actor,rollout,reward': all}}",
        "algorithm.adv_type=remax",
        "critic=!unset",
    ),
    "deterministic kernels, log-probs of the rollout": (
        "runner.deterministic=true",
        "algorithm.rollout_is=null",
        "algorithm.old_log_probs=rollout",
    ),
}


@pytest.fixture
def url() -> Iterator[str]:
    """The address of a reward server that scores as `my_tools:score`."""
    with reward_server(
        lambda asked: scores(*(float(len(one["response"].encode()) % 3 == 0) for one in asked))
    ) as address:
        yield address


@pytest.mark.parametrize("name", [name for name in WITH if WITH[name]])
def test_it_resumes_to_the_state_that_it_would_have_had(
    command, folder, final_state, logged, differences, url: str, name: str
):
    (folder / "my_tools.py").write_text(TOOLS)
    (folder / "my_game.py").write_text(GAME)
    more = (key.replace("URL", url) for key in WITH[name])
    keys = ("algorithm.rollout_is={}", "reward.type=my_tools:score", *more)
    run = (
        *("reasoning.yaml", f"runner.max_staleness={AHEAD}", f"runner.max_steps={STEPS}", "runner.save_interval=2"),
        *("runner.val_check_interval=3", "runner.keep_checkpoints=10", *keys),
    )
    ended = command(*run, "runner.output_dir=whole")
    assert ended.code == 0, ended.err
    assert "rollouts are collected during updates, with weights 2 updates old" in ended.out
    again = f"runner.resume=whole/checkpoints/step-{HALF:08d}", "runner.output_dir=again"
    ended = command(*run, *again)
    assert ended.code == 0, ended.err
    assert differences(*(final_state(place, STEPS) for place in ("whole", "again"))) == []
    rows, resumed = logged("whole"), logged("again")
    assert differences([row for row in rows if row["step"] > HALF], resumed) == []
    warm_up = 3 if "critic warm-up" in name else 0
    version = [max(0, step - warm_up) for step in range(STEPS)]
    ages = [row["staleness/max"] for row in read_metrics(folder / "whole")[1:]]
    expected = [version[step] - version[max(0, step - AHEAD)] for step in range(STEPS)]
    counts = final_state("whole", STEPS)["run"]["task"]["samples"]["counts"]
    if name == "dynamic sampling without old surplus":
        assert max(ages) <= AHEAD
        assert counts["dropped"] == read_metrics(folder / "whole")[-1]["perf/samples_dropped"] > 0
    else:
        assert counts["dropped"] == 0
    if name == "partial rollouts":  # a response may have begun in an earlier rollout
        assert all(age >= least for age, least in zip(ages, expected, strict=True))
    elif not name.startswith("dynamic sampling"):  # which trains surplus groups later
        assert ages == expected


EMBODIED_WITH = {
    "V-trace": ("algorithm.rollout_is={vtrace: true}",),
    "normalised observations and rewards": ("env.normalize_observations=true", "env.normalize_rewards=true"),
    "a recurrent policy": ("actor.model.type=gru", "actor.model.recurrent_size=8", "env.max_episode_steps=9"),
    "chunks of actions": ("env.id=HalfCheetah-v5", "env.max_episode_steps=20", "actor.model.num_action_chunks=2"),
    "whole episodes": (
        "algorithm={loss_type: actor, adv_type: grpo, group_size: 2, rollout_is: {}}",
        "env.max_episode_steps=16",
    ),
    "two env ranks": (
        "cluster.component_placement={'actor_critic,rollout': all, env: 'all:0-1'}",
        "env.pipeline_stages=2",
        "env.normalize_observations=true",
    ),
}


@pytest.mark.parametrize("name", EMBODIED_WITH)
def test_environments_that_step_during_updates(command, folder, final_state, logged, differences, name: str):
    run = (
        *("embodied.yaml", f"runner.max_staleness={AHEAD}", f"runner.max_steps={STEPS}", "runner.save_interval=2"),
        *("runner.val_check_interval=3", "runner.keep_checkpoints=10", "algorithm.rollout_is={}", *EMBODIED_WITH[name]),
    )
    ended = command(*run, "runner.output_dir=whole")
    assert ended.code == 0, ended.err
    ended = command(*run, f"runner.resume=whole/checkpoints/step-{HALF:08d}", "runner.output_dir=again")
    assert ended.code == 0, ended.err
    states = [final_state(place, STEPS) for place in ("whole", "again")]
    assert differences(*states) == []
    assert differences([row for row in logged("whole") if row["step"] > HALF], logged("again")) == []
    rows = read_metrics(folder / "whole")[1:]
    ages = [min(step, AHEAD) for step in range(STEPS)]
    assert [row["staleness/max"] for row in rows] == [row["staleness/mean"] for row in rows] == ages
    samples = states[0]["run"]["task"]["samples"]
    assert samples["open"] == {}, "a row was issued and not trained on"
    assert samples["counts"]["issued"] == samples["counts"]["trained"] == STEPS * 4
    assert rows[0]["is/weight_max"] == pytest.approx(1.0, abs=1e-5)
    assert max(row["is/weight_max"] for row in rows) > 1.0001, "the correction has no effect"


@pytest.mark.parametrize(
    ("on_update", "name"),
    [
        ("continue", "nothing else"),
        ("abort", "nothing else"),
        ("continue", "dynamic sampling"),
        pytest.param("continue", "shaped rewards", marks=pytest.mark.release),
        pytest.param("continue", "PF-PPO after a critic warm-up", marks=pytest.mark.release),
    ],
)
def test_weights_that_change_while_responses_are_generated(
    command, folder, final_state, on_update: str, name: str
) -> None:
    """What they change depends on timing; the age has a limit, and nothing is lost when the run resumes."""
    (folder / "my_tools.py").write_text(TOOLS)
    run = (
        *("reasoning.yaml", "runner.max_staleness=2", f"runner.max_steps={STEPS}", "runner.save_interval=2"),
        *("algorithm.rollout_is={}", "reward.type=my_tools:score", "rollout.backend=torch", "data.train_size=24"),
        *(f"rollout.on_update={on_update}", "data.max_response_length=8", "rollout.max_running_requests=2"),
        *("algorithm.group_size=2", "runner.keep_checkpoints=10", "runner.val_check_interval=3", *WITH[name]),
    )
    ended = command(*run, "runner.output_dir=whole")
    assert ended.code == 0, ended.err
    ended = command(*run, f"runner.resume=whole/checkpoints/step-{HALF:08d}", "runner.output_dir=again")
    assert ended.code == 0, ended.err
    for place in ("whole", "again"):
        samples = final_state(place, STEPS)["run"]["task"]["samples"]
        counts, carried = samples["counts"], sum(samples["open"].values())
        assert counts["trained"] == STEPS * 8 * 2
        assert counts["issued"] == counts["trained"] + counts["rejected"] + carried
        assert counts["dropped"] == 0
        if name != "dynamic sampling":  # which rejects responses, and carries others to a later step
            assert counts["issued"] == counts["trained"]
            assert all(row["staleness/max"] <= 2 for row in read_metrics(folder / place)[1:])
