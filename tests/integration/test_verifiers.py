"""Environments of the library verifiers through the real command: learning, tools, failures, wrong names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from child_forks import forked_children
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rl_platform.metrics import read_metrics

vf = pytest.importorskip("verifiers", reason="pip install 'rl-platform[verifiers]'")
if not hasattr(vf, "load_environment"):
    pytest.skip("verifiers 0.4 has no load_environment()", allow_module_level=True)

ENVIRONMENTS = '''
import httpx
import verifiers as vf
from datasets import Dataset

ROWS = Dataset.from_list([{"question": f"{number}:", "answer": str(2 * number)} for number in range(9)])

def ascii(completion) -> float:
    said = "".join(message["content"] or "" for message in completion if message["role"] == "assistant")
    return sum(letter.isascii() for letter in said) / 6

def right(completion, answer) -> float:
    return float(completion[-1]["content"] == answer)

def raises(answer) -> float:
    if answer in "02468":
        raise KeyError("my own mistake")
    return 1.0

def asks(completion) -> float:
    return httpx.get("http://127.0.0.1:9/judge").json()["score"]

def ranked(completions) -> list[float]:
    return [1.0 for _ in completions]

def turns(state) -> float:
    raise ValueError("a metric, which has no weight")

class TwoTurns(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "<more>"}]

def double(n: int) -> str:
    """Doubles a number."""
    return str(2 * n)

def load_environment(kind: str = "single", reward: str = "ascii", rows: int = 9):
    rubric = vf.Rubric(funcs=[globals()[reward], turns], weights=[1.0, 0.0])
    options = {"dataset": ROWS.select(range(rows)), "rubric": rubric}
    if kind == "tools":
        return vf.ToolEnv(tools=[double], max_turns=4, **options)
    if kind == "hub":
        return vf.SingleTurnEnv(dataset=httpx.get("http://127.0.0.1:9/rows").json())
    return TwoTurns(max_turns=2, **options) if kind == "two turns" else vf.SingleTurnEnv(**options)
'''
ENGINE = '''
from pathlib import Path

from rl_platform.engines.rollout.base import Completion
from rl_platform.models.pretrained.hf_tokenizer import HFTokenizer
from rl_platform.records import WeightsReceived

class Calling:
    """Calls the tool with the number in the question, then answers with what it returned."""

    def __init__(self, setup):
        self.version = -1
        self.tokenizer = HFTokenizer("tokenizer", "actor.model")

    def receive(self, weights):
        self.version = weights.version
        return WeightsReceived(weights.version, weights.bytes, weights.buckets)

    def generate(self, requests, sampling, on_finished):
        for request in requests:
            text = self.tokenizer.decode(request.token_ids, special=True)
            assert '"name": "double"' in text, text  # the schema, by the chat template
            if "<tool_response> " in text:
                said = text.split("<tool_response> ")[1].split()[0]
            else:
                number = text.split("<s> user ")[1].partition(":")[0]
                said = '<tool_call>{"name": "double", "arguments": {"n": %s}}</tool_call>' % number
            tokens = (*self.tokenizer.encode(said), self.tokenizer.eos_token_ids[0])
            on_finished(Completion(request.index, tokens, (-1.0,) * len(tokens), "stop"))

    def abort(self): ...
    def offload(self): ...
    def close(self): ...
'''
TEMPLATE = (
    "{% if tools %}<s> system {% for tool in tools %} {{ tool | tojson }} {% endfor %} write "
    '<tool_call> {"name": n} </tool_call> </s> {% endif %}'
    "{% for m in messages %}<s> {% if m.role == 'tool' %}user <tool_response> {{ m.content }} </tool_response>"
    "{% else %}{{ m.role }} {{ m.content }}{% endif %}</s> {% endfor %}<s> assistant"
)
IMPORTS = """
import datasets, verifiers.clients
import rl_platform.components.agents.verifiers_program
verifiers.load_environment, verifiers.MultiTurnEnv
"""
WIDE = "actor.model.random_init.max_positions=64"


@pytest.fixture(scope="module", autouse=True)
def imported() -> Iterator[None]:
    """Imports the library once, which takes four seconds of processor time, and not in each of two dozen processes."""
    with forked_children("agents.verifiers_program", IMPORTS):
        yield


@pytest.fixture(autouse=True)
def environments(folder: Path) -> None:
    (folder / "small_rows.py").write_text(ENVIRONMENTS)


def agent(**arguments: object) -> str:
    parameters = f"{{id: small-rows, args: {{{', '.join(f'{name}: {value}' for name, value in arguments.items())}}}}}"
    return f"rollout.agent={{environment: {{type: verifiers, params: {parameters}}}}}"


def test_the_reward_of_a_rubric_is_learned(command) -> None:
    keys = (WIDE, "data.max_response_length=24", "rollout.sampling={max_new_tokens: 6}", "actor.optim.lr=1.0e-2")
    steps = ("runner.max_steps=10", "data.train_batch_size=16", "data.mini_batch_size=8", "data.train_size=40")
    ended = command("reasoning.yaml", agent(kind="two turns"), *keys, *steps)
    assert ended.code == 0, ended.err
    rows = read_metrics(Path("out"))[1:]
    assert all((row["turns/mean"], row["tool/errors"], row["reward/unscored"]) == (2, 0, 0) for row in rows)
    rewards = [row["reward/mean"] for row in rows]
    assert sum(rewards[-3:]) > 1.3 * sum(rewards[:3])


def test_tools_are_called_through_the_chat_template(command, folder: Path) -> None:
    (folder / "my_engine.py").write_text(ENGINE)
    save_tokenizer()
    keys = ("rollout.backend=my_engine.py:Calling", "actor.model.tokenizer=tokenizer", "data.use_chat_template=true")
    lengths = ("data.max_prompt_length=512", "data.max_response_length=256", "runner.max_steps=2")
    positions = "actor.model.random_init.max_positions=1024"
    ended = command("reasoning.yaml", agent(kind="tools", reward="right"), *keys, *lengths, positions)
    assert ended.code == 0, ended.err
    for row in read_metrics(Path("out"))[1:]:
        assert (row["reward/mean"], row["turns/mean"], row["tool/calls"], row["tool/errors"]) == (1, 2, 1, 0)
        assert row["actor/grad_norm"] > 0
        assert row["len/observation_mean"] > 0


def test_a_reward_function_that_raises_costs_its_trajectory(command) -> None:
    """The library alone counts the reward as 0."""
    keys = (WIDE, "runner.max_steps=1", "data.train_batch_size=20", "data.val_size=2")
    ended = command("reasoning.yaml", agent(reward="raises"), *keys)
    assert ended.code == 0, ended.err
    row = read_metrics(Path("out"))[1]
    assert 0 < row["tool/errors"] < 20
    assert row["reward/unscored"] == row["tool/errors"]
    assert (row["reward/mean"], row["turns/mean"]) == (1, 1)


def test_a_reward_that_cannot_be_reached_ends_the_run_with_its_traceback(command) -> None:
    ended = command("reasoning.yaml", agent(reward="asks"), WIDE)
    assert ended.code == 70
    assert "httpx.ConnectError" in ended.err
    assert "rollout.agent.environment verifiers failed for all" in ended.err


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (agent(kind="hub"), "Connection refused"),
        (agent(reward="ranked"), "compares the rollouts of a group"),
        (agent(rows=0), "its dataset is empty"),
        (agent(nothing=1), "unexpected keyword argument 'nothing'"),
        (agent().replace("small-rows", "small-row"), "Could not import 'small-row' environment"),
        (agent().replace("id: small-rows", "name: small-rows"), "id names the environment"),
        (agent().replace("args: {}", "args: 3"), "id names the environment"),
    ],
)
def test_wrong_environments_are_told_before_anything_starts(command, environment: str, message: str) -> None:
    ended = command("reasoning.yaml", environment)
    assert ended.code == 2
    assert message in ended.err
    assert "rollout.agent." in ended.err


def save_tokenizer() -> None:
    """Writes a tokenizer with one token per character, and a chat template with tools."""
    words = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    inner = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    made.chat_template = TEMPLATE
    made.save_pretrained("tokenizer")
