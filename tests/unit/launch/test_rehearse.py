"""`--rehearse`: the small config of every shipped one, and mistakes that are found in the real sizes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest

from rl_platform.config import LoadedConfig, load_config
from rl_platform.config.schema import Config
from rl_platform.config.schema.models import Actor
from rl_platform.envs.reasoning.tasks import build_questions
from rl_platform.errors import ConfigError
from rl_platform.launch.placed_config import load
from rl_platform.launch.rehearse.findings import check_sizes
from rl_platform.launch.rehearse.materials import architectures, write_questions
from rl_platform.launch.rehearse.rehearsal import _folder
from rl_platform.launch.rehearse.rehearsal_sizes import Materials
from rl_platform.launch.rehearse.rehearsed_runs import CpuSeconds
from rl_platform.launch.rehearse.shrink import flat_keys, shrunk
from rl_platform.launch.rehearse.small_models import options_of, small_options
from rl_platform.launch.start_checks.preflight import check_cheap
from rl_platform.models.pretrained.families import FAMILIES as COMPUTED
from rl_platform.models.pretrained.pretrained_lm import empty_causal_lm
from rl_platform.placement.estimates.architectures import families, family_of, known_options
from rl_platform.placement.estimates.workload import data_parallel
from rl_platform.placement.inventory import inventory_for
from rl_platform.placement.layout import LEARNERS
from rl_platform.placement.scheduler import Placement, schedule

ROOT = Path(__file__).parents[3]
SHIPPED = sorted((ROOT / "configs").glob("**/*.yaml"))
EIGHT_GPUS = ROOT / "configs/reasoning/recipes/qwen2.5_1.5b_gsm8k_8gpu.yaml"
# one of every family in platform/placement/estimates/architectures.yaml
IDS_OF_THE_TABLE = [
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B",
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
    "Qwen/Qwen3-30B-A3B",
    "Qwen/Qwen3-235B-A22B",
    "Qwen/Qwen1.5-MoE-A2.7B",
    "Qwen/Qwen2-57B-A14B",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen2.5-Math-7B-Instruct",
    "Qwen/Qwen2.5-7B",
    "Qwen/Qwen2.5-7B-Instruct",
    "deepseek-ai/DeepSeek-V3",
    "moonshotai/Moonlight-16B-A3B",
    "deepseek-ai/DeepSeek-V2-Lite",
    "deepseek-ai/DeepSeek-V2",
    "deepseek-ai/deepseek-llm-7b-chat",
    "meta-llama/Llama-3.2-3B",
    "meta-llama/Llama-3.1-8B",
    "meta-llama/Meta-Llama-3-8B",
    "sfairXC/FsfairX-LLaMA3-RM-v0.1",
    "meta-llama/Llama-2-7b-hf",
    "mistralai/Mixtral-8x7B-v0.1",
    "mistralai/Mistral-Nemo-Instruct-2407",
    "mistralai/Mistral-7B-v0.3",
    "openai/gpt-oss-20b",
    "openai/gpt-oss-120b",
    "ByteDance-Seed/Seed-OSS-36B-Base",
    "google/gemma-2b",
    "google/gemma-2-2b-it",
    "HuggingFaceTB/SmolLM2-1.7B",
    "HuggingFaceTB/SmolLM2-360M",
]
BURN = """
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # as in Ray, the kernel then forgets the times of children
if os.fork() == 0:
    while time.process_time() < 0.3:
        pass
    print("done", flush=True)
    time.sleep(60)
