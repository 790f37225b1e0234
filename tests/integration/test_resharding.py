"""A run that is killed goes on with another number of ranks and ends as one that was never stopped and never moved."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="Megatron would compute on the GPU of this machine"),
    pytest.mark.filterwarnings("ignore"),  # of Megatron, about kernels that are not installed
]
STEPS = 3
FSDP: list[str] = []
MEGATRON = ["actor.training_backend=megatron", "critic.training_backend=megatron"]
APART = ["cluster.devices_per_node=4", "cluster.component_placement={'actor,critic': 0-1, rollout: 2, reward: 3}"]


def two_ranks(parallel: str) -> list[str]:
    """Two processes of actor and critic each."""
    return [*MEGATRON, *APART, f"actor.parallel={parallel}", f"critic.parallel={parallel}"]


TENSOR, STAGES, EXPERTS = two_ranks("{tensor: 2}"), two_ranks("{pipeline: 2}"), two_ranks("{expert: 2}")
MIXTURE = ["actor.model={path: ./experts, tokenizer: bytes}"]


@pytest.mark.parametrize(
    ("one_rank", "layouts", "model"),
    [
        pytest.param(FSDP, [APART, FSDP], [], id="fsdp, two ranks to one"),
        pytest.param(MEGATRON, [TENSOR, STAGES, MEGATRON], [], id="megatron, tensor ranks to stages to one"),
        pytest.param(
            MEGATRON, [EXPERTS, STAGES], MIXTURE, id="megatron, expert ranks to stages", marks=pytest.mark.release
        ),
    ],
)
@pytest.mark.usefixtures("experts")
def test_a_killed_run_goes_on_with_other_ranks(
    command,
    tool,
    killed,
    final_state,
    scored: str,
    joins: str,
    one_rank: list[str],
    layouts: list[list[str]],
    model: list[str],
) -> None:
    """The run is killed after a step in each layout but the last one."""
    rest = [scored, f"runner.max_steps={STEPS}", "runner.save_interval=1", *model]
    whole = command("reasoning.yaml", *one_rank, *rest, "runner.output_dir=whole")
    assert whole.code == 0, whole.err
    for step, layout in enumerate(layouts[:-1], start=1):
        checkpoint = killed("reasoning.yaml", *layout, joins, *rest, at=f"step-{step:08d}")
        shards = [file.name for file in checkpoint.file("critic").glob("*.distcp")]
        assert sorted(shards) == [f"__{rank}_0.distcp" for rank in range(2)]
    ended = command("reasoning.yaml", *layouts[-1], *([joins] if APART[1] in layouts[-1] else []), *rest)
    assert ended.code == 0, ended.err
    assert f"resumed from step {len(layouts) - 1}" in ended.out
    expected, found = final_state("whole", STEPS), final_state("out", STEPS)
    for role in ("actor", "critic"):  # parameters, moments, counts
        moments = [tensor for name, tensor in expected[role]["optimizer"].items() if name.endswith("exp_avg")]
        assert max(float(tensor.abs().max()) for tensor in moments) > 1e-4, "nothing was learned"
        assert found[role].keys() == expected[role].keys()
        for group, tensors in expected[role].items():
            assert found[role][group].keys() == tensors.keys()
            for name, tensor in tensors.items():
                torch.testing.assert_close(
                    found[role][group][name], tensor, rtol=1e-5, atol=1e-6, msg=lambda t, n=name: f"{n}: {t}"
                )
    assert found["run"] == expected["run"]
    assert tool("export", "out", "-o", "exported").code == 0  # in one process, from the shards of all ranks
    exported, left = (AutoModelForCausalLM.from_pretrained(name).state_dict() for name in ("exported", "out/model"))
    assert exported.keys() == left.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in left.items())
