"""The search: what it proposes can be placed and fits, its order is stable, and more GPUs never make it worse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rl_platform.config import load_config
from rl_platform.config.schema import Config
from rl_platform.errors import ConfigError, Problem
from rl_platform.placement.inventory import inventory_for
from rl_platform.placement.scheduler import schedule
from rl_platform.planner.candidates import Candidate, SearchResult
from rl_platform.planner.report import Report, plan_report
from rl_platform.planner.search import search
from rl_platform.planner.search_text import search_text

ROOT = Path(__file__).parents[3]


def result_for(config: Config) -> SearchResult:
    return search(config, inventory_for(config.cluster))


def report_on(config: Config, candidate: Candidate) -> Report:
    """The plan of the config with the candidate's placement and changes."""
    tree = config.model_dump()
    for key, value in {"cluster.component_placement": candidate.component_placement, **candidate.changes}.items():
        *sections, name = key.split(".")
        branch = tree
        for section in sections:
            branch = branch[section]
        branch[name] = value
    changed = Config.model_validate(tree)
    inventory = inventory_for(changed.cluster)
    return plan_report(changed, schedule(changed.cluster, inventory), inventory)


def test_every_proposal_can_be_placed_and_is_what_the_plan_of_it_says(tmp_path: Path, plans: Any) -> None:
    config = plans.config(*plans.large, plans.llama(tmp_path), nodes=2, gpus=4)
    result = result_for(config)
    assert len(result.candidates) > 50
    for candidate in result.candidates[:: len(result.candidates) // 12]:
        report = report_on(config, candidate)
        assert report.seconds == pytest.approx(candidate.seconds)
        assert max(use.usage.peak for use in report.devices) == candidate.peak


def test_shared_split_and_separate_placements_are_among_them(plans: Any) -> None:
    groupings = {tuple(candidate.component_placement) for candidate in result_for(plans.config()).candidates}
    assert groupings == {
        ("actor,critic,rollout,reward",),
        ("actor,critic", "rollout,reward"),
        ("actor", "critic", "rollout,reward"),
        ("actor,rollout,reward", "critic"),
    }


def test_the_reference_is_placed_with_the_trainers_or_apart(plans: Any) -> None:
    config = plans.config("algorithm.use_kl_loss=true", placement={"actor,critic,reference,rollout,reward": "all"})
    groupings = {tuple(candidate.component_placement) for candidate in result_for(config).candidates}
    assert ("actor,critic", "reference", "rollout,reward") in groupings
    assert ("actor,reference", "critic", "rollout,reward") in groupings
    assert ("actor", "critic", "reference", "rollout,reward") in groupings
    assert all(sum(text.count("reference") for text in grouping) == 1 for grouping in groupings)


def test_models_get_ranks_that_their_layouts_divide(plans: Any) -> None:
    placed = {"actor,critic,reference,rollout,reward": "all"}
    layouts = [
        "algorithm.use_kl_loss=true",
        "actor.training_backend=megatron",
        "actor.parallel={tensor: 2, pipeline: 2}",
    ]
    result = result_for(plans.config(*layouts, "critic.parallel.context=2", placement=placed))
    sizes = {name: set() for name in ("actor", "critic", "reference")}
    for candidate in result.candidates:
        for names, devices in candidate.keys if not candidate.changes else ():
            for name in sizes.keys() & set(names):
                sizes[name].add(len(devices))
    assert sizes == {"actor": {4, 8}, "critic": {2, 4, 8}, "reference": {4, 8}}
    fewer = result_for(plans.config(*layouts, placement=placed, gpus=3)).candidates
    ranks = {each.changes.get("actor.parallel.pipeline", 2) * each.changes["actor.parallel.tensor"] for each in fewer}
    assert ranks == {1, 2}
    fixed = "critic.parallel.context=4"
    with pytest.raises(ConfigError, match="no placement gives the models ranks that their layouts divide"):
        result_for(plans.config(*layouts, fixed, placement=placed, gpus=3))


def test_what_does_not_fit_is_left_out(tmp_path: Path, plans: Any) -> None:
    huge = plans.llama(tmp_path, num_hidden_layers=32, hidden_size=4096)
    config = plans.config(*plans.large, huge, nodes=2)
    result = result_for(config)
    assert result.too_large > 0
    memory = result.device.memory
    assert memory is not None
    assert all(candidate.peak <= 0.9 * memory for candidate in result.candidates)
    assert result.smallest_peak > 0.9 * memory
    assert f"{result.too_large} do not fit into 79.0 GiB" in search_text(result, inventory_for(config.cluster), 0.0)
    roomy = result_for(plans.config(*plans.large, huge, nodes=2, gpu="b200"))
    assert roomy.too_large < result.too_large
    with pytest.raises(ConfigError, match=r"none of .* placements fits into memory: the leanest needs"):
        result_for(plans.config(*plans.large, huge, gpu="l4"))


def test_rollout_ranks_of_a_hosted_engine_have_one_or_several_devices(tmp_path: Path, plans: Any) -> None:
    placed = {"actor,critic,reward": "all", "rollout": "0-15:0-3"}
    config = plans.config(*plans.large, plans.llama(tmp_path), "rollout.backend=sglang", nodes=2, placement=placed)
    result = result_for(config)
    assert placed | {"actor,critic,reward": "0-15"} in [each.component_placement for each in result.candidates]
    assert {each.rollout_devices for each in result.candidates} == {1, 2, 4, 8}
    for candidate in result.candidates[:: len(result.candidates) // 7]:
        report = report_on(config, candidate)
        assert report.layout.parts["rollout"].per_rank == candidate.rollout_devices
        assert report.seconds == pytest.approx(candidate.seconds)
        assert max(use.usage.peak for use in report.devices) == candidate.peak
    fixed = plans.config(
        *plans.large,
        plans.llama(tmp_path),
        "rollout.backend=sglang",
        "rollout.tensor_parallel_size=4",
        nodes=2,
        placement=placed,
    )
    assert {each.rollout_devices for each in result_for(fixed).candidates} == {4}


def test_splits_of_the_models_and_micro_batches_are_searched(tmp_path: Path, plans: Any) -> None:
    by_megatron = [f"{role}.training_backend=megatron" for role in ("actor", "critic")]
    sizes = [f"{role}.max_tokens_per_micro_batch=8192" for role in ("actor", "critic")]
    config = plans.config(*plans.large, plans.llama(tmp_path), *by_megatron, *sizes)
    result = result_for(config)
    tried = {key for candidate in result.candidates for key in candidate.changes}
    names = ("parallel.tensor", "parallel.pipeline", "max_tokens_per_micro_batch")
    assert tried == {f"{role}.{name}" for role in ("actor", "critic") for name in names}
    changed = [each for each in result.candidates if len(each.changes) == 6]
    for candidate in changed[:: max(1, len(changed) // 7)]:
        report = report_on(config, candidate)
        assert report.seconds == pytest.approx(candidate.seconds)
        assert max(use.usage.peak for use in report.devices) == candidate.peak


def test_candidates_that_cannot_run_are_left_out(plans: Any) -> None:
    result = result_for(plans.config())

    def check(candidate: Candidate) -> None:
        if candidate.devices > 2:
            raise ConfigError([Problem("cluster", "too many")])

    left = result.checked(check)
    assert {each.devices for each in left.best_of_groupings} <= {1, 2}
    assert left.candidates[0] in result.candidates

    def refuse(_: Candidate) -> None:
        raise ConfigError([Problem("cluster", "none at all")])

    with pytest.raises(ConfigError, match="none at all"):
        result.checked(refuse)


def test_ranking_is_by_time_and_deterministic(tmp_path: Path, plans: Any) -> None:
    config = plans.config(*plans.large, plans.llama(tmp_path))
    first, second = result_for(config), result_for(config)
    assert first == second
    seconds = [candidate.seconds for candidate in first.candidates]
    assert seconds == sorted(seconds)
    assert len({str(candidate.overrides) for candidate in first.candidates}) == len(seconds)


@pytest.mark.parametrize("size", ["small", "large"])
def test_more_gpus_are_never_predicted_slower(tmp_path: Path, size: str, plans: Any) -> None:
    """A model too small for all of them is proposed on fewer."""
    overrides = (*plans.large, plans.llama(tmp_path)) if size == "large" else ()
    best = [
        result_for(plans.config(*overrides, nodes=nodes, gpus=gpus)).candidates[0].seconds
        for nodes, gpus in [(1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (4, 8), (8, 8)]
    ]
    assert best == sorted(best, reverse=True)
    assert best[-1] < best[0]


def test_it_beats_or_equals_the_placement_of_the_config(tmp_path: Path, plans: Any) -> None:
    for overrides in ((), (*plans.large, plans.llama(tmp_path))):
        config = plans.config(*overrides)
        assert result_for(config).candidates[0].seconds <= plans.report(config).seconds * (1 + 1e-9)


def test_machines_without_gpus_are_placed_by_node(plans: Any) -> None:
    config = plans.config(nodes=2, gpus=0)
    result = result_for(config)
    assert {"actor,critic,rollout,reward": "0-1"} in [candidate.component_placement for candidate in result.candidates]
    for candidate in result.candidates:
        cluster = config.cluster.model_copy(update={"component_placement": candidate.component_placement})
        assert schedule(cluster, inventory_for(cluster)).hosts


def test_a_model_that_cannot_be_counted_ends_the_search(plans: Any) -> None:
    with pytest.raises(ConfigError, match=r"actor.model: nothing can be predicted: no config.json of /nowhere"):
        result_for(plans.config("actor.model.path=/nowhere"))


def test_the_text_says_why_and_gives_yaml_to_paste(tmp_path: Path, plans: Any) -> None:
    config = plans.config(*plans.large, plans.llama(tmp_path), nodes=2)
    result = result_for(config)
    text = search_text(result, inventory_for(config.cluster), plans.report(config).seconds)
    assert "Placements on 16 h100s by predicted seconds per step (not measured" in text
    assert text.count("% (") == 4  # one reason for every grouping
    assert "of 79 GiB" in text
    assert "the placement of the config" in text
    pasted = yaml.safe_load(text[text.index("\ncluster:") :])
    assert pasted["cluster"]["component_placement"] == result.candidates[0].component_placement
    assert "corrected by 3 steps of x" in search_text(result, inventory_for(config.cluster), 0.0, "3 steps of x")


def test_an_embodied_run_keeps_one_rank_of_env_and_rollout() -> None:
    overrides = ["cluster.inventory={nodes: 1, gpus_per_node: 8, gpu: l4}"]
    config = load_config(ROOT / "configs" / "embodied" / "cartpole.yaml", overrides).config
    placements = [candidate.component_placement for candidate in result_for(config).candidates]
    assert {"actor_critic,env,rollout": "0"} in placements
    assert {"actor_critic": "0-3", "env,rollout": "4"} in placements
    for text in placements:
        cluster = config.cluster.model_copy(update={"component_placement": text})
        placed = schedule(cluster, inventory_for(cluster))
        assert placed.world_size("env") == placed.world_size("rollout") == 1
