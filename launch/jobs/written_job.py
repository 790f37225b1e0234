"""`--slurm` and `--kuberay`: writes the file of a job, and optionally submits it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_platform.config.schema import Config
from rl_platform.launch.jobs.kuberay import KubeRayOptions, manifest, write_manifest
from rl_platform.launch.jobs.slurm import SlurmOptions, sbatch_script, submit, write_script

if TYPE_CHECKING:
    from rl_platform.launch.command import Arguments


def written_job(arguments: Arguments, config: Config) -> str:
    """Writes the file and returns the line that says how to submit it, or what sbatch has printed."""
    run = config, arguments.config, arguments.overrides
    if arguments.slurm:
        path = write_script(config, sbatch_script(*run, SlurmOptions(arguments.sbatch or [], arguments.setup)))
        return submit(path) if arguments.submit else f"{path}: submit it with sbatch {path}"
    claim = "runs" if arguments.claim is None else arguments.claim
    path = write_manifest(config, manifest(*run, KubeRayOptions(arguments.image or "", claim, arguments.limit or [])))
    return f"{path}: submit it with kubectl create -f {path}"
