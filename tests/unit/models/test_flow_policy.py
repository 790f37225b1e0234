"""pi0 and SmolVLA: log-probs are those of the formulas, computed without caches. pi0 denoises as transformers does;
`test_smolvla.py` compares SmolVLA with LeRobot."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_platform.algorithms.action_levels import ActionLevels
from rl_platform.config.schema.models import Flow, Model, RandomLM
from rl_platform.envs.embodied.spaces import ActionSpace, EnvSpaces
from rl_platform.errors import ConfigError
from rl_platform.models.tokenizer import ByteTokenizer
from rl_platform.models.vlas import build as vlas
from rl_platform.models.vlas.flow_policy import FlowPolicy

SHAPE, ACTIONS, NUMBERS = (24, 24, 3), 3, 2
IMAGES = EnvSpaces(SHAPE, ActionSpace("continuous", NUMBERS), (NUMBERS,), (-1.0, 0.0), (1.0, 4.0), 0, "uint8")
STATES = EnvSpaces((5,), ActionSpace("continuous", NUMBERS), (NUMBERS,), (-1.0, 0.0), (1.0, 4.0))
TINY = RandomLM(hidden_size=16, num_layers=2, num_heads=2, intermediate_size=32, max_positions=128)
TOLD = ["reach it", "go"]
TASKS = torch.tensor([0, 1, 1, 0, 1, 0])
LEVELS = ActionLevels(ACTIONS, NUMBERS)
NETWORKS = ("pi0", "smolvla")
KINDS = [(method, steps) for method in ("flow_sde", "flow_cps", "flow_noise") for steps in ("one", "all")]


def model(method: str = "flow_sde", steps: str = "all", network: str = "pi0") -> Model:
    flow = Flow(method=method, stochastic_steps=steps, denoising_steps=4, noise_level=0.4)
    return Model(type=network, random_init=TINY, tokenizer="bytes", flow=flow, num_action_chunks=ACTIONS)


def built(section: Model, spaces: EnvSpaces = IMAGES, levels: ActionLevels = LEVELS) -> FlowPolicy:
    """A policy whose weights are large enough for images, instructions and times to change its actions."""
    torch.manual_seed(0)
    policy = vlas.build(section, spaces, levels, 3, TOLD)
    _enlarge(policy.network)
    if policy.std_head is not None:
        torch.nn.init.normal_(policy.std_head.weight)
    return policy


def _enlarge(network: torch.nn.Module) -> None:
    torch.manual_seed(1)
    for name, parameter in sorted(network.named_parameters()):
        if parameter.dim() > 1 and "embed" not in name and "mlp" not in name:
            torch.nn.init.normal_(parameter, std=0.2)


def observed(spaces: EnvSpaces) -> Tensor:
    torch.manual_seed(2)
    size = spaces.observation_size
    return torch.randint(0, 256, (6, size), dtype=torch.uint8) if spaces.images else torch.randn(6, size)


class PlainPi0:
    """transformers' pi0 with the weights of `policy`, called as its documentation does: no cache is passed on."""

    def __init__(self, policy: FlowPolicy, section: Model) -> None:
        self.network: Any = vlas._random(policy.network.config, 3)
        given = policy.network.state_dict()
        rest = self.network.load_state_dict(given, strict=False)
        assert all("embed_tokens" in name for name in rest.missing_keys)  # of the same seed
        assert not rest.unexpected_keys
        config, places = self.network.config, 16
        words = [ByteTokenizer().encode(f"{text}\n") for text in TOLD]
        longest = max(map(len, words))
        image = [config.vlm_config.image_token_id] * places
        ids = torch.tensor([image + told + [0] * (longest - len(told)) for told in words])
        mask = torch.tensor([[1] * (places + len(told)) + [0] * (longest - len(told)) for told in words])
        pixels = observed(IMAGES).view(-1, *SHAPE).permute(0, 3, 1, 2).float() / 127.5 - 1
        pixels = torch.nn.functional.interpolate(pixels, (64, 64), mode="bilinear", antialias=True)
        self.given: dict[str, Any] = {
            "state": torch.zeros(len(TASKS), config.max_state_dim),
            "input_ids": ids[TASKS],
            "attention_mask": mask[TASKS],
            "pixel_values": pixels[:, None],
            "pixel_attention_mask": torch.ones(len(TASKS), 1, dtype=torch.bool),
        }

    def velocity(self, x: Tensor, time: float) -> Tensor:
        velocity: Tensor = self.network(noise=x, timestep=torch.full((len(x),), time), **self.given).logits
        return velocity


