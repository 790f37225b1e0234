"""`--rehearse`: the small config of every shipped one, and mistakes that are found in the real sizes."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import pytest

from rl_platform.config import LoadedConfig, load_config
from rl_platform.envs.reasoning.tasks import build_questions
from rl_platform.errors import ConfigError
from rl_platform.launch.command import load
from rl_platform.launch.rehearse.architectures import options_of, small_options
from rl_platform.launch.rehearse.findings import check_sizes
from rl_platform.launch.rehearse.materials import architectures, write_questions
from rl_platform.launch.rehearse.shrink import Materials, flat, shrunk
from rl_platform.placement.inventory import inventory_for
from rl_platform.placement.scheduler import Placement, schedule

ROOT = Path(__file__).parents[3]
SHIPPED = sorted((ROOT / "configs").glob("**/*.yaml"))
EIGHT_GPUS = ROOT / "configs/reasoning/qwen2.5_1.5b_gsm8k_8gpu.yaml"
KL = ["algorithm.use_kl_loss=true", "cluster.component_placement={'actor,critic,rollout,reward,reference': all}"]


def sharing(placement: Placement) -> dict[tuple[str, str], bool]:
    sets = placement.accelerators
    return {(one, other): bool(sets[one] & sets[other]) for one, other in combinations(sorted(sets), 2)}


def hosts(placement: Placement) -> set[frozenset[str]]:
    return {frozenset(name for name, _ in host.members) for host in placement.hosts}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_small_config_is_valid_and_keeps_the_shape(path, tmp_path):
    loaded, placement, _ = load(str(path), [])
    small, changes = shrunk(loaded.config, placement, Materials(tmp_path))
    (tmp_path / "small.yaml").write_text(LoadedConfig(small, {}).resolved_yaml())
    again = load_config(tmp_path / "small.yaml").config
    before, after = flat(loaded.config.model_dump(mode="json")), flat(small.model_dump(mode="json"))
    differing = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    assert {change.key for change in changes} == differing
    new = schedule(again.cluster, inventory_for(again.cluster))
    assert hosts(new) == hosts(placement)
    for name in placement.components:
        assert (new.world_size(name) > 1) == (placement.world_size(name) > 1)
    if any(placement.accelerators.values()):
        assert sharing(new) == sharing(placement)
    assert again.runner.max_steps == 2


def test_every_parallelism_above_one_stays_above_one(tmp_path):
    loaded, placement, _ = load(str(ROOT / "configs/reasoning/deepseek_r1_7b_dapo_64gpu.yaml"), [])
    small, _ = shrunk(loaded.config, placement, Materials(tmp_path))
    assert small.actor.parallel.tensor == 2
    assert schedule(small.cluster, inventory_for(small.cluster)).world_size("actor") == 4  # TP 2, DP 2


def test_a_tensor_size_that_does_not_divide_the_real_heads_is_refused():
    loaded, placement, _ = load(str(EIGHT_GPUS), ["actor.parallel.tensor=8", "critic.parallel.tensor=8"])
    with pytest.raises(ConfigError) as caught:
        check_sizes(loaded.config, placement, architectures(loaded.config))
    assert {problem.key for problem in caught.value.problems} == {"actor.parallel.tensor", "critic.parallel.tensor"}


def test_a_reference_with_another_tokenizer_is_refused():
    other = "reference={model: {path: meta-llama/Llama-3.2-1B-Instruct}, training_backend: fsdp}"
    loaded, placement, _ = load(str(EIGHT_GPUS), [*KL, other])
    with pytest.raises(ConfigError, match="its tokenizer is that of Llama 3") as caught:
        check_sizes(loaded.config, placement, architectures(loaded.config))
    assert [problem.key for problem in caught.value.problems] == ["reference.model"]


def test_an_unknown_architecture_names_the_key_and_what_to_do():
    with pytest.raises(ConfigError, match="hf download") as caught:
        options_of("someone/unheard-of", "actor.model.path")
    assert caught.value.problems[0].key == "actor.model.path"


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
