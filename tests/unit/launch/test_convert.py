"""`rl-platform convert`: each system's keys and forms, the examples of its page, and files that are no such config."""

from __future__ import annotations

import itertools
import json
import random
import re
import zipfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml

import rl_platform as rl
from rl_platform.config.describe import is_known
from rl_platform.config.explanations.foreign_names import translate
from rl_platform.config.loader import load_config
from rl_platform.envs.embodied.descriptions import EnvDescription
from rl_platform.envs.embodied.env_facts import inspect_env
from rl_platform.launch.start_checks.policy_fit import policy_problems
from rl_platform.launch.tools.convert.conversion import convert
from rl_platform.launch.tools.convert.converted_yaml import as_yaml, report
from rl_platform.launch.tools.convert.key_tables import read_table
from rl_platform.launch.tools.convert.outcome import Unresolved
from rl_platform.launch.tools.convert.reading import SYSTEMS, read
from rl_platform.launch.tools.convert.shell import commands, known

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "convert.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(
    r"^<!-- convert: (\S+) -->\n```\w+\n(.*?)^```$\n\n```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL
)
PAIRS = yaml.safe_load(Path(__file__).with_name("convert_pairs.yaml").read_text(encoding="utf-8"))
GOOD = "ppo: {adv_estimator: {name: gae}}\nloss_fn: {ratio_clip_min: 0.2}\npolicy: {model_name: org/model}\n"
# what the keys of a pair stand beside
REST: dict[str, dict[str, Any]] = {
    "verl": {"data.train_files": "t.parquet", "actor_rollout_ref.model.path": "org/model"},
    "rlinf": {
        "runner.task_type": "reasoning",
        "cluster.component_placement": {"actor,rollout,reward": "all"},
        "algorithm.adv_type": "grpo",
        "algorithm.group_size": 8,
        "data.rollout_batch_size": 32,
        "data.train_data_paths": ["t.jsonl"],
        "reward.reward_type": "math",
        "rollout.model.model_path": "org/model",
    },
    "nemo-rl": {
        "ppo.adv_estimator.name": "gae",
        "cluster.gpus_per_node": 8,
        "policy.model_name": "org/model",
        "data.train.dataset_name": "gsm8k",
    },
    "trl": {"dataset_name": "org/data", "per_device_train_batch_size": 8},
    "sb3": {"env": "Pendulum-v1"},
}


@pytest.mark.parametrize(
    ("system", "pair"),
    [pytest.param(system, pair, id=f"{system}-{pair['given']}") for system, pairs in PAIRS.items() for pair in pairs],
)
def test_value_of_a_key(system: str, pair: dict[str, Any]) -> None:
    beside = {**REST[system], **pair.get("with", {})}
    done = convert(
        SYSTEMS[system], {**{key: beside[key] for key in beside if key not in pair["given"]}, **pair["given"]}
    )
    assert {key: done.values.get(key, "nothing") for key in pair.get("ours", {})} == pair.get("ours", {})
    row = next(row for row in done.rows if row.key in pair["given"])
    marks = {"not": "untranslated", "same": "same", "passed": "passed"}
    mark = next((each for each in marks if each in pair), "")
    assert row.outcome.status == marks.get(mark, "translated"), row.outcome
    assert pair.get(mark or "note", "") in row.outcome.why


@pytest.mark.parametrize(("name", "text", "report"), EXAMPLES, ids=[name for name, *_ in EXAMPLES])
def test_example_of_the_page(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, report: str
) -> None:
    """The command prints what the page shows, and the result loads and plans."""
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(text, encoding="utf-8")
    ended = tool("convert", name, "-o", "ours.yaml")
    assert ended.code == 0, ended.err
    assert ended.out.strip() == report.strip()
    config = load_config("ours.yaml").config
    assert config.runner.task_type == ("embodied" if name == "zoo.yml" else "reasoning")
    assert rl.plan("ours.yaml").data["components"]


def test_page_has_an_example_of_every_system() -> None:
    titles = {match[1] for *_, report in EXAMPLES if (match := re.search(r"\d+ keys of ([\w-]+):", report))}
    assert titles == {system.title for system in SYSTEMS.values()}