class PlainSmolVLA:
    """The network of `policy`, which reads all of the prefix for each velocity."""

    def __init__(self, policy: FlowPolicy, section: Model) -> None:
        self.policy = policy

    def velocity(self, x: Tensor, time: float) -> Tensor:
        policy, network = self.policy, self.policy.network
        images = network.images(observed(IMAGES), SHAPE)
        prefix = network.prefix(policy.instructions, TASKS, images, torch.zeros(len(TASKS), 1))
        velocity: Tensor = network.action_out_proj(network.expert(x, torch.full((len(x),), time), prefix))
        return velocity


PLAIN = {"pi0": PlainPi0, "smolvla": PlainSmolVLA}


def test_without_noise_it_denoises_as_transformers_does() -> None:
    section = model()
    policy, images = built(section), observed(IMAGES)
    rows, log_probs = policy.act(images, torch.Generator().manual_seed(5), deterministic=True, tasks=TASKS)
    start = torch.empty(6, ACTIONS, NUMBERS).normal_(generator=torch.Generator().manual_seed(5))
    plain = PlainPi0(policy, section)
    denoised = plain.network.sample_actions(noise=start, num_steps=4, **plain.given)
    assert (denoised - start).abs().max() > 0.1
    middle, half = torch.tensor([0.0, 2.0]), torch.tensor([1.0, 2.0])
    torch.testing.assert_close(policy.executed(rows), middle + half * denoised, atol=1e-6, rtol=1e-6)
    assert not log_probs.any()


