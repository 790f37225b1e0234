"""The HTTP protocol of reward servers.

    POST url  {"items": [{"prompt": text, "response": text, "answer": text, "metadata": {...}}, ...]}
    200       {"scores": [0.5, null, ...]}     one number per item, in order; null: no score

Metadata that JSON cannot represent is sent as text, and numbers that are not finite, as gaps of a table, as null. Not
covered: retries, see `http_scorer.py`.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from urllib.parse import urlsplit

from rl_platform.envs.reasoning.score import DIED, RAISED, TIMEOUT, Score, checked_reward, json_number, unscored
from rl_platform.envs.reasoning.verifiers import ScoreItem
from rl_platform.redact import redacted

HEADERS = {"Content-Type": "application/json", "Accept": "application/json", "Connection": "close"}
LONGEST_ANSWER = 16 * 2**20  # bytes
SHOWN = 200  # characters of an answer in messages
NOT_THERE = (502, 503, 504)  # a gateway without its server, or a server that is starting
TOO_MANY = 429


class Unanswered(Exception):
    """A request without scores. `reason`: DIED (no server), TIMEOUT, or RAISED (an invalid answer).

    `final`: a retry would fail in the same way.
    """

    def __init__(self, reason: str, detail: str, *, final: bool = False) -> None:
        super().__init__(detail)
        self.reason, self.detail, self.final = reason, detail, final


class Server(ABC):
    """Base class of servers that score. Posts to `url`; thread-safe. A request takes at most about `timeout_s` seconds.

    key: of the config, where the address is. secret: sent as bearer token, and never part of a message.
    """

    key = "reward.url"

    def __init__(self, url: str, timeout_s: float, secret: str = "") -> None:
        self.url, self._timeout_s, self._secret = redacted(url), timeout_s, secret  # the url of messages
        self._headers = HEADERS | ({"Authorization": f"Bearer {secret}"} if secret else {})
        parts = urlsplit(url)
        self._kind: type[HTTPConnection]
        self._kind, usual = (HTTPSConnection, 443) if parts.scheme == "https" else (HTTPConnection, 80)
        self._host, self._port = parts.hostname or "", parts.port or usual
        self._path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False

    @abstractmethod
    def ask(self, items: Sequence[ScoreItem]) -> list[Score]:
        """Returns a score per item; numbers that are not finite or out of range are invalid. Raises Unanswered.

        Without items it checks that the server answers.
        """

    def close(self) -> None:
        """Ends running requests; later ones fail."""
        with self._lock:
            self._closed = True
            for connected in self._open:
                _cut(connected)

    def post(self, body: bytes) -> bytes:
        """Returns the body of an answer with status 200. Raises Unanswered for others."""
        status, answer = self._post(body)
        if status in NOT_THERE:
            raise Unanswered(DIED, f"{self.url} answered with status {status}: {self.shown(answer)}")
        if status != 200:
            final = status < 500 and status != TOO_MANY
            detail = f"{self.url} answered with status {status}: {self.shown(answer)}"
            raise Unanswered(RAISED, detail, final=final)
        return answer

    def shown(self, answer: bytes) -> str:
        """Returns the beginning of an answer, for messages."""
        text = answer.decode(errors="replace")
        return (text.replace(self._secret, "***") if self._secret else text)[:SHOWN]

    def _post(self, body: bytes) -> tuple[int, bytes]:
        began = time.monotonic()
        connection = self._kind(self._host, self._port, timeout=self._timeout_s)
        try:
            connection.connect()
            with self._until(connection.sock, began + self._timeout_s):
                connection.request("POST", self._path, body, self._headers)
                response = connection.getresponse()
                status, answer = response.status, response.read(LONGEST_ANSWER)
        except (OSError, HTTPException, UnicodeError) as error:  # UnicodeError: an invalid host name
            if isinstance(error, TimeoutError) or time.monotonic() - began >= self._timeout_s:
                raise self._too_late() from error
            raise Unanswered(DIED, f"{self.url}: {type(error).__name__}: {error}") from error
        finally:
            connection.close()
        if time.monotonic() - began >= self._timeout_s:  # the answer may be incomplete
            raise self._too_late()
        return status, answer

    def _too_late(self) -> Unanswered:
        return Unanswered(TIMEOUT, f"{self.url} did not answer within {self._timeout_s:g} s (reward.timeout_s)")

    @contextmanager
    def _until(self, connected: socket.socket, deadline: float) -> Iterator[None]:
        """Shuts the connection down at the deadline. A socket's own timeout restarts with every byte that arrives."""
        timer = threading.Timer(max(deadline - time.monotonic(), 0.0), _cut, [connected])
        timer.daemon = True
        with self._lock:
            self._open.add(connected)
            if self._closed:
                _cut(connected)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            with self._lock:
                self._open.discard(connected)


class RewardServer(Server):
    """A server with the protocol of this file."""

    def ask(self, items: Sequence[ScoreItem]) -> list[Score]:
        try:
            body = _body({"items": [_to_json(item) for item in items]})
        except (TypeError, ValueError, RecursionError) as error:
            raise Unanswered(RAISED, f"the metadata cannot be sent as JSON: {error}", final=True) from error
        answer = self.post(body)
        try:
            scores = json.loads(answer)["scores"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            message = f"{self.url} answered with something else than {{'scores': [...]}}: {self.shown(answer)}"
            raise Unanswered(RAISED, message) from error
        if not isinstance(scores, list) or len(scores) != len(items):
            message = f"{self.url} did not answer with a list of {len(items)} scores: {self.shown(answer)}"
            raise Unanswered(RAISED, message)
        return [_score(value) for value in scores]


def _body(request: dict[str, object]) -> bytes:
    try:
        return json.dumps(request, default=str, allow_nan=False).encode()
    except ValueError:  # Python would write NaN, which is no JSON: other servers refuse the whole request
        read = json.loads(json.dumps(request, default=str), parse_constant=lambda _: None)
        return json.dumps(read).encode()


def _to_json(item: ScoreItem) -> dict[str, object]:
    return {"prompt": item.question, "response": item.response, "answer": item.answer, "metadata": item.metadata}


def _score(value: object) -> Score:
    try:
        return Score(checked_reward(json_number(value)))
    except ValueError as error:
        return unscored(RAISED, str(error))


def _cut(connected: socket.socket) -> None:
    with suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)