@pytest.mark.parametrize("system", SYSTEMS.values(), ids=SYSTEMS)
def test_renames_agree_with_the_table_of_names(system: Any) -> None:
    """A key that is renamed here goes where `names.yaml`, which messages print, says too; and it exists."""
    for key, ours in system.table.items():
        if isinstance(ours, str):
            assert is_known(ours) or ours.startswith(("rollout.engine_args.", "env.kwargs.")), (key, ours)
            named = translate(key, system.title)
            assert named is None or not named.here or named.note or ours in named.here or key in DIFFER, (key, ours)


@pytest.mark.parametrize("system", SYSTEMS.values(), ids=SYSTEMS)
def test_keys_of_a_table_are_in_one_place_and_exist_here(system: Any) -> None:
    table = read_table(system.name)
    assert not {*table.rules()} & {*system.rules}
    for block in table.blocks:
        assert bool(block.otherwise) == bool(block.applies or block.excluded)
        renamed = [each if isinstance(each, str) else each.to for each in block.to.values()]
        targets = [*renamed, *(each.to for each in block.choice.values()), *block.contained, *block.interval.values()]
        targets += [
            *block.top_k.values(),
            *block.dtype.values(),
            *(block.under + key for key in block.unchanged.split()),
        ]
        keys = [key for each in targets for key in ([each] if isinstance(each, str) else each)]
        assert [key for key in keys if not is_known(key)] == []


# `names.yaml` lists endings: these paths share one with another key
DIFFER = (
    "local_rollout_forward_batch_size",
    "actor_rollout_ref.ref.megatron.tensor_model_parallel_size",
    "actor_rollout_ref.ref.megatron.pipeline_model_parallel_size",
)


ODD = (None, True, -1, 10**30, float("inf"), float("nan"), "", "x: y", [], {}, [1, "a"], {"a": 1}, [{"name": 3}], -0.5)


@pytest.mark.parametrize("system", SYSTEMS.values(), ids=SYSTEMS)
def test_odd_values_are_reported(system: Any) -> None:
    draw = random.Random(1)
    exact = [key for key in system.table if "*" not in key]
    for _ in range(60):
        done = convert(system, {**REST[system.name], **{key: draw.choice(ODD) for key in draw.sample(exact, 5)}})
        assert "keys of" in report(done)[-1]
        assert yaml.safe_load(as_yaml(done, Path("x.yaml"))) is not None


def test_scripts_are_read_and_not_run(tmp_path: Path) -> None:
    text = f"""
    touch {tmp_path}/ran
    MODEL=${{MODEL:-org/model}}   # a comment with "quotes
    SIZE=$((2 * 16 + 1))
    if [ "$GPUS" = 8 ]; then TP=4; else TP=1; fi
    SUFFIX=a${{OPTIONAL:+-}}${{OPTIONAL}}
    DATA=( data.train_files="['$HOME/a.parquet']" data.x=${{SIZE}} )
    DATA+=( 'data.y=$SIZE' )
    python3 -m verl.trainer.main_ppo "${{DATA[@]}}" \\
        model=$MODEL \\  # a comment that ends the command in a shell
        name=$SUFFIX tp=${{TP}} day=$(date +%F) "$@"
    """
    words = next(words for words in commands(text) if "verl.trainer.main_ppo" in words)
    assert [known(word) for word in words[3:7]] == [
        "data.train_files=['${env:HOME}/a.parquet']",
        "data.x=33",
        "data.y=$SIZE",
        "model=org/model",
    ]
    assert [str(known(word)) for word in words[7:]] == ["name=a", "tp=...", "day=..."]
    assert list(tmp_path.iterdir()) == []


