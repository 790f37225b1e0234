"""Tools by JSON schema and text environments: what the policy reads, what is masked, what user code may do wrong.

The tools run in their real processes. A scripted engine writes the calls, as a random model would write none.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from stand_ins import Sink
from tiny_configs import REASONING
from waiting import HANG_S

from rl_platform.algorithms.shaping import ShapedRewards
from rl_platform.components.actor import LanguageActor
from rl_platform.components.agents import environment_loop, tool_processes, verifiers_program
from rl_platform.components.agents.agent_process import AgentProcess
from rl_platform.components.agents.conversation_metrics import conversation_metrics
from rl_platform.components.agents.environment_loop import check_environment
from rl_platform.components.agents.tool_classes import Calculator, SearchTool
from rl_platform.components.agents.tool_formats import format_of
from rl_platform.components.agents.tool_loop import schemas_of
from rl_platform.components.rollout import LanguageRollout
from rl_platform.config.schema.reward import Reward
from rl_platform.config.schema.rollout import Agent, EnvironmentOptions, ToolOptions
from rl_platform.errors import ConfigError, WorkerError
from rl_platform.models.pretrained.hf_tokenizer import HFTokenizer
from rl_platform.records import Prompt, Trajectory
from rl_platform.runners.trajectories import check_any_scored, rollout_batch

SCHEMA = {"name": "x", "description": "y", "parameters": {"type": "object"}}
TINY = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "intermediate_size": 32}
ENGINE = """
from pathlib import Path

from rl_platform.engines.rollout.base import Completion
from rl_platform.models.tokenizer import ByteTokenizer
from rl_platform.models.pretrained.hf_tokenizer import HFTokenizer
from rl_platform.records import WeightsReceived

class Scripted:
    '''Writes the parts of the text between « and » of its context, one per response; each token has log-prob -1.'''

    def __init__(self, setup):
        self.version = -1
        folder = Path(__file__).with_name("tokenizer")
        rendered = folder.exists()  # by a chat template; else each response ends with a token of its own
        self.tokenizer = HFTokenizer(str(folder), "actor.model") if rendered else ByteTokenizer()
        self.turn_end = None if rendered else self.tokenizer.eos_token_ids[0]

    def receive(self, weights):
        self.version = weights.version
        return WeightsReceived(weights.version, weights.bytes, weights.buckets)

    def generate(self, requests, sampling, on_finished):
        for request in requests:
            text, end = self.tokenizer.decode(request.token_ids, special=True), self.tokenizer.eos_token_ids[0]
            turns = text.partition("«")[2].partition("»")[0].split("¦")
            said = turns[max(text.count("<s> assistant") - 1, request.token_ids.count(self.turn_end))]
            tokens = (*self.tokenizer.encode(said), end)[: request.limit(sampling)]
            reason = "stop" if tokens[-1] == end else "length"
            on_finished(Completion(request.index, tokens, (-1.0,) * len(tokens), reason))

    def abort(self): ...
    def offload(self): ...
    def close(self): ...
"""
TOOLS = """
import os, threading, time
from pathlib import Path

FOLDER = Path(__file__).parent
LOCK, NOW, MOST = threading.Lock(), 0, 0

def schema(name):
    properties = {"n": {"type": "integer"}}
    return {"name": name, "description": "A tool.", "parameters": {"type": "object", "properties": properties}}

class Count:
    schema = schema("count")

    def __init__(self, question, params):
        self.total, self.step, self.question = 0, params.get("step", 1), question["answer"]

    def call(self, arguments):
        self.total += self.step * arguments.get("n", 1)
        return f"{self.question}:{self.total}"

    def close(self):
        (FOLDER / f"closed-{self.question}-{self.total}").touch()

class Bad:
    schema = schema("bad")

    def __init__(self, question, params): ...

    def call(self, arguments):
        match arguments["n"]:
            case 0: raise KeyError("my own mistake")
            case 1: time.sleep(600)
            case 2: return "x" * 10_000_000
            case 3: return {"not": "text"}
            case 4: os._exit(3)
            case 5: return "\\ud800!"
            case 6: raise SystemExit(1)

class Flaky:
    schema = schema("flaky")

    def __init__(self, question, params): ...

    def call(self, arguments):
        marker = FOLDER / "tried"
        if not marker.exists():
            marker.touch()
            raise OSError("busy")
        return "ok"

