"""The process of an environment server that steps the environments of one connection.

`Watch` calls the method `stop()` of environments that have one, from a separate thread. It does so when a step takes
too long, the connection is lost, the trainer sends no command, or the server ends.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from rl_platform.envs.embodied.block import EnvBlock, EnvFailure
from rl_platform.envs.embodied.buffers import Buffers
from rl_platform.envs.embodied.descriptions import (
    ENV_ERRORS,
    EnvDescription,
    EnvSetup,
    PixelFormat,
    check_time_limit,
    close_env,
    find_spec,
    make_env,
)
from rl_platform.envs.embodied.env_facts import rendering
from rl_platform.envs.embodied.remote.served_facts import ServedFacts
from rl_platform.envs.embodied.remote.wire import Fields, Kind, Message, Reader, WireError, receive, send
from rl_platform.envs.embodied.spaces import EnvSpaces, read_spaces
from rl_platform.errors import ConfigError, Problem
from rl_platform.interrupts import wake_main_thread
from rl_platform.standard_streams import never_fail

if TYPE_CHECKING:
    from rl_platform.envs.embodied.spaces import AnyEnv

logger = logging.getLogger(__name__)
STOP_LIMIT_S = 2.0


@dataclass(frozen=True)
class ServedSetup(EnvSetup):
    """The setup of one connection. made: the environments built so far, by number; they may already move."""

    made: dict[int, AnyEnv] = field(default_factory=dict)

    def make(self, index: int) -> AnyEnv:
        self.made[index] = super().make(index)
        return self.made[index]

    def stops(self) -> list[Callable[[], object]]:
        """Returns the `stop` methods of the environments that have one."""
        return [stop for env in list(self.made.values()) if (stop := stop_of(env)) is not None]


def stop_of(env: AnyEnv) -> Callable[[], object] | None:
    """Returns the `stop` method of an environment, by which a robot stops; None if it has none."""
    stop = getattr(env.unwrapped, "stop", None)
    return stop if callable(stop) else None


class ServedBlock(EnvBlock):
    """Environments of one connection, which can be stopped."""

    def end_episodes(self) -> None:
        """Ends the running episodes as invalid and begins new ones, in place of a step."""
        active = ~self._idle
        self._finals[:] = self._observations
        self._rewards[:], self._terminated[:] = 0.0, False
        self._truncated[:] = self._invalid[:] = active
        if active.any():
            which = active.nonzero()[0]
            self._reset(which, [self._spares.seed_of_new(i) for i in which.tolist()])

    def _replace(self, i: int, doing: str, error: BaseException) -> None:
        if (stop := stop_of(self._envs[i])) is not None:
            try:
                stop()
            except ENV_ERRORS:  # a signal ends the process, which then stops all environments
                logger.exception("stop() raised")
        super()._replace(i, doing, error)


def _call_all(stops: list[Callable[[], object]]) -> None:
    """Calls each function in a thread of its own, so that one that hangs or raises does not delay the others."""
    threads = [threading.Thread(target=_call, args=(stop,), daemon=True) for stop in stops]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _call(stop: Callable[[], object]) -> None:
    try:
        stop()
    except BaseException:
        logger.exception("stop() raised")


class Watch:
    """Stops the environments, and ends this process after a hanging step or a lost connection.

    step_timeout_s, silence_s: the longest step and the longest time between commands, in seconds.
    """

    def __init__(self, sock: socket.socket, lifeline: int, step_timeout_s: float, silence_s: float, name: str) -> None:
        self._socket, self._name = sock, name
        self._step_timeout_s, self._silence_s = step_timeout_s, silence_s
        self._lock = threading.Lock()  # of the state between commands; a stop during a step does not take it
        self._stopping = threading.RLock()  # the environments are closed after a stop, not during it
        self._halted, self._ending = False, False
        self._working = self._moving = True  # a robot may move while it, or another one, is built
        self._deadline = float("inf")
        self.stops: Callable[[], list[Callable[[], object]]] = list  # of the environments that were built
        self._poller = select.poll()
        self._poller.register(sock, getattr(select, "POLLRDHUP", 0))
        self._poller.register(lifeline, 0)  # hang-ups are always reported
        self._lifeline = lifeline
        threading.Thread(target=self._run, daemon=True).start()

    def begin(self) -> bool:
        """Starts the deadline of a command; returns whether the environments were stopped since the last command.

        The caller calls it before each command. Raises EOFError if the connection has ended."""
        with self._lock:
            if self._ending:
                raise EOFError("the connection ended")
            halted, self._halted = self._halted, False
            self._working = self._moving = True
            self._deadline = time.monotonic() + self._step_timeout_s
            return halted

    def done(self) -> None:
        """Starts the time without commands: called after the environments were built and after each command."""
        with self._lock:
            self._working, self._deadline = False, time.monotonic() + self._silence_s

    def stop(self, why: str) -> None:
        """Stops the environments unless they were stopped already, in STOP_LIMIT_S.

        A command that continues may move them again, so that they do not count as stopped before it has ended.
        """
        with self._stopping:
            moving, self._moving = self._moving, self._working
            if not moving:
                return
            end = _end_process_later()
            if stops := self.stops():
                logger.warning("%s is stopped: %s", self._name, why)
                _call_all(stops)
                self._halted = True
            end.cancel()

    def _run(self) -> None:
        tick = min(self._step_timeout_s, self._silence_s, 1.0) / 10
        while not (events := self._poller.poll(1000 * tick)):
            with self._lock:
                late = time.monotonic() > self._deadline
                if late and not self._working:
                    self.stop(f"no command for {self._silence_s:g} s")
                    self._deadline, late = float("inf"), False
            if late:
                self._end(f"a step took more than {self._step_timeout_s:g} s")
        ended = any(fd == self._lifeline for fd, _ in events)
        self._end("the server ends" if ended else "the connection ended")

    def _end(self, why: str) -> NoReturn:
        self._ending = True
        _end_process_later()
        self.stop(why)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends the main thread between commands
        while True:
            time.sleep(0.2)
            self.stop(why)


def _end_process_later() -> threading.Timer:
    """Ends this process after STOP_LIMIT_S, whatever its threads do, unless the timer is cancelled."""
    end = threading.Timer(STOP_LIMIT_S, os._exit, (1,))
    end.daemon = True
    end.start()
    return end


def main() -> None:
    """Builds the environments and executes commands until the connection ends.

    Arguments of the process: descriptors of the server's pipe and of the connection, and a JSON object: `environment`,
    `facts`, `silence_s`, and the fields of the trainer's message `OPEN`.
    """
    _start_logging()
    lifeline, descriptor, text = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    del sys.argv[1:]  # an environment may parse the command line
    sock, request = socket.socket(fileno=descriptor), json.loads(text)
    description = _description(request["environment"])
    watch = Watch(sock, lifeline, request["step_timeout_s"], request["silence_s"], description.id)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    wake_main_thread()
    block = None
    try:
        setup = _setup(description, request)
        watch.stops = setup.stops
        buffers = Buffers(request["num_envs"], setup.spaces)
        block = ServedBlock(setup, buffers, 0, request["num_envs"], 0, 1)
        watch.done()
        send(sock, Kind.DONE)
        _serve(sock, watch, block, buffers, setup.spaces)
    except WireError as error:
        logger.warning("the trainer is refused: it sent %s", error)
    except EnvFailure as error:
        _fail(sock, error.env_index, error.doing, error.details)
    except (EOFError, OSError, KeyboardInterrupt):
        pass  # the trainer has closed the connection, or a signal ends the process
    except Exception:
        _fail(sock, 0, "start", traceback.format_exc())
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # which would interrupt a stop()
        watch.done()
        watch.stop("the connection ended")
        if block is not None:
            block.close()


def _description(fields: Fields) -> EnvDescription:
    pixels, tasks = fields["pixels"], {name: tuple(fields[name]) for name in ("tasks", "task_names")}
    return EnvDescription(**{**fields, **tasks, "pixels": pixels and PixelFormat(**pixels)})


def _setup(description: EnvDescription, request: Fields) -> ServedSetup:
    spaces, numbers = ServedFacts.of(request["facts"]).spaces, request.get("numbers", range(request["num_envs"]))
    mode = "rgb_array" if request["render"] else None
    return ServedSetup(description, find_spec(description), spaces, numbers, mode, request["restarts"])


def _serve(sock: socket.socket, watch: Watch, block: ServedBlock, buffers: Buffers, spaces: EnvSpaces) -> None:
    count, counted = len(buffers.idle), buffers.failures.copy()
    results = {name: getattr(buffers, name) for name in ("rewards", "terminated", "truncated", "invalid")}
    ends = {name: getattr(buffers, name) for name in ("returns", "lengths", "success_once", "success_at_end")}
    targets, bounds = {"actions": buffers.actions, "idle": buffers.idle}, _bounds(spaces)
    reader = Reader(sock)
    while True:
        message = receive(reader, (Kind.RESET, Kind.STEP, Kind.RENDER), targets)
        if message.kind == Kind.RESET:
            seeds = _seeds(message, count)
            watch.begin()
            block.reset(seeds)
            arrays = {"observations": buffers.observations}
        elif message.kind == Kind.RENDER:
            watch.begin()
            arrays = {"frame": block.render()}
        else:
            _check_actions(message, buffers, *bounds)
            if watch.begin():
                block.end_episodes()
            else:
                block.step()
            arrays = {"observations": buffers.observations, **results}
            ended = buffers.terminated | buffers.truncated
            if ended.any():
                arrays |= {**ends, "final_observations": buffers.final_observations[ended]}
        watch.done()  # before the answer, after which the trainer may leave at once
        failed = {}
        if (new := buffers.failures - counted).any():
            failed, counted[:] = {"replaced": np.repeat(np.arange(count), new).tolist()}, buffers.failures
        send(sock, Kind.DONE, failed, arrays)


def _seeds(message: Message, count: int) -> list[int]:
    seeds = message.fields.get("seeds")
    if not isinstance(seeds, list) or len(seeds) != count or not all(type(n) is int and 0 <= n < 2**64 for n in seeds):
        raise WireError(f"no list of {count} seeds")
    return seeds


def _bounds(spaces: EnvSpaces) -> tuple[np.ndarray, np.ndarray]:
    """Returns the lowest and highest actions of the policy."""
    if spaces.action.kind == "continuous":
        return np.asarray(spaces.action_low, np.float32), np.asarray(spaces.action_high, np.float32)
    return np.zeros((), np.int64), np.reshape(spaces.action.counts, spaces.policy_action_shape) - 1


def _check_actions(message: Message, buffers: Buffers, low: np.ndarray, high: np.ndarray) -> None:
    if "actions" not in message.arrays:
        raise WireError("a step without actions")
    if "idle" not in message.arrays:
        buffers.idle[:] = False
    actions = buffers.actions
    if not ((actions >= low) & (actions <= high) & np.isfinite(actions)).all():
        raise WireError("actions outside of their bounds")


def _fail(sock: socket.socket, env_index: int, doing: str, details: str) -> None:
    logger.warning("environment %d failed in %s:\n%s", env_index, doing, details)
    with contextlib.suppress(OSError):
        send(sock, Kind.FAILED, {"env_index": env_index, "doing": doing, "details": details[-20_000:]})


def describe() -> None:
    """Builds an environment and sends its facts, with `stops`: it has a `stop`, or the reason of a failure.

    Arguments of the process: the descriptor of the pipe, and the description of the environment as JSON.
    """
    _start_logging()
    pipe, description = socket.socket(fileno=int(sys.argv[1])), _description(json.loads(sys.argv[2]))
    del sys.argv[1:]
    try:
        facts, stops = _facts(description)
    except ConfigError as error:
        send(pipe, Kind.REFUSED, {"reason": "\n".join(map(str, error.problems))})
    except Exception:
        send(pipe, Kind.REFUSED, {"reason": f"env.id: cannot be built:\n{traceback.format_exc()}"})
    else:
        send(pipe, Kind.WELCOME, {**facts.fields(), "stops": stops})


def _facts(description: EnvDescription) -> tuple[ServedFacts, bool]:
    """Returns the facts of the environments of all tasks, and whether one has a `stop`. Builds one after the other.

    Raises ConfigError if one cannot be built, or has other spaces than that of the first task.
    """
    names = description.task_names or ("",)
    spaces: list[EnvSpaces] = []
    limited, stops, rates = True, False, []
    for number, name in enumerate(names):
        try:
            env = make_env(description.of_task(number))
            spaces.append(read_spaces(env, description.id))
        except ConfigError as error:
            if not name:
                raise
            problems = [replace(each, key="--tasks", message=f"{name}: {each.message}") for each in error.problems]
            raise ConfigError(problems) from error
        limited &= _limited(env, description.id)
        stops |= stop_of(env) is not None
        modes, rate = rendering(env)
        rates.append(rate if "rgb_array" in modes else 0)
        close_env(env, description.id)
        if spaces[-1] != spaces[0]:
            message = f"task {name} has other spaces than {names[0]}"
            raise ConfigError([Problem("--tasks", message, value=str(spaces[-1]), allowed=str(spaces[0]))])
    rate = 0 if stops or 0 in rates else rates[0]  # a video repeats the actions of an episode, which would move a robot
    return ServedFacts(description.id, spaces[0], limited, description.task_names, rate), stops


def _limited(env: AnyEnv, env_id: str) -> bool:
    try:
        check_time_limit(env, env_id)
    except ConfigError:
        return False
    return True


def _start_logging() -> None:
    never_fail()  # an environment may print
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
