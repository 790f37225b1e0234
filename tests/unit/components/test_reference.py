"""A reference in every layout says what one plain process says, and holds its share of the parameters and no more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import Forked
from launcher_forks import Launchers
from process_groups import end_process_groups
from torch import Tensor

from rl_platform.components.actor import LanguageActor
from rl_platform.config.schema.cluster import Cluster
from rl_platform.placement.estimates.component_shapes import shapes
from rl_platform.placement.estimates.memory import MemoryModel
from rl_platform.placement.inventory import Inventory
from rl_platform.placement.scheduler import schedule
from rl_platform.runtime.host import ComponentContext

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_gloo_available(), reason="this build of torch has no gloo"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="Megatron would compute on the GPU of this machine"),
    pytest.mark.filterwarnings("ignore"),  # of Megatron, about kernels that are not installed
]
ALONE = ("cpu_offload", "megatron")  # in this process
SHARED = ("dp2", "context", "megatron dp2", "tp2", "tp2 sp", "pp2", "pp2 vp2", "ep2")  # by two ranks
layouts = pytest.mark.parametrize("layout", [*ALONE, *SHARED])


@pytest.fixture(scope="module")
def runs(script: Callable[[Path], ModuleType]) -> Iterator[ModuleType]:
    yield script(Path(__file__).with_name("reference_ranks.py"))
    end_process_groups()


@pytest.fixture(scope="module")
def folder(runs: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("references")
    runs.save_models(made)
    return made


@pytest.fixture(scope="module")
def expected(runs: ModuleType, folder: Path) -> dict[str, dict[str, Any]]:
    """What plain torch finds in this process, by the name of the model."""
    torch.set_num_threads(1)
    assert not dist.is_initialized()
    return {model: runs.report(folder, f"plain {model}") for model in ("small", "deep", "experts")}


@pytest.fixture(scope="module")
def found(runs: ModuleType, expected: Any, folder: Path, launchers: Launchers) -> dict[str, list[dict[str, Any]]]:
    """What every rank of every layout finds."""
    reports = {layout: [runs.report(folder, layout)] for layout in ALONE}
    Forked(Path(str(runs.__file__)), launchers).run((2, folder, [*SHARED]))
    for layout in SHARED:
        reports[layout] = [torch.load(folder / f"{layout}-{rank}.pt", weights_only=False) for rank in range(2)]
    return reports


@pytest.fixture
def alone(runs: ModuleType, expected: dict[str, dict[str, Any]], layout: str) -> dict[str, Any]:
    """What plain torch finds with the model of this layout."""
    return expected[runs.MODELS.get(layout, "small")]


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(
            found[name], expected[name], rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_what_the_others_are_compared_to(runs: ModuleType, folder: Path, expected: Any) -> None:
    """The log-probabilities of an actor that was not trained yet, to the bit, however the rows stand together."""
    context = ComponentContext(name="actor", rank=0, world_size=1, accelerators=(), seed=3)
    actor = LanguageActor(context, runs.config(folder, "plain small"))
    for name in runs.LENGTHS:
        answer = expected["small"]["packed"][name]["reference_log_probs"]
        assert torch.equal(answer, actor.evaluate(runs.batch(name))["log_probs"])
        assert float(answer.min()) < -3
        for forward in runs.FORWARDS:
            assert_close(expected["small"][forward][name], expected["small"]["packed"][name])


@layouts
def test_log_probs_are_those_of_plain_torch_on_every_rank(runs, found, alone, layout: str) -> None:
    for report in found[layout]:
        for forward in runs.FORWARDS:
            for name in runs.LENGTHS:
                assert list(report[forward][name]) == ["reference_log_probs"]
                assert_close(report[forward][name], alone["packed"][name])


@layouts
def test_states_and_the_output_matrix_for_a_full_kl(found, alone, layout: str) -> None:
    for report in found[layout]:
        assert report["full"].keys() == {"reference_log_probs", "reference_states", "head"}
        assert_close(report["full"], alone["full"])


@layouts
def test_there_are_no_gradients_and_no_optimizer(found, layout: str) -> None:
    assert [report["others"] for report in found[layout]] == [0] * len(found[layout])


@pytest.mark.parametrize("layout", ["dp2", "tp2", "pp2"])
def test_it_leaves_the_device_and_comes_back(found, alone, layout: str) -> None:
    for report in found[layout]:
        assert report["away"]["bytes"] == [0, 0]
        for answer in report["away"]["answers"]:
            assert_close({"reference_log_probs": answer}, alone["packed"]["uneven"])


@layouts
def test_a_plan_counts_what_the_ranks_hold(runs, folder, found, alone, layout: str) -> None:
    """The plan is of the first rank; fsdp's has what is gathered on top."""
    config, ranks = runs.config(folder, layout), 2 if layout in SHARED else 1
    placed = Cluster(component_placement={"actor,critic,reference": f"0-{ranks - 1}" if ranks > 1 else "0"})
    where = schedule(placed, Inventory.declared(1, 8)).layout
    planned = MemoryModel(config, shapes(config)[0], where, on_gpu=True).rank("reference")
    whole = alone["held"]
    if "cpu_offload" in layout:
        assert 0 < planned.weights < whole + 1
        assert found[layout][0]["held"] == whole  # in main memory
    elif config.actor.training_backend == "megatron":
        assert found[layout][0]["held"] == pytest.approx(planned.weights, rel=0.05)
    else:
        held = [report["held"] for report in found[layout]]
        assert sum(held) == whole
        assert max(held) == pytest.approx(whole / ranks, rel=0.01)
        assert whole / ranks < planned.weights
    assert planned.gradients == planned.optimizer == 0
    assert planned.activations > 0
