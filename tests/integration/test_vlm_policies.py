"""Runs with policies on vision-language models: stopped runs go on, ranks agree, wrong inputs are refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from rl_platform.components.actor import embodied_policy, trained_policy
from rl_platform.launch.placed_config import load
from rl_platform.launch.saved.loaded_policy import load_policy
from rl_platform.launch.start_checks.env_spaces import fitting_spaces
from rl_platform.launch.start_checks.model_checks import policy_bytes
from rl_platform.metrics import read_metrics

TINY = "{hidden_size: 16, num_layers: 2, num_heads: 2, intermediate_size: 32, max_positions: 64}"
RANDOM = f"random_init: {TINY}, tokenizer: bytes, instruction: go"
CHEETAH = ("env.id=HalfCheetah-v5", "env.max_episode_steps=7", "env.normalize_observations=true")
PI0 = (*CHEETAH, f"actor.model={{type: pi0, {RANDOM}, flow: {{denoising_steps: 3}}}}")
SMOLVLA = (*CHEETAH, PI0[-1].replace("pi0", "smolvla"))
CHUNKS = (*PI0, "actor.model.num_action_chunks=2", "data.mini_batch_size=16", "actor.micro_batch_size=8")
FOLDER = (
    *CHEETAH,
    "actor.model={type: pi0, path: saved, tokenizer: bytes, instruction: go, flow: {denoising_steps: 3}}",
)
PICTURES = """
import gymnasium, numpy as np