def test_files_are_yaml_1_1_and_words_are_those_of_hydra(tmp_path: Path) -> None:
    """As the systems read them; 0809 ended a script with a traceback."""
    file, script = tmp_path / "a.yaml", tmp_path / "a.sh"
    file.write_text(
        "actor_rollout_ref: {actor: {shuffle: yes, use_kl_loss: Off, optim: {lr: 1e-6}}}\n"
        "data: {seed: 010, train_batch_size: 1_024}\ntrainer: {experiment_name: 0809, project_name: n}\n"
    )
    keys = read(file, "verl").keys
    assert keys == {
        "actor_rollout_ref.actor.shuffle": True,
        "actor_rollout_ref.actor.use_kl_loss": False,
        "actor_rollout_ref.actor.optim.lr": 1e-6,
        "data.seed": 8,
        "data.train_batch_size": 1024,
        "trainer.experiment_name": "0809",
        "trainer.project_name": "n",
    }
    words = "actor_rollout_ref.model.path=on trainer.experiment_name=0809 data.seed=3"
    script.write_text(f"python -m verl.trainer.main_ppo {words}\n")
    assert read(script).keys == {
        "actor_rollout_ref.model.path": "on",
        "trainer.experiment_name": "0809",
        "data.seed": 3,
    }


def test_the_training_command_of_verl_follows_other_programs(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "python tools/convert_weights.py --hf_model_path a --output_path b\n"
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=gae actor_rollout_ref.rollout.n=2 trainer.nnodes=1\n",
        encoding="utf-8",
    )
    assert read(script).keys == {
        "algorithm.adv_estimator": "gae",
        "actor_rollout_ref.rollout.n": 2,
        "trainer.nnodes": 1,
    }


STUDY = (Path(__file__).parents[3] / "docs/tutorials/from-stable-baselines3.md").read_text(encoding="utf-8")


def test_the_script_of_the_tutorial_is_converted(tool: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(re.search(r"```python\n(from stable.*?)```", STUDY, re.DOTALL)[1])
    assert tool("convert", tmp_path / "train.py", "-o", tmp_path / "ours.yaml").code == 0
    config = load_config(tmp_path / "ours.yaml").config
    assert (config.env.id, config.env.num_envs, config.env.rollout_steps, config.runner.max_steps) == (
        "CartPole-v1",
        8,
        128,
        60,
    )
    assert (config.data.mini_batch_size, config.actor.optim.lr, config.algorithm.entropy_bonus) == (256, 1e-3, 0.01)


SB3 = """
raise SystemExit("nothing is run")
N, ENV = 4, "Pendulum-v1"
env = VecNormalize(DummyVecEnv([make for _ in range(N)]), gamma=0.9)
KW = dict(net_arch=[32], activation_fn=nn.ReLU)
make = lambda: gym.make(ENV, g=9.8)
model = PPO("MlpPolicy", env, policy_kwargs=KW, learning_rate=lambda left: left * 3e-4, seed=3)
model.learn(total_timesteps=STEPS)
"""
GRPO = """
RATE = 1e-6
data = load_dataset("openai/gsm8k", "main", split="train")
config = GRPOConfig(learning_rate=RATE, num_generations=4, beta=beta())
GRPOTrainer(model="Qwen/Qwen2.5-0.5B-Instruct", reward_funcs=[close], args=config, train_dataset=data)
"""


@pytest.mark.parametrize(
    ("text", "known_keys", "computed"),
    [
        (
            SB3,
            {"policy": "MlpPolicy", "seed": 3, "env_kwargs.g": 9.8, "policy_kwargs.net_arch": [32]},
            {"learning_rate", "n_envs", "n_timesteps", "normalize", "env"},
        ),
        (
            GRPO,
            {
                "learning_rate": 1e-6,
                "num_generations": 4,
                "model_name_or_path": "Qwen/Qwen2.5-0.5B-Instruct",
                "dataset_name": "openai/gsm8k",
                "dataset_config": "main",
                "dataset_train_split": "train",
                "reward_funcs": "[close]",
            },
            {"beta"},
        ),
        (
            "load_dataset('json', data_files='mine.jsonl', split='train')\nGRPOConfig(num_generations=4)",
            {"dataset_name": "json", "data_files": "mine.jsonl", "dataset_train_split": None},
            set(),
        ),
    ],
)
def test_python_is_parsed_and_what_it_computes_is_named(
    tmp_path: Path, text: str, known_keys: dict[str, object], computed: set[str]
) -> None:
    (tmp_path / "train.py").write_text(text, encoding="utf-8")
    foreign = read(tmp_path / "train.py")
    assert {key for key, value in foreign.keys.items() if isinstance(value, Unresolved)} == computed
    assert {key: foreign.keys.get(key) for key in known_keys} == known_keys
    rows = {row.key: row.outcome.status for row in convert(foreign.system, foreign.keys).rows if row.given}
    assert all(rows[key] == "untranslated" for key in computed)


@pytest.mark.parametrize(
    "text", ["a='b", 'a="${b', "a=(b c", "a=`b", "x=$((1+", "${", "case a in", "'", 'echo "$(' * 50]
)
def test_broken_scripts_end(text: str) -> None:
    list(commands(text))


def test_defaults_of_hydra_are_merged_or_named(tmp_path: Path) -> None:
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "cheetah.yaml").write_text("total_num_envs: 4\nmax_episode_steps: 100\n", encoding="utf-8")
    file = tmp_path / "run.yaml"
    file.write_text(
        "defaults: [env/cheetah@env.train, model/mlp@actor.model, override hydra/job_logging: stdout]\n"
        "runner: {task_type: embodied, logger: {experiment_name: '${runner.name}'}, name: x}\n"
        "algorithm: {adv_type: gae, loss_type: actor_critic}\n"
        "cluster: {component_placement: {'actor,env,rollout': all}}\n"
        "rollout: {model: {precision: '${missing.key}'}}\n"
        "env: {train: {total_num_envs: 16, init_params: {id: Ant-v5}}}\n",
        encoding="utf-8",
    )
    foreign = read(file)
    done = convert(foreign.system, foreign.keys)
    assert foreign.system.name == "rlinf"
    assert (done.values["env.num_envs"], done.values["env.max_episode_steps"]) == (16, 100)
    assert done.values["runner.experiment_name"] == "x"
    reasons = {row.key: row.outcome.why for row in done.of("untranslated")}
    assert "not beside" in reasons["defaults: model/mlp@actor.model"]
    assert "cannot be resolved" in reasons["rollout.model.precision"]


