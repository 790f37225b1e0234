"""The recurrent policy: sequences and single steps are the same, and nothing crosses the start of an episode."""

from __future__ import annotations

import pytest
import torch

from rl_platform.envs.embodied.spaces import ActionSpace
from rl_platform.models.policies.recurrent_policy import RecurrentPolicy
from rl_platform.models.policy import PolicyConfig

SPACES = [ActionSpace("continuous", 3), ActionSpace("discrete", 4)]
SEQUENCES, STEPS = 5, 7


@pytest.fixture(params=SPACES, ids=lambda space: space.kind)
def policy(request: pytest.FixtureRequest) -> RecurrentPolicy:
    torch.manual_seed(0)
    made = RecurrentPolicy((4,), request.param, PolicyConfig((16,), initial_log_std=-0.3, recurrent_size=6))
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return made


@pytest.fixture
def starts() -> torch.Tensor:
    begins = torch.rand(SEQUENCES, STEPS, generator=torch.Generator().manual_seed(3)) < 0.3
    begins[0] = False
    begins[1, 0] = True
    return begins


def test_a_sequence_is_its_steps_one_by_one(policy: RecurrentPolicy, starts: torch.Tensor) -> None:
    observations, first = torch.randn(SEQUENCES, STEPS, 4), torch.randn(SEQUENCES, 6)
    state, numbers = first, torch.Generator().manual_seed(1)
    chosen, drawn, states = [], [], []
    for step in range(STEPS):
        state = torch.where(starts[:, step, None], 0.0, state)
        actions, log_probs, state = policy.act(observations[:, step], state, numbers)
        chosen, drawn, states = [*chosen, actions], [*drawn, log_probs], [*states, state]
    log_probs, entropy, values, all_states = policy.evaluate(observations, torch.stack(chosen, 1), first, starts)
    torch.testing.assert_close(log_probs.detach(), torch.stack(drawn, 1))
    torch.testing.assert_close(all_states.detach(), torch.stack(states, 1))
    assert entropy.shape == values.shape == (SEQUENCES, STEPS)
    head, value = policy.heads(all_states[:, -1])
    torch.testing.assert_close(values[:, -1], value)
    assert len(torch.unique(log_probs)) == SEQUENCES * STEPS
    assert head.shape == (SEQUENCES, policy.action_space.size)


def test_the_gradient_reaches_the_first_step_of_the_episode_and_none_before(policy: RecurrentPolicy) -> None:
    observations = torch.randn(1, STEPS, 4, requires_grad=True)
    first, starts = torch.randn(1, 6, requires_grad=True), torch.zeros(1, STEPS, dtype=torch.bool)
    actions, _, _ = policy.act(torch.zeros(STEPS, 4), torch.zeros(STEPS, 6))

    def reached() -> list[bool]:
        _, _, values, _ = policy.evaluate(observations, actions[None], first, starts)
        gradient = torch.autograd.grad(values[0, -1], [observations, first])
        return [*gradient[0][0].any(-1).tolist(), bool(gradient[1].any())]

    assert reached() == [True] * (STEPS + 1)
    starts[0, 3] = True
    assert reached() == [False] * 3 + [True] * (STEPS - 3) + [False]


def test_equal_seeds_give_equal_policies_that_start_near_uniform() -> None:
    made = []
    for _ in range(2):
        torch.manual_seed(4)
        made.append(RecurrentPolicy((4,), SPACES[1], PolicyConfig((8,), recurrent_size=6)))
    for name, tensor in made[0].state_dict().items():
        assert torch.equal(tensor, made[1].state_dict()[name]), name
    gates = made[0].cell.weight_hh.detach().chunk(3)
    for gate in gates:
        torch.testing.assert_close(gate @ gate.T, torch.eye(6), atol=1e-5, rtol=0)
    logits, values = made[0].heads(torch.randn(9, 6))
    assert logits.abs().max() < 0.1
    assert (values == 0).all()
