"""The batch script: read by bash, its options, and run for real with stand-ins for the cluster's own commands."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from pathlib import Path

import pytest
from waiting import until

NAMES = {1: "n1", 4: "n1 n2 n3 n4"}
STAND_INS = {
    "scontrol": 'printf "%s\\n" $NAMES',
    "hostname": "echo 10.0.0.7 fe80::1",
    "sleep": "exec /bin/sleep 0.02",
    "python": 'echo "a line of Ray"; /bin/sleep 0.2; grep -c start "$LOG.rays"',  # nodes that have started Ray
    "ray": 'echo "ray $*" >> "$LOG"; exec /bin/sleep 60',
    "srun": """
echo "srun $*" >> "$LOG"
while [[ $1 == --* ]]; do [[ $1 == --ntasks=* ]] && tasks=${1#*=}; shift; done
if [[ $1 == ray ]]; then for ((task = 0; task < tasks; task++)); do echo start >> "$LOG.rays"; done; fi
exec "$@"
""",
    "platform-launch": 'printf "%s\\n" "$@" > "$LOG.arguments"; exit 75',
    "sbatch": 'echo "Submitted batch job 17: $2"',
}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins for Slurm's and Ray's commands on PATH; returns the file they log to."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in STAND_INS.items():
        (tools / name).write_text(f"#!/bin/bash\n{text}\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    for name, value in {"SLURM_JOB_ID": "40003", "SLURM_JOB_NODELIST": "n[1-4]", "SLURM_CPUS_ON_NODE": "64"}.items():
        monkeypatch.setenv(name, value)
    return tmp_path / "log"


def options(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")]


@pytest.mark.parametrize("nodes", [1, 4])
def test_the_script_asks_for_the_nodes_of_the_config(command, folder: Path, nodes: int):
    ended = command("--slurm", "--nodes", nodes, "reasoning.yaml", "cluster.gpus_per_node=8")
    assert ended.code == 0, ended.err
    assert ended.out == "ppo.sbatch: submit it with sbatch ppo.sbatch\n"
    script = (folder / "ppo.sbatch").read_text()
    assert options(script) == [
        "job-name=ppo",
        f"nodes={nodes}",
        "ntasks-per-node=1",
        "signal=B:TERM@120",
        "gpus-per-node=8",
        "exclusive",
    ]
    assert subprocess.run(["bash", "-n", "ppo.sbatch"], check=False).returncode == 0
    line = next(line for line in script.splitlines() if "platform-launch reasoning.yaml" in line)
    assert line.split() == [
        "platform-launch",
        "reasoning.yaml",
        "cluster.gpus_per_node=8",
        f"cluster.num_nodes={nodes}",
        "cluster.address=auto",
        "&",
    ]


@pytest.mark.parametrize("nodes", [1, 4])
def test_the_script_starts_ray_everywhere_and_the_run_on_the_first_node(
    command, folder: Path, cluster: Path, monkeypatch: pytest.MonkeyPatch, nodes: int
):
    awkward = "runner.experiment_name=a 'quoted' $(touch bad) `x` \"name\" & more"
    setup = "export FROM_SETUP='with blanks'"
    ended = command("--slurm", f"--nodes={nodes}", "--setup", setup, "reasoning.yaml", awkward)
    assert ended.code == 0, ended.err
    script = next(folder.glob("*.sbatch"))
    monkeypatch.setenv("NAMES", NAMES[nodes])
    ran = subprocess.run(["bash", str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 75, ran.stderr  # that of the run
    arguments = Path(f"{cluster}.arguments").read_text().splitlines()
    assert arguments == ["reasoning.yaml", awkward, f"cluster.num_nodes={nodes}", "cluster.address=auto"]
    assert not (folder / "bad").exists()
    lines = cluster.read_text().splitlines()
    rays = [line for line in lines if line.startswith("ray")]
    assert rays[0] == "ray start --head --node-ip-address=10.0.0.7 --port=20003 --disable-usage-stats --block"
    assert rays[1:] == ["ray start --address=10.0.0.7:20003 --disable-usage-stats --block"] * (nodes > 1)
    workers = [line for line in lines if "srun" in line and "--nodelist=n2,n3,n4" in line]
    assert len(workers) == (nodes > 1)
    assert all("--nodes=3 --ntasks=3" in line and "--cpus-per-task=64" in line for line in workers)
    assert next(line for line in lines if "platform-launch" in line).count("--nodelist=n1 ") == 1


def test_a_cluster_that_does_not_come_up_ends_the_job_with_the_reason(
    command, folder: Path, cluster: Path, monkeypatch: pytest.MonkeyPatch
):
    (folder / "tools" / "ray").write_text("#!/bin/bash\nexit 1\n")
    (folder / "tools" / "python").write_text("#!/bin/bash\necho 'no Ray here' >&2; exit 1\n")
    monkeypatch.setenv("NAMES", NAMES[1])
    assert command("--slurm", "reasoning.yaml").code == 0
    ran = subprocess.run(["bash", "ppo.sbatch"], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 75
    assert "Ray at 10.0.0.7:20003 does not have 1 of n1" in ran.stderr
    assert "no Ray here" in ran.stderr
    assert not Path(f"{cluster}.arguments").exists()


def test_slurms_warning_reaches_the_run(command, folder: Path, cluster: Path, monkeypatch: pytest.MonkeyPatch):
    run = "trap 'echo saved >> \"$LOG\"; exit 143' TERM; touch started; while true; do /bin/sleep 0.05; done"
    (folder / "tools" / "platform-launch").write_text(f"#!/bin/bash\n{run}\n")
    monkeypatch.setenv("NAMES", NAMES[1])
    assert command("--slurm", "reasoning.yaml").code == 0
    with subprocess.Popen(["bash", "ppo.sbatch"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as job:
        until((folder / "started").exists)
        job.send_signal(signal.SIGTERM)  # to the batch script alone, as B:TERM does
        assert job.wait(timeout=60) == 143
    assert "saved" in cluster.read_text().splitlines()


def test_options_of_sbatch_are_passed_on_and_replace_ours(command, folder: Path):
    given = ("--sbatch=partition=gpu", "--sbatch=time=02:00:00", "--sbatch=cpus-per-task=16", "--sbatch=job-name=mine")
    assert command("--slurm", *given, "reasoning.yaml").code == 0
    written = options((folder / "ppo.sbatch").read_text())
    assert written == [
        "nodes=1",
        "ntasks-per-node=1",
        "signal=B:TERM@120",
        "partition=gpu",
        "time=02:00:00",
        "cpus-per-task=16",
        "job-name=mine",
    ]


@pytest.mark.parametrize("option", ["--partition=gpu", "comment=two words", "wrap=$(rm x)", "a\nb", ""])
def test_options_that_sbatch_would_misread_are_refused(command, folder: Path, option: str):
    ended = command("--slurm", f"--sbatch={option}", "reasoning.yaml")
    assert ended.code == 2
    assert "--sbatch: not an option of sbatch as one word" in ended.err
    assert not list(folder.glob("*.sbatch"))


def test_an_edited_script_stays(command, folder: Path):
    for _ in range(2):
        assert command("--slurm", "reasoning.yaml").code == 0
    script = folder / "ppo.sbatch"
    script.write_text(edited := script.read_text() + "# mine\n")
    ended = command("--slurm", "reasoning.yaml")
    assert ended.code == 2
    assert "ppo.sbatch: cannot be written: it exists and has another content" in ended.err
    assert script.read_text() == edited


def test_the_folder_is_quoted(command, folder: Path, monkeypatch: pytest.MonkeyPatch):
    odd = folder / "a folder; with 'marks'"
    odd.mkdir()
    monkeypatch.chdir(odd)
    assert command("--slurm", "../reasoning.yaml").code == 0
    line = next(line for line in Path("ppo.sbatch").read_text().splitlines() if line.startswith("cd --"))
    assert shlex.split(line) == ["cd", "--", str(odd)]


def test_submit(command, cluster: Path):
    ended = command("--slurm", "--submit", "reasoning.yaml")
    assert ended.code == 0
    assert ended.out == "Submitted batch job 17: ppo.sbatch\n"
    (cluster.parent / "tools" / "sbatch").write_text("#!/bin/bash\necho 'invalid partition' >&2; exit 1\n")
    ended = command("--slurm", "--submit", "reasoning.yaml")
    assert ended.code == 70
    assert "sbatch refused ppo.sbatch: invalid partition" in ended.err


def test_submit_without_sbatch(command, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")
    ended = command("--slurm", "--submit", "reasoning.yaml")
    assert ended.code == 2
    assert "there is no sbatch on this machine" in ended.err


@pytest.mark.parametrize("arguments", [("--submit",), ("--sbatch=requeue",), ("--setup=x",)])
def test_options_of_slurm_without_it_are_wrong_usage(command, arguments: tuple[str, ...]):
    ended = command(*arguments, "reasoning.yaml")
    assert ended.code == 2
    assert "belong to --slurm" in ended.err


def test_the_placement_is_checked_for_the_nodes_asked_for(command, folder: Path):
    ended = command("--slurm", "--nodes=2", "reasoning.yaml", "cluster.gpus_per_node=8",
                    "cluster.component_placement={'actor,critic,rollout,reward': 0-16}")  # fmt: skip
    assert ended.code == 2
    assert "accelerator 16 does not exist: the cluster has 16 accelerators" in ended.err
    assert not list(folder.glob("*.sbatch"))
