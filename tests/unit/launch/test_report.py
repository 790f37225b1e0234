"""`rl-platform report`: what it reads, what it writes, wrong input, and texts that try to become markup."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from run_folder import EVIL, SECRET, make_run

from rl_platform.config import load_config
from rl_platform.launch.tools.report import live_report as report_command
from rl_platform.launch.tools.report.collect import EMBEDDED_BYTES, collect, evenly
from rl_platform.launch.tools.report.definitions import definition_of, definitions
from rl_platform.launch.tools.report.devices import busy_devices, without
from rl_platform.launch.tools.report.page import POINTS, page
from rl_platform.placement.inventory import Inventory
from rl_platform.placement.scheduler import schedule

ROOT = Path(__file__).parents[3]


def data_of(html: str) -> dict[str, Any]:
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, flags=re.DOTALL)
    return json.loads(found)


class TestPage:
    def test_texts_of_models_never_become_markup(self, tmp_path: Path) -> None:
        html = page(collect([make_run(tmp_path / EVIL.replace("/", "_"), name=EVIL)], tmp_path / "report.html"))
        assert html.lower().count("<script") == html.lower().count("</script") == 2  # the data and the page's own
        assert "<img src=x" not in html
        data = data_of(html)
        assert data["runs"][0]["title"] == EVIL
        assert EVIL in data["runs"][0]["conversations"][0]["response"]

    def test_secrets_are_removed(self, tmp_path: Path) -> None:
        run = make_run(tmp_path / "run")
        html = page(collect([run], tmp_path / "report.html"))
        assert SECRET not in html
        first, second = data_of(html)["runs"][0]["conversations"]
        assert "***" in first["response"]
        assert (first["tokens"], len(second["tokens"])) == ([], 1)  # tokens could spell the secret

    def test_it_needs_no_network(self, tmp_path: Path) -> None:
        html = page(collect([make_run(tmp_path / "run")], tmp_path / "report.html"))
        assert "default-src 'none'" in html
        assert set(re.findall(r"https?://[^\"' )]+", html)) <= {"http://www.w3.org/2000/svg"}
        assert not re.search(r"<(link|script)[^>]+(src|href)=", html)

    def test_numbers_that_are_not_finite_are_left_out(self, tmp_path: Path) -> None:
        data = data_of(page(collect([make_run(tmp_path / "run")], tmp_path / "report.html")))
        assert "actor/loss" not in data["curves"]
        assert data["curves"]["val/accuracy"] == [{"s": [12], "y": [0.5], "last": 0.5, "best": 0.5}]
        assert data["runs"][0]["answers"][0]["finding"]["title"] == "Losses or gradients are not finite"

    def test_a_long_run_stays_small(self, tmp_path: Path) -> None:
        html = page(collect([make_run(tmp_path / "run", steps=10 * POINTS + 1)], tmp_path / "report.html"))
        curve = data_of(html)["curves"]["reward/mean"][0]
        assert len(curve["s"]) == len(curve["y"]) <= POINTS
        assert (curve["s"][-1], curve["last"]) == (10 * POINTS + 1, 1.0)
        assert len(html) < 300_000
        response = data_of(html)["runs"][0]["conversations"][1]["response"]
        assert response.startswith("xxx")
        assert response.endswith("[... 14000 characters]")

    def test_several_runs_are_compared(self, tmp_path: Path) -> None:
        runs = [make_run(tmp_path / "a" / "run"), make_run(tmp_path / "b" / "run", name="other")]
        (runs[1] / "config.yaml").write_text('{"runner": {"task_type": "reasoning"}, "actor": {"optim": {"lr": 0.5}}}')
        data = data_of(page(collect(runs, tmp_path / "report.html")))
        assert [run["name"] for run in data["runs"]] == ["a/run", "b/run"]
        assert ["actor.optim.lr", "–", "0.5"] in data["differences"]
        assert len(data["curves"]["reward/mean"]) == 2

    @pytest.mark.parametrize(
        ("video", "reason"), [(False, "evaluation.video is off"), (True, "cannot draw, or none is")]
    )
    def test_it_says_why_there_is_no_video(self, tmp_path: Path, video: bool, reason: str) -> None:
        run = make_run(tmp_path / "run", task="embodied")
        for path in run.rglob("*.mp4"):
            path.unlink()
        config = {"runner": {"task_type": "embodied"}, "env": {"evaluation": {"video": video}}}
        (run / "config.yaml").write_text(json.dumps(config))
        assert reason in collect([run], tmp_path / "report.html")[0].lacks["videos"]

    def test_parts_of_the_reward_have_definitions(self, tmp_path: Path) -> None:
        data = data_of(page(collect([make_run(tmp_path / "run")], tmp_path / "report.html")))
        assert data["runs"][0]["conversations"][0]["parts"] == {"format": 0.5}
        assert "reward/format" in data["definitions"]


class TestCollect:
    def test_an_embodied_run_has_episodes_and_films(self, tmp_path: Path) -> None:
        (run,) = collect([make_run(tmp_path / "run", task="embodied")], tmp_path / "report.html")
        assert [each["return"] for each in run.episodes] == [3.5, None]
        (video,) = run.videos
        assert video.source == "data:video/mp4;base64,ZmlsbQ=="
        assert video.facts == {"step": 12, "seed": 7, "rewards": [1.0, 2.5], "steps_per_picture": 2}

    def test_a_large_film_is_linked(self, tmp_path: Path) -> None:
        folder = make_run(tmp_path / "runs" / "a b", task="embodied")
        with open(folder / "evaluation.mp4", "wb") as film:
            film.truncate(EMBEDDED_BYTES)
        (run,) = collect([folder], tmp_path / "pages" / "report.html")
        assert run.videos[0].source == "../runs/a%20b/evaluation.mp4"

    def test_what_is_missing_is_said(self, tmp_path: Path) -> None:
        folder = make_run(tmp_path / "run")
        for name in ("config.yaml", "tokens.jsonl", "samples.jsonl"):
            (folder / name).unlink()
        (run,) = collect([folder / "metrics.jsonl"], tmp_path / "report.html")
        assert run.lacks["card"] == run.lacks["placement"] == "The folder has no config.yaml."
        assert run.lacks["conversations"] == "The folder has no samples.jsonl."
        assert "runner.trace_steps" in run.lacks["timeline"]
        assert page([run])

    def test_a_run_without_steps(self, tmp_path: Path) -> None:
        folder = make_run(tmp_path / "run")
        (folder / "metrics.jsonl").write_text("")
        (run,) = collect([folder], tmp_path / "report.html")
        assert run.lacks["curves"] == "metrics.jsonl has no finished step yet."
        assert data_of(page([run]))["runs"][0]["progress"] == "There is no objective or validation yet."

    def test_a_config_whose_aliases_repeat_one_another(self, tmp_path: Path) -> None:
        folder = make_run(tmp_path / "run")
        levels = [f"s{level}: &s{level} {{a: *s{level - 1}, b: *s{level - 1}}}" for level in range(1, 20)]
        (folder / "config.yaml").write_text("\n".join(["s0: &s0 {x: 1}", *levels]))
        (run,) = collect([folder], tmp_path / "report.html")
        assert "each alias counted with all that it repeats" in run.lacks["config"]

    def test_damaged_lines_are_said_and_the_rest_is_shown(self, tmp_path: Path) -> None:
        folder = make_run(tmp_path / "run")
        with open(folder / "samples.jsonl", "a") as file:
            file.write("{\n")
        (run,) = collect([folder], tmp_path / "report.html")
        assert len(run.conversations) == 2
        assert run.lacks["conversations"].startswith("samples.jsonl:3: not a JSON object")

    def test_a_run_of_another_machine_is_drawn_with_its_gpus(self, tmp_path: Path) -> None:
        folder = make_run(tmp_path / "run")
        config = ROOT / "configs" / "reasoning" / "ppo_tiny.yaml"
        placement = 'cluster.component_placement={"actor,critic": 0-1, "rollout,reward": 2-3}'
        (folder / "config.yaml").write_text(load_config(config, [placement]).resolved_yaml())
        (run,) = collect([folder], tmp_path / "report.html")
        assert "GPUs: drawn for nodes with" in run.lacks["placement note"]
        assert "gpu 3" in run.placement.lower()
        assert dict(run.card)["policy loss"]

    def test_evenly(self) -> None:
        assert evenly(range(5), 9) == [0, 1, 2, 3, 4]
        assert evenly(range(101), 3) == [0, 50, 100]


def test_a_device_is_idle_while_none_of_its_ranks_works() -> None:
    def event(name: str, kind: str, begin: float, end: float) -> Any:
        return {"name": name, "cat": kind, "ts": begin, "dur": end - begin}

    lanes = {
        "steps": [event("step 1", "step", 0, 100), event("step 2", "step", 100, 200)],
        "runner": [event("generate", "phase", 100, 140), event("train actor", "phase", 140, 200)],
        "rollout[0]": [event("generate", "call", 100, 140), event("put", "wait", 130, 140)],
        "actor[0]": [event("update", "call", 140, 200)],
    }
    placement = schedule_of({"actor": "0", "rollout": "1"})
    actor, rollout = busy_devices(lanes, placement)
    assert (actor.device, actor.components, actor.share) == ("GPU 0 of node 0", ("actor",), 0.6)
    assert rollout.share == pytest.approx(0.3)
    assert rollout.waiting == pytest.approx({"train actor": 0.6, "generate": 0.1})
    (shared,) = busy_devices(lanes, schedule_of({"actor,rollout": "0"}))
    assert shared.share == pytest.approx(0.9)
    assert without([(0, 10)], [(-1, 1), (4, 5), (9, 20)]) == [(1, 4), (5, 9)]


def schedule_of(placement: dict[str, str]) -> Any:
    from rl_platform.config.schema.cluster import Cluster

    return schedule(Cluster(component_placement=placement, devices_per_node=2), Inventory.emulated(1, 2))


class TestCommand:
    def test_it_writes_one_file(self, tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        opened: list[str] = []
        monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url) or True)
        ended = tool("report", str(make_run(tmp_path / "run")), "-o", str(tmp_path / "new" / "r.html"), "--open")
        assert ended.code == 0, ended.err
        assert ended.out == f"{tmp_path / 'new' / 'r.html'}\n"
        assert opened == [(tmp_path / "new" / "r.html").as_uri()]
        assert os.listdir(tmp_path / "new") == ["r.html"]

    def test_wrong_input(self, tool, tmp_path: Path) -> None:
        run = str(make_run(tmp_path / "run"))
        (tmp_path / "file.txt").write_text("x")
        damaged = make_run(tmp_path / "damaged")
        (damaged / "metrics.jsonl").write_text('{"step": 1}\noops\n{"step": 3}\n')
        for arguments, code, *texts in (
            (["nowhere", str(tmp_path)], 2, "no such folder", "value: nowhere", "holds runs, and is none"),
            ([str(tmp_path / "file.txt")], 2, "is a file of another kind", "the output folder of a run"),
            (
                [str(damaged)],
                65,
                "metrics.jsonl:2: not a JSON object with a step: 'oops'. Remove the line, or resume the run",
            ),
            ([run, "-o", str(tmp_path)], 2, "--output: is a folder", "*.html"),
            ([run, run, "-o", f"{run}/metrics.jsonl"], 2, "has the wrong ending", "*.html", "more than once"),
            ([run] * 9, 2, "too many runs for one page", "at most 8"),
            ([run, "-o", str(tmp_path / "file.txt" / "r.html")], 2, "file.txt is a file"),
            ([], 2, "Missing argument"),
        ):
            ended = tool("report", *arguments)
            assert ended.code == code, (arguments, ended.err)
            assert all(text in ended.err for text in texts), (texts, ended.err)
            assert "Traceback" not in ended.err

    def test_a_run_that_goes_on_is_followed_to_its_end(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder, output = make_run(tmp_path / "run"), tmp_path / "report.html"
        (folder / "lock").touch()
        seen: list[int] = []

        def sleep(_: float) -> None:
            seen.append(data_of(output.read_text())["follow"])
            with open(folder / "metrics.jsonl", "a") as file:
                file.write('{"step": 13, "reward/mean": 1.0}\n{"step": 14, "rew')  # the last line is being written
            (folder / "finished").touch()

        monkeypatch.setattr(report_command.time, "sleep", sleep)
        lines = list(report_command.report([folder], output, show=False, follow=True))
        assert lines[1:] == ["written again every 10 s until the run ends; Ctrl-C stops that"]
        assert seen == [10]
        data = data_of(output.read_text())
        assert (data["follow"], data["runs"][0]["step"], data["runs"][0]["state"]) == (0, 13, "finished")

    def test_following_a_finished_run_ends(self, tmp_path: Path) -> None:
        lines = list(report_command.report([make_run(tmp_path / "run")], tmp_path / "r.html", show=False, follow=True))
        assert lines[-1] == "no run goes on, so the report is final"


class TestDefinitions:
    def test_the_page_of_the_docs_is_generated(self, tool) -> None:
        assert tool("metrics").out == (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")

    def test_every_definition_is_complete(self) -> None:
        names = [each.name for each in definitions()]
        assert len(names) == len({*names})
        for each in definitions():
            assert each.means, each.name
            assert (ROOT / each.source).is_file(), each
            filled = each.name.replace("<", "").replace(">", "")
            assert each.fits(filled)

    def test_the_first_definition_that_fits_counts(self) -> None:
        found = {name: definition_of(name) for name in ("time/actor.update", "time/train actor", "val/gsm8k/accuracy")}
        assert [each and each.name for each in found.values()] == [
            "time/<component>.<method>",
            "time/<phase>",
            "val/<source>/accuracy",
        ]
        assert definition_of("my/metric") is None
