"""Paths that the operating system refuses: the key or option that names them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import typer.main

from rl_platform.config.explanations.given_words import given_words
from rl_platform.config.explanations.refused_paths import named_paths, refused_path
from rl_platform.errors import ConfigError, WorkerError
from rl_platform.launch import command
from rl_platform.launch.tools import verbs

NAMED = [("data.task.path", "data/gsm8k"), ("runner.output_dir", "~/runs/a"), ("reward.type", "mine/code.py:score")]
NAMED += [("env.python", "x" * 300), ("rollout.agent.function", "")]


def _refused(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("data/gsm8k", "data.task.path"),
        (os.path.abspath("data/gsm8k/train.jsonl"), "data.task.path"),
        (os.path.expanduser("~/runs/a/config.yaml"), "runner.output_dir"),
        (os.path.expanduser("~/runs"), "runner.output_dir"),
        ("mine/code.py", "reward.type"),
        (f"/cache/environments/{'x' * 300}/bin/python", "env.python"),
        ("data/gsm8", None),
        ("/etc/shadow", None),
        ("/", None),
        (os.getcwd(), None),
    ],
)
def test_the_key_that_names_the_path(path: str, key: str | None):
    problem = refused_path(_refused(errno.EACCES, path), NAMED)
    assert (problem and problem.key) == key


def test_the_message_says_where_and_what_to_do():
    error = _refused(errno.ENAMETOOLONG, "data/gsm8k/train.jsonl")
    problem = refused_path(error, NAMED, {"data.task.path": "my.yaml:3"}.__getitem__)
    assert str(problem).splitlines() == [
        "my.yaml:3: data.task.path: this path cannot be used: File name too long: data/gsm8k/train.jsonl",
        "    value: data/gsm8k",
        "    hint: a shorter path: most systems allow 255 bytes for a name and 4096 for a path",
    ]


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EIO])
def test_other_errors_keep_their_traceback(number: int):
    with pytest.raises(OSError, match="data/gsm8k"), named_paths(lambda: NAMED):
        raise _refused(number, "data/gsm8k")


def test_the_error_of_a_worker():
    with pytest.raises(ConfigError, match=r"data\.task\.path"), named_paths(lambda: NAMED):
        raise WorkerError("reward[0] failed") from _refused(errno.EACCES, "data/gsm8k")
    with pytest.raises(WorkerError), named_paths(lambda: NAMED):
        raise WorkerError("reward[0] failed") from KeyError("data/gsm8k")


def test_words_of_a_command_line():
    app = typer.main.get_command(verbs.app)
    words = ["out", "-o", "a.png", "--compare", "in", "--title=x", "k.y=z"]
    given = [("RUN", "out"), ("-o", "a.png"), ("RUN", "in"), ("--title", "x"), ("k.y", "z")]
    assert list(given_words(app.commands["plot"], words)) == given
    launch = typer.main.get_command(command.app)
    assert list(given_words(launch, ["--eval", "out"], "--eval")) == [("--eval", "out")]


LONG = "x" * 300
TOO_LONG = "this path cannot be used: File name too long"


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["embodied.yaml", f"runner.output_dir={LONG}"], "command line: runner.output_dir"),
        (["embodied.yaml", f"runner.resume={LONG}", "runner.max_step=3"], "command line: runner.resume"),
        (["embodied.yaml", f"runner.warm_start={{demonstrations: {LONG}}}"], "runner.warm_start.demonstrations"),
        (["reasoning.yaml", f"actor.model={{path: {LONG}}}"], "command line: actor.model.path"),
        (["reasoning.yaml", f"actor.model.tokenizer={LONG}"], "command line: actor.model.tokenizer"),
        (["questions.yaml"], "questions.yaml:10: data.task.path"),
        (["--eval", LONG], "--eval"),
        (["embodied.yaml", "--plan", "--calibrate", LONG], "--calibrate"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_launch_names_the_path_that_is_refused(command, folder: Path, words: list[str], key: str):
    questions = (folder / "reasoning.yaml").read_text().replace("  train_size: 60\n", "")
    task = "{type: digits, params: {operation: last, length: 2}}"
    (folder / "questions.yaml").write_text(questions.replace(task, f"{{type: jsonl, path: {LONG}}}"))
    ended = command(*words)
    assert ended.code == 2, ended.err
    assert f"{key}: {TOO_LONG}" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("name", [LONG, f"{LONG}.yaml", "/".join("x" * 2500)])
def test_a_config_whose_name_is_too_long(command, name: str):
    ended = command(name)
    assert (ended.code, ended.out) == (2, "")
    assert "config: the file cannot be read: File name too long" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["plot", LONG], "RUN"),
        (["report", LONG], "RUN"),
        (["export", LONG], "RUN"),
        (["snapshot", LONG], "RUN"),
        (["record", LONG, "--step", "1"], "RUN"),
        (["replay", LONG], "RECORDING"),
        (["convert", LONG], "FILE"),
        (["data", "gsm8k", "--from", LONG], "--from"),
        (["data", "gsm8k", "--from=.", "-o", LONG], "-o"),
        (["sweep", "embodied.yaml", "runner.seed=1,2", f"--output={LONG}"], "--output"),
        (["environment-server", f"{LONG}.pyz"], "FILE"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
@pytest.mark.usefixtures("folder")
def test_verbs_name_the_path_that_is_refused(tool, words: list[str], key: str):
    ended = tool(*words)
    assert ended.code == 2, ended.err
    assert f"{key}: {TOO_LONG}" in ended.err
    assert "Traceback" not in ended.err


def test_a_folder_that_may_not_be_entered(command, tool, monkeypatch: pytest.MonkeyPatch):
    stat = os.stat

    def locked(path, **options):
        if str(path).endswith("locked/run"):
            raise _refused(errno.EACCES, str(path))
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", locked)
    refused = "this path cannot be used: Permission denied"
    for ended in (command("embodied.yaml", "runner.output_dir=locked/run"), tool("plot", "locked/run")):
        assert ended.code == 2, ended.err
        assert refused in ended.err
        assert "value: locked/run" in ended.err
        assert "Traceback" not in ended.err
