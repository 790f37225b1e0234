"""Records one episode as an mp4 file.

A separate process renders, so a graphics library that crashes or hangs cannot end the run.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from rl_platform.envs.embodied.drawing import CannotDraw, with_drawing
from rl_platform.envs.embodied.evaluate import Begin, PolicyFunction, one_by_one
from rl_platform.envs.embodied.spaces import EnvDescription, make_env
from rl_platform.envs.embodied.vector import VectorEnv


def record_video(
    description: EnvDescription,
    policy: PolicyFunction,
    path: Path,
    seed: int,
    max_steps: int = 2000,
    timeout_s: float = 60.0,
    *,
    chunked: bool = False,
    begin: Begin | None = None,
) -> str | None:
    """Writes the episode of `seed`, at most `max_steps` steps of it, to `path`.

    Returns None, or a note that says why there is no video. A MUJOCO_GL that is set is used as it is. `timeout_s`
    limits each step and each frame. `chunked`, `begin`: as of `evaluate`.
    """
    probe = make_env(description)
    metadata = probe.metadata
    uses_mujoco = hasattr(probe.unwrapped, "mujoco_renderer")
    probe.close()
    if "rgb_array" not in metadata.get("render_modes", ()):
        return f"no video: {description.id} cannot draw (its render modes: {metadata.get('render_modes', [])})"

    def record(variables: dict[str, str]) -> None:
        envs = VectorEnv(description, 1, 1, timeout_s, render_mode="rgb_array", worker_variables=variables)
        try:
            if begin is not None:
                begin(1)
            act = one_by_one(policy) if chunked else policy
            _record(envs, act, path, seed, max_steps, int(metadata.get("render_fps") or 30))
        finally:
            envs.close()

    try:
        with_drawing(uses_mujoco, record)
    except (CannotDraw, OSError) as error:  # such as a full disk
        return f"no video of {description.id}: {error}"
    return None


def _record(envs: VectorEnv, policy: PolicyFunction, path: Path, seed: int, max_steps: int, fps: int) -> None:
    import imageio.v2 as imageio

    observations = envs.reset([seed])
    frame = envs.render()
    path.parent.mkdir(exist_ok=True)
    unfinished = path.with_name(f".{path.stem}.unfinished.mp4")
    try:
        # the pixel format needs even sizes only; a larger block size would resize frames
        with imageio.get_writer(unfinished, format="FFMPEG", fps=fps, macro_block_size=2) as writer:  # type: ignore[arg-type]
            writer.append_data(frame)
            for _ in range(max_steps):
                result = envs.step(policy(observations))
                if result.ended[0]:
                    break
                observations = result.observations
                writer.append_data(envs.render())
        unfinished.replace(path)
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
