"""One trajectory of a black-box agent: its calls of the endpoint, and the training rows that they make.

Tokens are recorded as the engine generated them. If the messages of a call begin with those of an earlier call and its
answer, the call continues the recorded tokens. Only the new messages are encoded. Otherwise the agent has rewritten its
context, and a new row begins. Calls that go on from the same answer share its tokens, which are trained on in one of
their rows.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rl_platform.components.agents.agent_function import JsonObject
from rl_platform.components.agents.generations import Generations, Sampled
from rl_platform.components.agents.tool_formats import ToolFormat
from rl_platform.config.schema.data import Data
from rl_platform.errors import ConfigError
from rl_platform.models.tokenizer import Tokenizer
from rl_platform.records import Conversation, Prompt, Trajectory

_REFUSED = ("stop", "response_format", "logit_bias", "top_logprobs", "functions", "audio", "modalities")
LENGTH = "context_length_exceeded"
_OVERFLOW = "this model's maximum context length is exceeded"  # OpenAI's wording, which agents compare


class Refused(Exception):
    """A request that the endpoint does not answer. code: as of OpenAI, or empty."""

    def __init__(self, message: str, code: str = "", status: int = 400) -> None:
        super().__init__(message)
        self.code, self.status = code, status


Said = tuple[JsonObject, str]  # a message of the policy, and its text with all calls of tools


@dataclass(frozen=True, eq=False)
class Call:
    """An answer of the policy. before: the one that it goes on from. messages: up to and with it. token_ids: likewise;
    the answer begins at `start`. began: answers that were complete when the call began."""

    before: Call | None
    messages: tuple[str, ...]
    token_ids: tuple[int, ...]
    start: int
    log_probs: tuple[float, ...]
    finish_reason: str
    began: int

    @property
    def chain(self) -> list[Call]:
        """This answer and those before it, first ones first."""
        return [*(self.before.chain if self.before else ()), self]


class ChatSession:
    """place: of the trajectory in `generations`. max_calls: `rollout.agent.max_calls`. seed: of a digest of the context
    and how often it came before. tools: how the model writes calls of tools."""

    def __init__(
        self,
        place: int,
        generations: Generations,
        tokenizer: Tokenizer,
        data: Data,
        max_calls: int,
        seed: Callable[[str, int], int],
        version: int,
        tools: ToolFormat,
    ) -> None:
        self.generations, self.loop = generations, generations.loop
        self._place, self._tokenizer, self._data, self._seed = place, tokenizer, data, seed
        self._max_calls, self._version, self._format = max_calls, version, tools
        self._calls: list[Call] = []
        self._seen: Counter[tuple[int, ...]] = Counter()
        self._tasks: set[asyncio.Task[object]] = set()
        self._started = 0
        self.overflowed = ""  # why the context is too long

    def end(self) -> None:
        """Cancels calls under way. Runs in the loop."""
        for task in self._tasks:
            task.cancel()

    async def chat(self, body: JsonObject) -> JsonObject:
        """Answers a request of /v1/chat/completions in a task that `end` cancels. Raises Refused."""
        if (task := asyncio.current_task()) is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await self.answer(body)

    async def say(self, messages: Sequence[JsonObject], tools: Sequence[JsonObject] | None = None) -> Said | None:
        """Returns the policy's next message, and its text with all calls of tools; None if the context is too long.

        Raises Refused.
        """
        try:
            answer = await self.answer({"messages": list(messages), "tools": tools})
        except Refused as refused:
            if refused.code != LENGTH:
                raise
            return None
        last = self._calls[-1]
        return answer["choices"][0]["message"], self._tokenizer.decode(last.token_ids[last.start :])

    async def answer(self, body: JsonObject) -> JsonObject:
        """Answers a request of /v1/chat/completions. Raises Refused."""
        messages, tools, count = _checked(body)
        if tools and not self._data.use_chat_template:
            raise Refused("tools need the chat template of the model: data.use_chat_template: true")
        if self._started + count > self._max_calls:
            raise Refused(f"{_OVERFLOW}: {self._started} calls were made, the most of rollout.agent.max_calls", LENGTH)
        self._started += count
        before, context = self._context(messages, tools)
        limit = self._room(before, context, body.get("max_completion_tokens") or body.get("max_tokens"))
        wanted = []
        for _ in range(count):
            digest = hashlib.blake2b(json.dumps(context).encode(), digest_size=8).hexdigest()
            wanted.append(Sampled(context, self._seed(digest, self._seen[context]), limit))
            self._seen[context] += 1
        began = len(self._calls)
        choices, written = [], 0
        for index, completion in enumerate(await self.generations.sample(self._place, wanted)):
            text = self._tokenizer.decode(completion.token_ids)
            message = _assistant(text, self._format if tools else None, f"{began + index}")
            self._calls.append(
                Call(
                    before,
                    (*map(_normal, messages), _normal(message)),
                    context + completion.token_ids,
                    len(context),
                    completion.log_probs,
                    completion.finish_reason,
                    began,
                )
            )
            reason = "tool_calls" if "tool_calls" in message else completion.finish_reason
            choice = {"index": index, "message": message, "finish_reason": reason, "logprobs": None}
            if body.get("logprobs"):
                pairs = zip(completion.token_ids, completion.log_probs, strict=True)
                choice["logprobs"] = {"content": [self._log_prob(*pair) for pair in pairs]}
            choices.append(choice)
            written += len(completion.token_ids)
        usage = {"prompt_tokens": len(context), "completion_tokens": written, "total_tokens": len(context) + written}
        head = {"id": f"chatcmpl-{self._place}-{began}", "object": "chat.completion", "created": int(time.time())}
        return {**head, "model": body.get("model", "policy"), "choices": choices, "usage": usage}

    def trajectory(self, prompt: Prompt, sample: int, retries: int) -> Trajectory | None:
        """Returns the trajectory of all calls so far; None without a call. Further rows are in `Trajectory.rows`."""
        continued = {call.before for call in self._calls}
        leaves = sorted((call for call in self._calls if call not in continued), key=lambda call: call.token_ids)
        if not leaves:
            return None
        owned: set[Call] = set()
        rows = {}
        for leaf in leaves:  # in an order that does not depend on when parallel calls came
            own = [call for call in leaf.chain if call not in owned]
            owned.update(own)
            rows[leaf] = self._row(prompt, sample, leaf, own, retries)
        read = rows.pop(max(leaves, key=lambda call: call.began))  # by reward functions: the last answer
        return replace(read, rows=tuple(rows.values()))

    def _row(self, prompt: Prompt, sample: int, leaf: Call, own: Sequence[Call], retries: int) -> Trajectory:
        first = own[0].start
        observed, log_probs = [True] * (len(leaf.token_ids) - first), [0.0] * (len(leaf.token_ids) - first)
        for call in own:
            span = slice(call.start - first, len(call.token_ids) - first)
            observed[span], log_probs[span] = [False] * len(call.log_probs), call.log_probs
        turns = tuple(self._tokenizer.decode(call.token_ids[call.start :]) for call in own)
        response = leaf.token_ids[first:]
        return Trajectory(
            replace(prompt, token_ids=leaf.token_ids[:first]),
            sample,
            response,
            tuple(log_probs),
            "length" if self.overflowed else leaf.finish_reason,
            self._version,
            self._tokenizer.decode(response),
            conversation=Conversation(turns, tuple(observed), len(own) - 1, retries=retries),
        )

    def _context(
        self, messages: Sequence[JsonObject], tools: Sequence[JsonObject] | None
    ) -> tuple[Call | None, tuple[int, ...]]:
        """Returns the answer that the messages go on from, and all tokens of the context."""
        normal = tuple(map(_normal, messages))
        begun = [call for call in self._calls if call.messages == normal[: len(call.messages)] != normal]
        before = max(begun, key=lambda call: (len(call.messages), call.token_ids), default=None)
        new = [_for_template(message) for message in messages[len(before.messages) if before else 0 :]]
        tokenizer, text = self._tokenizer, "".join(str(message["content"]) for message in new)
        try:
            if before is None:
                return None, tuple(first_context(new, tools, tokenizer, self._data.use_chat_template))
            ended = before.token_ids[-1] in tokenizer.eos_token_ids
            added = (
                tokenizer.continuation(new, ended, tools)
                if self._data.use_chat_template
                else tokenizer.observation(text, chat=False, ended=ended)
            )
            return before, before.token_ids + tuple(added)
        except (ValueError, ConfigError) as error:
            raise Refused(str(error)) from error

    def _room(self, before: Call | None, context: tuple[int, ...], asked: int | None) -> int:
        data = self._data
        if not context:
            raise Refused("the messages are empty: there is no token to go on from")
        if before is None:
            room, what = (
                data.max_response_length,
                f"{len(context)} tokens, data.max_prompt_length is {data.max_prompt_length}",
            )
            over = len(context) > data.max_prompt_length
        else:
            room = data.max_response_length - (len(context) - before.chain[0].start)
            what = f"no token of data.max_response_length, {data.max_response_length}, is left"
            over = room < 1
        if over:
            self.overflowed = f"{_OVERFLOW}: {what}"
            raise Refused(self.overflowed, LENGTH)
        return min(room, self.generations.sampling.max_new_tokens, asked or room)

    def _log_prob(self, token: int, log_prob: float) -> dict[str, object]:
        text = self._tokenizer.decode([token], special=True)
        return {"token": text, "bytes": list(text.encode()), "logprob": log_prob, "top_logprobs": []}


def _checked(body: JsonObject) -> tuple[list[JsonObject], list[JsonObject] | None, int]:
    """Returns the messages, tools and number of answers of a request. Raises Refused."""
    messages, count = body.get("messages"), body.get("n") or 1
    if not isinstance(messages, list) or not messages:
        raise Refused("messages must be a list with at least one message")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Refused(f"a message has a role and a content, not {message!r}")
        if not isinstance(calls := message.get("tool_calls") or [], list):
            raise Refused(f"tool_calls must be a list, not {calls!r:.100}")
        for call in calls:
            match call:
                case {"function": {"name": str(), "arguments": _}}:
                    continue
            raise Refused(f"a call of a tool has a function with name and arguments, not {call!r:.100}")
    for key in ("n", "max_tokens", "max_completion_tokens"):
        value = body.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise Refused(f"{key} must be a positive whole number, not {value!r}")
    for key in _REFUSED:
        if body.get(key) and body[key] != {"type": "text"}:
            raise Refused(f"{key} is not supported: the run's config decides how tokens are sampled")
    # half of a surrogate pair, which JSON can hold, is no character that a tokenizer encodes
    texts = [_text(message.get("content")).encode(errors="replace").decode() for message in messages]
    checked = [{**message, "content": text} for message, text in zip(messages, texts, strict=True)]
    return checked, body.get("tools"), count


def _text(content: object) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        texts = [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
        if len(texts) == len(content):
            return "".join(texts)
    raise Refused("the content of a message must be text")


def _normal(message: JsonObject) -> str:
    """Returns a message in one form: agents may send it back with other spaces, or without an id."""
    calls = [
        (call["function"]["name"], _arguments(call["function"]["arguments"]))
        for call in message.get("tool_calls") or ()
    ]
    return json.dumps([message["role"], (message.get("content") or "").strip(), calls], sort_keys=True)


def _arguments(arguments: object) -> object:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def first_context(
    messages: Sequence[JsonObject], tools: Sequence[object] | None, tokenizer: Tokenizer, chat: bool
) -> list[int]:
    """Returns the tokens of the first call of a trajectory. tools: the schemas that the chat template renders."""
    if chat:
        return tokenizer.apply_chat(messages, tools)
    return tokenizer.encode("".join(str(message["content"]) for message in messages))


def _for_template(message: JsonObject) -> JsonObject:
    """Returns the message with arguments of calls as values, for chat templates. OpenAI's format has text."""
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": _arguments(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _assistant(text: str, tools: ToolFormat | None, name: str) -> JsonObject:
    """Returns the answer as a message. With tools, calls that can be read become `tool_calls`."""
    before, called = tools.read(text) if tools else (text, [])
    calls = [
        {
            "id": f"call-{name}-{number}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for number, call in enumerate(called)
        if not call.error
    ]
    if not calls:
        return {"role": "assistant", "content": text}
    return {"role": "assistant", "content": before, "tool_calls": calls}