class Crowd:
    schema = schema("crowd")

    def __init__(self, question, params): ...

    def call(self, arguments):
        global NOW, MOST
        with LOCK:
            NOW += 1
            MOST = max(MOST, NOW)
        time.sleep(0.1)
        with LOCK:
            NOW -= 1
        return str(MOST)

class NoSetup(Count):
    schema = schema("no_setup")

    def __init__(self, question, params):
        raise RuntimeError("no index here")

class Game:
    def __init__(self, params):
        self.params = params

    def reset(self, question, seed):
        if question["answer"] == "unborn":
            raise KeyError("my own mistake")
        self.seed, self.heard = seed, []
        return question["text"]

    def step(self, text):
        self.heard.append(text)
        if text == "hang":
            time.sleep(600)
        if text == "die":
            os._exit(3)
        if text == "wrong":
            return "a", "b"
        if text == "nan":
            return "a", float("nan"), False
        return f"<{len(self.heard)}>", 0.5, text == "end"

class Unending(Game):
    def close(self):
        time.sleep(600)

class Scored(Game):
    def score(self):
        return 7.0
"""
CALL = '<tool_call>{"name": "%s", "arguments": {"n": %s}}</tool_call>'


def calling(name: str, n: object) -> str:
    return CALL % (name, n)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_engine.py").write_text(ENGINE)
    (tmp_path / "my_tools.py").write_text(TOOLS)
    return tmp_path


@pytest.fixture
def generated(folder: Path, context, reasoning, closes) -> Callable[..., Any]:
    """generated(scripts, tools=[...]): one trajectory for each script, a list of responses or a key and such a list."""

    def build(
        scripts: list[list[str]], longest: int = 800, answers: Sequence[str] = "012345", **agent: Any
    ) -> list[Trajectory]:
        texts = ["«" + "¦".join(script) + "»" for script in scripts]
        pairs = zip(texts, answers, strict=False)
        prompts = [Prompt(index, text, answer, tuple(text.encode())) for index, (text, answer) in enumerate(pairs)]
        for tool in agent.get("tools", ()):
            tool["type"] = tool["type"].replace("my_tools", str(folder / "my_tools.py"))
        if "environment" in agent:
            agent["environment"]["type"] = agent["environment"]["type"].replace("my_tools", str(folder / "my_tools.py"))
        model = {"random_init": TINY | {"max_positions": 2048}, "tokenizer": "bytes"}
        if chat := (folder / "tokenizer").exists():
            model["tokenizer"] = str(folder / "tokenizer")
        config = reasoning(
            rollout={"backend": f"{folder / 'my_engine.py'}:Scripted", "agent": {"num_workers": 1} | agent},
            actor={"model": model},
            data={"max_prompt_length": 1200, "max_response_length": longest, "use_chat_template": chat},
        )
        rank = closes(LanguageRollout(context("rollout"), config))
        rank.receive(LanguageActor(context(), config).publish(7))
        found: list[Trajectory] = []
        rank.generate(prompts, 1, config.rollout.sampling, "train", 4, Sink(found))
        return sorted(found, key=lambda trajectory: trajectory.prompt.index)

    return build


def tools(*names: str, **options: Any) -> dict[str, Any]:
    return {"tools": [{"type": f"my_tools:{name}"} | options for name in names], "tool_format": "hermes"}


def written(trajectory: Trajectory, by_policy: bool) -> str:
    pairs = zip(trajectory.token_ids, trajectory.sampled, strict=True)
    return bytes(token for token, sampled in pairs if sampled == by_policy and token < 256).decode()


def test_results_are_read_and_masked_and_all_else_is_trained_on(generated) -> None:
    scripts = [[calling("count", 2), calling("count", 3) + calling("flaky", 0), "five"], ["no call"]]
    one, other = generated(scripts, **tools("Count", "Flaky"))
    assert written(one, by_policy=True) == "".join(scripts[0])
    said = ["<tool_response>0:2</tool_response><tool_response>0:5</tool_response>"]
    said.append("<tool_response>error: OSError: busy</tool_response>")
    assert written(one, by_policy=False) == "\n".join(said)
    assert [log_prob == -1 for log_prob in one.log_probs] == [*one.sampled]
    assert one.conversation.turns == tuple(scripts[0])
    assert (one.conversation.observations, one.conversation.failed, one.conversation.reward) == (2, False, None)
    assert '"description": "A tool."' in bytes(one.prompt.token_ids).decode()
    assert (other.text, all(other.sampled)) == ("no call", True)

    counted = torch.ones(2, dtype=torch.bool)
    batch = rollout_batch([one, other], ShapedRewards(torch.ones(2), counted, counted, {}), pad_token_id=256)
    for row, trajectory in enumerate((one, other)):
        start = len(trajectory.prompt.token_ids)
        trained = batch.inputs["tokens"][row][batch.action_mask[row]].tolist()
        assert bytes(token for token in trained if token < 256).decode() == written(trajectory, by_policy=True)
        assert not batch.action_mask[row, :start].any()
    metrics = conversation_metrics([one, other])
    assert (metrics["tool/count/calls"], metrics["tool/flaky/calls"], metrics["tool/flaky/errors"]) == (2, 1, 1)


def test_each_trajectory_has_its_state_which_is_closed(generated, folder: Path) -> None:
    scripts = [[calling("count", 1), calling("count", 1), "."], [calling("count", 5), "."]]
    options = tools("Count", params={"step": 10})
    texts = [written(one, by_policy=False) for one in generated(scripts, **options)]
    assert texts == [
        "<tool_response>0:10</tool_response><tool_response>0:20</tool_response>",
        "<tool_response>1:50</tool_response>",
    ]
    assert sorted(path.name for path in folder.glob("closed-*")) == ["closed-0-20", "closed-1-50"]


ANSWERED = {  # at most so many tokens of a result: calls, and how the answers begin
    20: [
        (calling("bad", 0), "error: KeyError: 'my own mistake'"),
        (calling("bad", 2), "x" * 20),
        (calling("bad", 3), "error: TypeError: call"),  # "call() returns text, not {'not': 'text'}", cut
        (calling("bad", 5), "?!"),
        (calling("bad", 6), "error: SystemExit: 1"),
        (calling("bad", '"one"'), "error: 'one' is not"),
        ('<tool_call>{"name": "bad"}', "error: the call has no </tool_call>"),
        ('<tool_call>{"name": "bad", "arguments": [1]}</tool_call>', "error: arguments must be an object"),
    ],
    100: [
        (calling("none", 0), "error: there is no function none, only bad"),
        (r'<tool_call>{"name": "\ud800"}</tool_call>', "error: there is no function ?"),
        ("<tool_call>{'name'}</tool_call>", "error: the call is not JSON"),
        ('<tool_call>["bad"]</tool_call>', "error: a call is an object with a name"),
    ],
}


@pytest.mark.parametrize("longest", ANSWERED)
def test_wrong_calls_and_results_are_answered(generated, longest: int) -> None:
    calls, answers = zip(*ANSWERED[longest], strict=True)
    found = generated([[call, "done"] for call in calls], answers=calls, **tools("Bad", max_result_tokens=longest))
    for one, call, said in zip(found, calls, answers, strict=True):
        assert written(one, by_policy=False).removeprefix("<tool_response>").startswith(said[:longest])
        assert (one.valid, one.conversation.turns[-1]) == (True, "done")
        metrics = conversation_metrics([one])
        right = call in (calling("bad", 2), calling("bad", 5))
        assert metrics["tool/bad/errors"] + metrics["tool/malformed"] == (not right)
        assert metrics["tool/errors"] == 0


def test_a_tool_that_hangs_or_dies_is_set_up_again_and_others_go_on(generated) -> None:
    scripts = [
        [calling("bad", 1), calling("count", 1), "."],
        [calling("bad", 4), calling("count", 1), "."],
        [calling("count", 1), calling("count", 1), "."],
    ]
    hung, dead, fine = generated(scripts, **tools("Count", "Bad", timeout_s=3), num_workers=3)
    assert "error: no result within 3 s" in written(hung, by_policy=False)
    assert "error: its process ended: exit code 3" in written(dead, by_policy=False)
    assert all(one.valid and one.conversation.turns[-1] == "." for one in (hung, dead, fine))
    assert "0:1" in written(hung, by_policy=False)
    counts = dict(hung.conversation.counts)
    assert (counts["bad/calls"], counts["bad/timeouts"], counts["bad/errors"], counts["count/calls"]) == (1, 1, 0, 1)


def test_a_schema_that_refers_to_nothing(generated, folder: Path) -> None:
    source = (folder / "my_tools.py").read_text()
    (folder / "my_tools.py").write_text(source.replace('{"type": "integer"}', '{"$ref": "#/nowhere"}'))
    [one] = generated([[calling("count", 1), "."]], **tools("Count"))
    assert "nowhere" in written(one, by_policy=False)
    assert (one.valid, dict(one.conversation.counts)["count/errors"]) == (True, 1)


def test_retries(generated) -> None:
    [one] = generated([[calling("flaky", 0), "."]], **tools("Flaky", retries=1))
    assert written(one, by_policy=False) == "<tool_response>ok</tool_response>"
    assert dict(one.conversation.counts)["flaky/errors"] == 1


def test_the_built_in_tools(generated, folder: Path) -> None:
    documents = folder / "documents.jsonl"
    facts = {"Oxley": "The bus to Oxley is number 714.", "Elwick": "The bus to Elwick is number 8."}
    lines = (json.dumps({"title": title, "text": text}) for title, text in facts.items())
    documents.write_text("\n".join(lines))
    calls = [
        '<tool_call>{"name": "search", "arguments": {"query": "bus* \\"Oxley\\" OR"}}</tool_call>',
        '<tool_call>{"name": "python", "arguments": {"code": "print(6 * 7)"}}</tool_call>',
        '<tool_call>{"name": "python", "arguments": {"code": "1 / 0"}}</tool_call>',
        '<tool_call>{"name": "calculator", "arguments": {"expression": "(2+3)*4"}}</tool_call>',
    ]
    search = {"type": "search", "params": {"documents": str(documents), "limit": 1}}
    python = {"type": "python", "params": {"isolation": "none"}}
    [one] = generated([[*calls, "."]], tools=[search, python, {"type": "calculator"}], tool_format="hermes")
    said = ["Oxley: The bus to Oxley is number 714.", "42\n", "error: ZeroDivisionError: division by zero", "20"]
    assert written(one, by_policy=False) == "".join(f"<tool_response>{text}</tool_response>" for text in said)


def test_an_index_in_a_file(tmp_path: Path) -> None:
    import sqlite3

    connection = sqlite3.connect(tmp_path / "index.db")
    with connection:
        connection.execute("CREATE VIRTUAL TABLE pages USING fts5(title, text)")
        connection.execute("INSERT INTO pages VALUES ('Oxley', 'number 714')")
    tool = SearchTool({}, {"documents": str(tmp_path / "index.db")})
    assert tool.call({"query": "oxley?"}) == "Oxley: number 714"
    assert tool.call({"query": "elwick"}) == tool.call({"query": "*"}) == "no results"


def test_a_text_of_a_document_may_have_any_line_separators(tmp_path: Path) -> None:
    text = "first\u2028second\x85third"
    lines = [json.dumps({"title": "t", "text": text}, ensure_ascii=False), "", '{"title": "u", "text": "v"}']
    (tmp_path / "pages.jsonl").write_text("\r\n".join(lines), encoding="utf-8", newline="")
    tool = SearchTool({}, {"documents": str(tmp_path / "pages.jsonl")})
    assert (tool.call({"query": "second"}), tool.call({"query": "v"})) == (f"t: {text}", "u: v")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("\n", "pages.jsonl holds no documents"),
        ('{"title": "t", "text": "x"}\n\n{"text": "x"}', "pages.jsonl:3: has no title and text"),
        ('{"title": "t", "text": "x"}\n{"title"', "pages.jsonl:2: not JSON: "),
    ],
)
def test_wrong_documents_are_refused_with_their_line(tmp_path: Path, lines: str, message: str) -> None:
    (tmp_path / "pages.jsonl").write_text(lines)
    search = ToolOptions(type="search", params={"documents": str(tmp_path / "pages.jsonl")})
    with pytest.raises(ConfigError) as failed:
        schemas_of(Agent(tools=[search]))
    assert message in str(failed.value)


@pytest.mark.parametrize("limit", [1, 2])
def test_the_limit_of_calls_at_the_same_time(generated, limit: int) -> None:
    found = generated([[calling("crowd", 0), "."]] * 6, **tools("Crowd", max_running=limit))
    assert max(int(written(one, by_policy=False)[15]) for one in found) == limit


def test_calls_of_llama_3(generated) -> None:
    scripts = [
        ['{"name": "count", "parameters": {"n": 4}}; {"name": "count", "parameters": {}}', "{5}"],
        ['{"name": ', "."],
    ]
    one, other = generated(scripts, **tools("Count") | {"tool_format": "llama3", "max_calls": 2})
    assert "0:4" in written(one, by_policy=False)
    assert "0:5" in written(one, by_policy=False)
    assert one.conversation.turns[-1] == "{5}"
    assert dict(one.conversation.counts)["malformed"] == 0
    assert "error: the call is not JSON" in written(other, by_policy=False)


def test_the_length_and_the_number_of_calls_end_a_trajectory(generated) -> None:
    script = [calling("count", 1)] * 9
    [cut] = generated([script], longest=200, **tools("Count"))
    assert cut.finish_reason == "length"
    assert len(cut.token_ids) <= 200
    assert cut.sampled[-1]
    [last] = generated([script], **tools("Count"), max_calls=3)
    assert len(last.conversation.turns) == 3
    assert last.sampled[-1]


def test_tools_that_cannot_be_set_up_end_the_run_with_the_traceback(generated) -> None:
    found = generated([["."], ["."]], **tools("NoSetup"))
    with pytest.raises(WorkerError, match="no index here") as caught:
        check_any_scored(found, Reward())
    assert "rollout.agent.tools failed for all of 2" in str(caught.value)


def test_a_prompt_too_short_for_the_tools_is_refused_with_the_length_they_need(
    command, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    Path("reasoning.yaml").write_text(REASONING)
    keys = ["rollout.agent={tools: [{type: calculator}], tool_format: hermes}", "runner.max_steps=1"]
    ended = command("reasoning.yaml", *keys)
    assert ended.code == 2
    found = re.search(r"the shortest has (\d+) tokens with the description of the tools", ended.err)
    assert found, ended.err
    needed = int(found[1])
    assert f"hint: data.max_prompt_length={needed} keeps all of them" in ended.err
    positions = f"actor.model.random_init.max_positions={needed + 3}"
    for length, code in ((needed - 1, 2), (needed, 0)):
        ended = command("reasoning.yaml", *keys, positions, f"data.max_prompt_length={length}")
        assert ended.code == code, ended.err


def test_a_context_that_is_too_long_is_told(generated) -> None:
    [cut] = generated([["." * 1500]], **tools("Count"))
    assert not cut.valid
    assert "data.max_prompt_length is 1200" in cut.verdict


# Text environments ----------------------------------------------------------------------------------------------------


def game(name: str = "Game", **options: Any) -> dict[str, Any]:
    return {"environment": {"type": f"my_tools:{name}"} | options}


def test_an_episode(generated) -> None:
    one, cut, *more = generated([["a", "b", "end"], *[["a"] * 3] * 5], **game(), max_calls=3)
    assert all(each.valid for each in more)
    assert written(one, by_policy=True) == "abend"
    assert written(one, by_policy=False) == "<1><2>"
    assert [log_prob == -1 for log_prob in one.log_probs] == [*one.sampled]
    assert (one.conversation.reward, cut.conversation.reward) == (1.5, 1.5)
    [scored] = generated([["a", "end"]], **game("Scored"))
    assert scored.conversation.reward == 7


def test_an_episode_with_tools(generated) -> None:
    """A response with a call is no step: the policy reads the result and goes on in the same turn of the game."""
    scripts = [["a", calling("count", 2), "b", calling("count", 3), calling("nope", 0), "end"], ["end"], ["a"] * 6]
    one, other, cut = generated(scripts, **game(), **tools("Count"), max_calls=6)
    assert written(one, by_policy=True) == "".join(scripts[0])
    results = [written(one, by_policy=False).count(f"<tool_response>{text}") for text in ("0:2", "0:5", "error:")]
    assert results == [1, 1, 1]
    assert [f"<{step}>" in written(one, by_policy=False) for step in (1, 2, 3)] == [True, True, False]
    assert [each.conversation.reward for each in (one, other, cut)] == [1.5, 0.5, 3.0]
    assert [log_prob == -1 for log_prob in one.log_probs] == [*one.sampled]
    assert '"description": "A tool."' in bytes(one.prompt.token_ids).decode()
    metrics = conversation_metrics([one, other, cut])
    assert (metrics["tool/count/calls"], metrics["tool/malformed"]) == (2, 1)
    [failed, kept] = generated(
        [[calling("count", 1), "die"], ["end"]], answers="23", **game(), **tools("Count"), num_workers=2
    )
    assert (failed.valid, kept.valid) == (False, True)


def test_an_environment_that_fails_costs_its_trajectory(generated) -> None:
    scripts = [["hang"], ["end"], ["a", "die"], ["wrong"], ["nan"], ["a"]]
    answers = ["0", "1", "2", "3", "4", "unborn"]
    found = generated(scripts, answers=answers, **game(timeout_s=3), num_workers=6)
    assert [one.valid for one in found] == [False, True, False, False, False, False]
    assert found[0].verdict == "step() took more than 3 s (rollout.agent.environment.timeout_s)"
    assert conversation_metrics(found)["tool/errors"] == 5


def test_an_environment_whose_end_hangs_is_named(generated, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_processes, "END_S", 1.0)
    monkeypatch.setattr(environment_loop, "END_S", 1.0)
    [one] = generated([["end"]], **game("Unending"))
    assert (one.valid, one.verdict) == (False, "score() and close() took more than 1 s")


def test_an_environment_that_never_works_ends_the_run_with_its_traceback(generated) -> None:
    found = generated([["a"]], answers=["unborn"], **game())
    with pytest.raises(WorkerError, match="my own mistake") as caught:
        check_any_scored(found, Reward())
    assert "rollout.agent.environment" in str(caught.value)


def test_the_guessing_game(generated) -> None:
    options = {"environment": {"type": "guess_number", "params": {"largest": 1, "turns": 2, "prompt": "?"}}}
    prompt = "«9¦what¦1»"
    options["environment"]["params"]["prompt"] = prompt
    [one] = generated([["unused"]], **options)
    assert written(one, by_policy=False) == "lower\n"
    assert one.conversation.reward == 0  # two turns, none of them right
    options["environment"]["params"] = {"largest": 1, "turns": 4, "prompt": prompt}
    [one] = generated([["unused"]], **options)
    assert written(one, by_policy=False) == "lower\nno number\n"
    assert one.conversation.reward == pytest.approx(0.5)  # the third of four


@pytest.mark.parametrize("dataset", ["countdown", "puzzle24", "simple_integration", "polynomial_multiplication"])
def test_reasoning_gym_runs_no_code_of_the_policy(dataset: str, tmp_path: Path) -> None:
    from rl_platform.components.agents.text_environments import ReasoningGym

    environment = ReasoningGym({"dataset": dataset, "attempts": 3})
    environment.reset({}, 1)
    touched = tmp_path / "touched"
    assert environment.step(f"__import__('pathlib').Path({str(touched)!r}).touch()")[0].startswith("That is not right")
    assert not touched.exists()
    environment.step("1 +")  # no expression
    assert environment.step(str(environment._entry["answer"]))[2]
    assert 0 < environment.score() <= 1 / 3


def test_reasoning_gym_computes_formulas_of_many_episodes_in_a_process_of_tools(closes) -> None:
    process = closes(AgentProcess("tool_program"))
    spec = {"type": "reasoning_gym", "params": {"dataset": "countdown", "attempts": 1}}

    def asked(**job: Any) -> list[Any]:
        return [future.result(HANG_S) for future in [process.run({"key": str(key), **job}) for key in range(8)]]

    asked(do="start", environment="reasoning_gym")
    asked(do="reset", environment=spec, question={}, seed=1, longest=1000)
    assert [step[1:] for step in asked(do="step", text="(1 + 1) * 2", longest=100)] == [[0.0, True]] * 8
    assert all(0 <= score < 1 for score in asked(do="end"))


def test_reasoning_gym_as_an_environment() -> None:
    from rl_platform.components.agents.text_environments import ReasoningGym

    environment = ReasoningGym({"dataset": "chain_sum", "attempts": 2, "min_terms": 2, "max_terms": 2})
    text = environment.reset({}, 5)
    assert text == ReasoningGym({"dataset": "chain_sum", "min_terms": 2, "max_terms": 2}).reset({}, 5)
    answer = environment._entry["answer"]
    assert environment.step("no")[2] is False
    assert environment.step(answer)[2] is True
    assert environment.score() == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("(2+3)*4", "20"),
        (" 1 + 1 = ", "2"),
        ("1/3", "0.3333333333"),
        ("1/0", "error: division by zero"),
        ("", "error: not an expression"),
        *((text, "error: only numbers, + - * / and parentheses") for text in ("2^3+1", "sqrt(16)+2", "1,000+2", "x=3")),
        ("1e999999999", "error: only numbers, + - * / and parentheses"),
        ("2**3", "error: only numbers, + - * / and parentheses"),
    ],
)
def test_the_calculator_computes_the_whole_expression(expression: str, result: str) -> None:
    """It computed what stood at its end: 2^3+1 was 4."""
    assert Calculator({}, {}).call({"expression": expression}) == result


def test_a_game_of_textarena() -> None:
    pytest.importorskip("textarena")
    from rl_platform.components.agents.text_environments import TextArena

    game = TextArena({"game": "GuessTheNumber-v0"})
    assert "guess the number between 1 and 20" in game.reset({}, 5)
    text, reward, done = game.step("[1]")
    assert (text, reward, done) == ("The target number is higher.", 0.0, False)
    for number in range(2, 21):
        text, reward, done = game.step(f"[{number}]")
        if done:
            break
    assert 0 < reward < 1  # it is far away when the turns end
    for params in ({}, {"game": "Nope-v0"}, {"game": "TicTacToe-v0"}):  # none, unknown, for two players
        with pytest.raises(ConfigError, match="refuses them"):
            check_environment(Agent(environment=EnvironmentOptions(type="textarena", params=params)))


# Formats --------------------------------------------------------------------------------------------------------------

QWEN = (
    "{% if tools %}<s> system {% for tool in tools %} {{ tool | tojson }} {% endfor %} write "
    '<tool_call> {"name": n} </tool_call> </s> {% endif %}'
    "{% for m in messages %}<s> {% if m.role == 'tool' %}user <tool_response> {{ m.content }} </tool_response>"
    "{% else %}{{ m.role }} {{ m.content }}{% endif %}</s> {% endfor %}<s> assistant"
)
LLAMA = QWEN.replace('<tool_call> {"name": n} </tool_call>', '{"name": function name, "parameters": dictionary}')
XML = QWEN.replace('{"name": n}', "<function=n>")
NONE = QWEN.replace("{% if tools %}", "{% if false %}")


@pytest.fixture
def tokenizer(tmp_path: Path) -> Callable[[str], HFTokenizer]:
    """tokenizer(template): with one token per character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def build(template: str) -> HFTokenizer:
        words = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
        inner = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>"))
        inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        made = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
        made.chat_template = template
        made.save_pretrained(tmp_path / "tokenizer")
        return HFTokenizer(str(tmp_path / "tokenizer"), "actor.model")

    return build


