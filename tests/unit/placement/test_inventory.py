"""Inventories: declared, detected on a machine with invented GPUs, and with node groups."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rl_platform.config.schema.cluster import Cluster, NodeGroup
from rl_platform.placement import inventory
from rl_platform.placement.inventory import Inventory, Node, detect_accelerators, inventory_for

ONE = {"actor": "all"}


def install_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_declared_nodes() -> None:
    inventory = inventory_for(Cluster(num_nodes=2, gpus_per_node=8, component_placement=ONE))
    sizes = [(node.name, node.num_accelerators, node.cpus) for node in inventory.nodes]
    assert sizes == [("node-0", 8, None), ("node-1", 8, None)]
    assert inventory.origin == "declared by cluster.gpus_per_node"
    # no GPUs declared is not no declaration
    assert inventory_for(Cluster(gpus_per_node=0, component_placement=ONE)).origin.startswith("declared")


def test_cpu_workers_stand_for_accelerators_and_say_so() -> None:
    inventory = inventory_for(Cluster(num_nodes=2, devices_per_node=8, component_placement=ONE))
    assert inventory.num_accelerators == 16
    assert inventory.origin == "no real GPUs: 8 CPU workers per node by cluster.devices_per_node"
    assert inventory.nodes[0].visible_devices((0, 1)) == ""


def test_this_machine() -> None:
    (node,) = inventory_for(Cluster(component_placement=ONE)).nodes
    assert node.cpus is not None
    assert 1 <= node.cpus <= (os.cpu_count() or 1)
    assert node.memory is not None
    assert node.memory > 2**26
    assert node.num_accelerators == len(node.device_ids)


def test_more_nodes_than_this_machine_are_an_assumption() -> None:
    inventory = inventory_for(Cluster(num_nodes=3, component_placement=ONE))
    assert len(inventory.nodes) == 3
    assert "assuming that every node is like this machine" in inventory.origin


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ("0", "1", "2", "3")),
        ("2,3", ("2", "3")),
        (" 3 , 1 ", ("3", "1")),
        ("", ()),
        ("-1", ()),
        ("0,-1,2", ("0",)),
        ("0,9,1", ("0",)),
        ("1,1", ("1",)),
        ("GPU-8932f937,GPU-0ff1ce", ("GPU-8932f937", "GPU-0ff1ce")),
    ],
)
def test_only_visible_gpus_count_and_keep_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: tuple[str, ...]
) -> None:
    install_nvidia_smi(tmp_path, monkeypatch, "printf '0\\n1\\n2\\n3\\n'")
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert detect_accelerators() == (expected, f'CUDA_VISIBLE_DEVICES is "{visible}"' if visible is not None else "")


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'Driver/library version mismatch'; exit 18", "nvidia-smi failed (Driver/library version mismatch)"),
        ("echo 'cannot reach the driver' >&2; exit 9", "nvidia-smi failed (cannot reach the driver)"),
        pytest.param("exec sleep 30", "nvidia-smi gave no answer", marks=pytest.mark.slow),
    ],
)
def test_a_broken_driver_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, reason: str) -> None:
    install_nvidia_smi(tmp_path, monkeypatch, script)
    monkeypatch.setattr(inventory, "DRIVER_TIMEOUT_S", 1.0)
    (node,), origin = Inventory.detected().nodes, Inventory.detected().origin
    assert node.num_accelerators == 0
    assert reason in origin
    assert "no GPU is used" in origin


def test_a_tool_that_cannot_start_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvidia_smi(tmp_path, monkeypatch, "")
    (tmp_path / "nvidia-smi").write_bytes(b"\x7fELF of another machine")
    assert "nvidia-smi could not be started (Exec format error)" in Inventory.detected().origin


def test_without_the_tool_device_files_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory.shutil, "which", lambda name: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    files = [name for name in os.listdir("/dev") if re.fullmatch(r"nvidia[0-9]+", name)]
    assert len(detect_accelerators()[0]) == len(files)


def test_resources_count_accelerators_across_nodes_and_nodes_where_there_are_none() -> None:
    inventory = Inventory(
        (Node("a", 2), Node("b", 0, labels=frozenset({"cpu"})), Node("c", 1, labels=frozenset({"big"})))
    )
    assert inventory.resources(None) == [(0, 0), (0, 1), (2, 0)]
    assert inventory.resources("big") == [(2, 0)]
    assert inventory.resources("cpu") == [(1, None)]
    assert inventory.resources("node") == [(0, None), (1, None), (2, None)]
    assert inventory.resources("tpu") == []
    assert Inventory((Node("a"), Node("b"))).resources(None) == [(0, None), (1, None)]


def test_groups_label_nodes_and_give_them_variables() -> None:
    groups = [
        NodeGroup(label="train", node_ranks="0-1", env_vars={"NCCL_SOCKET_IFNAME": "eth0"}),
        NodeGroup(label="sim", node_ranks="1,3", env_vars={"MUJOCO_GL": "egl", "NCCL_SOCKET_IFNAME": "eth0"}),
    ]
    inventory, problems = Inventory.declared(4, 8).with_groups(groups)
    assert problems == []
    assert [sorted(node.labels) for node in inventory.nodes] == [["train"], ["sim", "train"], [], ["sim"]]
    assert dict(inventory.nodes[1].env_vars) == {"NCCL_SOCKET_IFNAME": "eth0", "MUJOCO_GL": "egl"}
    assert dict(inventory.nodes[2].env_vars) == {}


def test_planning_loads_neither_torch_nor_ray() -> None:
    code = "import sys, rl_platform.planner.placement_text\n"
    code += "print([m for m in ('torch', 'ray', 'numpy') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"
