"""A tiny reward model as a Hugging Face folder, reward servers in threads, and the clock of hung rewards."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_platform.envs.reasoning.scoring_process import ScoringProcess

SHORT_S = 0.2  # the pool looks at its clock twice in that time


class HungRewards:
    """The clock of scoring processes, for a pool with the timeout `SHORT_S`. It stands still, so that no response runs
    out of time because the machine is busy; `halfway` and `over` say which processes have spent the time of a response.
    """

    def __init__(self, is_hung: Callable[[int], bool], monkeypatch: pytest.MonkeyPatch) -> None:
        """is_hung: of a process id; these run out of time at once, as long as `waits` is false."""
        self.halfway, self.over, self.waits = set[int](), set[int](), False

        def waiting_s(process: ScoringProcess) -> float:
            pid = process.child.pid
            if process.idle or not is_hung(pid):
                return 0.0
            if pid in self.over or not self.waits:
                return 2 * SHORT_S
            return 0.6 * SHORT_S if pid in self.halfway else 0.0

        monkeypatch.setattr(ScoringProcess, "waiting_s", property(waiting_s))


TEMPLATE = "{% for turn in messages %}<{{ turn.role }}>{{ turn.content }}<end>{% endfor %}"
Answer = tuple[int, str] | None


def make_classifier(
    folder: Path, *, num_labels: int = 1, template: str | None = TEMPLATE, pad: str | None = None, positions: int = 128
) -> Path:
    """Writes a random Llama that gives `num_labels` numbers and reads bytes, with its tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

    vocabulary = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<end>", "<system>", "<user>", "<assistant>"]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>", pad_token=pad)
    tokenizer.add_special_tokens({"additional_special_tokens": special[1:]})
    tokenizer.chat_template = template
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=positions,
        num_labels=num_labels,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = LlamaForSequenceClassification(config)
        torch.nn.init.normal_(network.score.weight)
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def reward_server(answer: Callable[[list[dict[str, Any]]], Answer], port: int = 0) -> Iterator[str]:
    """A server whose answer to the items of a request is `answer(items)`. Gives its address."""
    with post_server(lambda request, _: answer(request["items"]), port) as url:
        yield url


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


@contextmanager
def post_server(
    answer: Callable[[Any, str | None], Answer], port: int = 0, path: str = "score?by=test"
) -> Iterator[str]:
    """A server whose answer to a request with this key is `answer(request, key)`: status and body, or None to close
    the connection without one. Gives its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            request = json.loads(body, parse_constant=_refused)
            found = answer(request, self.headers["Authorization"])
            if found is None:
                self.close_connection = True
                return
            self.send_response(found[0])
            self.end_headers()
            self.wfile.write(found[1].encode())

        def log_message(self, *_: object) -> None:
            """Nothing on the terminal."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/{path}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def scores(*values: Any) -> Answer:
    return 200, json.dumps({"scores": values})