@pytest.mark.parametrize(("template", "name"), [(QWEN, "hermes"), (LLAMA, "llama3")])
def test_the_format_is_that_of_the_chat_template(tokenizer, template: str, name: str) -> None:
    found = format_of(tokenizer(template), Agent(tools=[ToolOptions(type="calculator")]), chat=True)
    assert (found.name, found.in_template) == (name, True)
    assert found.results([("1", "calculator", "3")])[0]["role"] == "tool"
    other = "llama3" if name == "hermes" else "hermes"
    forced = format_of(tokenizer(template), Agent(tools=[ToolOptions(type="calculator")], tool_format=other), chat=True)
    assert (forced.name, forced.in_template) == (other, False)


@pytest.mark.parametrize(("template", "name"), [(QWEN, "hermes"), (LLAMA, "llama3")])
def test_a_trajectory_is_the_conversation_as_the_template_renders_it(
    generated, tokenizer, template: str, name: str
) -> None:
    made = tokenizer(template)
    call = calling("count", 2) if name == "hermes" else '{"name": "count", "parameters": {"n": 2}}'
    [one] = generated([[call, "two"]], **tools("Count") | {"tool_format": "auto"})
    sampled = [token for token, own in zip(one.token_ids, one.sampled, strict=True) if own]
    assert made.decode(sampled, special=True) == f"{call}</s>two</s>"
    messages = [("user", one.prompt.text), ("assistant", "HERE"), ("tool", "0:2")]
    said = [{"role": role, "content": text} for role, text in messages]
    rendered = made.decode(made.apply_chat(said, [{"type": "function", "function": SCHEMA}]), special=True)
    before, _, after = rendered.partition("HERE")
    found = made.decode((*one.prompt.token_ids, *one.token_ids), special=True)
    assert found.startswith(before.partition("<s> user")[0][:9])
    assert found.endswith(f"{call}</s>{after.partition('</s>')[2]}two</s>")
    assert '"name": "count"' in found


