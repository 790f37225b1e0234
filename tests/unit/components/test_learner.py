"""Actor, critic and reference: updates, what stops them, what they publish and save."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from neutral_batches import neutral_batch

from rl_platform.algorithms.kl import full_kl
from rl_platform.algorithms.variants.importance_weights import mismatch_weights
from rl_platform.components.actor import EmbodiedActor, LanguageActor
from rl_platform.components.critic import LanguageCritic
from rl_platform.components.learner import FAILURES_IN_A_ROW
from rl_platform.components.reference import LanguageReference
from rl_platform.config.schema import Config
from rl_platform.engines.training.fsdp import FSDPEngine
from rl_platform.envs.embodied.spaces import ActionSpace, EnvSpaces
from rl_platform.errors import ConfigError, Diverged
from rl_platform.records import RolloutBatch
from rl_platform.runners.watching.failed_batches import keep_failed_batch

NAN = float("nan")


def spoiled(batch: RolloutBatch) -> RolloutBatch:
    """Every loss on it is NaN."""
    return replace(
        batch, advantages=torch.full_like(batch.advantages, NAN), returns=torch.full_like(batch.returns, NAN)
    )


class TestUpdate:
    def test_the_loss_falls(self, context, reasoning, token_batch) -> None:
        critic = LanguageCritic(context("critic"), reasoning(algorithm={"critic_ppo_epochs": 3}))
        batch = token_batch()
        losses = [critic.update(batch, step)["critic/loss"] for step in range(5)]
        assert losses[-1] < 0.8 * losses[0]

    def test_equal_seeds_give_equal_updates_and_metrics(self, context, reasoning, token_batch) -> None:
        config = reasoning(algorithm={"ppo_epochs": 2, "entropy_bonus": 0.01})
        results = []
        for _ in range(2):
            actor = LanguageActor(context(), config)
            results.append((actor.update(token_batch(), 0), actor.publish(1).state))
        (metrics, weights), (other_metrics, other_weights) = results
        assert metrics == other_metrics
        assert all(torch.equal(weights[name], other_weights[name]) for name in weights)
        assert metrics["actor/skipped_updates"] == 0
        assert metrics["actor/lr"] == 1e-2
        assert metrics["actor/grad_norm"] > 0
        assert metrics["actor/entropy"] > 0

    def test_the_learning_rate_follows_the_steps(self, context, reasoning, token_batch) -> None:
        optim = {"lr": 1e-2, "lr_schedule": "linear", "lr_warmup_steps": 2}
        critic = LanguageCritic(context("critic"), reasoning(critic={"use_critic_model": True, "optim": optim}))
        rates = [critic.update(token_batch(), step)["critic/lr"] for step in (0, 1, 2, 6)]
        assert rates == pytest.approx([5e-3, 1e-2, 1e-2, 5e-3])

    def test_mini_batches_without_rows_that_count_are_left_out(self, context, reasoning, token_batch) -> None:
        batch = token_batch()
        actor = LanguageActor(context(), reasoning())
        before = {name: tensor.clone() for name, tensor in actor.publish(0).state.items()}
        metrics = actor.update(replace(batch, sample_mask=torch.zeros(8, dtype=torch.bool)), 0)
        assert metrics == {"actor/lr": 1e-2, "actor/skipped_updates": 0.0}
        assert all(torch.equal(before[name], tensor) for name, tensor in actor.publish(0).state.items())


class TestNotFinite:
    """`mini_batch_size` 4 of 8 rows: two optimizer steps per update."""

    def test_three_in_a_row_end_the_run(self, context, reasoning, token_batch) -> None:
        assert FAILURES_IN_A_ROW == 3
        actor = LanguageActor(context(), reasoning())
        actor.update(token_batch(), 0)
        before = {name: tensor.clone() for name, tensor in actor.publish(0).state.items()}
        assert actor.update(spoiled(token_batch()), 1)["actor/skipped_updates"] == 2
        with pytest.raises(Diverged, match=r"actor.*3 optimizer steps in a row.*PPO step 2.*actor\.optim\.lr"):
            actor.update(spoiled(token_batch()), 2)
        assert all(torch.equal(before[name], tensor) for name, tensor in actor.publish(0).state.items())

    def test_its_rows_are_kept_and_named(self, context, reasoning, token_batch, tmp_path, caplog) -> None:
        actor, batch = LanguageActor(context(), reasoning()), spoiled(token_batch())
        actor.update(batch, 4)
        (path,) = (tmp_path / "failures").iterdir()  # one epoch: its last mini-batch
        assert path.name == "step-00000005-actor-0.pt"
        assert str(path) in caplog.text
        kept = torch.load(path, weights_only=True)
        assert kept["advantages"].isnan().all()
        rows = {tuple(row.tolist()) for row in batch.inputs["tokens"]}
        assert {tuple(row.tolist()) for row in kept["inputs.tokens"]} < rows
        with pytest.raises(Diverged, match=r"step-00000006-actor-0\.pt"):
            actor.update(batch, 5)

    def test_only_the_first_ones_are_kept(self, reasoning, token_batch, tmp_path) -> None:
        for step in range(12):
            keep_failed_batch(token_batch(), reasoning(), "critic", step, 0)
        assert len(list((tmp_path / "failures").iterdir())) == 10

    def test_one_good_step_starts_the_count_again(self, context, reasoning, token_batch) -> None:
        critic = LanguageCritic(context("critic"), reasoning())
        for step in range(3):
            assert critic.update(spoiled(token_batch()), step)["critic/skipped_updates"] == 2
            assert critic.update(token_batch(), step)["critic/skipped_updates"] == 0


class TestPolicyLoss:
    """Every key of the policy loss reaches the parameters, the same ones for every micro-batch size."""

    @pytest.mark.parametrize(
        "keys",
        [
            {"policy_loss": "reinforce"},
            {"policy_loss": "gspo", "loss_agg_func": "seq-mean-token-mean"},
            {"policy_loss": "cispo"},
            {"positive_nll_coef": 0.5},
            {"rollout_is": {"mode": "icepop"}},
        ],
        ids=str,
    )
    def test_acts_and_does_not_depend_on_micro_batches(self, keys, context, reasoning, token_batch) -> None:
        batch = replace(token_batch(), correct=torch.arange(8) % 2 == 0)
        base = {"ppo_epochs": 2, "loss_agg_func": keys.get("loss_agg_func", "token-mean")}

        def trained(algorithm: dict[str, object], rows: int | None = None) -> torch.Tensor:
            config = reasoning(algorithm=base | algorithm)
            config = config.changed({"actor.micro_batch_size": rows})
            used = batch
            if (correction := config.algorithm.rollout_is) is not None:
                weights, _ = mismatch_weights(batch.log_probs, batch.rollout_log_probs - 5.5, batch.mask, correction)
                used = replace(batch, loss_weights=weights)
            actor = LanguageActor(context(), config)
            actor.update(used, 0)
            return torch.cat([tensor.flatten() for tensor in actor.publish(1).state.values()])

        plain, whole = trained({}), trained(keys)
        assert not torch.allclose(plain, whole, atol=1e-4)
        for rows in (1, 2):
            torch.testing.assert_close(trained(keys, rows), whole, rtol=1e-4, atol=2e-4)


class TestModels:
    def test_critic_values_start_at_zero(self, context, reasoning, token_batch) -> None:
        """A head of the usual size would give values of several units and gradients in the hundreds."""
        values = LanguageCritic(context("critic"), reasoning()).evaluate(token_batch())["values"]
        assert values.shape == (8, 8)
        assert not values.any()

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_the_reference_is_the_actor_at_the_start(self, dtype, context, reasoning, token_batch) -> None:
        model = reasoning().actor.model.model_dump() | {"dtype": dtype}
        config = reasoning(algorithm={"use_kl_loss": True}, actor={"model": model, "optim": {"lr": 1e-2}})
        actor, reference = LanguageActor(context(), config), LanguageReference(context("reference"), config)
        batch = token_batch()
        at_start = reference.evaluate(batch)["reference_log_probs"]
        assert torch.equal(
            at_start, actor.evaluate(batch)["log_probs"]
        )  # so that no KL is measured where there is none
        actor.update(replace(batch, reference_log_probs=at_start), 0)
        assert not torch.equal(at_start, actor.evaluate(batch)["log_probs"])
        assert torch.equal(at_start, reference.evaluate(batch)["reference_log_probs"])

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_full_kl_to_the_reference(self, dtype, context, reasoning, token_batch) -> None:
        """Equal to the sum over the vocabulary, 0 at the start, and held back as a term of the loss."""
        keys = {"kl_loss_type": "full", "kl_penalty": "full", "allow_both_kl": True, "ppo_epochs": 4}
        keys |= {"use_kl_loss": True, "use_kl_in_reward": True}
        model = reasoning().actor.model.model_dump() | {"dtype": dtype}
        drift = []
        for coefficient in (0.0, 10.0):
            config = reasoning(
                algorithm=keys | {"kl_loss_coef": coefficient}, actor={"model": model, "optim": {"lr": 1e-2}}
            )
            actor, reference = LanguageActor(context(), config), LanguageReference(context("reference"), config)
            actor.receive_reference_head(reference.head())
            batch = replace(token_batch(), **reference.evaluate(token_batch()))
            at_start = actor.evaluate(batch)
            torch.testing.assert_close(at_start["full_kl"], torch.zeros(8, 8), rtol=0, atol=1e-4)
            batch = replace(batch, log_probs=at_start["log_probs"])
            assert "actor/kl_loss" in actor.update(batch, 0)
            found = actor.evaluate(batch)["full_kl"]
            drift.append(found[batch.action_mask].mean().item())
            if dtype == "float32":
                actor.engine.model.keep_states = True
                logits = actor.outputs(batch).states @ actor.engine.model.model.head.weight.detach().T
                expected = full_kl(logits, batch.reference_states @ reference.head().T)
                torch.testing.assert_close(found, torch.where(batch.action_mask, expected, 0.0), rtol=1e-4, atol=1e-5)
        assert drift[1] < 0.5 * drift[0]

    def test_the_reference_hands_over_states_only_for_a_full_kl(self, context, reasoning, token_batch) -> None:
        reference = LanguageReference(context("reference"), reasoning(algorithm={"use_kl_loss": True}))
        assert list(reference.evaluate(token_batch())) == ["reference_log_probs"]

    def test_a_reference_with_another_vocabulary_is_refused(self, context, reasoning) -> None:
        with pytest.raises(ConfigError, match=r"reference\.model.*the reference has 7 of them, the actor 2"):
            LanguageActor(context(), reasoning()).receive_reference_head(torch.zeros(7, 16))

    def test_log_probs_are_at_the_sampling_temperature(self, context, reasoning, token_batch) -> None:
        batch = token_batch()
        one = LanguageActor(context(), reasoning()).evaluate(batch)["log_probs"]
        hot = LanguageActor(context(), reasoning(rollout={"sampling": {"temperature": 1e6}})).evaluate(batch)[
            "log_probs"
        ]
        uniform = torch.where(batch.action_mask, -torch.tensor(259.0).log(), 0.0)
        torch.testing.assert_close(hot, uniform, rtol=0, atol=1e-4)
        assert not torch.allclose(one, uniform, atol=1e-2)

    def test_micro_batches_of_the_forward_change_nothing(self, context, reasoning, token_batch) -> None:
        batch = token_batch()
        whole, parts = (
            LanguageActor(context(), reasoning(algorithm={"logprob_forward_micro_batch_size": rows})).evaluate(batch)
            for rows in (None, 3)
        )
        torch.testing.assert_close(whole["log_probs"], parts["log_probs"], rtol=1e-5, atol=1e-5)

    def test_state_of_one_is_the_state_of_the_other(self, context, reasoning, token_batch, tmp_path) -> None:
        config = reasoning()
        actor = LanguageActor(context(), config)
        actor.update(token_batch(), 0)
        other = LanguageActor(context(), config)
        actor.failures = 2
        actor.save_state(str(tmp_path))
        other.load_state(str(tmp_path))
        assert other.failures == 2
        assert other.update(token_batch(seed=1), 1) == actor.update(token_batch(seed=1), 1)
        ours, theirs = actor.publish(2).state, other.publish(2).state
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)

    def test_export(self, context, reasoning, token_batch, tmp_path) -> None:
        from transformers import AutoModelForCausalLM

        actor = LanguageActor(context(), reasoning())
        actor.update(token_batch(), 0)
        batch = token_batch()
        expected = actor.evaluate(batch)["log_probs"][0]
        loaded = AutoModelForCausalLM.from_pretrained(actor.export(str(tmp_path / "model")))
        tokens = batch.inputs["tokens"][0, : int(batch.inputs["lengths"][0])]
        found = loaded(tokens[None]).logits[0].log_softmax(-1)[1:-1].gather(1, tokens[2:, None]).squeeze(1)
        torch.testing.assert_close(found, expected[2 : len(tokens)], rtol=1e-5, atol=1e-5)


class TestEmbodied:
    spaces = EnvSpaces((3,), ActionSpace("continuous", 2), (2,), (-1.0, -1.0), (1.0, 1.0))

    def actor(self, context, **algorithm: object) -> EmbodiedActor:
        config = Config(
            runner={"task_type": "embodied"},
            cluster={"component_placement": {"actor_critic,env,rollout": "all"}},
            algorithm={"loss_type": "actor_critic", **algorithm},
            data={"mini_batch_size": 8},
            actor={"model": {"hidden_sizes": [8]}, "optim": {"lr": 1e-2}},
            env={"id": "CartPole-v1"},
        )
        return EmbodiedActor(context(), config, self.spaces)

    def batch(self) -> RolloutBatch:
        numbers = torch.Generator().manual_seed(0)
        shape = (2, 4)
        ends = torch.tensor([[False, True, False, True], [False, False, False, True]])
        return neutral_batch(
            torch.ones(shape, dtype=torch.bool),
            inputs={
                "observations": torch.randn(*shape, 3, generator=numbers),
                "actions": torch.randn(*shape, 2, generator=numbers),
            },
            ends=ends,
            bootstrapped=ends & torch.tensor([[True, False, True, True], [True] * 4]),
            end_observations=torch.randn(*shape, 3, generator=numbers),
        )

    @pytest.mark.parametrize("rows", [None, 1])
    def test_values_of_the_states_after_ends(self, rows, context) -> None:
        actor, batch = self.actor(context, logprob_forward_micro_batch_size=rows), self.batch()
        policy = actor.engine.model.model
        torch.nn.init.normal_(policy.value_head.weight)
        found = actor.evaluate(batch)
        with torch.no_grad():
            log_probs, _, values = policy.evaluate(
                *(batch.inputs[n].flatten(0, 1) for n in ("observations", "actions"))
            )
            following = policy(batch.end_observations.flatten(0, 1))[1].view(2, 4)
        torch.testing.assert_close(found["values"], values.view(2, 4))
        torch.testing.assert_close(found["log_probs"], log_probs.view(2, 4))
        torch.testing.assert_close(found["end_values"], torch.where(batch.bootstrapped, following, 0.0))
        assert found["end_values"][0, 3] != 0
        assert found["end_values"][0, 1] == 0

    def test_no_end_needs_a_value(self, context) -> None:
        batch = self.batch()
        found = self.actor(context).evaluate(replace(batch, bootstrapped=torch.zeros(2, 4, dtype=torch.bool)))
        assert not found["end_values"].any()


@pytest.mark.parametrize("size", [2, 8])
def test_a_critic_has_mini_batches_of_its_own_size(context, reasoning, token_batch, size, monkeypatch) -> None:
    rows: list[int] = []
    step = FSDPEngine.step

    def counting(engine: FSDPEngine, batch: RolloutBatch, *arguments: Any) -> Any:
        rows.append(len(batch))
        return step(engine, batch, *arguments)

    monkeypatch.setattr(FSDPEngine, "step", counting)
    config = reasoning(algorithm={"ppo_epochs": 3}, critic={"use_critic_model": True, "mini_batch_size": size})
    LanguageCritic(context(), config).update(token_batch(), 0)
    assert rows == [size] * (3 * 8 // size)


class TestTargetKL:
    """8 rows in mini-batches of 4 and 3 epochs: 6 optimizer steps, in the first of which nothing has moved."""

    def update(self, context, config, batch: RolloutBatch, kind: type = LanguageActor) -> dict[str, float]:
        learner = kind(context(), config)
        if kind is LanguageActor:
            batch = replace(batch, **learner.evaluate(batch))
        return learner.update(batch, 0)

    def test_the_rest_is_skipped_after_too_long_a_step(self, context, reasoning, token_batch) -> None:
        config = reasoning(algorithm={"ppo_epochs": 3, "target_kl": 1e-6})
        metrics = self.update(context, config, token_batch())
        assert metrics["actor/early_stopped"] == 1
        assert metrics["actor/optimizer_steps"] == 2
        assert metrics["actor/approx_kl_k3"] > 1e-6

    def test_a_bound_that_is_never_reached_changes_nothing(self, context, reasoning, token_batch) -> None:
        bounded = self.update(context, reasoning(algorithm={"ppo_epochs": 3, "target_kl": 1e6}), token_batch())
        free = self.update(context, reasoning(algorithm={"ppo_epochs": 3}), token_batch())
        assert bounded.pop("actor/early_stopped") == 0
        assert bounded.pop("actor/optimizer_steps") == 6
        assert bounded.pop("actor/approx_kl_k3") >= 0
        assert bounded == free

    def test_the_metric_is_k3_of_the_old_policy_over_active_positions(self, context, reasoning, token_batch) -> None:
        """One optimizer step, so that the policy measured is the one before the update."""
        config = reasoning(algorithm={"target_kl": 1e6}, data={"mini_batch_size": 8, "max_response_length": 8})
        batch = token_batch()
        actor = LanguageActor(context(), config)
        log_ratio = (actor.evaluate(batch)["log_probs"] - batch.log_probs)[batch.mask]
        expected = float((log_ratio.exp() - 1 - log_ratio).mean())
        assert actor.update(batch, 0)["actor/approx_kl_k3"] == pytest.approx(expected, rel=1e-4)

    def test_masked_positions_do_not_count(self, context, reasoning, token_batch) -> None:
        config = reasoning(algorithm={"ppo_epochs": 3, "target_kl": 1e6})
        batch = token_batch()
        spoilt = replace(batch, log_probs=torch.where(batch.mask, batch.log_probs, NAN))
        found = [LanguageActor(context(), config).update(b, 0)["actor/approx_kl_k3"] for b in (batch, spoilt)]
        assert found[0] == found[1]

    def test_a_critic_of_its_own_goes_on(self, context, reasoning, token_batch) -> None:
        config = reasoning(algorithm={"ppo_epochs": 3, "target_kl": 1e-6})
        metrics = self.update(context, config, token_batch(), LanguageCritic)
        assert "actor/early_stopped" not in metrics
        assert metrics == self.update(context, reasoning(algorithm={"ppo_epochs": 3}), token_batch(), LanguageCritic)

    def test_embodied(self, context) -> None:
        embodied = TestEmbodied()
        actor = embodied.actor(context, ppo_epochs=5, target_kl=1e-9)
        batch = embodied.batch()
        batch = replace(batch, **actor.evaluate(batch), advantages=torch.randn(2, 4), returns=torch.randn(2, 4))
        metrics = actor.update(batch.flatten(), 0)
        assert metrics["actor/early_stopped"] == 1
        assert metrics["actor/optimizer_steps"] == 2  # of 5, one per epoch
