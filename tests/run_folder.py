"""Folders as runs leave them, made in milliseconds, for tests of what reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

EVIL = "</script><script>document.body.dataset.evil = 1</script><img src=x onerror=alert(1)><!--"
SECRET = "hf_abcdefghijklmnop"


def make_run(folder: Path, steps: int = 12, task: str = "reasoning", name: str = "try") -> Path:
    """A folder as a run leaves it, with texts that must not become markup."""
    folder.mkdir(parents=True)
    rows: list[dict[str, Any]] = [
        {"step": step, "reward/mean": step / steps, "actor/approx_kl": 0.01, "time/step": 1.0, "time/generate": 0.5}
        for step in range(1, steps + 1)
    ]
    rows[-1] |= {"val/accuracy": 0.5, "actor/loss": None}
    write_lines(folder / "metrics.jsonl", rows)
    if task == "reasoning":
        sample = {"step": 1, "prompt": EVIL, "response": f"key {SECRET} {EVIL}", "reward": None, "reward/format": 0.5}
        long = {"step": 2, "prompt": "1+1=", "response": "x" * 20_000, "reward": 1.0, "finish_reason": "length"}
        write_lines(folder / "samples.jsonl", [sample, long])
        tokens = [{"step": 2, "sample": 0, "text": EVIL, "log_prob": -1.0, "new_log_prob": -0.9, "advantage": 2.0}]
        write_lines(folder / "tokens.jsonl", [*tokens, {"step": 1, "sample": 0, "text": SECRET, "log_prob": -1.0}])
    else:
        episode = {"step": 12, "seed": 7, "return": 3.5, "length": 5, "finish_reason": "terminated"}
        write_lines(folder / "samples.jsonl", [episode, episode | {"seed": 8, "return": None}])
        (folder / "evaluation.mp4").write_bytes(b"film")
        facts = {"step": 12, "seed": 7, "rewards": [1.0, 2.5], "steps_per_picture": 2, "text": EVIL}
        (folder / "evaluation.json").write_text(json.dumps(facts))
    config = {"runner": {"task_type": task, "experiment_name": name, "api_key": SECRET}}
    (folder / "config.yaml").write_text(json.dumps(config))
    return folder


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
