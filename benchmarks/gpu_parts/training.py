"""Optimizer steps of a model of 1.5 B parameters on the rows of training_gpu.py; one process for each backend."""

from __future__ import annotations

import argparse

import torch
from training_gpu import CASES, engine_of, flops, lengths_of, peak_flops, step_of

from gpu_parts.part import Report, Setup, at_most, fast
from rl_platform.placement.estimates.hardware import GIB

MFU = fast(0.45)
PRODUCT = (16_384, 1_536, 8_960)  # rows, inputs and outputs of a product in float32


def measure(setup: Setup, report: Report, backend: str) -> None:
    settings = argparse.Namespace(dry_run=setup.small, rows=32, length=2048, micro_tokens=16_384)
    if setup.small:
        settings.rows, settings.length, settings.micro_tokens = 4, 32, 64
    if backend == "fsdp":
        float32_products(setup, report)
    engine, peak = engine_of(settings, backend, setup.device), None if setup.small else peak_flops()
    for case in CASES:
        norms = []
        step = step_of(engine, settings, case)
        seconds = setup.seconds(lambda norms=norms, step=step: norms.append(step()), rounds=3, warm_up=1)
        report.rate(f"{case} rows", sum(lengths_of(settings, case)), seconds, "tokens/s")
        if peak is not None:
            report.rate(f"{case} rows: MFU", flops(settings, case) / peak, seconds, "", MFU)
        report(f"{case} rows: steps without a finite gradient", sum(not norm > 0 for norm in norms), "", at_most(0))
    if not setup.small:
        report("peak memory", torch.cuda.max_memory_allocated() / GIB, "GiB")


def float32_products(setup: Setup, report: Report) -> None:
    """Reports TFLOP/s of float32 products with each value of `runner.matmul_precision`."""
    rows, inputs, outputs = (64, 32, 64) if setup.small else PRODUCT
    left = torch.randn(rows, inputs, device=setup.device)
    right = torch.randn(inputs, outputs, device=setup.device)
    before = torch.get_float32_matmul_precision()
    for precision in ("highest", "high"):
        torch.set_float32_matmul_precision(precision)
        seconds = setup.seconds(lambda: left @ right)
        name = f"float32 products with matmul_precision {precision}"
        report.rate(name, 2 * rows * inputs * outputs / 1e12, seconds, "TFLOP/s")
    torch.set_float32_matmul_precision(before)
