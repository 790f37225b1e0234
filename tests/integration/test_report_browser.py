"""The report in a real browser: it draws itself without network, and texts of models stay texts.

Needs the package playwright and a Chromium of the system, which nothing downloads.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from run_folder import make_run, write_lines

from rl_platform.launch.tools.report.collect import collect
from rl_platform.launch.tools.report.page import write

playwright = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed: apt-get install chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as starter:
        started = starter.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield started
        started.close()


# Cells of one word that take several lines.
BROKEN_WORDS = """[...document.querySelectorAll("th, #phases td")].filter(cell => {
  const text = document.createRange();
  text.selectNodeContents(cell);
  const lines = [...text.getClientRects()].map(box => Math.round(box.top / 15));
  const word = !/\\s/.test(cell.textContent) && !cell.querySelector("svg");
  return word && Math.max(...lines) - Math.min(...lines) > 1;
}).map(cell => cell.textContent)"""


class Opened:
    """A page that has drawn itself. problems: errors, and requests that leave the file."""

    def __init__(self, browser: Any, path: Path, **options: Any) -> None:
        self.problems: list[str] = []
        self.page = browser.new_page(viewport={"width": 1180, "height": 900}, reduced_motion="reduce", **options)
        self.page.on("console", lambda message: self.problems.append(message.text))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", self._requested)
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-ready=yes]", timeout=60_000, state="attached")

    def _requested(self, request: Any) -> None:
        if not request.url.startswith(("file:", "data:")):
            self.problems.append(request.url)

    def tip(self) -> str:
        self.page.locator("#tip").wait_for(state="visible", timeout=60_000)
        return self.page.locator("#tip").inner_text()

    def tip_under_the_pointer(self, place: Any) -> str:
        """The pointer comes back until the tip shows: a layout that settles late moves the place away below it."""
        for _ in range(20):
            place.hover()
            if self.page.locator("#tip").is_visible():
                break
            self.page.mouse.move(0, 0)
        return self.tip()


def test_a_reasoning_run(browser: Any, tmp_path: Path) -> None:
    write(collect([make_run(tmp_path / "run")], tmp_path / "report.html"), tmp_path / "report.html")
    opened = Opened(browser, tmp_path / "report.html")
    page = opened.page
    assert page.evaluate("document.body.dataset.evil") is None  # the script inside a response
    assert page.locator("img[onerror]").count() == 0
    assert "</script><script>" in page.locator("#conversations").inner_text()

    assert page.locator(".finding.bad b").all_inner_texts() == ["Losses or gradients are not finite"]
    assert "reward/mean went from 0.083 to 1.000" in page.locator("#verdict").inner_text()
    assert page.locator("#curves .chart svg path").count() >= 2
    tip = opened.tip_under_the_pointer(page.locator("#curves [data-metric='actor/approx_kl']"))
    assert "how far the policy moved" in tip
    assert "unit: nats" in tip
    page.keyboard.press("Escape")
    page.locator("#tip").wait_for(state="hidden", timeout=60_000)

    chart = page.locator("#curves svg[aria-label='reward/mean']").first
    chart.focus()
    page.keyboard.press("ArrowLeft")
    assert "at 11" in opened.tip()

    page.get_by_label("with tokens only").check()
    page.get_by_role("button", name="ratio").click()
    assert page.get_by_role("button", name="ratio").get_attribute("aria-pressed") == "true"
    page.locator("#conversations .text[aria-label^=tokens]").press("ArrowRight")
    assert "log-prob" in opened.tip()
    tip = opened.tip_under_the_pointer(page.locator("#conversations .token").first)
    assert "1.11" in tip  # exp(-0.9 - -1)

    page.get_by_placeholder("find a metric").fill("nonsense")
    assert "No metric has this" in page.locator("#curves").inner_text()
    assert opened.problems == []


def test_two_runs_and_an_episode(browser: Any, tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "first", task="embodied"), make_run(tmp_path / "second", task="embodied")]
    write_lines(runs[1] / "metrics.jsonl", [{"step": step, "episode/return": step} for step in range(1, 4)])
    write(collect(runs, tmp_path / "report.html"), tmp_path / "report.html")
    opened = Opened(browser, tmp_path / "report.html", color_scheme="dark")
    page = opened.page
    assert page.locator("h1").inner_text() == "2 runs compared"
    assert page.locator("#comparison tbody").first.locator("tr").count() == 2
    assert page.locator(".finding .level").all_inner_texts()[-1].lower() == "note"  # three steps are too few to judge
    ticks = page.locator("#curves svg[aria-label='episode/return'] text[text-anchor=middle]").all_text_contents()
    assert all(tick.isdigit() for tick in ticks), ticks  # there is no step 1.5
    assert page.locator("#episodes video").count() == 1
    assert page.locator("#episodes svg[aria-label='reward of each step'] path").count() == 1
    assert "Values of single steps were not recorded" in page.locator("#episodes").inner_text()
    assert "config.yaml does not load here" in page.locator("#placement").inner_text()
    page.get_by_role("button", name="second").click()
    assert "runner.trace_steps" in page.locator("#timeline").inner_text()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(13, 17, 23)"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert [text for text in opened.problems if "ERR_" not in text and "media" not in text.lower()] == []


def test_labels_of_large_negative_numbers_keep_their_sign(browser: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", task="embodied")
    rows = [{"step": step, "episode/return": -12_000.0 * step} for step in range(1, 9)]
    write_lines(run / "metrics.jsonl", rows)
    write(collect([run], tmp_path / "report.html"), tmp_path / "report.html")
    page = Opened(browser, tmp_path / "report.html").page
    labels = page.locator("#curves svg[aria-label='episode/return'] text[text-anchor=end]")
    assert any(text.startswith("-") for text in labels.all_text_contents())
    assert all(left >= 0 for left in labels.evaluate_all("all => all.map(each => each.getBBox().x)"))


def test_a_narrow_page_scrolls_tables_and_pictures_alone(browser: Any, tmp_path: Path) -> None:
    names = ["a_run_with_a_name", "another_run_with_a_name", "third_run"]
    runs = [make_run(tmp_path / name, task="embodied", name=name) for name in names]
    for run in runs:
        row = {"val/return": 500.0, "episode/return": 124.5, "time/step": 1.0, "time/sync weights": 0.1}
        write_lines(run / "metrics.jsonl", [row | {"step": step} for step in range(1, 4)])
    write(collect(runs, tmp_path / "report.html"), tmp_path / "report.html")
    page = Opened(browser, tmp_path / "report.html").page
    page.set_viewport_size({"width": 400, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") == 400
    assert page.evaluate(BROKEN_WORDS) == []


def test_a_followed_run_reads_the_file_again(browser: Any, tmp_path: Path) -> None:
    folder, path = make_run(tmp_path / "run"), tmp_path / "report.html"
    write(collect([folder], path), path, follow=1)
    opened = Opened(browser, path)
    write_lines(folder / "metrics.jsonl", [{"step": step, "reward/mean": 0.5} for step in range(1, 31)])
    write(collect([folder], path), path)
    opened.page.get_by_text("step 30 of").wait_for(timeout=60_000)
    assert opened.page.locator("nav .live").count() == 0  # it is final


def test_the_sliders_of_a_plan(browser: Any, tmp_path: Path, command: Any) -> None:
    config = Path(__file__).parents[2] / "configs/reasoning/recipes/deepseek_r1_7b_dapo_64gpu.yaml"
    (tmp_path / "plan.html").write_text(command("--plan=html", config).out, encoding="utf-8")
    opened = Opened(browser, tmp_path / "plan.html")
    page = opened.page
    before = page.locator("#step").inner_text()
    assert "max_response_length" not in page.locator("#command").inner_text()
    page.get_by_label("longest response").fill("4")
    assert page.locator("#step").inner_text() != before
    assert "data.max_response_length=32768" in page.locator("#command").inner_text()
    assert page.locator("text=cannot hold").count() == 1
    assert page.locator(".bar i").count() >= 7
    assert page.evaluate("document.querySelector('img').naturalWidth") > 0
    assert opened.problems == []


def test_a_measured_step_stands_beside_the_plan(browser: Any, tmp_path: Path, command: Any) -> None:
    config = Path(__file__).parents[2] / "configs/reasoning/ppo_tiny.yaml"
    steps = ("runner.max_steps=2", "runner.trace_steps=2", "runner.val_check_interval=0", "runner.save_interval=0")
    folder = tmp_path / "run"
    ended = command(config, *steps, f"runner.output_dir={folder}")
    assert ended.code == 0, ended.err
    html = command("--plan=html", f"--calibrate={folder}", config).out
    (tmp_path / "plan.html").write_text(html, encoding="utf-8")
    opened = Opened(browser, tmp_path / "plan.html")
    page = opened.page
    rows = [row.split("\t") for row in page.locator("#measured table").first.inner_text().splitlines()[1:]]
    assert {"generate", "log-probs", "values", "train critic", "train actor"} <= {row[0] for row in rows}
    assert all(len(row) == 4 and float(row[3]) > 0 for row in rows)
    boxes = [bar.bounding_box() for bar in page.locator("#measured .bar i").all()]
    assert len(boxes) >= 5
    assert all(box is not None and box["width"] > 0 for box in boxes)
    step = page.locator("#step").inner_text()
    page.get_by_label("longest response").fill("4")
    assert page.locator("#step").inner_text() != step
    assert page.locator("#measured").is_visible()
    assert opened.problems == []
