"""Models with an id of the Hugging Face hub, on machines that reach the hub and on others."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import HANG_S

CODE = """
import json, os
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import LocalEntryNotFoundError
from rl_platform.models.pretrained.model_folder import model_folder
name = model_folder("acme/small")
try:
    hf_hub_download(name, "adapter_config.json")
except Exception as error:
    missing = type(error).__name__
kept = open(hf_hub_download(name, "config.json")).read() if os.environ.get("HF_HUB_OFFLINE") else ""
print(json.dumps([name, missing, kept, os.environ.get("HF_HUB_OFFLINE")]))
"""


@pytest.fixture
def refusing_hub() -> Iterator[str]:
    """The address of a hub that has no file."""

    class Refuses(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuses) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def load(home: Path, endpoint: str) -> tuple[list[object], str]:
    """What CODE printed with a cache that has config.json of acme/small, and its stderr."""
    model = home / "hub" / "models--acme--small"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("abc")
    (model / "snapshots" / "abc").mkdir(parents=True)
    (model / "snapshots" / "abc" / "config.json").write_text("{}")
    outside = ("HF_", "TRANSFORMERS_", "HTTP_PROXY", "http_proxy", "NO_PROXY", "no_proxy")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(outside)}
    variables |= {"HF_HOME": str(home), "HF_ENDPOINT": endpoint}
    command = [sys.executable, "-c", CODE]
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=2 * HANG_S)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout), ended.stderr


def test_without_the_hub_its_cache_is_read_at_once(tmp_path: Path) -> None:
    """By the library alone each file that the cache lacks costs six attempts."""
    printed, told = load(tmp_path, "http://127.0.0.1:9")
    assert printed == ["acme/small", "LocalEntryNotFoundError", "{}", "1"]
    assert told.splitlines() == [
        "http://127.0.0.1:9 cannot be reached ([Errno 111] Connection refused): "
        "models and data with an id of the hub are read from its local cache"
    ]


def test_a_hub_that_answers_is_asked(tmp_path: Path, refusing_hub: str) -> None:
    printed, _ = load(tmp_path, refusing_hub)
    assert printed == ["acme/small", "RemoteEntryNotFoundError", "", None]
