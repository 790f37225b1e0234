"""The RayJob manifest: its fields are those of KubeRay, its options, and its entry command is one that loads."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from rl_platform.config import load_config

# The fields that a manifest uses, with their types in KubeRay's CRD (ray.io/v1, KubeRay 1.7) and in Kubernetes' pods.
CONTAINER = {
    "name": str,
    "image": str,
    "env": [{"name": str, "value": str}],
    "resources": {"limits": dict},
    "volumeMounts": [{"name": str, "mountPath": str}],
}
VOLUME = {"name": str, "persistentVolumeClaim?": {"claimName": str}, "emptyDir?": {"medium": str}}
TEMPLATE = {"spec": {"containers": [CONTAINER], "volumes": [VOLUME]}}
COUNTS = {"replicas": int, "minReplicas": int, "maxReplicas": int}
RAY_JOB = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str},
    "spec": {
        "entrypoint": str,
        "backoffLimit": int,
        "shutdownAfterJobFinishes": bool,
        "rayClusterSpec": {
            "rayVersion": str,
            "authOptions": {"mode": str},
            "headGroupSpec": {"rayStartParams": dict, "template": TEMPLATE},
            "workerGroupSpecs?": [{"groupName": str, **COUNTS, "rayStartParams": dict, "template": TEMPLATE}],
        },
    },
}


def violations(value: Any, schema: Any, path: str = "") -> list[str]:
    """Fields of `value` that `schema` does not have, that are missing, or that have another type."""
    if isinstance(schema, type):
        return [] if isinstance(value, schema) else [f"{path}: {value!r} is no {schema.__name__}"]
    if isinstance(schema, list):
        return [wrong for item in value for wrong in violations(item, schema[0], f"{path}[]")]
    fields = {name.rstrip("?"): inner for name, inner in schema.items()}
    found = [f"{path}.{name}: unknown" for name in value if name not in fields]
    found += [f"{path}.{name}: missing" for name in schema if not name.endswith("?") and name not in value]
    known = [name for name in value if name in fields]
    return found + [wrong for name in known for wrong in violations(value[name], fields[name], f"{path}.{name}")]


def written(command: Any, folder: Path, *words: object) -> Any:
    ended = command("--kuberay", "--image", "reg.example/rl:0.1", *words)
    assert ended.code == 0, ended.err
    (path,) = folder.glob("*.rayjob.yaml")
    assert ended.out == f"{path.name}: submit it with kubectl create -f {path.name}\n"
    assert path.stat().st_mode & 0o077 == 0  # overrides may hold secrets
    return yaml.safe_load(path.read_text())


@pytest.mark.parametrize("nodes", [1, 4])
def test_the_manifest_has_a_pod_per_node_and_fields_of_kuberay_only(command, folder: Path, nodes: int):
    limits = ("--limit", "cpu=64", "--limit=memory=512Gi", "--claim", "team.runs")
    job = written(command, folder, "--nodes", nodes, *limits, "reasoning.yaml", "cluster.gpus_per_node=8")
    assert violations(job, RAY_JOB) == []
    assert (job["apiVersion"], job["kind"], job["metadata"]["name"]) == ("ray.io/v1", "RayJob", "ppo")
    cluster = job["spec"]["rayClusterSpec"]
    workers = cluster.get("workerGroupSpecs", [])
    assert [group["replicas"] for group in workers] == [nodes - 1] * (nodes > 1)
    for group in (cluster["headGroupSpec"], *workers):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert container["resources"]["limits"] == {"nvidia.com/gpu": "8", "cpu": "64", "memory": "512Gi"}
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == "team.runs"


def test_the_entry_command_is_the_run(command, folder: Path, tmp_path: Path):
    """A shell that gets the entry command runs platform-launch in the image's folder, with words that load."""
    awkward = "runner.experiment_name=9 'quoted' $(touch bad) `x` \"name\" & more"
    job = written(command, folder, "--nodes=2", "reasoning.yaml", awkward)
    name = job["metadata"]["name"]
    assert re.fullmatch(r"[a-z][a-z0-9-]{0,46}(?<!-)", name)
    (tmp_path / "platform-launch").write_text('#!/bin/sh\npwd > ran; printf "%s\\n" "$@" >> ran\n')
    (tmp_path / "platform-launch").chmod(0o755)
    entry = job["spec"]["entrypoint"].replace("cd /workspace ", f"cd {shlex.quote(str(folder))} ")
    subprocess.run(["sh", "-c", entry], check=True, env={"PATH": f"{tmp_path}:/usr/bin:/bin"})
    where, config, *overrides = (folder / "ran").read_text().splitlines()
    assert Path(where) == folder
    assert not (folder / "bad").exists()
    assert overrides == [awkward, "cluster.num_nodes=2", "cluster.address=auto", f"runner.output_dir=/runs/{name}"]
    assert load_config(folder / config, overrides).config.cluster.num_nodes == 2