def test_defaults_of_nemo_rl_are_merged_or_named(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(f"{GOOD}value_loss_fn: {{scale: 0.4}}\n", encoding="utf-8")
    for parent, scale in (("base.yaml", 0.4), ("elsewhere/base.yaml", "nothing")):
        (tmp_path / "run.yaml").write_text(f"defaults: {parent}\n{GOOD}", encoding="utf-8")
        foreign = read(tmp_path / "run.yaml")
        done = convert(foreign.system, foreign.keys)
        assert done.values.get("algorithm.value_loss_scale", "nothing") == scale
        assert [row.key for row in done.of("untranslated")] == ([] if scale == 0.4 else [f"defaults: {parent}"])


def test_saved_model(tool: Any, tmp_path: Path) -> None:
    """A model that Stable-Baselines3 saved: schedules are read from their text, and pickles are not loaded."""
    pickled = {":type:": "<class 'function'>", ":serialized:": "not a pickle"}
    data = {
        "policy_class": {**pickled, "__module__": "stable_baselines3.common.policies"},
        "n_envs": 4,
        "n_steps": 64,
        "n_epochs": 5,
        "batch_size": 64,
        "gae_lambda": 0.9,
        "ent_coef": 0.01,
        "seed": None,
        "_total_timesteps": 1000,
        "learning_rate": {**pickled, "value_schedule": "LinearSchedule(start=0.001, end=0, end_fraction=1)"},
        "clip_range": {**pickled, "value_schedule": "ConstantSchedule(val=0.1)"},
        "clip_range_vf": pickled,
        "policy_kwargs": {**pickled, "activation_fn": "<class 'torch.nn.modules.activation.ReLU'>", "net_arch": [32]},
    }
    with zipfile.ZipFile(tmp_path / "model.zip", "w") as archive:
        archive.writestr("data", json.dumps(data))
        archive.writestr("policy.pth", b"weights")
    ended = tool("convert", str(tmp_path / "model.zip"), "--env", "Pendulum-v1", "-o", str(tmp_path / "ours.yaml"))
    assert ended.code == 0, ended.err
    assert re.search(r"clip_range_vf += \.\.\. -> pickled, and never loaded", ended.out)
    config = load_config(tmp_path / "ours.yaml").config
    assert (config.env.id, config.actor.optim.lr, config.actor.optim.lr_schedule) == ("Pendulum-v1", 0.001, "linear")
    assert (config.algorithm.clip_ratio_high, config.actor.model.activation) == (0.1, "relu")
    assert config.actor.model.hidden_sizes == [32]
    assert (config.runner.max_steps, config.env.normalize_rewards) == (4, False)
    assert "VecNormalize is saved in a file of its own" in ended.out


def test_json_of_arguments_goes_to_standard_output(tool: Any, tmp_path: Path) -> None:
    file = tmp_path / "grpo.json"
    arguments = {"model_name_or_path": "org/model", "dataset_name": "org/data", "num_generations": 4, "own_key": 1}
    file.write_text(json.dumps({**arguments, "hub_token": "hf_abcdefgh12345"}), encoding="utf-8")
    ended = tool("convert", str(file), "--from", "trl")
    assert ended.code == 0, ended.err
    assert yaml.safe_load(ended.out)["algorithm"]["adv_type"] == "grpo"
    assert "own_key" in ended.err
    assert "hf_abcdefgh12345" not in ended.err + ended.out


@pytest.mark.parametrize("kl_coef", [0.0, 0.05])
def test_a_script_of_trl_has_a_reference_if_it_has_a_kl_penalty(tool: Any, tmp_path: Path, kl_coef: float) -> None:
    arguments = {"kl_coef": kl_coef, "sft_model_path": "org/model", "reward_model_path": "org/reward"}
    file = tmp_path / "ppo.json"
    file.write_text(json.dumps({**arguments, "dataset_name": "org/data", "total_episodes": 64}), encoding="utf-8")
    ended = tool("convert", str(file), "--from", "trl")
    assert ended.code == 0, ended.err
    (placed,) = yaml.safe_load(ended.out)["cluster"]["component_placement"]
    assert ("reference" in placed.split(",")) == (kl_coef > 0)


def test_an_edited_result_stays(tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name, text, _ = EXAMPLES[0]
    Path(name).write_text(text, encoding="utf-8")
    for _ in range(2):
        assert tool("convert", name, "-o", "ours.yaml").code == 0
    edited = Path("ours.yaml").read_text() + "# mine\n"
    Path("ours.yaml").write_text(edited)
    for output in ("ours.yaml", name):
        ended = tool("convert", name, "-o", output)
        assert (ended.code, "Traceback" in ended.err) == (2, False)
    assert "it exists and has another content" in tool("convert", name, "-o", "ours.yaml").err
    assert (Path("ours.yaml").read_text(), Path(name).read_text()) == (edited, text)


VLA = """
runner: {task_type: embodied, max_epochs: 1, logger: {log_path: results, experiment_name: small, logger_backends: []}}
cluster: {component_placement: {'actor,env,rollout': '0'}}
algorithm: {adv_type: gae, loss_type: actor_critic, group_size: 1, update_epoch: 1}
env:
  train: {env_type: libero, total_num_envs: 4, max_episode_steps: 20, max_steps_per_rollout_epoch: 20, rollout_epoch: 1,
    task_suite_name: libero_goal, init_params: {camera_heights: 32, camera_widths: 48, render: true}}
  eval: {env_type: libero, total_num_envs: 2, video_cfg: {save_video: true}}
actor:
  global_batch_size: 16
  micro_batch_size: 8
  model: {model_type: KIND, model_path: models/vla, action_dim: 5, num_action_chunks: 5, obs_dim: 6, more: {x: 1},
    add_value_head: true, openpi: {config_name: pi0_libero, num_images_in_input: 3, noise_method: flow_sde}}
rollout: {pipeline_stage_num: 1}
critic: {use_critic_model: false}
"""


@pytest.mark.parametrize(
    ("kind", "shape", "parts"),
    [
        ("mlp_policy", (6,), []),
        ("openpi", (3, 32, 48, 3), []),
        ("openvla_oft", (3, 32, 48, 3), []),
        ("gr00t", (3 * 32 * 48 * 3 + 6,), [("images", (3, 32, 48, 3)), ("state", (6,))]),
    ],
)
def test_stand_ins_have_the_shapes_of_the_file(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, shape: tuple[int, ...], parts: list[object]
) -> None:
    """They are beside the result, which names them; the network gets its settings, and the policy fits."""
    monkeypatch.chdir(tmp_path)
    Path("vla.yaml").write_text(VLA.replace("KIND", kind), encoding="utf-8")
    ended = tool("convert", "vla.yaml", "-o", "new/ours.yaml")
    assert ended.code == 0, ended.err
    assert "new/simulators.py: libero is a stand-in" in ended.out
    config = load_config("new/ours.yaml").config
    assert config.env.id == "new/simulators.py:libero"
    with pytest.warns(UserWarning, match="libero is a stand-in"):
        spaces = inspect_env(EnvDescription.of(config.env)).spaces
    assert (spaces.observation_shape, spaces.action_shape) == (shape, (5,))
    assert [(part.name, part.shape) for part in spaces.parts] == parts
    with pytest.warns(UserWarning, match="Gr00t is a stand-in") if parts else nullcontext():
        assert [*policy_problems(config.actor.model, spaces)] == []
    if parts:
        assert config.actor.model.type == "new/policies.py:Gr00t"
        assert "new/policies.py: Gr00t is a stand-in" in ended.out
        assert [path.name for path in sorted(Path("new").glob("*.*"))] == ["ours.yaml", "policies.py", "simulators.py"]
        ended = tool("convert", "vla.yaml", "-o", "new/other.yaml")  # the same stand-ins
        assert ended.code == 0, ended.err


@pytest.mark.slow
@pytest.mark.usefixtures("forked_runs")
def test_a_converted_example_rehearses_with_its_stand_ins(
    tool: Any, command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("vla.yaml").write_text(VLA.replace("KIND", "gr00t"), encoding="utf-8")
    assert tool("convert", "vla.yaml", "-o", "ours.yaml").code == 0
    ended = command("--rehearse", "ours.yaml")
    assert ended.code == 0, ended.err
    assert "rehearsal of small passed" in ended.out


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"simulators.py": "def other(): ...\n"}, "simulators.py exists and does not define libero"),
        ({"simulators.py": "def libero(\n"}, "simulators.py exists and does not define libero"),
        ({"simulators.py": "libero: int\n"}, "simulators.py exists and does not define libero"),
        ({"simulators.py/x": ""}, "simulators.py exists and does not define libero"),
        ({"policies.py": "from mine import Other\n"}, "policies.py exists and does not define Gr00t"),
        ({"ours.yaml": "mine: 1\n"}, "it exists and has another content"),
    ],
)
def test_wrong_files_in_the_place_of_stand_ins(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], words: str
) -> None:
    """Nothing is written beside them."""
    monkeypatch.chdir(tmp_path)
    Path("vla.yaml").write_text(VLA.replace("KIND", "gr00t"), encoding="utf-8")
    for name, text in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text, encoding="utf-8")
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    ended = tool("convert", "vla.yaml", "-o", "ours.yaml")
    assert (ended.code, "Traceback" in ended.err) == (2, False)
    assert words in ended.err
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before


