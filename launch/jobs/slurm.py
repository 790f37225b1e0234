"""`platform-launch --slurm`: a batch script that starts Ray on the nodes of a Slurm job and the run on the first one.

The script is plain bash that users may read and edit. Running under Ray by hand does not need it. Container plug-ins
and environment modules differ between clusters: `--setup` loads them.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rl_platform.config.schema import Config
from rl_platform.errors import ConfigError, PlatformError, Problem
from rl_platform.launch.jobs.job_file import write_job

if TYPE_CHECKING:
    from rl_platform.launch.command import Arguments

GRACE_S = 120  # before the time limit, for the run to end cleanly; it continues when the same script is submitted again
START_S = 300  # for all nodes to join
_OPTION = re.compile(r"[a-z][a-z0-9-]*(=[^\s\"'\\`$#;&|<>()]+)?")

_SCRIPT = """\
# Ray on every node of the job, the run on the first. Written by platform-launch --slurm; submit it with sbatch.
set -euo pipefail
cd -- {folder}
{setup}
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${{nodes[0]}}
port=$((20000 + SLURM_JOB_ID % 20000))  # jobs that share a node do not meet
# not --ip-address, which is 127.0.1.1 where /etc/hosts names the machine so
address=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --all-ip-addresses | awk '{{print $1; exit}}')
export RAY_ADDRESS="$address:$port"  # what cluster.address=auto joins
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')  # other users of the nodes cannot join without it
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
export RAY_worker_niceness=0 MALLOC_ARENA_MAX=1  # as where a run starts Ray itself
step=(srun --overlap --cpu-bind=none --cpus-per-task="$SLURM_CPUS_ON_NODE")
on_head=("${{step[@]}}" --nodes=1 --ntasks=1 --nodelist="$head")

background=()
complaints=$(mktemp)
stop() {{ kill "${{background[@]}}" 2> /dev/null || true; wait; rm -f "$complaints"; }}
trap stop EXIT

count='import ray; ray.init(address="auto", log_to_driver=False); print(sum(n["Alive"] for n in ray.nodes()))'
joined() {{ "${{on_head[@]}}" python -c "$count" 2> "$complaints" | tail -n 1; }}
wait_for() {{  # that many nodes
    until [[ $(joined || true) == "$1" ]]; do
        if (( SECONDS > {start} )) || ! kill -0 "${{background[0]}}" 2> /dev/null; then
            echo "Ray at $RAY_ADDRESS does not have $1 of ${{nodes[*]}} after $SECONDS s:" >&2
            cat "$complaints" >&2
            exit 75
        fi
        sleep 2
    done
}}

"${{on_head[@]}}" ray start --head --node-ip-address="$address" --port="$port" --disable-usage-stats --block &
background+=($!)
wait_for 1
if (( ${{#nodes[@]}} > 1 )); then
    others=$((${{#nodes[@]}} - 1))
    list=$(IFS=,; echo "${{nodes[*]:1}}")
    "${{step[@]}}" --nodes="$others" --ntasks="$others" --nodelist="$list" \\
        ray start --address="$RAY_ADDRESS" --disable-usage-stats --block &
    background+=($!)
    wait_for "${{#nodes[@]}}"
fi

"${{on_head[@]}}" \\
    {command} &
run=$!
trap 'kill -TERM "$run" 2> /dev/null || true' TERM  # Slurm's warning before the time limit
code=0
wait "$run" || code=$?
while kill -0 "$run" 2> /dev/null; do  # the warning interrupted the wait
    code=0
    wait "$run" || code=$?
done
exit "$code"
"""


def write(arguments: Arguments, config: Config) -> str:
    """Writes the script into the working folder, named after the run. Returns the line that says how to submit it, or
    what sbatch has printed.

    Raises ConfigError for options that sbatch would not read as one word, and for the number of nodes among them.
    """
    name = re.sub(r"[^A-Za-z0-9._-]", "_", config.runner.experiment_name)
    path = write_job(Path(f"{name}.sbatch"), _script(arguments, config, name))
    return _submit(path) if arguments.submit else f"{path}: submit it with sbatch {path}"


def _script(arguments: Arguments, config: Config, name: str) -> str:
    """Returns the script for `cluster.num_nodes` whole nodes (`cpus-per-task`: for parts of them)."""
    cluster, sbatch = config.cluster, arguments.sbatch or []
    words = [f"job-name={name}", f"nodes={cluster.num_nodes}", "ntasks-per-node=1", f"signal=B:TERM@{GRACE_S}"]
    if cluster.gpus_per_node:
        words.append(f"gpus-per-node={cluster.gpus_per_node}")
    _check(sbatch)
    given = {option.partition("=")[0] for option in sbatch}
    if not given & {"exclusive", "cpus-per-task"}:
        words.append("exclusive")
    words = [word for word in words if word.partition("=")[0] not in given] + sbatch
    head = "".join(f"#SBATCH --{word}\n" for word in words)
    command = shlex.join(["platform-launch", arguments.config, *arguments.overrides, "cluster.address=auto"])
    setup = f"{arguments.setup}\n" if arguments.setup else ""
    body = _SCRIPT.format(folder=shlex.quote(str(Path.cwd())), setup=setup, start=START_S, command=command)
    return f"#!/bin/bash\n{head}\n{body}"


def _submit(path: Path) -> str:
    """Submits the script and returns the output of sbatch. Raises ConfigError without sbatch, PlatformError if it
    refuses."""
    if shutil.which("sbatch") is None:
        hint = f"on a machine of the cluster: sbatch {path}"
        raise ConfigError([Problem("--submit", "there is no sbatch on this machine", hint=hint)])
    ended = subprocess.run(["sbatch", "--", str(path)], capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise PlatformError(f"sbatch refused {path}: {ended.stderr.strip() or ended.stdout.strip()}")
    return ended.stdout.strip()


def _check(sbatch: Sequence[str]) -> None:
    problems = [
        Problem(
            "--sbatch",
            "not an option of sbatch as one word",
            value=option,
            allowed="name=value or name, without dashes before it and without blanks or quotes",
            hint="as partition=gpu",
        )
        for option in sbatch
        if not _OPTION.fullmatch(option)
    ]
    problems += [
        Problem("--sbatch", "the number of nodes is that of the config", value=option, hint="--nodes N sets both")
        for option in sbatch
        if option.partition("=")[0] == "nodes"
    ]
    if problems:
        raise ConfigError(problems)