def test_an_output_folder_of_the_command_line_stays(command, folder: Path):
    job = written(command, folder, "reasoning.yaml", "runner.output_dir=/runs/mine")
    assert job["spec"]["entrypoint"].count("runner.output_dir=") == 1


def test_a_long_name_becomes_one_that_kubernetes_takes(command, folder: Path):
    job = written(command, folder, "reasoning.yaml", f"runner.experiment_name=Run_{'x' * 42}_of_today")
    assert job["metadata"]["name"] == f"run-{'x' * 42}"


def test_options_that_kubernetes_would_refuse_are_listed_together(command, folder: Path):
    options = ("--image", "two words", "--claim", "Runs", "--limit", "cpu", "--limit", "memory=512 Gi")
    ended = command("--kuberay", *options, "reasoning.yaml")
    assert ended.code == 2
    assert "4 problems" in ended.err
    assert all(text in ended.err for text in ("two words", "value: Runs", "value: cpu\n", "value: memory=512 Gi"))
    assert not list(folder.glob("*.rayjob.yaml"))


@pytest.mark.parametrize(
    ("image", "hint"),
    [
        ("REGISTRY/rl-platform:cpu", "REGISTRY stands for the address of your registry, as ghcr.io/me"),
        ("reg.example/RL:v1.A", "did you mean reg.example/rl:v1.A?"),
        ("RL", "did you mean rl?"),
        ("https://reg.example/rl:1", "did you mean reg.example/rl:1?"),
        ("rl:", "as ghcr.io/me/rl-platform:cpu"),
        ("a:b:c", "as ghcr.io/me/rl-platform:cpu"),
        ("", "as ghcr.io/me/rl-platform:cpu"),
    ],
)
def test_an_image_that_no_registry_has(command, folder: Path, image: str, hint: str):
    ended = command("--kuberay", "--image", image, "reasoning.yaml")
    assert (ended.code, "Traceback" in ended.err) == (2, False)
    assert "--image: not an image" in ended.err
    assert f"hint: {hint}\n" in ended.err
    assert not list(folder.glob("*.rayjob.yaml"))


@pytest.mark.parametrize("image", ["rl", "me/rl_x:V1", "localhost:5000/me/rl:cpu", "r.io/a/b@sha256:" + "0" * 64])
def test_images(command, folder: Path, image: str):
    assert command("--kuberay", "--image", image, "reasoning.yaml").code == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--kuberay",), "--kuberay needs --image"),
        (("--nodes=2",), "--nodes belongs to --slurm or --kuberay"),
        (("--image=x",), "belong to --kuberay"),
        (("--claim=x",), "belong to --kuberay"),
        (("--limit=cpu=1",), "belong to --kuberay"),
        (("--kuberay", "--image=x", "--slurm"), "exclude each other"),
        (("--kuberay", "--image=x", "--submit"), "belong to --slurm"),
    ],
)
def test_wrong_usage(command, options: tuple[str, ...], message: str):
    ended = command(*options, "reasoning.yaml")
    assert ended.code == 2
    assert message in ended.err
