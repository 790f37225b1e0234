"""State in shards: what goes in comes out in any cut, what does not fit is refused, and reading runs no code."""

from __future__ import annotations

import errno
import io
import os
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from rl_platform.checkpoint.verify import damage
from rl_platform.checkpoint.write import HashingWriter
from rl_platform.config.schema.models import Optim
from rl_platform.engines.training.fsdp import FSDPEngine
from rl_platform.engines.training.sharded_state import ShardedState, ShardedTensor, adam_state, state_bytes
from rl_platform.engines.training.state_files import read, read_whole, write
from rl_platform.errors import CheckpointError
from rl_platform.launch.start_checks.model_checks import BYTES_SAVED
from rl_platform.models.forward import TokenPolicy
from rl_platform.models.language import LanguageModel

VALUES = torch.arange(60.0).view(6, 10)


def state(values: Tensor = VALUES, step: float = 3.0) -> ShardedState:
    return {"w": ShardedTensor.of(values), "step": ShardedTensor.of(torch.tensor(step))}


def rows(*cuts: int) -> ShardedTensor:
    """A tensor of 6 rows, held in parts that begin at these rows."""
    parts = [((start, 0), torch.zeros(stop - start, 10)) for start, stop in zip(cuts, [*cuts[1:], 6], strict=True)]
    return ShardedTensor((6, 10), parts)


def test_another_cut_reads_the_same(tmp_path: Path) -> None:
    cut = rows(0, 1, 4)
    for (start, _), part in cut.parts:
        part.copy_(VALUES[start : start + len(part)])
    write({"w": cut}, tmp_path)
    other = rows(0, 2)
    read({"w": other}, tmp_path)
    assert torch.equal(torch.cat([part for _, part in other.parts]), VALUES)
    columns = ShardedTensor((6, 10), [((0, 7), torch.zeros(6, 3))])
    read({"w": columns}, tmp_path)
    assert torch.equal(columns.parts[0][1], VALUES[:, 7:])
    assert torch.equal(read_whole(tmp_path)["w"], VALUES)


def test_copies_are_read_and_not_written(tmp_path: Path) -> None:
    write(state(), tmp_path / "whole")
    copy = ShardedTensor((6, 10), [((0, 0), torch.zeros(6, 10))], [((2, 0), torch.zeros(2, 10, dtype=torch.bfloat16))])
    read({"w": copy, "step": ShardedTensor.of(torch.tensor(0.0))}, tmp_path / "whole")
    assert torch.equal(copy.copies[0][1], VALUES[2:4].bfloat16())
    write({"w": copy}, tmp_path / "again")
    assert torch.equal(read_whole(tmp_path / "again")["w"], VALUES)
    assert state_bytes({"w": copy}) == VALUES.nbytes


