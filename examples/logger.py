"""Writes the mean return of each step into a CSV file in the folder of the run."""

from collections.abc import Mapping

from rl_platform.reporter import Reporter, RunInfo


class Returns(Reporter):
    def start(self, info: RunInfo) -> None:
        self.path = info.output_dir / "returns.csv"
        if info.resumed_step is None:
            self.path.write_text("step,return\n")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        if "episode/return" in metrics:
            with self.path.open("a") as file:
                file.write(f"{step},{metrics['episode/return']:.1f}\n")
