"""Secrets are neither printed nor stored nor sent to loggers."""

from __future__ import annotations

from pathlib import Path
from time import process_time

import pytest
import yaml

from rl_platform.config import load_config
from rl_platform.errors import ConfigError, Problem
from rl_platform.redact import is_secret, redacted, without_secrets
from rl_platform.reporter import Reporter, Reporters

SECRET = "hunter2-very-secret"
CONFIG = """\
runner: {{task_type: reasoning}}
cluster:
  component_placement: {{"actor,rollout,reward": all}}
  node_groups: [{{label: a, node_ranks: "0", env_vars: {{WANDB_API_KEY: "{secret}", NCCL_DEBUG: INFO}}}}]
algorithm: {{adv_type: grpo, group_size: 4}}
data: {{task: {{type: digits}}}}
actor: {{model: {{path: HuggingFaceTB/SmolLM2-135M}}}}
reward: {{type: http, url: "{url}"}}
"""


@pytest.mark.parametrize(
    "text",
    [
        f"http://user:{SECRET}@host/score did not answer",
        f"https://user:pa/{SECRET}@host:80/x",
        f"postgres://{SECRET}@host",
        f"http://host/score?token={SECRET}&x=1",
        f"http://host/score?{SECRET}",
        f"Authorization: Bearer {SECRET}",
        f"WANDB_API_KEY={SECRET}",
        f"{{'OPENAI_API_KEY': '{SECRET}', 'a': 1}}",
        f"password: {SECRET}",
        f"sk-{SECRET.replace('-', '')}",
        f"hf_{SECRET.replace('-', '')}",
        f"github_pat_{SECRET.replace('-', '')}",
        f"AIza{SECRET.replace('-', '')}",
        f"eyJhbGciOiJIUzI1NiJ9.{SECRET}.{SECRET}",
        f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET.replace('-', '')}\n-----END RSA PRIVATE KEY-----",
        f"bob:{SECRET}@proxy:3128 does not answer",
        f"https:\\/\\/bob:{SECRET}@host\\/x",
        f"Authorization: Token {SECRET}",
        f"authorization: Digest username=bob, response={SECRET}",
        f"{{'Cookie': 'session={SECRET}', 'a': 1}}",
        f"X-Api-Key: {SECRET}",
        f'{{\\"password\\": \\"{SECRET}\\"}}',
        f"--api-key {SECRET}",
        f"machine host login bob password {SECRET}",
        f"passphrase: {SECRET}",
        f"bob:{SECRET}@example.org",
        f"bob:{SECRET.replace('2', '')}@example.org/path",
    ],
)
def test_messages_have_no_secrets(text: str) -> None:
    shown = redacted(text)
    assert "***" in shown
    assert "very" not in shown
    assert redacted(shown) == shown
    assert "very" not in str(Problem("reward.url", "is no address", value=text, hint="another"))


@pytest.mark.parametrize(
    "text",
    [
        "http://host:80/v1/chat/completions",
        "actor.model.tokenizer: bytes",
        "max_tokens=5",
        "a@b",
        "1e-5",
        "api_key_env: X",
        "reward.type: hf_math_verify",
        "hf_hub_download of a model",
    ],
)
def test_other_messages_stay(text: str) -> None:
    assert redacted(text) == text


@pytest.mark.parametrize(
    "piece",
    [
        "-----BEGIN PRIVATE KEY-----",
        "--a",
        "-" * 30,
        "eyJaaaaaaaaaaa.",
        "login a ",
        "a.",
        "a",
        "://",
        "?a",
        "token",
        "a:",
        "://a:",
        "token= ",
        "bearer ",
        "sk-",
        "?",
        ";",
        "&",
        "x:1",
        "@",
        "hf_",
    ],
)
def test_long_texts_take_little_time(piece: str) -> None:
    began = process_time()
    redacted(piece * 20_000)
    assert process_time() - began < 2.0


def test_values_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", SECRET)
    assert redacted(f"the server says: no {SECRET} here") == "the server says: no *** here"
    monkeypatch.delenv("SOME_TOKEN")
    monkeypatch.setenv("HTTPS_PROXY", f"bob:{SECRET}@proxy:3128")
    assert redacted(f"the proxy refuses {SECRET}") == "the proxy refuses ***"


def test_the_working_folder_of_a_shell_is_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PWD", "/home/someone/code")
    text = 'File "/home/someone/code/reward.py", line 3'
    assert redacted(text) == text


def test_names() -> None:
    assert all(map(is_secret, ("WANDB_API_KEY", "hf_token", "password", "env_vars.AWS_SECRET_ACCESS_KEY")))
    assert all(
        map(is_secret, ("X-Api-Key", "PGPASSWORD", "GITHUB_PAT", "accessToken", "OPENAI_KEY", "DB_PASS", "Cookie"))
    )
    assert not any(map(is_secret, ("max_tokens", "tokenizer", "api_key_env", "keys", "sort_key")))


def test_nested_values() -> None:
    tree = {"a": [{"token": SECRET, "url": f"http://h/?key={SECRET}&n=2"}], "n": 1, "token": None}
    assert without_secrets(tree) == {"a": [{"token": "***", "url": "http://h/?key=***&n=2"}], "n": 1, "token": None}


def test_stored_configs_and_loggers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG.format(secret=SECRET, url=f"http://host/score?token={SECRET}&n=1"))
    loaded = load_config(tmp_path / "config.yaml")
    for shown in (loaded.resolved_yaml(), str(loaded.shown())):
        assert SECRET not in shown
        assert "http://host/score?token=***&n=1" in shown
        assert "INFO" in shown
    assert SECRET in loaded.resolved_yaml(with_secrets=True)


def test_references_to_the_environment_are_stored_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SCORE_VALUE", SECRET)  # no telling name
    url = "http://host/${env:MY_SCORE_VALUE}/score"
    (tmp_path / "config.yaml").write_text(CONFIG.format(secret="${env:MY_SCORE_VALUE}", url=url))
    loaded = load_config(tmp_path / "config.yaml")
    assert loaded.config.reward.url == f"http://host/{SECRET}/score"
    stored = yaml.safe_load(loaded.resolved_yaml())
    assert stored["reward"]["url"] == url
    assert loaded.shown()["reward"]["url"] == url
    assert SECRET not in f"{loaded.resolved_yaml()} {loaded.shown()}"
    (tmp_path / "again.yaml").write_text(loaded.resolved_yaml())
    assert load_config(tmp_path / "again.yaml").config == loaded.config
    assert SECRET not in redacted(f"cannot reach http://host/{SECRET}/score")


def test_a_variable_that_is_not_set_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG.format(secret="x", url="http://host/${env:NOT_SET_ANYWHERE}"))
    with pytest.raises(ConfigError, match=r"reward\.url: there is no environment variable NOT_SET_ANYWHERE"):
        load_config(tmp_path / "config.yaml")


@pytest.mark.parametrize("override", ["reward.url=", "reward.url ", "rewrad.url=", "reward="])
def test_a_refused_password_is_not_printed(tmp_path: Path, override: str) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG.format(secret="x", url="http://host/score"))
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "config.yaml", [f"{override}http://user:{SECRET}@host/score"])
    assert SECRET not in str(caught.value)


def test_notes() -> None:
    class Sink(Reporter):
        notes: list[str] = []  # noqa: RUF012

        def note(self, text: str) -> None:
            self.notes.append(text)

    sink = Sink()
    Reporters([sink]).note(f"http://user:{SECRET}@host does not answer")
    assert sink.notes == ["http://***@host does not answer"]