def test_what_was_written_is_told_by_hash_and_equal_states_make_equal_files(tmp_path: Path) -> None:
    written = write(state(), tmp_path / "first")
    assert written == write(state(VALUES.clone()), tmp_path / "second")
    assert {file.name for file in (tmp_path / "first").iterdir()} == written.keys() == {"__0_0.distcp", ".metadata"}
    assert [damage(tmp_path / "first", name, file) for name, file in written.items()] == ["", ""]
    assert write(state(VALUES + 1), tmp_path / "third") != written


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (state() | {"more": ShardedTensor.of(torch.zeros(2))}, "more is missing: it is of another model"),
        ({"step": ShardedTensor.of(torch.tensor(0.0))}, "w is not in this model: it is of another one"),
        (state(torch.zeros(6, 9)), r"w has the shape \(6, 10\) and not \(6, 9\): it is of another model"),
    ],
)
def test_a_state_of_another_model_is_refused(tmp_path: Path, wanted: ShardedState, message: str) -> None:
    write(state(), tmp_path)
    before = wanted["step"].parts[0][1].clone()
    with pytest.raises(CheckpointError, match=message):
        read(wanted, tmp_path)
    assert wanted["step"].parts[0][1] == before, "nothing is half loaded"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    write(state(), tmp_path)
    (tmp_path / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        read(state(), tmp_path)


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("was-here",)


def test_code_in_the_index_never_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(state(), tmp_path / "state")
    (tmp_path / "state" / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match="mkdir does not belong into a checkpoint"):
        read(state(), tmp_path / "state")
    assert not (tmp_path / "was-here").exists()


def test_code_in_a_shard_never_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write({"step": state()["step"]}, tmp_path / "state")
    file = tmp_path / "state" / "__0_0.distcp"
    evil = io.BytesIO()
    torch.save(Evil(), evil)
    file.write_bytes(evil.getvalue() + bytes(max(0, file.stat().st_size - len(evil.getvalue()))))
    with pytest.raises(CheckpointError):
        read({"step": state()["step"]}, tmp_path / "state")
    assert not (tmp_path / "was-here").exists()


def test_a_full_disk_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would tell of positions in a file."""

    def full(self: HashingWriter, data: bytes) -> int:
        self.error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise self.error

    monkeypatch.setattr(HashingWriter, "write", full)
    with pytest.raises(CheckpointError, match="says rank 0: No space left on device"):
        write(state(), tmp_path)


def test_adam_before_its_first_step_is_what_adam_makes() -> None:
    parameter = nn.Parameter(torch.ones(3))
    made, own = (torch.optim.AdamW([parameter], fused=True) for _ in range(2))
    adam_state(own, parameter)
    for optimizer in (made, own):
        parameter.data.fill_(1.0)
        parameter.grad = torch.ones(3)
        optimizer.step()
    assert made.state[parameter].keys() == own.state[parameter].keys()
    for key, value in made.state[parameter].items():
        assert torch.equal(value, own.state[parameter][key])
        assert value.dtype == own.state[parameter][key].dtype


def test_a_value_head_is_saved_with_its_moments_and_goes_on(ranks, tmp_path: Path) -> None:
    critic = ranks.engine("critic")
    fresh = critic.weights()
    assert not any(bool(fresh[f"model.head.{name}"].any()) for name in ("weight", "bias"))
    base = ranks.engine("actor").weights()  # of the same seed: the base fills all but the head
    assert all(torch.equal(base[name], tensor) for name, tensor in fresh.items() if ".backbone." in name)
    ranks.steps(critic, "critic", 0, 2)
    write(critic.sharded_state(), tmp_path)
    saved = read_whole(tmp_path)
    for name in ("weight", "bias"):
        for key in (f"model.model.head.{name}", f"optimizer.model.head.{name}.exp_avg_sq"):
            assert bool(saved[key].any()), key
        assert saved[f"optimizer.model.head.{name}.step"] == 2
    other = ranks.engine("critic")
    read(other.sharded_state(), tmp_path)
    assert ranks.steps(other, "critic", 2, 4) == ranks.steps(critic, "critic", 2, 4)
    with pytest.raises(CheckpointError, match=r"head\.bias is not in this model"):
        read(ranks.engine("actor").sharded_state(), tmp_path)


def test_a_state_takes_the_disk_that_is_asked_for_before_a_run(ranks, tmp_path: Path) -> None:
    network = LlamaForCausalLM(
        LlamaConfig(vocab_size=500, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4)
    )
    model = TokenPolicy(LanguageModel(network), temperature=1.0)
    engine = FSDPEngine(model, Optim(), dtype=torch.float32, horizon=8, device=torch.device("cpu"))
    estimate = BYTES_SAVED * sum(parameter.numel() for parameter in model.parameters())
    taken = sum(file.bytes for file in write(engine.sharded_state(), tmp_path).values())
    assert estimate < taken < 1.02 * estimate
    assert state_bytes(engine.sharded_state()) == pytest.approx(taken, rel=0.02)


def test_frozen_parameters_and_second_names_are_not_written(ranks) -> None:
    engine = ranks.engine("actor")
    names = {name.removeprefix("model.") for name in engine.sharded_state() if name.startswith("model.")}
    assert "model.backbone.embed_tokens.weight" in names
    assert "model.head.weight" not in names  # tied to the embedding
    engine.model.model.backbone.norm.weight.requires_grad_(False)
    assert names - {"model.backbone.norm.weight"} == {
        name.removeprefix("model.") for name in engine.sharded_state() if name.startswith("model.")
    }
