"""A rollout on the pretended device never waits for it and copies nothing in a step."""

from __future__ import annotations

import torch
from device_rehearsal.costs import check, combined
from device_rehearsal.pretended_device import CPU, CUDA, Device, pretended_device
from device_rehearsal.runs import Report, assert_same
from tensor_physics import device_config, on_device

STEPS = 9  # with episodes of at most 9 steps, some end in every rollout


def collected(device: torch.device, *, stays: bool) -> Report:
    """Returns the tensors of two rollouts, and their metrics."""
    report: Report = {}
    with on_device(device_config(on_device=stays), device) as (environment, _):
        assert (
            environment.rollout_path(True) == f"rollouts stay on {device}, with their observations and actions"
        ) == stays
        for step in range(2):
            batch, metrics = environment.collect(step, None)
            assert batch.action_mask.device == CPU
            report |= {f"{name} {step}": tensor for name, tensor in batch.inputs.items()}
            fields = {name: tensor for name, tensor in vars(batch).items() if isinstance(tensor, torch.Tensor)}
            report |= {f"{name} {step}": tensor for name, tensor in fields.items()}
            report |= {f"{name} {step}": torch.tensor(value) for name, value in metrics.items()}
            assert metrics["episode/count"] > 0
    return report


def test_results_equal_those_of_the_cpu_and_of_the_path_through_main_memory() -> None:
    with pretended_device():
        there, through_host = (collected(CUDA, stays=stays) for stays in (True, False))
    assert_same(there, through_host)
    assert_same(there, collected(CPU, stays=True))


def test_a_step_costs_no_wait_and_no_copy(device: Device) -> None:
    def cost(steps: int) -> dict[str, int]:
        with on_device(device_config(rollout_steps=steps), CUDA) as (environment, _):
            environment.collect(0, None)  # draws the starts
            device.counts.clear()
            environment.collect(1, None)
            return dict(device.counts.totals())

    short, long = cost(STEPS), cost(STEPS + 1)
    step = combined((1, long), (-1, short))
    check("device rollout", {"collect": {"step": step, "call": combined((1, short), (-STEPS, step))}})