def parts(policy: FlowPolicy, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The first recorded step [B] and the points [B,S+1,K,D] of the chains."""
    chain = rows[:, 1 : -ACTIONS * NUMBERS].unflatten(1, (-1, ACTIONS, NUMBERS))
    assert chain.shape[1] == policy.denoising.recorded + 1
    return rows[:, 0].long(), chain


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize(("method", "steps"), [kind for kind in KINDS if kind[0] != "flow_noise"])
def test_log_probs_are_those_of_the_formulas(method: str, steps: str, network: str) -> None:
    section = model(method, steps, network)
    policy, images = built(section), observed(IMAGES)
    rows, log_probs = policy.act(images, torch.Generator().manual_seed(5), tasks=TASKS)
    plain, level = PLAIN[network](policy, section), 0.4
    first, chain = parts(policy, rows)
    expected = torch.zeros(6, ACTIONS, NUMBERS)
    for place in range(chain.shape[1] - 1):
        for row in range(6):
            x, after, t = chain[:, place], chain[row, place + 1], 1 - (int(first[row]) + place) / 4
            with torch.no_grad():
                v = plain.velocity(x, t)[row].double()
            x, d = x[row].double(), 0.25
            x0, x1 = x - v * t, x + v * (1 - t)
            if method == "flow_sde":
                s = level * math.sqrt(t / (1 - (t if t < 1 else 0.75)))
                mean = x0 * (1 - t + d) + x1 * (t - d - s**2 * d / (2 * t))
                std = torch.tensor(s * math.sqrt(d))
            else:
                mean = x0 * (1 - t + d) + x1 * (t - d) * math.cos(math.pi * level / 2)
                std = torch.tensor((t - d) * math.sin(math.pi * level / 2))
            expected[row] += torch.distributions.Normal(mean, std.double()).log_prob(after.double()).float()
    torch.testing.assert_close(log_probs, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize(("method", "steps"), KINDS)
@pytest.mark.parametrize("spaces", [IMAGES, STATES], ids=["images", "states"])
def test_the_ratio_is_one_before_the_first_update(method: str, steps: str, spaces: EnvSpaces, network: str) -> None:
    policy, seen = built(model(method, steps, network), spaces), observed(spaces)
    rows, log_probs = policy.act(seen, torch.Generator().manual_seed(5), tasks=TASKS)
    again, entropies, values = policy.evaluate(seen, rows, TASKS)
    assert torch.equal(again, log_probs)
    assert values.shape == (6, 1)
    (again.sum() + entropies.sum() + values.sum()).backward()
    assert all(each.grad is not None for each in policy.parameters() if each.requires_grad)
    assert policy.network.action_out_proj.weight.grad.any()
    assert policy.network.decoder.layers[0].self_attn.v_proj.weight.grad.any()


@pytest.mark.parametrize("network", NETWORKS)
def test_learned_deviations_stay_within_their_bounds_and_have_an_entropy(network: str) -> None:
    policy, images = built(model("flow_noise", network=network)), observed(IMAGES)
    rows, log_probs = policy.act(images, torch.Generator().manual_seed(5), tasks=TASKS)
    _, chain = parts(policy, rows)
    prefix = policy._prefix(images, TASKS)
    deviations = []
    for step in range(4):
        velocity, learned = policy._velocity(chain[:, step], torch.full((6,), step), prefix)
        assert learned is not None
        deviations.append(learned)
        residual = (chain[:, step + 1] - (chain[:, step] - velocity / 4)) / learned
        assert residual.abs().max() < 5
        log_probs = log_probs - torch.distributions.Normal(0.0, 1.0).log_prob(residual) + learned.log()
    assert log_probs.abs().max() < 1e-4
    std = torch.stack(deviations)
    assert 0.08 <= std.min() < 0.11 < 0.13 < std.max() <= 0.16
    expected = torch.distributions.Normal(torch.zeros_like(std), std).entropy().sum(0)
    torch.testing.assert_close(policy.evaluate(images, rows, TASKS)[1], expected)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_row_does_not_depend_on_how_a_batch_is_split(deterministic: bool, network: str) -> None:
    policy, images = built(model(steps="one", network=network)), observed(IMAGES)

    def act(first: int, last: int) -> Tensor:
        generator = torch.Generator().manual_seed(5)
        return policy.act(images[first:last], generator, deterministic, (first, 6), TASKS[first:last])[0]

    torch.testing.assert_close(torch.cat([act(0, 2), act(2, 6)]), act(0, 6))


def test_one_step_of_a_chain_is_noisy_and_all_of_them_are_chosen() -> None:
    policy = built(model(steps="one"), STATES)
    seen, tasks = observed(STATES).repeat(20, 1), TASKS.repeat(20)
    rows, _ = policy.act(seen, torch.Generator().manual_seed(5), tasks=tasks)
    assert sorted(rows[:, 0].unique().tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize("network", NETWORKS)
def test_numbers_that_are_not_executed_draw_no_noise(network: str) -> None:
    """A pretrained model has longer chunks and wider actions than the environment."""
    section = model(network=network)
    config = vlas.network_config(section, STATES, LEVELS, 259)
    config.chunk_size, config.max_action_dim = 5, 4
    tokens = [[7, 8]]
    action_range = vlas.ActionRange(STATES.action_low, STATES.action_high)
    policy = FlowPolicy(vlas._random(config, 3), tokens, STATES, section.flow, LEVELS, action_range)
    seen = observed(STATES)
    rows, log_probs = policy.act(seen, torch.Generator().manual_seed(5))
    assert torch.equal(policy.evaluate(seen, rows)[0], log_probs)
    assert log_probs.shape == policy.executed(rows).shape == (6, ACTIONS, NUMBERS)
    chain = rows[:, 1:-6].unflatten(1, (5, 5, 4))
    prefix = policy._prefix(seen, None)
    with torch.no_grad():
        euler = chain[:, 0] - policy._velocity(chain[:, 0], torch.zeros(6, dtype=torch.int64), prefix)[0] / 4
    moved = (chain[:, 1] - euler).abs() > 1e-6
    assert moved[:, :ACTIONS, :NUMBERS].all()
    assert moved.sum() == 6 * ACTIONS * NUMBERS


@pytest.mark.parametrize("network", NETWORKS)
def test_a_single_action_has_a_single_log_prob(network: str) -> None:
    levels = ActionLevels(1, NUMBERS)
    policy = built(model(network=network).model_copy(update={"num_action_chunks": 1}), STATES, levels)
    seen = observed(STATES)
    rows, log_probs = policy.act(seen, torch.Generator().manual_seed(5), tasks=TASKS)
    assert log_probs.shape == (6,)
    assert policy.executed(rows).shape == (6, NUMBERS)
    torch.testing.assert_close(policy.evaluate(seen, rows, TASKS)[0].sum((1, 2)), log_probs)


def test_an_instruction_that_is_too_long_for_smolvla() -> None:
    for told, key in ((["go " * 60], "actor.model.instruction"), (["go", "go " * 60], "env.tasks")):
        with pytest.raises(ConfigError, match=r"has 181 tokens, and the model reads at most 128") as raised:
            vlas.build(model(network="smolvla"), STATES, LEVELS, 3, told)
        assert raised.value.problems[0].key == key
