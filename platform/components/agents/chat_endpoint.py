"""An OpenAI-compatible endpoint on loopback: /v1/chat/completions and /v1/models, one key per trajectory.

A streamed answer is sent when it is complete. The run's config gives temperature, top_p and seed; those of a request
are ignored.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from rl_platform.components.agents.agent_function import JsonObject
from rl_platform.components.agents.chat_session import ChatSession, Refused

LONGEST_BODY = 16 * 2**20  # bytes


class ChatEndpoint:
    """Serves sessions until `close`."""

    def __init__(self) -> None:
        self._sessions: dict[str, ChatSession] = {}
        self._server = _ChatServer(self._sessions)
        threading.Thread(target=self._server.serve_forever, daemon=True, name="agents-endpoint").start()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    @contextmanager
    def serving(self, key: str, session: ChatSession) -> Iterator[None]:
        """Within the block, requests with this key belong to the session. Later ones are refused."""
        self._sessions[key] = session
        try:
            yield
        finally:
            del self._sessions[key]
            session.end()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _ChatServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024  # agents of a batch connect at the same time

    def __init__(self, sessions: dict[str, ChatSession]) -> None:
        super().__init__(("127.0.0.1", 0), _ChatHandler)
        self.sessions = sessions


class _ChatHandler(BaseHTTPRequestHandler):
    server: _ChatServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        if self.path.rstrip("/") == "/v1/models":
            self._send(200, {"object": "list", "data": [{"id": "policy", "object": "model", "owned_by": "run"}]})
        else:
            self._refuse(Refused(f"there is no {self.path}: POST /v1/chat/completions", status=404))

    def do_POST(self) -> None:
        try:
            body = self._body()
            if self.path.rstrip("/") != "/v1/chat/completions":
                raise Refused(f"there is no {self.path}: POST /v1/chat/completions", status=404)
            key = self.headers.get("Authorization", "").removeprefix("Bearer ")
            if (session := self.server.sessions.get(key)) is None:
                message = "the key is unknown, or its trajectory has ended"
                raise Refused(message, "invalid_api_key", status=401)
            answer = asyncio.run_coroutine_threadsafe(session.chat(body), session.loop).result()
        except Refused as refused:
            self._refuse(refused)
        except (CancelledError, RuntimeError):  # the trajectory has ended
            self._refuse(Refused("the trajectory has ended", "invalid_api_key", status=401))
        else:
            with suppress(ConnectionError):
                self._stream(answer) if body.get("stream") else self._send(200, answer)

    def log_message(self, format: str, *arguments: object) -> None: ...

    def _body(self) -> JsonObject:
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > LONGEST_BODY:
            self.close_connection = True
            raise Refused(f"a request has a Content-Length of at most {LONGEST_BODY} bytes")
        try:
            body = json.loads(self.rfile.read(int(length)))
        except ValueError as error:
            raise Refused(f"the request is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise Refused("the request is not a JSON object")
        return body

    def _refuse(self, refused: Refused) -> None:
        error = {"message": str(refused), "type": "invalid_request_error", "code": refused.code or None}
        with suppress(ConnectionError):
            self._send(refused.status, {"error": error})

    def _send(self, status: int, message: JsonObject, kind: str = "application/json") -> None:
        self._write(status, json.dumps(message).encode(), kind)

    def _write(self, status: int, data: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, answer: JsonObject) -> None:
        head = {key: answer[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
        chunks = []
        for choice in answer["choices"]:
            delta = dict(choice["message"])
            if "tool_calls" in delta:
                delta["tool_calls"] = [{"index": at, **call} for at, call in enumerate(delta["tool_calls"])]
            shared = {"index": choice["index"], "logprobs": choice["logprobs"]}
            chunks.append({**head, "choices": [{**shared, "delta": delta, "finish_reason": None}]})
            last = {"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"]}
            chunks.append({**head, "choices": [last]})
        chunks.append({**head, "choices": [], "usage": answer["usage"]})
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
        self._write(200, "".join([*lines, "data: [DONE]\n\n"]).encode(), "text/event-stream")