class Picture(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 255, (12, 12, 3), np.uint8)

    def __init__(self, high=1):
        self.action_space = gymnasium.spaces.Box(0, high, (1,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.bright = int(self.np_random.integers(2))
        return np.full(self.observation_space.shape, 50 + 150 * self.bright, np.uint8), {}

    def step(self, action):
        reward = 1 - abs(float(action[0]) - self.bright)
        return self.reset()[0], reward, False, False, {}

gymnasium.register("Picture-v0", Picture, max_episode_steps=10)
"""
PICTURE = "env.id=pictures:Picture-v0"
SEEN = (PICTURE, *PI0[3:])
SMOLVLA_CHUNKS = (*SMOLVLA, *CHUNKS[4:])
TOKENS = (PICTURE, f"actor.model={{type: vlm_tokens, {RANDOM}, action_bins: 5}}")
TWO_LEARNERS = "{actor_critic: 'all:0-1', 'env,rollout': all}"
TOKEN_CHUNKS = (*TOKENS, "actor.model.num_action_chunks=2", "data.mini_batch_size=16", "actor.micro_batch_size=8")


@pytest.fixture(autouse=True)
def pictures(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment of images whose reward is 1 for an action as bright as its picture, in module pictures."""
    (folder / "pictures.py").write_text(PICTURES)
    monkeypatch.syspath_prepend(folder)


@pytest.mark.parametrize(
    "kind",
    [
        PI0,
        (*CHUNKS, "actor.model.flow.stochastic_steps=all"),
        (*SEEN, "actor.model.flow.method=flow_noise"),
        (*SMOLVLA_CHUNKS, "actor.model.flow.stochastic_steps=all"),
        (*TOKEN_CHUNKS, "actor.model.train_vision=false"),
    ],
    ids=["pi0, one", "pi0, all", "pi0, images", "smolvla, all", "vlm_tokens"],
)
def test_a_run_that_was_stopped(kind: tuple[str, ...], assert_ends_the_same_if_stopped) -> None:
    assert_ends_the_same_if_stopped("embodied.yaml", *kind)


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        (CHUNKS, "actor.model.flow.denoising_steps=2"),
        (CHUNKS, "actor.model.flow.noise_level=0.3"),
        (CHUNKS, "actor.model.flow.method=flow_cps"),
        (CHUNKS, "actor.model.flow.stochastic_steps=all"),
        (CHUNKS, "actor.model.instruction=stay"),
        (CHUNKS, "actor.model.train_backbone=false"),
        (CHUNKS, "actor.lora={rank: 2}"),
        (TOKEN_CHUNKS, "actor.model.action_bins=4"),
        (TOKEN_CHUNKS, "actor.model.instruction=stay"),
        (TOKEN_CHUNKS, "actor.model.train_vision=false"),
        (TOKEN_CHUNKS, "actor.lora={rank: 2}"),
        (TOKEN_CHUNKS, "algorithm.entropy_bonus=0.1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_key_has_an_effect(kind: tuple[str, ...], key: str, learned, differences) -> None:
    assert differences(learned("embodied.yaml", *kind, steps=1)[0], learned("embodied.yaml", *kind, key, steps=1)[0])


@pytest.mark.parametrize("kind", [PI0, SMOLVLA, TOKENS], ids=["pi0", "smolvla", "vlm_tokens"])
def test_the_first_ratio_is_exactly_one(kind: tuple[str, ...], command) -> None:
    ended = command("embodied.yaml", *kind, "algorithm.ppo_epochs=1", "data.mini_batch_size=64", "runner.max_steps=1")
    assert ended.code == 0, ended.err
    row = next(row for row in read_metrics("out") if row["step"] == 1)
    assert row["actor/ratio_max"] == row["actor/ratio_min"] == 1
    assert row["mismatch/abs_logp"] < 1e-5


@pytest.mark.parametrize(
    "kind",
    [
        (*CHUNKS, "actor.model.train_backbone=false"),
        (*CHUNKS, "actor.lora={rank: 2}"),
        (*SMOLVLA_CHUNKS, "actor.lora={rank: 2}"),
        TOKENS,
    ],
    ids=["expert", "adapters", "smolvla, adapters", "vlm_tokens"],
)
def test_a_checkpoint_gives_the_policy_of_the_model_folder(kind: tuple[str, ...], command) -> None:
    assert command("embodied.yaml", *kind, "runner.max_steps=1", "actor.optim.lr=0.01").code == 0
    checkpoint, left = load_policy("out"), load_policy("out/model")
    assert checkpoint.saved.description == left.saved.description
    assert checkpoint.saved.weights.keys() == left.saved.weights.keys()
    assert all(torch.equal(tensor, left.saved.weights[name]) for name, tensor in checkpoint.saved.weights.items())
    seen = np.random.default_rng(0).normal(size=(4, 17))
    if kind is TOKENS:
        seen = (100 + 50 * seen[:, 0, None, None, None] * np.ones((12, 12, 3))).clip(0, 255).astype(np.uint8)
    for deterministic in (True, False):
        np.testing.assert_array_equal(checkpoint.act(seen, deterministic), left.act(seen, deterministic))
    assert len(np.unique(left.act(seen, False))) > 1


def test_adapters_alone_are_trained_beside_a_frozen_backbone(learned) -> None:
    """Without the second key the vision tower and its projection are trained too."""
    adapters = (*TOKEN_CHUNKS, "actor.lora={rank: 2}")
    rest = {"value_head"}
    for frozen in (False, True):
        more = ("actor.model.train_backbone=false",) if frozen else ()
        names = learned("embodied.yaml", *adapters, *more, steps=1)[0]["actor"]["model"]
        others = {name.split(".")[1] for name in names if ".lora_" not in name}
        assert others == (rest if frozen else {*rest, "network"})


@pytest.mark.parametrize(
    "kind", [(*TOKEN_CHUNKS, "actor.model.train_backbone=false"), (*CHUNKS,)], ids=["tokens", "pi0"]
)
def test_the_size_of_a_checkpoint_counts_trained_parameters(kind: tuple[str, ...], folder: Path) -> None:
    """A frozen model of billions of parameters needs no space on the disk."""
    config = load("embodied.yaml", [*kind, "actor.lora={rank: 2}"])[0].config
    spaces = fitting_spaces(config)
    trained = sum(each.numel() for each in trained_policy(config, spaces, 0).parameters() if each.requires_grad)
    assert trained < 0.9 * sum(each.numel() for each in embodied_policy(config, spaces, 0).parameters())
    observed = config.env.num_envs * spaces.observation_size * (1 if spaces.images else 4)
    assert policy_bytes(config, spaces) == 12 * trained + observed


def test_recomputed_layers_change_nothing(learned) -> None:
    plain = learned("embodied.yaml", *TOKEN_CHUNKS, steps=1)[0]["actor"]
    saving = learned("embodied.yaml", *TOKEN_CHUNKS, "actor.gradient_checkpointing=true", steps=1)[0]["actor"]
    for name, tensor in plain.items():
        if torch.is_tensor(tensor):
            torch.testing.assert_close(saving[name], tensor, atol=2e-4, rtol=0)


def test_two_ranks_train_a_vision_tower_in_bfloat16(command, joins: str) -> None:
    """FSDP gathers the layers of the language model in bfloat16; LayerNorm of a vision tower needs one type on CPUs."""
    half = "actor.model.dtype=bfloat16", f"cluster.component_placement={TWO_LEARNERS}", "runner.max_steps=1"
    ended = command("embodied.yaml", *TOKEN_CHUNKS, *half, joins)
    assert ended.code == 0, ended.err
    row = next(row for row in read_metrics("out") if row["step"] == 1)
    assert np.isfinite(row["actor/grad_norm"])
    assert row["actor/grad_norm"] > 0


@pytest.mark.parametrize(
    ("kind", "placement"),
    [
        pytest.param(CHUNKS, TWO_LEARNERS, id="pi0 with FSDP"),
        pytest.param(SMOLVLA_CHUNKS, TWO_LEARNERS, id="smolvla with FSDP"),
        pytest.param(TOKEN_CHUNKS, TWO_LEARNERS, id="vlm_tokens with FSDP"),
        pytest.param(CHUNKS, "{'actor_critic,env': all, rollout: 'all:0-1'}", id="pi0, two rollout ranks"),
    ],
)
def test_the_number_of_ranks_changes_nothing(kind: tuple[str, ...], placement: str, joins: str, learned) -> None:
    alone = learned("embodied.yaml", *kind)[0]["actor"]
    apart = learned("embodied.yaml", *kind, f"cluster.component_placement={placement}", joins)[0]["actor"]
    assert alone.keys() == apart.keys()
    for name, tensor in alone.items():
        if torch.is_tensor(tensor):
            torch.testing.assert_close(apart[name], tensor, atol=1e-3, rtol=1e-3)


def saved_pi0(folder: Path, **options: object) -> None:
    """A folder with random weights and statistics of the data set robot."""
    from rl_platform.config.schema.models import RandomLM
    from rl_platform.models.vlas.build import _random, _random_pi0

    tiny = RandomLM(hidden_size=16, num_layers=2, num_heads=2, intermediate_size=32, max_positions=64)
    _random(_random_pi0(tiny, 20, 4, 8, 259), 0).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["norm_stats"] = {"robot": {"action": {"q01": [-0.5] * 6, "q99": [0.25] * 6, "mask": [True] * 5 + [False]}}}
    (folder / "config.json").write_text(json.dumps(config | options))


def test_weights_of_a_folder_act_in_the_range_of_its_data_set(command, folder: Path) -> None:
    saved_pi0(folder / "saved")
    ended = command("embodied.yaml", *FOLDER, "actor.model.unnorm_key=robot", "runner.max_steps=1")
    assert ended.code == 0, ended.err
    policy = load_policy("out")
    actions = policy.act(np.zeros((200, 17)), False)
    assert -0.5 < np.median(actions[:, :5]) < 0.25
    assert np.abs(np.median(actions[:, :5]) + 0.125) < 0.1
    assert actions[:, 0].std() < 0.6 * actions[:, 5].std()


@pytest.mark.parametrize(
    ("overrides", "key", "told"),
    [
        ((*PI0, "env.id=CartPole-v1"), "actor.model.type", "actor.model.type: vla"),
        ((*TOKENS, "env.id=Pendulum-v1"), "actor.model.type", "env.pixels"),
        ((*TOKENS, "actor.model.train_backbone=false"), "actor.model.train_backbone", "actor.lora"),
        ((*TOKENS, "actor.model.flow.method=flow_cps"), "actor.model.flow", "has other actions"),
        ((*TOKENS, "actor.training_backend=megatron"), "actor.training_backend", "actor.training_backend: fsdp"),
        (
            (PICTURE, FOLDER[-1].replace("pi0", "vlm_tokens").replace(", flow: {denoising_steps: 3}", "")),
            "actor.model.path",
            "pi0",
        ),
        ((*PI0, "actor.training_backend=megatron"), "actor.training_backend", "actor.training_backend: fsdp"),
        ((*SMOLVLA, "actor.training_backend=megatron"), "actor.training_backend", "actor.training_backend: fsdp"),
        ((*SMOLVLA, "env.id=CartPole-v1"), "actor.model.type", "actor.model.type: vla"),
        ((*SMOLVLA, "actor.gradient_checkpointing=true"), "actor.gradient_checkpointing", "type smolvla caches"),
        ((*SMOLVLA, "actor.model.unnorm_key=robot"), "actor.model.unnorm_key", "actor.model.path"),
        (
            (*CHEETAH[:2], "env.normalize_observations=false", FOLDER[-1].replace("pi0", "smolvla")),
            "actor.model.path",
            "a policy of type pi0, not smolvla",
        ),
        (
            (*CHEETAH, FOLDER[-1].replace("pi0", "smolvla").replace("tokenizer: bytes, ", "")),
            "actor.model.tokenizer",
            "HuggingFaceTB/SmolVLM2-500M-Video-Instruct",
        ),
        ((*PI0, "actor.model.instruction=null"), "actor.model.instruction", "needs an instruction"),
        ((*PI0, "actor.model.unnorm_key=robot"), "actor.model.unnorm_key", "actor.model.path"),
        ((*PI0, "actor.gradient_checkpointing=true"), "actor.gradient_checkpointing", "actor.micro_batch_size"),
        ((*PI0, "algorithm.entropy_bonus=0.1"), "algorithm.entropy_bonus", "flow_noise"),
        (
            (*PI0, "actor.model.flow={method: flow_cps, denoising_steps: 1}"),
            "actor.model.flow.denoising_steps",
            "at least 2",
        ),
        ((*PI0, "actor.model.action_bins=5"), "actor.model.action_bins", "has other actions"),
        ((CHEETAH[0], PI0[3], "env.pixels={camera: front}", "env.num_workers=1"), "env.pixels.camera", "track"),
        ((*SEEN, "env.kwargs={high: .inf}"), "actor.model.type", "RescaleAction"),
        ((*FOLDER, "actor.model.unnorm_key=other"), "actor.model.unnorm_key", "robot"),
        (
            (*FOLDER, "actor.model.num_action_chunks=8", "data.mini_batch_size=8"),
            "actor.model.num_action_chunks",
            "1..4",
        ),
        ((*FOLDER, "actor.model.path=./nowhere"), "actor.model.path", "no such model"),
    ],
)
def test_wrong_inputs_are_refused_with_the_key(overrides, key: str, told: str, command, folder: Path, request) -> None:
    if "pixels" in str(overrides):
        request.getfixturevalue("drawing")
    saved_pi0(folder / "saved")
    ended = command("embodied.yaml", *overrides)
    assert ended.code == 2, ended.err
    text = " ".join(ended.err.split())
    assert f" {key}: " in f" {text}", ended.err
    assert told in text, ended.err
    assert not Path("out").exists()


def test_a_trained_smolvla_becomes_a_folder_of_lerobot_again(command, tool, folder: Path) -> None:
    """The export holds the trained weights and the steps of the run."""
    from safetensors.torch import load_file, save_file

    from rl_platform.config.schema.models import RandomLM
    from rl_platform.models.vlas.build import _random, _random_smolvla
    from rl_platform.models.vlas.lerobot_folder import file_name_of

    tiny = RandomLM(hidden_size=16, num_layers=2, num_heads=2, intermediate_size=32, max_positions=64)
    network = _random(_random_smolvla(tiny, 20, 4, 8, 259), 0)
    (folder / "vlm").mkdir()
    (folder / "saved").mkdir()
    (folder / "vlm" / "config.json").write_text(network.config.vlm_config.to_json_string(use_diff=False))
    options = {"type": "smolvla", "vlm_model_name": str(folder / "vlm"), "chunk_size": 4, "max_state_dim": 20}
    (folder / "saved" / "config.json").write_text(json.dumps(options | {"max_action_dim": 8}))
    given = {file_name_of(name): tensor for name, tensor in network.state_dict().items()}
    save_file(given, folder / "saved" / "model.safetensors")
    settings = (CHEETAH[0], CHEETAH[1], FOLDER[-1].replace("pi0", "smolvla"), "runner.max_steps=1")
    ended = command("embodied.yaml", *settings, "env.normalize_observations=true")
    assert (ended.code, "would get them scaled by other statistics" in ended.err) == (2, True), ended.err
    ended = command("embodied.yaml", *settings, "env.normalize_observations=false", "actor.optim.lr=0.01")
    assert ended.code == 0, ended.err
    ended = tool("export", "out", "--format", "lerobot", "-o", "back")
    assert ended.code == 0, ended.err
    assert "SmolVLAPolicy.from_pretrained" in ended.out
    back, weights = load_file(folder / "back" / "model.safetensors"), load_policy("out").saved.weights
    assert back.keys() == given.keys()
    acts = {"num_steps": 3, "n_action_steps": 1}
    assert json.loads((folder / "back" / "config.json").read_text()) == options | {"max_action_dim": 8} | acts
    trained = {name for name in given if not torch.equal(back[name], given[name])}
    assert {name for name in given if "vision" not in name and "embed" not in name} > trained > set()
    assert all(
        torch.equal(back[file_name_of(name.removeprefix("network."))], tensor)
        for name, tensor in weights.items()
        if name.startswith("network.")
    )


def test_a_transformers_without_pi0_is_refused_with_the_line_to_type(command, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    monkeypatch.delitem(CONFIG_MAPPING_NAMES, "pi0")
    ended = command("embodied.yaml", *PI0)
    assert ended.code == 2, ended.err
    assert "pip install --upgrade transformers" in ended.err
