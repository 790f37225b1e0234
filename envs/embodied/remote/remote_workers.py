"""`env.address`: environments of servers on this or other machines, see `environment_server.py`.

A connection replaces a worker process: it has a share of the environments, a deadline and replacements. The server does
not send the state of its environments, so a resumed run begins new episodes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import socket
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from rl_platform.envs.embodied.block import failure
from rl_platform.envs.embodied.buffers import Buffers
from rl_platform.envs.embodied.descriptions import EnvDescription, EnvSetup, no_time_limit
from rl_platform.envs.embodied.env_facts import EnvFacts
from rl_platform.envs.embodied.processes.workers import EnvWorkers
from rl_platform.envs.embodied.remote import wire
from rl_platform.envs.embodied.remote.served_facts import ServedFacts
from rl_platform.envs.embodied.remote.wire import Fields, Kind, WireError
from rl_platform.envs.embodied.success import UNREPORTED
from rl_platform.errors import ConfigError, Deadline, Problem, Unreachable, WorkerDied

logger = logging.getLogger(__name__)
KEY, TOKEN_KEY = "env.address", "env.token_file"
RECONNECT_S = 60.0
LARGEST_FRAME = 1 << 25  # bytes of a picture
SENDING_S = 10.0  # the longest time to send a command
_PAUSE_S = 0.2
_known: dict[tuple[str, str], ServedFacts] = {}  # by address and id


class _Busy(Exception):
    """The server has no environments left."""


def inspect_remote(description: EnvDescription, *, limited: bool = True) -> EnvFacts:
    """Returns the facts that the servers report. Raises ConfigError if one does not answer or has another environment.

    limited: as in `inspect_env`.
    """
    for address in description.addresses:
        if (address, description.id) not in _known:
            try:
                sock, facts = _connect(address, description)
            except (OSError, EOFError, UnicodeError) as error:  # UnicodeError: an invalid host name
                raise ConfigError([_unanswered(address, description, error)]) from error
            sock.close()
            if limited and not facts.limited and description.max_episode_steps is None:
                raise ConfigError([no_time_limit(description.id)])
            _known[address, description.id] = facts
        _check_tasks(address, _known[address, description.id], description)
    spaces = [_known[address, description.id].spaces for address in description.addresses]
    for address, other in zip(description.addresses, spaces, strict=True):
        if other != spaces[0]:
            message = f"{address} has other spaces than {description.addresses[0]}"
            raise ConfigError([Problem(KEY, message, value=str(other), allowed=str(spaces[0]))])
    rate = min(_known[address, description.id].render_rate for address in description.addresses)
    return EnvFacts(spaces[0], ("rgb_array",), rate) if rate else EnvFacts(spaces[0])


def _unanswered(address: str, description: EnvDescription, error: Exception) -> Problem:
    host, port = wire.host_and_port(address)
    listen = "" if host in ("127.0.0.1", "localhost") else f"--host {host} "  # its default is the loopback interface
    hint = f"on that machine: python server.pyz --env {description.id} {listen}--port {port} --token-file token"
    reason = getattr(error, "strerror", None) or error
    return Problem(KEY, f"no environment server answers ({reason})", value=address, hint=hint)


def _token(description: EnvDescription) -> str:
    try:
        if description.token_file is not None:
            return wire.read_token(description.token_file)
        return wire.checked_token(os.environ.get(wire.TOKEN_VARIABLE, "").strip())
    except ValueError as error:
        hint = f"copy the token of the server into a file: {TOKEN_KEY}=token; or set {wire.TOKEN_VARIABLE}"
        value = description.token_file or wire.TOKEN_VARIABLE
        raise ConfigError([Problem(TOKEN_KEY, str(error), value=value, hint=hint)]) from error


def _connect(address: str, description: EnvDescription) -> tuple[socket.socket, ServedFacts]:
    """Returns a connection and the facts of its server. Raises OSError, EOFError, or ConfigError for a server that
    refuses or has another environment."""
    token = _token(description)
    deadline = time.monotonic() + wire.GREETING_TIMEOUT_S
    sock = socket.create_connection(wire.host_and_port(address), timeout=wire.GREETING_TIMEOUT_S)
    try:
        wire.prepare(sock)
        wire.claim(sock, token)
        message = wire.receive(sock, (Kind.WELCOME, Kind.REFUSED), deadline=deadline)
        if message.kind == Kind.REFUSED:
            reason = str(message.fields.get("reason"))
            key = TOKEN_KEY if reason == "wrong token" else KEY
            hint = "copy the file of the server's --token-file to the trainer" if key == TOKEN_KEY else ""
            raise ConfigError([Problem(key, f"the server refuses: {reason}", value=address, hint=hint)])
        facts = ServedFacts.of(message.fields)
        if facts.id != description.id:
            message_ = f"the server at {address} has another environment"
            raise ConfigError([Problem("env.id", message_, value=description.id, hint=f"env.id={facts.id}")])
    except WireError as error:
        sock.close()
        hint = "write server.pyz again with this version: rl-platform environment-server server.pyz"
        raise ConfigError([Problem(KEY, f"cannot be used: {error}", value=address, hint=hint)]) from error
    except BaseException:
        sock.close()
        raise
    return sock, facts


def _check_tasks(address: str, facts: ServedFacts, description: EnvDescription) -> None:
    """Raises ConfigError if the server has other tasks than the run."""
    there, here = facts.tasks, description.task_names
    if there != here:
        message = f"the server at {address} has other tasks, or another order"
        hint = f"env.tasks: [{', '.join(f'{{name: {name}}}' for name in there)}], or other --tasks of the server"
        value, allowed = (", ".join(names) or "none" for names in (here, there))
        raise ConfigError([Problem("env.tasks", message, value=value, allowed=allowed, hint=hint)])


class RemoteWorker:
    """A connection that steps environments first..last-1; the counterpart of `EnvWorker`."""

    pid = -1
    _results = ("observations", "rewards", "terminated", "truncated", "invalid")
    _ends = ("returns", "lengths", "success_once", "success_at_end")  # if episodes ended
    _open: ClassVar[weakref.WeakSet[RemoteWorker]] = weakref.WeakSet()  # those of this process

    def __init__(
        self,
        index: int,
        rows: tuple[int, int],
        address: str,
        setup: EnvSetup,
        buffers: Buffers,
        step_timeout_s: float,
        *,
        draws: bool,
    ) -> None:
        """Connects, for up to RECONNECT_S. `wait("start", ...)` waits until the environments are built.

        draws: the server loads its graphics library, which may be missing there.
        """
        self._name, self._index, self._rows = f"environment server {address}", index, slice(*rows)
        self._address, self._setup, self._buffers = address, setup, buffers
        self._answer: list[bytes] | None = None
        self._waits = True  # whether a command has no answer yet
        self.suspended, self._thread, self._draws = False, threading.get_ident(), draws
        buffers.busy[index] = rows[0]
        spaces, names = setup.spaces, (*self._results, *self._ends)
        self._targets = {name: getattr(buffers, name)[self._rows] for name in names}
        self._most_finals = (rows[1] - rows[0]) * spaces.observation_size * np.dtype(spaces.observation_dtype).itemsize
        request = {
            "num_envs": rows[1] - rows[0],
            "numbers": [int(number) for number in setup.numbers[rows[0] : rows[1]]],
            "max_episode_steps": setup.description.max_episode_steps,
            "restarts": max(setup.restarts - int(buffers.failures.sum()), 0),
            "step_timeout_s": float(step_timeout_s),
            "render": setup.render_mode is not None,
            "draws": draws,
        }
        self._socket = self._connected(request)
        self._reader = wire.Reader(self._socket)
        self._open.add(self)

    def _connected(self, request: Fields) -> socket.socket:
        """Tries to connect until the server answers and has environments for this connection."""
        description, deadline = self._setup.description, time.monotonic() + RECONNECT_S
        while True:
            try:
                return self._opened(request)
            except _Busy as busy:
                if self._suspend_another():
                    continue
                reason: object = busy
            except (OSError, EOFError) as error:
                reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            if time.monotonic() > deadline:
                raise Unreachable(f"{self._name} ({description.id}) was not available for {RECONNECT_S:g} s: {reason}")
            time.sleep(_PAUSE_S)

    def _opened(self, request: Fields) -> socket.socket:
        sock, facts = _connect(self._address, self._setup.description)
        try:
            _check_tasks(self._address, facts, self._setup.description)
            if facts.spaces != self._setup.spaces:
                raise ConfigError([Problem(KEY, "the server's environment has other spaces now", value=self._address)])
            wire.send(sock, Kind.OPEN, request)
            deadline = time.monotonic() + wire.GREETING_TIMEOUT_S
            answer = wire.receive(sock, (Kind.GRANTED, Kind.REFUSED), deadline=deadline)
            if answer.kind == Kind.REFUSED:
                reason = str(answer.fields.get("reason"))
                if answer.fields.get("busy") is True:
                    raise _Busy(reason)
                raise ConfigError([Problem(KEY, f"the server refuses: {reason}", value=self._address)])
            limit, own = answer.fields.get("step_timeout_s"), request["step_timeout_s"]
            if isinstance(limit, int | float) and limit < own:
                text = "%s ends a step after %g s (its --step-timeout-s); env.step_timeout_s is %g"
                logger.warning(text, self._name, limit, own)
        except WireError as error:
            sock.close()
            raise EOFError(str(error)) from error
        except BaseException:
            sock.close()
            raise
        return sock

    def _suspend_another(self) -> bool:
        """Closes another connection of this process to the same server.

        An idle one of this thread is closed first, as for an evaluation on the only robot. Otherwise one that draws is
        closed, because a run can continue without its video.

        Returns whether there was one.
        """
        others = [other for other in list(self._open) if other._address == self._address and not other.suspended]
        for other in others:
            if other._thread == self._thread and not other._waits:
                other.suspended = True
                other.hang_up()
                return True
        for other in others:
            if other._draws and not self._draws:
                self._open.discard(other)
                with contextlib.suppress(OSError):
                    other._socket.shutdown(socket.SHUT_RDWR)  # its own thread closes it
                return True
        return False

    def send_step(self) -> None:
        arrays = {"actions": self._buffers.actions[self._rows]}
        idle = self._buffers.idle[self._rows]
        if idle.any():
            arrays["idle"] = idle
        self._send("step", Kind.STEP, {}, arrays)

    def command(self, method: str, *arguments: Any) -> None:
        """Resets the environments, with the seeds in the last argument, or draws; `save` needs no server."""
        if method == "save":
            if self._index == 0:
                logger.warning("environments of servers (env.address) are not saved: a resumed run begins new episodes")
            # EnvBlock.save returns the same for an environment that cannot be saved
            state = pickle.dumps((None, 0.0, 0, (UNREPORTED, UNREPORTED)))
            self._answer = [state] * (self._rows.stop - self._rows.start)
        elif method == "render":
            self._send(method, Kind.RENDER, {}, {})
        else:
            assert method in ("reset", "restore"), method
            self._send(method, Kind.RESET, {"seeds": [int(seed) for seed in arguments[-1]]}, {})

    def _send(self, doing: str, kind: Kind, fields: Mapping[str, object], arrays: Mapping[str, np.ndarray]) -> None:
        self._waits = True
        try:
            wire.send(self._socket, kind, fields, arrays, time.monotonic() + SENDING_S)
        except OSError as error:
            raise self._died(doing, error) from error

    def wait(self, doing: str, timeout_s: float, buffers: Buffers, since: float | None = None) -> Any:
        """Returns the result of the latest command. Raises Deadline, WorkerDied or WorkerError.

        since: the start of the timeout (time.monotonic); None: now.
        """
        if self._answer is not None:
            answer, self._answer = self._answer, None
            return answer
        deadline = (time.monotonic() if since is None else since) + timeout_s
        try:
            expected = (Kind.DONE, Kind.FAILED, Kind.REFUSED)
            most = LARGEST_FRAME if doing == "render" else self._most_finals
            message = wire.receive(self._reader, expected, self._targets, deadline, most)
            if message.kind == Kind.DONE and doing == "render":
                frame = message.arrays.get("frame", np.empty(0))
                if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3:
                    raise WireError("no picture")
            elif message.kind == Kind.DONE and doing != "start":
                self._check(doing, message)
        except TimeoutError as error:
            limit = " (env.step_timeout_s)" if doing != "start" else ""
            late = f"did not finish its {doing} within {timeout_s:g} s{limit}"
            raise Deadline(f"{self._name} ({self._setup.description.id}) {late}") from error
        except (OSError, EOFError, WireError) as error:
            raise self._died(doing, error) from error
        self._waits = False
        if message.kind == Kind.REFUSED:
            raise self._died(doing, WireError(f"the server refused: {message.fields.get('reason')}"))
        if message.kind == Kind.FAILED:
            index, details = message.fields.get("env_index"), str(message.fields.get("details"))
            number = self._rows.start + (index if isinstance(index, int) else 0)
            raise failure(number, self._setup.description.id, doing, details)
        return message.arrays.get("frame")

    def _check(self, doing: str, message: wire.Message) -> None:
        """Copies results that were not received in place. Raises WireError for missing or impossible ones."""
        buffers, rows = self._buffers, self._rows
        observations, rewards = buffers.observations[rows], buffers.rewards[rows]
        ended = (buffers.terminated[rows] | buffers.truncated[rows]).nonzero()[0] if doing == "step" else ()
        needed = self._results if doing == "step" else self._results[:1]
        if not all(name in message.arrays for name in (*needed, *(self._ends if len(ended) else ()))):
            raise WireError("an answer without results")
        numbers = [observations, rewards]
        if len(ended):
            finals = message.arrays.get("final_observations", observations[:0])
            if (finals.dtype, finals.shape) != (observations.dtype, (len(ended), observations.shape[1])):
                raise WireError("ends of episodes without their last observations")
            buffers.final_observations[rows][ended] = finals
            numbers += [finals, buffers.returns[rows]]
        if not all(np.isfinite(array).all() for array in numbers):
            raise WireError("numbers that are not finite")
        replaced = message.fields.get("replaced", [])
        if not all(isinstance(i, int) and 0 <= i < len(rewards) for i in replaced):
            raise WireError("replacements of environments that are not there")
        for i in replaced:
            number, env_id = rows.start + i, self._setup.description.id
            logger.warning("environment %d (%s) raised and was replaced; see the log of %s", number, env_id, self._name)
            buffers.failures[number] += 1

    def _died(self, doing: str, error: Exception) -> WorkerDied:
        rows, env_id = self._rows, self._setup.description.id
        reason = f"the connection was lost during {doing} ({error})"
        return WorkerDied(f"{self._name}: {reason}, environments {rows.start}..{rows.stop - 1} ({env_id})")

    def kill(self) -> None:
        """Closes the connection; the server ends the process of its environments."""
        self.hang_up()

    def hang_up(self) -> None:
        self._open.discard(self)
        self._socket.close()

    def reap(self) -> None:
        """Does nothing: the server waits for the process."""


class RemoteWorkers(EnvWorkers):
    """The connections of a `VectorEnv`, distributed over the addresses in turn."""

    _members: list[RemoteWorker]  # type: ignore[assignment]

    def __init__(
        self, setup: EnvSetup, bounds: Sequence[int], step_timeout_s: float, variables: Mapping[str, str]
    ) -> None:
        self._remote, self._suspensions = setup, 0
        super().__init__(setup, bounds, step_timeout_s, variables)

    @property
    def pids(self) -> list[int]:
        """Empty: the processes are the server's."""
        return []

    def send_step(self, indices: Iterable[int]) -> None:
        self._resume(indices)
        super().send_step(indices)

    def call(self, method: str, *per_env: Sequence[object]) -> list[object]:
        if method != "save":
            self._resume(range(len(self._members)))
        return super().call(method, *per_env)

    def _resume(self, indices: Iterable[int]) -> None:
        """Connects suspended members again. Their first step is invalid, as after a replacement."""
        for index in indices:
            if self._members[index].suspended:
                self._suspensions += 1
                self._start_again(index, [self.seed, 0, self._suspensions])

    def _start(self, index: int) -> RemoteWorker:  # type: ignore[override]
        rows, addresses = (self._bounds[index], self._bounds[index + 1]), self._remote.description.addresses
        number = self._remote.numbers[rows[0]] // (rows[1] - rows[0])  # in the run: ranks share the servers equally
        address = addresses[number % len(addresses)]
        draws = bool(self._variables)  # `video.play` gives none: it steps in the render mode and draws nothing
        return RemoteWorker(index, rows, address, self._remote, self.buffers, self._timeout_s, draws=draws)
