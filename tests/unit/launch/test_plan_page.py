"""`--plan=html`: one file without network, with the plan of every position and a measured step."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("unmeasured")
TINY = ("runner.max_steps=3", "runner.trace_steps=3", "runner.val_check_interval=0", "runner.output_dir=run")


def data_of(html: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    return json.loads(found.group(1))


def test_the_page_holds_the_plan_of_every_position(command):
    ended = command("reasoning.yaml", "runner.experiment_name=</script><b>", "--plan=html")
    assert ended.code == 0, ended.err
    assert set(re.findall(r"https?://[^\"' )]+", ended.out)) == set()
    assert "</script><b>" not in ended.out
    data = data_of(ended.out)
    assert data["title"] == "</script><b>"
    own = data["points"][",".join(map(str, data["own"]))]
    plan = json.loads(command("reasoning.yaml", "--plan=json").out)
    assert own["seconds"] == plan["step"]["seconds"]
    assert [span[1] for span in own["spans"]] == [phase["phase"] for phase in plan["step"]["phases"]]
    assert own["memory"][0]["peak"] == plan["devices"][0]["memory_bytes"]["peak"]
    assert own["changes"] == ""
    sizes = 1
    for slider in data["sliders"]:
        sizes *= len(slider["values"])
    assert len(data["points"]) == sizes > 1
    assert all(0 <= point["picture"] < len(data["pictures"]) for point in data["points"].values() if "picture" in point)


def test_a_run_stands_beside_its_plan(command, folder):
    assert command("reasoning.yaml", *TINY).code == 0
    ended = command("reasoning.yaml", "--plan=html", "--calibrate=run")
    assert ended.code == 0, ended.err
    measured = data_of(ended.out)["measured"]
    assert measured["spans"][0][0] == "generate"
    assert all(0 <= start <= stop for _, start, stop in measured["spans"])
    assert {"generate", "train actor"} <= {phase for phase, _, _ in measured["rows"]}
    Path("run/trace.json").unlink()
    measured = data_of(command("reasoning.yaml", "--plan=html", "--calibrate=run").out)["measured"]
    assert measured["spans"] == []
    assert "a run writes it after the steps of runner.trace_steps" in measured["lacks"]


def test_a_wrong_config_and_a_wrong_run_give_no_page(command):
    for wrong in ("actor.optim.lr=-1", "--calibrate=nothing"):
        ended = command("reasoning.yaml", "--plan=html", wrong)
        assert (ended.code, ended.out) == (2, ""), ended.err
