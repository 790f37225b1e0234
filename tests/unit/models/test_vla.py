"""The vision-language-action policy against the same language model as transformers runs it, row by row."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributions import Categorical

from rl_platform.config.schema.models import ConvNet, Model, RandomLM
from rl_platform.envs.embodied.spaces import ActionSpace, EnvSpaces
from rl_platform.errors import ConfigError
from rl_platform.models.language import LanguageModel
from rl_platform.models.policies.vision import ImageEncoder
from rl_platform.models.policies.vla import VisionLanguagePolicy, policy_without_weights, vision_language_policy
from rl_platform.models.saved_policy import language_of

CNN = ConvNet(channels=[4, 6], kernels=[4, 3], strides=[2, 1])
SHAPE = (10, 12, 3)
REACH = EnvSpaces(SHAPE, ActionSpace("continuous", 2), (2,), (-1.0, 0.0), (1.0, 4.0), 0, "uint8")
CHOOSE = EnvSpaces(SHAPE, ActionSpace("discrete", 4), (), (), (), 0, "uint8")
TINY = RandomLM(hidden_size=16, num_layers=2, num_heads=2, intermediate_size=32, max_positions=64)


@pytest.fixture
def build(causal_lm: Callable[..., Any]) -> Callable[..., tuple[VisionLanguagePolicy, Any]]:
    """A policy with heads away from zero, and its language model as transformers runs it."""

    def make(
        spaces: EnvSpaces = REACH, kind: str = "llama", told: tuple[list[int], ...] = ([5, 3, 8],)
    ) -> tuple[VisionLanguagePolicy, Any]:
        plain = causal_lm(kind)
        language = LanguageModel(copy.deepcopy(plain), value_head=True)
        torch.manual_seed(1)
        instructions = [torch.tensor(words) for words in told]
        policy = VisionLanguagePolicy(language, instructions, ImageEncoder(SHAPE, CNN), spaces, bins=7)
        for head in (policy.action_head, policy.language.head):
            torch.nn.init.normal_(head.weight)
        return policy, plain

    return make


def pixels(rows: int = 6) -> torch.Tensor:
    return torch.randint(256, (rows, 360), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_it_is_the_language_model_on_words_picture_and_queries(kind: str, build) -> None:
    policy, plain = build(kind=kind)
    logits, values = policy(pixels())
    pictures = policy.norm(policy.project(policy.encoder.places(pixels().float() / 255)))
    words = plain.get_input_embeddings()(torch.tensor([5, 3, 8]))
    for row, picture in enumerate(pictures):
        sequence = torch.cat([words, picture, policy.queries])
        states = plain.base_model(inputs_embeds=sequence[None]).last_hidden_state[0]
        torch.testing.assert_close(logits[row], policy.action_head(states[-2:]), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(values[row], policy.language.head(states[-3])[0], rtol=1e-4, atol=1e-4)


TOLD = ([5, 3, 8], [9], [2, 7, 4, 4, 1])
TASKS = torch.tensor([2, 0, 1, 0, 2, 2])


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_each_row_reads_the_instruction_of_its_task(kind: str, build) -> None:
    policy, _ = build(kind=kind, told=TOLD)
    logits, values = policy(pixels(), TASKS)
    for row, task in enumerate(TASKS.tolist()):
        alone, _ = build(kind=kind, told=(TOLD[task],))
        expected_logits, expected_values = alone(pixels())
        torch.testing.assert_close(logits[row], expected_logits[row], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(values[row], expected_values[row], rtol=1e-4, atol=1e-4)
    bins, drawn = policy.act(pixels(), torch.Generator().manual_seed(1), tasks=TASKS)
    parts = [
        policy.act(pixels()[i : i + 2], torch.Generator().manual_seed(1), among=(i, 6), tasks=TASKS[i : i + 2])
        for i in (0, 2, 4)
    ]
    assert torch.equal(bins, torch.cat([part[0] for part in parts]))
    torch.testing.assert_close(policy.evaluate(pixels(), bins, TASKS)[0], drawn)


@pytest.mark.parametrize("spaces", [REACH, CHOOSE], ids=["continuous", "discrete"])
def test_the_log_prob_of_an_action_is_the_sum_over_its_components(spaces: EnvSpaces, build) -> None:
    policy, _ = build(spaces)
    bins, drawn = policy.act(pixels(), torch.Generator().manual_seed(1))
    log_probs, entropy, values = policy.evaluate(pixels(), bins)
    logits, expected_values = policy(pixels())
    components = Categorical(logits=logits)
    assert bins.shape == logits.shape[:2]
    torch.testing.assert_close(log_probs, components.log_prob(bins).sum(-1))
    torch.testing.assert_close(drawn, log_probs.detach())
    torch.testing.assert_close(entropy, components.entropy().sum(-1))
    torch.testing.assert_close(values, expected_values)
    best, _ = policy.act(pixels(), deterministic=True)
    assert torch.equal(best, logits.argmax(-1))


def test_bins_are_drawn_from_it(build) -> None:
    policy, _ = build()
    many = pixels(1).expand(4_000, -1)
    bins, _ = policy.act(many, torch.Generator().manual_seed(3))
    shares = torch.nn.functional.one_hot(bins, 7).float().mean(0)
    torch.testing.assert_close(shares, policy(many[:1])[0][0].softmax(-1), atol=0.03, rtol=0)


def test_bins_divide_the_way_between_the_bounds(build) -> None:
    policy, _ = build()
    bins = torch.arange(7)[:, None].expand(7, 2)
    executed = policy.executed(bins)
    torch.testing.assert_close(executed[:, 0], torch.linspace(-1, 1, 7))
    torch.testing.assert_close(executed[:, 1], torch.linspace(0, 4, 7))
    assert build(CHOOSE)[0].executed(torch.tensor([[3], [0]])).tolist() == [3, 0]


def model(**changes: Any) -> Model:
    return Model(type="vla", random_init=TINY, tokenizer="bytes", instruction="reach", cnn=CNN, **changes)


def test_the_start_is_uniform_and_worth_nothing() -> None:
    torch.manual_seed(0)
    policy = vision_language_policy(model(action_bins=5), REACH, seed=1)
    logits, values = policy(pixels())
    assert torch.count_nonzero(logits) == torch.count_nonzero(values) == 0
    assert logits.shape == (6, 2, 5)
    pictures = policy.norm(policy.project(policy.encoder.places(pixels().float() / 255)))
    for part in (pictures, policy.queries):
        assert 0.5 < part.square().mean().sqrt() / policy.words.square().mean().sqrt() < 2


def test_its_language_model_can_end_after_the_first_layers() -> None:
    """As the whole one does where the other layers pass on what they get."""

    def built(**changes: Any) -> VisionLanguagePolicy:
        torch.manual_seed(0)
        policy = vision_language_policy(model(**changes), REACH, seed=1)
        torch.nn.init.normal_(policy.action_head.weight)
        return policy

    whole, shorter = built(), built(backbone_layers=1)
    whole.language.backbone.layers[1].register_forward_hook(lambda _, given, __: given[0])
    assert len(shorter.language.backbone.layers) == 1
    torch.testing.assert_close(shorter(pixels()), whole(pixels()))


def test_a_policy_of_the_first_layers_is_read_again(causal_lm, tmp_path: Path) -> None:
    """Some families list the kind of each layer in their config."""
    causal_lm("qwen2", vocab_size=300).save_pretrained(tmp_path)
    section = Model(type="vla", path=str(tmp_path), tokenizer="bytes", instruction="go", cnn=CNN, backbone_layers=1)
    policy = vision_language_policy(section, REACH, seed=1)
    about = language_of(policy)
    assert about is not None
    assert len(about.config["layer_types"]) == 1
    again = policy_without_weights(section, REACH, about.config, about.instruction_lengths)
    again.load_state_dict(policy.state_dict())
    assert torch.equal(again._states(torch.ones(1, 2, 32), None), policy._states(torch.ones(1, 2, 32), None))


def test_a_tokenizer_with_more_tokens_than_the_model(causal_lm, tmp_path: Path) -> None:
    causal_lm().save_pretrained(tmp_path)
    section = Model(type="vla", path=str(tmp_path), tokenizer="bytes", instruction="go", cnn=CNN)
    with pytest.raises(ConfigError, match=r"actor\.model\.tokenizer: .* token 111, and the model has tokens 0 to 60"):
        vision_language_policy(section, REACH, seed=1)


def test_it_cannot_have_more_layers_than_there_are() -> None:
    with pytest.raises(ConfigError, match=r"has 2 layers") as raised:
        vision_language_policy(model(backbone_layers=3), REACH, seed=1)
    assert raised.value.problems[0].key == "actor.model.backbone_layers"


@pytest.mark.parametrize("train_backbone", [True, False])
def test_what_is_trained(train_backbone: bool) -> None:
    torch.manual_seed(0)
    policy = vision_language_policy(model(train_backbone=train_backbone), REACH, seed=1)
    for head in (policy.action_head, policy.language.head):
        torch.nn.init.normal_(head.weight)
    log_probs, _, values = policy.evaluate(pixels(), torch.zeros(6, 2, dtype=torch.int64))
    (log_probs + values).sum().backward()
    moved = {name for name, parameter in policy.named_parameters() if parameter.grad is not None}
    names = {name for name, _ in policy.named_parameters()}
    assert not any("embed" in name for name in names)
    backbone = {name for name in names if name.startswith("language.backbone.")}
    assert moved == names - {"words"} - (set() if train_backbone else backbone)


def test_another_instruction_is_another_policy() -> None:
    outputs = []
    for text in ("reach", "leave"):
        torch.manual_seed(0)
        policy = vision_language_policy(model().model_copy(update={"instruction": text}), REACH, seed=1)
        torch.manual_seed(5)
        torch.nn.init.normal_(policy.action_head.weight)
        outputs.append(policy(pixels())[0])
    assert (outputs[0] - outputs[1]).abs().max() > 1e-3


def test_an_instruction_that_is_too_long() -> None:
    with pytest.raises(ConfigError, match=r"actor.model.instruction.*the language model reads 64"):
        vision_language_policy(model().model_copy(update={"instruction": "reach " * 20}), REACH, seed=1)
    with pytest.raises(ConfigError, match=r"env.tasks.*the language model reads 64"):
        vision_language_policy(model(), REACH, seed=1, instructions=["reach", "reach " * 20])


def test_values_are_float32_under_autocast(build) -> None:
    policy, _ = build()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, values = policy(pixels())
    assert logits.dtype == values.dtype == torch.float32
    torch.testing.assert_close(values, policy(pixels())[1], atol=0.3, rtol=0.1)