def test_a_real_simulator_in_the_place_of_a_stand_in_stays(
    tool: Any, command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("vla.yaml").write_text(VLA.replace("KIND", "gr00t"), encoding="utf-8")
    Path("simulators.py").write_text(mine := "from gymnasium.envs.classic_control import PendulumEnv as libero\n")
    ended = tool("convert", "vla.yaml", "-o", "ours.yaml")
    assert ended.code == 0, ended.err
    assert "simulators.py: kept, because it defines libero" in ended.out
    assert Path("simulators.py").read_text() == mine
    refused = command("--check", "ours.yaml")
    assert refused.code == 2
    assert "unexpected keyword argument 'task_suite_name'" in refused.err
    refused = command("--check", "ours.yaml", "actor.model.kwargs.kind=2")
    assert "actor.model.type: its constructor is called with" in refused.err


def test_a_layout_that_the_model_does_not_allow_is_named(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = EXAMPLES[0][1].replace(
        "trainer.n_gpus_per_node=1",
        "trainer.n_gpus_per_node=3 actor_rollout_ref.actor.megatron.tensor_model_parallel_size=3 "
        "--config-name=ppo_megatron_trainer.yaml",
    )
    Path("run.sh").write_text(text, encoding="utf-8")
    ended = tool("convert", "run.sh", "-o", "ours.yaml")
    assert ended.code == 2, ended.out
    assert re.search(
        r"ours.yaml:\d+: actor.parallel.tensor: tensor ranks have equal shares of the model's 14", ended.err
    )


BOMB = "a: &a {x: 1, y: 1}\n" + "".join(  # a section of 8 sections of 8 ..., nine levels of them
    f"{name}: &{name} {{{', '.join(f'k{each}: *{before}' for each in range(8))}}}\n"
    for before, name in itertools.pairwise("abcdefghij")
)


@pytest.mark.parametrize(
    ("name", "text", "arguments", "words"),
    [
        ("gone.yaml", None, [], "no such file"),
        ("list.yaml", "- 1\n- 2\n", [], "holds no keys"),
        ("broken.yaml", "a: [1\n", [], "not readable as YAML"),
        ("tabs.yaml", "a:\n\tb: 1\n", [], "tabs.yaml:2: not readable as YAML: while scanning"),
        ("circle.yaml", "a: &a\n  b: *a\n", ["--from", "verl"], "an alias contains itself"),
        ("bomb.yaml", BOMB, ["--from", "rlinf"], "aliases repeat more than 100,000 values"),
        (
            "twice.yaml",
            "a:\n  b: 1\n  c: 2\n  b: 3\n",
            [],
            "twice.yaml:4: b: this key appears twice\n    hint: the first is in line 2",
        ),
        (
            "twice.yaml",
            "a: {b: 1, b: 3}\nc: 1\na: 2\n",
            [],
            "twice.yaml:3: a: this key appears twice\n    hint: the first is in line 1",
        ),
        ("twice.yaml", "a: {b: 1, b: 3}\nc: 1\na: 2\n", [], "2 problems:\ntwice.yaml:1: b: this key appears twice"),
        ("broken.json", "{", [], "not readable as JSON"),
        ("twice.json", '{"a": {"b": 1, "b": 2}}', [], "the key 'b' appears twice"),
        ("notes.sh", "echo hello\n", [], "no training command"),
        ("ppo.yaml", GOOD, ["--from", "verl"], "it looks like NeMo-RL: --from nemo-rl"),
        ("sft.yaml", "learning_rate: 1e-5\nmax_length: 10\n", [], "not a config of any of"),
        ("dpo.yaml", "learning_rate: 1e-5\nbeta: 0.1\n", ["--from", "trl"], "not a config of TRL"),
        ("zoo.yml", "A-v1: {n_steps: 8, n_epochs: 1}\nB-v1: {n_steps: 8, n_epochs: 1}\n", [], "hint: --env A-v1"),
        ("zoo.yml", "A-v1: {n_steps: 8, n_epochs: 1}\n", ["--env", "C-v1"], "no such block"),
        ("a2c.yml", "n_steps: 8\ngae_lambda: 1\nuse_rms_prop: true\n", ["--from", "sb3"], "another algorithm"),
        ("ours.yaml", (ROOT / "configs/reasoning/ppo_tiny.yaml").read_text(encoding="utf-8"), [], "already"),
        ("ppo.yaml", GOOD, ["-o", "ours.yaml"], "ours.yaml:3: cluster: this key is required"),
        ("model.zip", "PK", [], "no training command"),
        ("train.py", "import torch\n", [], "no calls of PPOConfig, GRPOConfig, PPO"),
        ("train.py", "PPO('MlpPolicy', 'A-v1')\nPPO('MlpPolicy', 'B-v1')\n", [], "2 calls of"),
        ("train.py", "PPO(\n", [], "not readable as Python"),
        ("defaults.yaml", "defaults: 5\nx: 1\n", [], "not a config of any of"),
        ("quickstart.sh", EXAMPLES[0][1], ["-o", "quickstart.sh/ours.yaml"], "--output: "),
        ("quickstart.sh", EXAMPLES[0][1], ["-o", "."], "--output: "),
        ("quickstart.sh", EXAMPLES[0][1], ["-o", "ours.txt"], "did you mean ours.yaml?"),
    ],
)
def test_wrong_input(
    tool: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    text: str | None,
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path(name).write_text(text, encoding="utf-8")
    ended = tool("convert", name, *arguments)
    assert ended.code == 2, ended.out
    assert words in ended.err
    assert "Traceback" not in ended.err