@pytest.mark.parametrize(("template", "message"), [(XML, "another format"), (NONE, "shows no tools")])
def test_templates_without_a_known_format(tokenizer, template: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as failed:
        format_of(tokenizer(template), Agent(tools=[ToolOptions(type="calculator")]), chat=True)
    assert "hermes or llama3" in str(failed.value)


# Before the start -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (3, "not a dictionary"),
        ({}, "has the name None"),
        (SCHEMA | {"name": "two words"}, "has the name 'two words'"),
        (SCHEMA | {"description": 3}, "has no description"),
        (SCHEMA | {"parameters": {}}, '"type": "object"'),
        (SCHEMA | {"parameters": {"type": "object", "properties": 3}}, "has wrong parameters"),
        (SCHEMA | {"parameters": {"type": "object", "default": {1, 2}}}, "has wrong parameters"),
    ],
)
def test_wrong_schemas(schema: object, message: str, tmp_path: Path) -> None:
    lines = ("class Own:", f"schema = {schema!r}", "def __init__(self, a, b): ...", "def call(self, a): ...")
    (tmp_path / "own.py").write_text("\n  ".join(lines))
    with pytest.raises(ConfigError) as failed:
        schemas_of(Agent(tools=[ToolOptions(type=f"{tmp_path / 'own.py'}:Own")]))
    assert message in str(failed.value)
    assert "rollout.agent.tools" in str(failed.value)


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        ({"type": "search"}, "there is no such file"),
        ({"type": "search", "params": {"documents": __file__}}, "database"),
        ({"type": "search", "params": {"document": "x"}}, "no such parameter"),
        ({"type": "calculator", "params": {"digits": 3}}, "no such parameter"),
        ({"type": "python", "params": {"cpu_s": "1"}}, "another type"),
        ({"type": "python", "params": {"isolation": "jail"}}, "isolation is sandbox or none"),
    ],
)
def test_wrong_parameters_of_built_in_tools(tool: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as failed:
        schemas_of(Agent(tools=[ToolOptions(**tool)]))
    assert message in str(failed.value)


def test_two_tools_of_one_name() -> None:
    with pytest.raises(ConfigError, match="several tools have this name"):
        schemas_of(Agent(tools=[ToolOptions(type="calculator")] * 2))


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("reasoning_gym", {"dataset": "chain_sums"}),
        ("reasoning_gym", {}),
        ("reasoning_gym", {"dataset": "chain_sum", "min_terms": "two"}),
        ("guess_number", {"larges": 3}),
        ("guess_number", {"largest": "many"}),
    ],
)
def test_wrong_parameters_of_built_in_environments(name: str, params: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.agent\.environment\.params"):
        check_environment(Agent(environment=EnvironmentOptions(type=name, params=params)))


@pytest.mark.parametrize(
    ("installed", "params", "message"),
    [
        ("0.3.1", {}, "id names the environment"),
        ("0.3.1", {"id": "x", "args": 3}, "id names the environment"),
        ("0.3.1", {"id": "x", "rows": 3}, "id names the environment"),
        ("0.4.0", {"id": "x"}, "verifiers 0.4.0 is installed, which has no load_environment()"),
        ("", {"id": "x"}, "the package verifiers is not installed"),
    ],
)
def test_environments_of_verifiers_that_cannot_be_loaded(
    monkeypatch: pytest.MonkeyPatch, installed: str, params: dict[str, Any], message: str
) -> None:
    """tests/integration/test_verifiers.py has environments that the library loads."""

    def version(name: str) -> str:
        if not installed:
            raise verifiers_program.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(verifiers_program, "version", version)
    with pytest.raises(ConfigError) as failed:
        check_environment(Agent(environment=EnvironmentOptions(type="verifiers", params=params)))
    assert message in str(failed.value)
    assert ("pip install 'rl-platform[verifiers]'" in str(failed.value)) == ("installed" in message)


def test_the_line_that_installs_openenv(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/integration/test_openenv.py has environments of its servers."""
    monkeypatch.setitem(sys.modules, "openenv", None)
    monkeypatch.delitem(sys.modules, "rl_platform.components.agents.openenv_environment", raising=False)
    environment = EnvironmentOptions(type="openenv", params={"url": "http://127.0.0.1:8000"})
    with pytest.raises(ConfigError, match="openenv") as failed:
        check_environment(Agent(environment=environment))
    assert "pip install 'rl-platform[openenv]'" in str(failed.value)