time.sleep(60)
"""
NO_DEFAULTS = ("ministral", "hunyuan_v1_dense", "dots1")  # of transformers, with which a model can be built
KL = ["algorithm.use_kl_loss=true", "cluster.component_placement={'actor,critic,rollout,reward,reference': all}"]


def kv_heads(config):
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def sharing(placement: Placement) -> dict[tuple[str, str], bool]:
    sets = placement.accelerators
    return {(one, other): bool(sets[one] & sets[other]) for one, other in combinations(sorted(sets), 2)}


def hosts(placement: Placement) -> set[frozenset[str]]:
    return {frozenset(name for name, _ in host.members) for host in placement.hosts}


def several(config: Config, placement: Placement) -> dict[str, bool]:
    """What is larger than 1: kinds of parallelism, devices of a rank, ranks of a device, parts of a batch."""
    found = {}
    for role in set(LEARNERS) & placement.components.keys():
        section = config.section(role)
        sizes = section.parallel.model_dump() | {"data": data_parallel(section, placement.world_size(role))}
        found |= {f"{role} {kind}": size > 1 for kind, size in sizes.items()}
    for name, slots in placement.components.items():
        devices = {(slot.node, device) for slot in slots for device in slot.accelerators}
        found[f"{name}: devices of a rank"] = any(len(slot.accelerators) > 1 for slot in slots)
        found[f"{name}: ranks of a device"] = 0 < len(devices) < len(slots)
    data = config.data
    found["mini-batches"] = config.rows_per_step > data.mini_batch_size
    found["micro-batches"] = data.mini_batch_size > (config.actor.micro_batch_size or data.mini_batch_size)
    found["samples of a prompt"] = config.algorithm.group_size > 1
    found["env workers"] = config.runner.task_type == "embodied" and config.env.num_workers > 1
    return found


@pytest.mark.parametrize("section", ["reward={{{}}}", "reward.functions=[{{{}}}]"])
@pytest.mark.parametrize("own", [None, "http://127.0.0.1:1/score"])
def test_a_served_reward_model_is_kept_or_replaced_by_a_server_of_the_rehearsal(tmp_path, section, own):
    served = "type: model, model: {path: models/reward, url: 'http://10.0.0.7:8000/classify'}"
    loaded, placement, _ = load(str(ROOT / "configs/reasoning/ppo.yaml"), [section.format(served)])
    small, _ = shrunk(loaded.config, placement, Materials(tmp_path, reward_url=own))
    (_, before), (_, after) = *loaded.config.reward.parts, *small.reward.parts
    if own is None:
        assert (after.type, after.model) == ("model", before.model)
    else:
        assert (after.type, after.url, after.model) == ("http", own, None)
    (tmp_path / "small.yaml").write_text(LoadedConfig(small, {}).resolved_yaml())
    load_config(tmp_path / "small.yaml")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_small_config_is_valid_and_keeps_the_shape(path, tmp_path):
    loaded, placement, _ = load(str(path), [])
    small, changes = shrunk(loaded.config, placement, Materials(tmp_path))
    (tmp_path / "small.yaml").write_text(LoadedConfig(small, {}).resolved_yaml())
    again = load_config(tmp_path / "small.yaml").config
    before, after = flat_keys(loaded.config), flat_keys(small)
    differing = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    assert {change.key for change in changes} == differing
    inventory = inventory_for(again.cluster)
    new = schedule(again.cluster, inventory)
    check_cheap(again, new)  # of a run
    assert hosts(new) == hosts(placement)
    for name in placement.components:
        assert (new.world_size(name) > 1) == (placement.world_size(name) > 1)
    if any(placement.accelerators.values()):
        assert sharing(new) == sharing(placement)
    assert several(again, new) == several(loaded.config, placement)
    assert len(new.hosts) <= 12  # processes
    assert again.runner.max_steps == 2


@pytest.mark.parametrize("num_envs", [1, 3, 16])
@pytest.mark.parametrize(("length", "small_length"), [(1, 1), (3, 2), (5, 4), (30, 8), ("null", None)])
def test_sequences_of_a_recurrent_policy_divide_the_small_rollout(length, small_length, num_envs, tmp_path):
    """60 steps are divided by 5, and the 16 of a rehearsal are not."""
    sizes = [f"env.num_envs={num_envs}", "env.rollout_steps=60", "data.mini_batch_size=60"]
    if num_envs == 3:
        sizes.append("env.tasks=[{name: a}, {name: b}, {name: c}]")
        sizes.append("env.evaluation.episodes=3")
    path = str(ROOT / "configs/embodied/masked_cartpole.yaml")
    loaded, placement, _ = load(path, [*sizes, f"actor.model.sequence_length={length}"])
    small, _ = shrunk(loaded.config, placement, Materials(tmp_path))
    (tmp_path / "small.yaml").write_text(LoadedConfig(small, {}).resolved_yaml())
    again = load_config(tmp_path / "small.yaml").config
    expected = 8 if (length, num_envs) == ("null", 3) else small_length  # 24 rows are no multiple of 16
    assert again.actor.model.sequence_length == expected


@pytest.mark.parametrize("name", ["pi0", "vlm_tokens"])
def test_a_policy_with_trained_weights_becomes_a_small_random_one(name, tmp_path):
    """The folder of the weights need not be on this machine, nor the statistics of actions in it."""
    trained = ["actor.model.path=/weights", "~actor.model.random_init", "~actor.model.tokenizer"]
    path = str(ROOT / f"configs/embodied/{name}.yaml")
    loaded, placement, _ = load(path, [*trained, "actor.model.unnorm_key=bridge"])
    small, changes = shrunk(loaded.config, placement, Materials(tmp_path))
    (tmp_path / "small.yaml").write_text(LoadedConfig(small, {}).resolved_yaml())
    model = load_config(tmp_path / "small.yaml").config.actor.model
    assert (model.type, model.path, model.unnorm_key, model.tokenizer) == (name, None, None, "bytes")
    assert model.random_init is not None
    assert ("actor.model.path", "replaced") in {(change.key, change.kind) for change in changes}


@pytest.mark.parametrize(
    ("overrides", "kinds", "ranks"),
    [
        (["actor.parallel={tensor: 4, pipeline: 4}", "critic.parallel={tensor: 4, pipeline: 4}"], "tensor pipeline", 8),
        (["actor.parallel={expert: 8}", "critic.parallel={expert: 8}"], "expert", 2),
        (["actor={training_backend: fsdp, model: {path: Qwen/Qwen2.5-7B}, parallel: {context: 8}}"], "context", 4),
        (["actor.parallel={tensor: 8, pipeline: 8}", "critic.parallel={tensor: 8, pipeline: 8}"], "tensor pipeline", 4),
    ],
)
def test_every_parallelism_above_one_stays_above_one(tmp_path, overrides, kinds, ranks):
    path = ROOT / "configs/reasoning/recipes/deepseek_r1_7b_dapo_64gpu.yaml"
    loaded, placement, _ = load(str(path), overrides)
    config, _ = shrunk(loaded.config, placement, Materials(tmp_path))
    assert [getattr(config.actor.parallel, kind) for kind in kinds.split()] == [2] * len(kinds.split())
    new = schedule(config.cluster, inventory_for(config.cluster))
    assert new.world_size("actor") == ranks
    assert several(config, new) == several(loaded.config, placement)


def test_responses_that_a_random_model_does_not_end_are_trained_on(tmp_path):
    loaded, placement, _ = load(str(EIGHT_GPUS), ["algorithm.overlong.filter=true"])
    small, changes = shrunk(loaded.config, placement, Materials(tmp_path))
    assert not small.algorithm.overlong.filter
    assert [change.kind for change in changes if change.key == "algorithm.overlong.filter"] == ["replaced"]


@pytest.mark.parametrize(("runtime", "sync"), [("auto", "full"), ("ray", "delta")])
def test_one_process_sends_no_differences_of_weights(tmp_path, runtime, sync):
    """Two nodes need processes, their rehearsal on one worker does not."""
    nodes = [
        "cluster.inventory.nodes=2",
        "cluster.inventory.gpus_per_node=1",
        "cluster.address=auto",
        f"cluster.runtime={runtime}",
    ]
    groups = "cluster.node_groups=[{label: robot, node_ranks: '1', accelerators: 0}]"
    parts = "{actor_critic: 0, rollout: 0, env: {node_group: robot, placement: 0}}"
    overrides = [*nodes, groups, f"cluster.component_placement={parts}", "rollout.sync=delta"]
    loaded, placement, _ = load(str(ROOT / "configs/embodied/cartpole.yaml"), overrides)
    check_cheap(loaded.config, placement)
    small, _ = shrunk(loaded.config, placement, Materials(tmp_path))
    assert small.rollout.sync == sync
    check_cheap(small, schedule(small.cluster, inventory_for(small.cluster)))


def test_a_tensor_size_that_does_not_divide_the_real_heads_is_refused():
    loaded, placement, _ = load(str(EIGHT_GPUS), ["actor.parallel.tensor=8", "critic.parallel.tensor=8"])
    with pytest.raises(ConfigError) as caught:
        check_sizes(loaded.config, placement, architectures(loaded.config))
    assert {problem.key for problem in caught.value.problems} == {"actor.parallel.tensor", "critic.parallel.tensor"}


def test_a_small_model_keeps_grouped_heads_tying_and_rotary_base():
    loaded, _, _ = load(str(EIGHT_GPUS), [])
    real = options_of("Qwen/Qwen2.5-1.5B-Instruct", "actor.model.path").options
    small = small_options(real, loaded.config.actor, 320)
    assert small["num_attention_heads"] > small["num_key_value_heads"] > 1
    same = ("model_type", "tie_word_embeddings", "rope_theta")
    assert {name: small[name] for name in same} == {name: real[name] for name in same}
    assert small["num_hidden_layers"] == 2


def test_stored_questions_become_a_few_rows_of_the_same_columns(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": f"{n}?"}], "reward": {"truth": str(n)}} for n in range(60)]
    (tmp_path / "real.json").write_text(json.dumps(rows))
    columns = {"prompt_column": "prompt", "answer_column": "reward.truth"}
    sources = [
        {"label": "real", "type": "file", "path": str(tmp_path / "real.json"), "weight": 2.0} | columns,
        {"label": "absent", "type": "dataset", "path": "some/where", "val_split": "test", "val_size": 90} | columns,
    ]
    changed = ["data.task=null", f"data.sources={json.dumps(sources)}"]
    loaded, placement, _ = load(str(EIGHT_GPUS), changed)
    materials = Materials(tmp_path)
    small, _ = shrunk(loaded.config, placement, materials)
    assert write_questions(loaded.config, materials) == ["some/where", "some/where"]
    (tmp_path / "small.yaml").write_text(LoadedConfig(small, {}).resolved_yaml())
    assert [source.weight for source in load_config(tmp_path / "small.yaml").config.data.sources] == [2.0, 1.0]
    split = build_questions(small.data, seed=1)
    assert {question.source for question in split.train} == {"real", "absent"}
    assert all(question.messages for question in split.train if question.source == "real")
    assert len(split.validation) == 8


def test_every_family_has_a_small_model_with_the_same_kinds_of_layers():
    from transformers import AutoConfig

    assert [family_of(hub_id) for hub_id in IDS_OF_THE_TABLE] == list(families())
    table = [known_options(hub_id) for hub_id in IDS_OF_THE_TABLE]
    defaults = [AutoConfig.for_model(name).to_dict() for name in COMPUTED if name not in NO_DEFAULTS]
    for options in [*table, *defaults]:
        real = AutoConfig.for_model(**options)
        small = AutoConfig.for_model(**small_options(options, Actor(), 320) | {"pad_token_id": 0})
        network = empty_causal_lm(small, options["model_type"], "actor.model.path")
        assert sum(parameter.numel() for parameter in network.parameters()) < 2e6
        assert set(getattr(small, "layer_types", None) or ()) == set(getattr(real, "layer_types", None) or ())
        grouped = [config.num_attention_heads != kv_heads(config) for config in (real, small)]
        assert grouped[0] == grouped[1], options["model_type"]
        assert small.tie_word_embeddings == real.tie_word_embeddings


def test_cpu_seconds_count_children_that_nobody_waits_for():
    earlier = CpuSeconds()
    earlier.read()  # children of other tests
    before = earlier.total()
    with subprocess.Popen([sys.executable, "-c", BURN], stdout=subprocess.PIPE, start_new_session=True) as process:
        with CpuSeconds() as cpu:
            assert process.stdout.readline() == b"done\n"
            cpu.read()
        os.killpg(process.pid, 9)
    assert 0.3 <= cpu.total() - before < 5


def test_folders_of_killed_rehearsals_are_deleted_by_the_next(tmp_path: Path) -> None:
    killed, young, old, others = (tmp_path / f"rl-rehearse-{name}" for name in ("killed", "young", "old", "others"))
    for folder in (killed, young, old):
        folder.mkdir()
    (killed / ".lock").touch()
    os.utime(old, (0, 0))
    others.symlink_to(tmp_path)
    with _folder(str(tmp_path)) as first, _folder(str(tmp_path)) as second:
        assert {*tmp_path.iterdir()} == {young, others, first, second}
    assert {*tmp_path.iterdir()} == {young, others}
