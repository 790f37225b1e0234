"""`rl-platform doctor`: its sections, what it finds wrong, and that it loads no large library."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from rl_platform.launch.tools import doctor, installed
from rl_platform.launch.tools.installed import EXTRAS, Row

ROOT = Path(__file__).parents[3]


def test_the_report_as_json_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom rl_platform.launch.tools import doctor\ndoctor.show(True)\nassert 'torch' not in sys.modules"
    )
    environment = os.environ | {"RAY_AUTH_TOKEN": "3f9ab2c1secret", "RL_PLATFORM_CACHE": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert "3f9ab2c1secret" not in ended.stdout
    report = json.loads(ended.stdout)
    sections = {title: {row["name"]: row for row in rows} for title, rows in report.items() if title != "problems"}
    assert report["problems"] == sum(row["state"] == "problem" for rows in sections.values() for row in rows.values())
    assert sections["machine"]["memory"]["value"] <= psutil.virtual_memory().total
    others = {"vllm", "megatron", "code sandbox", "video", "MuJoCo drawing", "Vulkan", "manipulation"}
    assert {*EXTRAS, *others} == set(sections["features"])
    assert "torch" in sections["packages"]["installed"]["text"]
    simulators = sections["features"]["manipulation"]
    assert (simulators["state"], simulators["fix"]) == ("missing", "rl-platform environment manipulation")
    assert sections["folders"]["models"]["text"].startswith(str(tmp_path))


def test_a_machine_without_a_driver_of_vulkan(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VK_ICD_FILENAMES", "VK_DRIVER_FILES"):
        monkeypatch.setenv(name, "/nowhere/driver.json")
    row = next(row for row in installed.features() if row.name == "Vulkan")
    assert row.state == "missing"
    assert "no driver can be used" in row.text or "libvulkan.so.1" in row.text
    assert "docs/maniskill.md" in row.fix


def test_the_report_as_text(tool, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {
        "machine": [Row("CPU", "one"), Row("open files", "10", "note", "ulimit -n 65536")],
        "features": [Row("plot", "matplotlib is not installed", "missing", "pip install 'rl-platform[plot]'")],
        "network": [Row("Ray token", "API_KEY=abcdefgh", "problem", "chmod 600 x")],
    }
    monkeypatch.setattr(doctor, "diagnose", lambda: rows)
    ended = tool("doctor")
    assert ended.code == 0
    assert ended.out.splitlines() == [
        "machine",
        "  ok      CPU         one",
        "  note    open files  10",
        "                      -> ulimit -n 65536",
        "features",
        "  missing plot  matplotlib is not installed",
        "                -> pip install 'rl-platform[plot]'",
        "network",
        "  PROBLEM Ray token  API_KEY=***",
        "                     -> chmod 600 x",
        "1 problem; 1 optional part is missing",
    ]


@pytest.mark.parametrize(("arguments", "message"), [(["--jsn"], "--jsn"), (["all"], "all")])
def test_wrong_usage(tool, arguments: list[str], message: str) -> None:
    ended = tool("doctor", *arguments)
    assert ended.code == 2
    assert message in ended.err


def test_every_extra_has_a_purpose() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {*EXTRAS, "code", "bench", "crosscheck", "docs", "test"} == set(project["optional-dependencies"])


Requires = Callable[[dict[str, tuple[str, list[str]]]], None]


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Requires:
    """packages({"a": ("1.0", ["b>=2"])}): the installed packages, with version and requirements."""

    def install(known: dict[str, tuple[str, list[str]]]) -> None:
        def version(name: str) -> str:
            if name not in known:
                raise installed.PackageNotFoundError(name)
            return known[name][0]

        def requires(name: str) -> list[str]:
            version(name)
            return known[name][1]

        monkeypatch.setattr(installed, "version", version)
        monkeypatch.setattr(installed, "requires", requires)

    return install


def test_packages_that_are_missing_too_old_or_in_conflict(packages: Requires) -> None:
    packages(
        {
            "rl-platform": ("0.1", ["old>=2", "fine", "absent", "with-extra[x]", "matplotlib; extra == 'plot'"]),
            "old": ("1.9", []),
            "fine": ("3.0rc1", ["deep<2"]),
            "deep": ("2.5", ["fine", "gone; sys_platform == 'win32'"]),
            "with-extra": ("1", ["lost; extra == 'x'", "ignored; extra == 'y'"]),
        }
    )
    rows = {row.name: row for row in installed.packages()}
    assert rows["old"].text == "old 1.9 is installed, >=2 is needed"
    assert rows["old"].fix == "pip install 'old>=2'"
    assert rows["absent"].text == "absent is not installed"
    assert rows["installed"].text == "fine 3.0rc1, with-extra 1"
    conflicts = [row for row in installed.packages() if "needs" in row.text]
    assert [row.name for row in conflicts] == ["with-extra", "fine"]
    assert conflicts[1].text == "needs deep<2: deep 2.5 is installed, <2 is needed"
    assert conflicts[0].fix == "pip install 'lost'"
    assert installed._extra("plot", "pictures").fix == "pip install 'rl-platform[plot]'"
    assert installed._extra("new", "x").text.startswith("the installed package is older than this extra")
    packages({})
    (row,) = installed.packages()
    assert row.state == "problem"
    assert "not installed as a package" in row.text


def test_parts_that_cannot_start_give_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUJOCO_GL", "nothing")
    row = installed._drawing()
    assert row.state == "missing"
    assert "invalid value for environment variable MUJOCO_GL: nothing; for videos and pixels" in row.text
    from rl_platform.envs.reasoning.sandbox import isolation

    monkeypatch.setattr(isolation, "missing_layers", lambda: ["seccomp: no library"])
    assert installed._sandbox().text == "seccomp: no library; for reward.type: code"
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    assert installed._video().state == "missing"


@pytest.mark.parametrize(
    ("files", "quota", "limit"),
    [
        (
            {
                "/proc/self/cgroup": "0::/a/b\n",
                "/sys/fs/cgroup/a/b/cpu.max": "max 100000",
                "/sys/fs/cgroup/a/cpu.max": "150000 100000",
                "/sys/fs/cgroup/a/b/memory.max": "max",
                "/sys/fs/cgroup/memory.max": "4096",
            },
            1.5,
            4096,
        ),
        (
            {
                "/proc/self/cgroup": "3:memory:/job\n2:cpu,cpuacct:/job\n",
                "/sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "200000",
                "/sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000",
                "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
                "/sys/fs/cgroup/memory/job/memory.limit_in_bytes": "8192",
            },
            2.0,
            8192,
        ),
        ({}, None, None),
    ],
)
def test_limits_of_control_groups(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, str], quota: float | None, limit: int | None
) -> None:
    monkeypatch.setattr(doctor, "_read", lambda path: files.get(str(path), ""))
    assert doctor._cpu_quota() == quota
    assert doctor._memory_limit() == limit


def test_fewer_cores_than_threads_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_cpu_quota", lambda: 0.5)
    row = next(row for row in doctor._machine() if row.name == "cores")
    assert (row.state, row.value) == ("problem", 0.5)
    assert row.fix.startswith("OMP_NUM_THREADS=1")


@pytest.mark.parametrize(
    ("script", "rows"),
    [
        (
            'case "$1" in *name*) echo "NVIDIA H100 80GB HBM3, 81559, 12, 570.1";; *) echo 0;; esac',
            [
                ("GPU 0", "NVIDIA H100 80GB HBM3, 81559 MiB, 12 MiB in use, driver 570.1", "ok"),
                ("visible", "1", "ok"),
                ("torch", "2.13.0+cpu is a build for CPUs", "problem"),
            ],
        ),
        ("echo broken; exit 9", [("nvidia-smi", "failed: broken", "problem")]),
        ('case "$1" in *name*) echo odd;; *) echo 0;; esac', [("GPU 0", "odd", "ok")]),
        (None, [("GPUs", "none: nvidia-smi is not installed. Everything runs on the CPU", "note")]),
    ],
)
def test_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, rows: list[tuple[str, str, str]]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(doctor, "version", lambda name: "2.13.0+cpu")
    if script is None:
        monkeypatch.setattr(doctor, "ask_driver", lambda fields: None)
        monkeypatch.setattr(doctor, "detect_accelerators", lambda: ((), ""))
    else:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = [(row.name, row.text, row.state) for row in doctor._gpus()]
    assert found[: len(rows)] == rows


def test_ray_tokens_are_found_and_never_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert doctor._token().state == "ok"
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    assert doctor._token().state == "problem"
    token = tmp_path / "token"
    token.write_text("abc")
    token.chmod(0o644)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    assert doctor._token().fix == f"chmod 600 {token}"
    token.chmod(0o600)
    row = doctor._token()
    assert (row.state, row.text) == (
        "ok",
        f"RAY_AUTH_MODE is token; a token is in {token}. A Ray that a run starts has its own",
    )


@pytest.mark.parametrize(
    ("variable", "value", "state"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", "ok"),
        ("GLOO_SOCKET_IFNAME", "eth", "problem"),
        ("GLOO_SOCKET_IFNAME", "ib0", "problem"),
        ("NCCL_SOCKET_IFNAME", "eth", "ok"),
        ("NCCL_SOCKET_IFNAME", "=eth", "problem"),
        ("NCCL_SOCKET_IFNAME", "^docker", "ok"),
    ],
)
def test_interfaces(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, state: str) -> None:
    def address(text: str) -> SimpleNamespace:
        return SimpleNamespace(family=doctor.socket.AF_INET, address=text)

    addresses = {"lo": [address("127.0.0.1")], "eth0": [address("10.0.0.2")], "ib0": [address("10.1.0.2")]}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {n: SimpleNamespace(isup=n != "ib0") for n in addresses})
    monkeypatch.setattr(doctor, "_resolved", lambda: "127.0.1.1")
    monkeypatch.setenv(variable, value)
    rows = {row.name: row for row in doctor._network()}
    assert rows["interfaces"].text == "lo 127.0.0.1, eth0 10.0.0.2"
    assert rows[variable].state == state
    assert rows["host name"].fix.endswith("GLOO_SOCKET_IFNAME=eth0")


def test_folders_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RL_PLATFORM_CACHE", str(tmp_path / "file" / "models"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "new" / "hub"))
    monkeypatch.chdir(tmp_path)
    rows = {row.name: row for row in doctor._folders()}
    assert (rows["models"].state, rows["models"].fix) == ("problem", "RL_PLATFORM_CACHE names another one")
    assert rows["Hugging Face"].text.endswith("will be made")
    monkeypatch.setattr(doctor, "LEAST_FREE", 2**70)
    assert {row.state for row in doctor._folders()} == {"problem"}


def test_an_address_of_ray_at_which_nothing_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def row(address: str) -> Row:
        monkeypatch.setenv("RAY_ADDRESS", address)
        return next(row for row in doctor._network() if row.name == "Ray address")

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert row(f"127.0.0.1:{port}").state == row(f"ray://127.0.0.1:{port}").state == row("auto").state == "ok"
    for address, reason in ((f"127.0.0.1:{port}", "nothing answers there"), ("head", "that is not HOST:PORT")):
        assert (row(address).state, reason in row(address).text) == ("problem", True)


def test_a_working_folder_that_was_removed(tmp_path: Path) -> None:
    begin = "import os, sys\nfrom rl_platform.launch.cli import tools\nos.rmdir(os.getcwd())\n"
    code = f"{begin}sys.argv[1:] = ['keys']\ntools()"
    (gone := tmp_path / "gone").mkdir()
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=gone)
    assert (ended.returncode, "working folder: it was removed" in ended.stderr) == (2, True), ended.stderr
