"""Memory estimates against what really built models hold and keep, and the laws they must obey."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from reward_parts import make_classifier

from rl_platform.config import load_config
from rl_platform.config.schema import Config
from rl_platform.config.schema.cluster import Cluster
from rl_platform.config.schema.models import Model, Parallel, RandomLM
from rl_platform.config.schema.reward import Reward, RewardModel
from rl_platform.placement.estimates.component_shapes import language_shape, shapes
from rl_platform.placement.estimates.memory import (
    COMMUNICATOR,
    PROCESS_ON_GPU,
    SENT_BUCKET,
    Memory,
    MemoryModel,
)
from rl_platform.placement.estimates.model_shape import ModelShape
from rl_platform.placement.estimates.tensor_bytes import saved_bytes_per_token
from rl_platform.placement.inventory import Inventory
from rl_platform.placement.layout import Layout
from rl_platform.placement.scheduler import schedule
from rl_platform.planner.split_layout import layout_of_split
from rl_platform.runtime.weights.group import BUCKET

ROOT = Path(__file__).parents[3]
WIDE = RandomLM(hidden_size=64, num_layers=3, num_heads=4, num_kv_heads=2, intermediate_size=160, max_positions=64)


def layout(placement: dict[str, object], nodes: int = 1, gpus: int = 8) -> Layout:
    cluster = Cluster(num_nodes=nodes, component_placement=placement)
    return schedule(cluster, Inventory.declared(nodes, gpus)).layout


def model(config: Config, where: Layout, *, on_gpu: bool = True) -> MemoryModel:
    return MemoryModel(config, shapes(config)[0], where, on_gpu=on_gpu)


@pytest.fixture
def config() -> Config:
    return load_config(ROOT / "configs/reasoning/ppo_tiny.yaml").config


def test_the_formula_of_saved_tensors_is_close_to_what_autograd_saves() -> None:
    """Per layer and token: the difference between a model of three layers and one of one, of equal width."""
    from rl_platform.models.causal_lm import load_causal_lm
    from rl_platform.models.language import LanguageModel
    from rl_platform.models.packed import pack

    def saved(layers: int) -> int:
        random = WIDE.model_copy(update={"num_layers": layers})
        network = LanguageModel(load_causal_lm(Model(random_init=random, tokenizer="bytes"), 259, 258, seed=1))
        parameters = {parameter.untyped_storage().data_ptr() for parameter in network.parameters()}
        seen: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if (
                tensor.data_ptr() not in parameters
                and storage.data_ptr() not in parameters
                and tensor.is_floating_point()
            ):
                seen[storage.data_ptr()] = storage.nbytes()
                alive.append(tensor)
            return tensor

        alive: list[torch.Tensor] = []
        packed = pack([torch.arange(48) + row for row in range(4)])
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            network.hidden(packed.tokens, packed.positions, packed.attention)
        return sum(seen.values())

    measured = (saved(3) - saved(1)) / 2 / (4 * 48)
    shape = language_shape(Model(random_init=WIDE, tokenizer="bytes"))
    assert isinstance(shape, ModelShape)
    assert saved_bytes_per_token(shape, "float32") == pytest.approx(measured, rel=0.15)
    assert saved_bytes_per_token(shape, "bfloat16") < saved_bytes_per_token(shape, "float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_formula_of_recomputed_tensors_is_close_to_what_a_forward_pass_leaves(dtype: str) -> None:
    from rl_platform.accel.openmp_team import has_team
    from rl_platform.config.schema.models import Trainable
    from rl_platform.engines.training.build import training_engine
    from rl_platform.models.causal_lm import load_causal_lm
    from rl_platform.models.forward import TokenValues
    from rl_platform.models.language import LanguageModel
    from rl_platform.models.packed import pack

    if dtype == "bfloat16" and not has_team():
        pytest.skip("torch computes without libgomp here")
    packed = pack([torch.arange(48) + row for row in range(4)])

    def left(layers: int) -> int:
        random = WIDE.model_copy(update={"num_layers": layers})
        network = load_causal_lm(Model(random_init=random, tokenizer="bytes"), 259, 258, seed=1)
        values = TokenValues(LanguageModel(network, value_head=True))
        where, kind = torch.device("cpu"), getattr(torch, dtype)
        engine = training_engine(Trainable(), values, dtype=kind, horizon=1, device=where, nominal=False)
        inputs = packed.tokens, packed.positions, packed.attention
        engine.model.model.hidden(*inputs)  # masks and indices of the batch
        with torch.profiler.profile(profile_memory=True) as profile:
            states = engine.model.model.hidden(*inputs)
        assert states.requires_grad  # they hold what the backward pass needs
        return sum(event.self_cpu_memory_usage for event in profile.key_averages())

    shape = language_shape(Model(random_init=WIDE, tokenizer="bytes"))
    assert isinstance(shape, ModelShape)
    measured = (left(3) - left(1)) / 2 / (4 * 48)
    assert saved_bytes_per_token(shape, dtype, recomputed=True) == pytest.approx(measured, rel=0.15)


def test_learner_weights_gradients_and_optimizer_are_those_of_adamw(config: Config) -> None:
    from rl_platform.models.causal_lm import load_causal_lm

    network = load_causal_lm(config.actor.model, 259, 258, seed=1)
    optimizer = torch.optim.AdamW(network.parameters())
    sum(parameter.sum() for parameter in network.parameters()).backward()
    optimizer.step()
    size = sum(parameter.nbytes for parameter in network.parameters())
    gradients = sum(parameter.grad.nbytes for parameter in network.parameters())
    states = sum(
        tensor.nbytes for state in optimizer.state.values() for name, tensor in state.items() if name != "step"
    )
    estimated = model(config, layout({"actor,critic,rollout,reward": "0"})).rank("actor")
    assert (estimated.weights, estimated.gradients, estimated.optimizer) == (size, gradients, states)


def test_in_main_memory_gradients_take_the_place_of_the_activations_of_a_single_micro_batch() -> None:
    where = layout({"actor,critic,rollout,reward": "0"})
    whole, split = (
        model(loaded({"actor.max_tokens_per_micro_batch": tokens}), where, on_gpu=False).rank("actor")
        for tokens in ("null", "512")
    )
    assert split.gradients == split.weights  # those of earlier micro-batches are there
    assert whole.passing == whole.activations > whole.weights


def test_the_key_value_cache_is_the_engines(config: Config) -> None:
    from rl_platform.engines.rollout import kv_cache, prefill
    from rl_platform.engines.rollout.base import Request
    from rl_platform.engines.rollout.torch import TorchRolloutEngine
    from rl_platform.models.causal_lm import load_config as load_model_config
    from rl_platform.placement.estimates import memory
    from rl_platform.records import SamplingParams

    engine = TorchRolloutEngine(load_model_config(config.actor.model, 259, 258), (258,), 4, device=torch.device("cpu"))
    cache = engine._new_batch([Request(number, (1,), 0) for number in range(4)], SamplingParams(1)).cache
    for _ in range(4 * ((config.data.max_prompt_length + config.data.max_response_length) // cache.page)):
        cache.take()
    filled = cache.tails.nbytes + sum(segment.nbytes for pool in cache.pools.values() for segment in pool.segments)
    few = config.changed({"rollout.max_running_requests": 4})
    estimate = model(few, layout({"actor,critic,rollout,reward": "0"})).rank("rollout").kv_cache
    assert filled <= estimate < filled + 2 * cache.tails.nbytes
    assert (memory.PREFILL_TOKENS, memory.GPU_PREFILL_TOKENS) == (prefill.PREFILL_TOKENS, prefill.GPU_PREFILL_TOKENS)
    assert memory.PAGES_BESIDE == 2 * kv_cache.PAGE


def test_graphs_of_the_built_in_engine_stay_unless_it_leaves_or_training_uses_the_gpu_meanwhile() -> None:
    where = layout({"actor,critic,reward": "0", "rollout": "1"})
    torch_engine = {"rollout.backend": "torch"}
    memory = model(loaded(torch_engine), where).rank("rollout")
    filtered = model(loaded(torch_engine | {"rollout.sampling.top_p": 0.9}), where).rank("rollout")
    assert 0 < memory.graphs < memory.activations
    assert filtered.graphs > 2 * memory.graphs
    assert memory.held("all") == memory.held("weights") == memory.weights + memory.graphs
    assert memory.held("nothing") == memory.sent("nothing") == 0
    assert memory.sent("all") == memory.weights, "graphs are recorded again and not sent"
    without = ({"rollout.backend": "sglang"}, torch_engine | {"runner.max_staleness": 1, "algorithm.rollout_is": {}})
    assert [model(loaded(one), where).rank("rollout").graphs for one in without] == [0, 0]
    assert model(loaded(torch_engine), where, on_gpu=False).rank("rollout").graphs == 0


def test_states_are_sharded_over_ranks() -> None:
    config = loaded(MANY)
    one = model(config, layout({"actor,critic,reference,rollout,reward": "0"}))
    eight = model(config, layout({"actor,critic,reference,rollout,reward": "all"}))
    for name in ("actor", "critic"):
        assert eight.rank(name).optimizer * 8 == pytest.approx(one.rank(name).optimizer, rel=1e-3)
        assert eight.rank(name).gradients * 8 == pytest.approx(one.rank(name).gradients, rel=1e-3)
        assert one.rank(name).weights / 8 < eight.rank(name).weights < one.rank(name).weights
    assert eight.rank("reference").weights == eight.rank("actor").weights
    assert one.rank("reference").optimizer == one.rank("reference").gradients == 0
    assert one.rank("reward").total == 0


def test_a_reward_model_is_whole_on_every_rank_of_the_reward(config: Config, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    make_classifier(tmp_path)
    network = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float32)
    size = sum(parameter.nbytes for parameter in network.parameters())
    for dtype, share in (("float32", 1.0), ("bfloat16", 0.5)):
        section = Reward(type="model", max_batch_size=4, model=RewardModel(path=str(tmp_path), dtype=dtype))
        scored = config.model_copy(update={"reward": section})
        estimated = model(scored, layout({"actor,critic,rollout": "0-3", "reward": "4-7"})).rank("reward")
        assert estimated.weights == pytest.approx(size * share, rel=1e-3)
        assert estimated.activations > 0
        assert estimated.optimizer == estimated.gradients == 0
    served = Reward(type="model", model=RewardModel(path=str(tmp_path), url="http://localhost:8000/classify"))
    for section in (served, config.reward):
        scored = config.model_copy(update={"reward": section})
        assert model(scored, layout({"actor,critic,rollout,reward": "0"})).rank("reward").total == 0


def test_the_generator_shares_the_weights_of_a_single_rank_in_its_process_only() -> None:
    config = loaded(MANY)
    weights = {
        "shared": model(config, layout({"actor,critic,reference,rollout,reward": "0"})),
        "several ranks": model(config, layout({"actor,critic,reference,rollout,reward": "0-1"})),
        "another GPU": model(config, layout({"actor,critic,reference": "0", "rollout,reward": "1"})),
    }
    weights_of = {name: estimate.rank("rollout").weights for name, estimate in weights.items()}
    whole = weights["shared"].rank("actor").weights
    assert weights_of == {"shared": 0, "several ranks": whole, "another GPU": whole}


@pytest.mark.parametrize(
    ("where", "changes", "bytes_each"),
    [
        ({"actor,critic,reference,rollout,reward": "0"}, {}, 0),  # one rank shows its own tensors
        ({"actor,critic,reference,rollout,reward": "0-3"}, {}, 0),  # the engine generates with the gathered ones
        ({"actor,critic,reference,rollout,reward": "0-3"}, {"rollout.backend": "sglang"}, 2),
        ({"actor,critic,reference": "0-3", "rollout,reward": "0-3"}, {}, 0),  # through the object store
        ({"actor,critic,reference": "0-3", "rollout,reward": "4-7"}, {}, 0),  # sent while they are gathered
        (
            {"actor,critic,reference": "0-3", "rollout,reward": "4-7"},
            {"runner.max_staleness": "1", "algorithm.rollout_is": "{}"},
            2,
        ),
        ({"actor,critic,reference": "0-3", "rollout,reward": "4-7"}, {"rollout.weight_transfer": "memory"}, 0),
        ({"actor,critic,reference": "0-3", "rollout,reward": "4-7"}, {"rollout.backend": "vllm"}, 0),
    ],
)
def test_a_sharded_learner_holds_one_publication_in_the_type_of_the_engine(
    where: dict[str, str], changes: dict[str, str], bytes_each: int
) -> None:
    half = {"actor.model": "{path: smollm2-135m-instruct, dtype: bfloat16}"}
    estimate = model(loaded(MANY | half | changes), layout(where))
    parameters = estimate.shapes["actor"].parameters
    actor = estimate.rank("actor")
    assert actor.published == bytes_each * parameters
    assert actor.lasting == actor.weights + actor.published + actor.optimizer
    assert actor.held("nothing") == actor.published, "it stays while the actor is away"
    assert estimate.rank("critic").published == estimate.rank("reference").published == 0


def test_the_sender_needs_two_buckets_and_two_copies_of_the_largest_tensor() -> None:
    assert SENT_BUCKET == BUCKET
    small = {"actor.max_tokens_per_micro_batch": "72", "data.max_response_length": "8"}
    where = layout({"actor,critic,reference": "0-3", "rollout,reward": "4-7"})
    sent, stored = (
        model(loaded(MANY | small | {"rollout.weight_transfer": transfer}), where).rank("actor")
        for transfer in ("auto", "memory")
    )
    largest = 4 * 49_152 * 576  # the embedding of SmolLM2-135M
    assert sent.activations == max(stored.activations, 2 * SENT_BUCKET + 2 * largest) > stored.activations


def test_on_a_gpu_lasting_parts_add_up_and_the_largest_passing_one_counts() -> None:
    config = loaded(MANY)
    estimate = model(config, layout({"actor,critic,reference,rollout,reward": "all"}))
    names = ("actor", "critic", "rollout")
    parts = [estimate.rank(name) for name in names]
    usage = estimate.usage([(name, 1.0, 1) for name in names])
    process = PROCESS_ON_GPU + COMMUNICATOR  # one process holds the components of one key, and one group their ranks
    assert usage.processes == process
    assert usage.peak == process + sum(p.lasting for p in parts) + max(p.passing for p in parts)
    assert usage.peak < process + sum(part.total for part in parts)
    apart = model(config, layout({"actor": "0-3", "critic,reference": "0-3", "rollout,reward": "4-7"}))
    two = apart.usage([("actor", 1.0, 1), ("critic", 1.0, 1)]).processes
    assert two == 2 * PROCESS_ON_GPU + 3 * COMMUNICATOR, "the actor has a second group, with the rollout"


def test_communicators_of_learners_of_megatrons_layout_and_of_weights_on_their_way() -> None:
    apart = {"actor,critic,reference": "0-3", "rollout,reward": "4-7"}
    split = {"actor.training_backend": "megatron", "actor.parallel.tensor": "2", "actor.parallel.pipeline": "2"}
    expected = [
        ({"rollout.weight_transfer": "memory"}, {"actor": 1, "critic": 1, "rollout": 0}),
        ({"rollout.weight_transfer": "group"}, {"actor": 2, "critic": 1, "rollout": 1}),
        (split | {"rollout.weight_transfer": "memory"}, {"actor": 2, "critic": 1, "rollout": 0}),
    ]
    for changes, counts in expected:
        estimate = model(loaded(MANY | changes), layout(apart))
        assert {name: estimate.communicators(name) for name in counts} == counts
        process = estimate.usage([("actor", 1.0, 1), ("critic", 1.0, 1)]).processes
        assert process == PROCESS_ON_GPU + counts["actor"] * COMMUNICATOR


def test_weights_between_processes_on_cpus_are_stored_in_two_versions() -> None:
    """In one process, under two keys or one, and on ranks of one key the rollout reads them where they are."""
    parts = {"actor,critic,reference,reward": "0", "rollout": "1"}
    for placement, nodes, versions in (
        (parts, 2, 2),
        (parts | {"rollout": "0"}, 1, 0),
        ({"actor,critic,reference,rollout,reward": "0"}, 1, 0),
        ({"actor,critic,reference,rollout,reward": "all"}, 2, 0),
    ):
        estimate = model(loaded({}), layout(placement, nodes, gpus=0), on_gpu=False)
        stored = versions * 4 * estimate.shapes["actor"].parameters
        assert estimate.rank("rollout").published == stored, placement
        assert versions == 0 or estimate.rank("actor").published == stored, placement


def test_publications_that_stay_readable_are_counted() -> None:
    together, ahead = {"actor,critic,reference,rollout,reward": "0-3"}, {"algorithm.rollout_is": "{}"}

    def published(**changes: str) -> float:
        keys = {key.replace("__", "."): value for key, value in changes.items()}
        estimate = model(loaded(MANY | ahead | keys), layout(together))
        return estimate.rank("actor").published / (4 * estimate.shapes["actor"].parameters)

    # the built-in engine generates with one of them
    assert published(runner__max_staleness="1") == 0
    assert published(runner__max_staleness="1", rollout__on_update="continue") == 1
    assert published(runner__max_staleness="2") == 2


def test_megatrons_layout_shares_the_state_and_what_a_micro_batch_keeps() -> None:
    where = layout({"actor,critic,reference,rollout,reward": "all"})
    base = MANY | {"actor.training_backend": "megatron", "actor.max_tokens_per_micro_batch": "304"}
    plain, shared = (loaded(base | more) for more in ({}, TENSOR))
    one, two = (model(config, where).rank("actor") for config in (plain, shared))
    assert one.weights == 2 * two.weights  # SmolLM2 divides by 3 in truth
    assert one.gradients == 0  # their buffer stays: it is counted with the optimizer
    assert two.optimizer == pytest.approx(two.weights * (1 + 2 / 4))  # gradients, and moments over 4 copies
    assert one.optimizer == pytest.approx(one.weights * (1 + 2 / 8), rel=1e-6)
    assert two.activations < one.activations
    half = model(loaded(base | {"actor.model": "{path: smollm2-135m-instruct, dtype: bfloat16}"}), where)
    assert half.rank("actor").weights * 2 == one.weights
    assert half.rank("actor").optimizer == pytest.approx(one.weights * (1 + 3 / 8), rel=1e-6)


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_layers_that_are_computed_again_keep_less(backend: str) -> None:
    where = layout({"actor,critic,reference,rollout,reward": "0"})
    again = {"actor.gradient_checkpointing": "true"}
    kept = [model(loaded(MANY | {"actor.training_backend": backend} | more), where) for more in ({}, again)]
    activations = [estimate.rank("actor").activations for estimate in kept]
    assert activations[1] < 0.6 * activations[0]


TENSOR = {"actor.parallel": "{tensor: 2}"}
MANY = {
    "actor.model": "{path: smollm2-135m-instruct}",
    "algorithm.use_kl_loss": "true",
    "cluster.component_placement": "{'actor,critic,reference,rollout,reward': all}",
}


def loaded(changes: dict[str, str], **more: str) -> Config:
    overrides = [f"{key}={value}" for key, value in {**changes, **more}.items()]
    return load_config(ROOT / "configs/reasoning/ppo.yaml", overrides).config


@pytest.mark.parametrize(
    ("change", "component", "part"),
    [
        ("actor.max_tokens_per_micro_batch=4096", "actor", "activations"),
        ("data.mini_batch_size=64", "actor", "activations"),
        ("rollout.max_running_requests=256", "rollout", "kv_cache"),
        ("data.max_response_length=512", "rollout", "kv_cache"),
    ],
)
def test_more_of_it_needs_more_memory(change: str, component: str, part: str) -> None:
    base = {**MANY, "actor.max_tokens_per_micro_batch": "1024", "data.train_batch_size": "1024"}
    key, _, value = change.partition("=")
    if key == "data.mini_batch_size":
        base["actor.max_tokens_per_micro_batch"] = "null"
    where = layout({"actor,critic,reference,rollout,reward": "0"})
    small = getattr(model(loaded(base), where).rank(component), part)
    large = getattr(model(loaded({**base, key: value}), where).rank(component), part)
    assert large > small


def test_a_generator_that_computes_in_another_type_has_weights_of_its_own() -> None:
    where = layout({"actor,critic,reference,rollout,reward": "0"})
    half = loaded(MANY | {"actor.model": "{path: smollm2-135m-instruct, dtype: bfloat16}"})
    plain, converted = (model(config, where).rank("rollout") for config in (loaded(MANY), half))
    assert plain.weights == 0
    assert converted.weights * 2 == model(half, where).rank("reference").weights
    assert converted.kv_cache * 2 == plain.kv_cache


def test_in_main_memory_one_matrix_at_a_time_is_bfloat16_and_packed_ones_end_with_the_generation() -> None:
    where = layout({"actor,critic,reference,rollout,reward": "0"})
    half = loaded(MANY | {"actor.model": "{path: smollm2-135m-instruct, dtype: bfloat16}"})
    plain, copied = (model(config, where, on_gpu=False) for config in (loaded(MANY), half))
    shape = plain.shapes["actor"]
    assert isinstance(shape, ModelShape)
    head = shape.vocabulary * shape.hidden
    for name in ("actor", "critic", "reference"):
        assert copied.rank(name).weights == plain.rank(name).weights
    passes = [one.rank("reference").activations for one in (plain, copied)]
    assert passes[1] - passes[0] == 2 * max(head, shape.matrices_per_layer)
    outer = shape.parameters - shape.matrices  # the generator packs matrices of the learner's type
    assert (plain.rank("rollout").weights, copied.rank("rollout").weights) == (0, 2 * outer)
    on_gpu = model(loaded(MANY), where).rank("rollout")
    assert plain.rank("rollout").activations - on_gpu.activations == 4 * (shape.matrices + head)
    assert plain.rank("rollout").lasting == 0


def test_layouts_of_a_placement_and_of_its_sizes_agree() -> None:
    """`around_reward` too: a search of a reward model schedules nothing."""
    splits = [
        ((("actor", "critic", "rollout", "reward"), range(16)),),
        ((("actor", "critic"), range(8)), (("rollout", "reward"), range(8, 16))),
        ((("actor",), range(3)), (("critic",), range(3, 9)), (("rollout", "reward"), range(9, 12))),
        ((("actor", "critic", "rollout", "reward"), range(1)),),
        ((("actor", "critic"), range(1)), (("rollout", "reward"), range(1, 2))),
    ]
    for keys in splits:
        placement = {",".join(names): f"{span.start}-{span.stop - 1}" for names, span in keys}
        cluster = Cluster(num_nodes=2, component_placement=placement)
        whole = schedule(cluster, Inventory.declared(2, 8)).layout
        assert layout_of_split(keys, 8) == whole


def test_adapters_are_all_that_has_gradients_and_optimizer_state() -> None:
    from rl_platform.config.schema.models import Lora
    from rl_platform.models.adapters.lora import add_adapters
    from rl_platform.models.causal_lm import load_causal_lm
    from rl_platform.models.language import LanguageModel

    config = loaded(MANY)
    lora = Lora(rank=4, target_modules=["q_proj", "k_proj", "o_proj", "up_proj", "down_proj"])
    network = LanguageModel(load_causal_lm(config.actor.model, 259, 258, seed=1))
    whole = sum(parameter.nbytes for parameter in network.parameters())
    add_adapters(network.backbone, lora, 1, "actor.lora")
    network.head.requires_grad_(False)
    adapters = sum(parameter.nbytes for parameter in network.parameters() if parameter.requires_grad)
    config = config.changed({"actor.lora": lora})
    assert "reference" not in shapes(config)[0]
    estimated = model(config, layout({"actor,critic,rollout,reward": "0"}))
    actor = estimated.rank("actor")
    assert (actor.weights, actor.gradients, actor.optimizer) == (whole + adapters, adapters, 2 * adapters)
    shape = shapes(config)[0]["rollout"]
    assert isinstance(shape, ModelShape)
    assert estimated.rank("rollout").weights == shape.layers * shape.matrices_per_layer * 4  # merged, its own
    eight = model(config, layout({"actor,critic,rollout,reward": "all"}))
    assert eight.rank("actor").optimizer == 2 * adapters // 8
    megatron = config.changed({"actor.training_backend": "megatron", "actor.parallel": Parallel(tensor=2)})
    split = model(megatron, layout({"actor,critic,rollout,reward": "all"}))
    assert split.rank("actor").weights == pytest.approx(whole / 2 + adapters, rel=0.01)
    assert split.rank("actor").optimizer == pytest.approx(adapters * (1 + 2 / 4), rel=0.01)  # gradients and moments


def test_states_in_main_memory_leave_the_gpu_what_is_gathered_and_shared_tokens_halve_activations() -> None:
    config = loaded(MANY)
    place = layout({"actor,critic,reference,rollout,reward": "0-3"})

    def actor(**keys: object) -> Memory:
        changed = config.changed({f"actor.{name}": value for name, value in keys.items()})
        return model(changed, place).rank("actor")

    usual, offloaded = actor(), actor(cpu_offload=True)
    assert offloaded.gradients == offloaded.optimizer == 0
    assert 0 < offloaded.weights < usual.weights
    one_row = {"micro_batch_size": 1}
    shared = actor(parallel=Parallel(context=2), **one_row).activations
    assert shared == pytest.approx(actor(**one_row).activations / 2, rel=0.3)
