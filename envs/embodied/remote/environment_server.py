"""The program of an environment server: `python server.pyz --env ID`, see `rl-platform environment-server`.

The operator names the environment; a trainer chooses the number of environments and their seeds. A thread checks each
connection, and a process of its own then steps its environments (`served_environments.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import ipaddress
import json
import logging
import os
import re
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import NoReturn

from rl_platform.envs.embodied.descriptions import PixelFormat
from rl_platform.envs.embodied.remote.served_facts import ServedFacts
from rl_platform.envs.embodied.remote.wire import (
    GREETING_TIMEOUT_S,
    TOKEN_VARIABLE,
    Fields,
    Kind,
    WireError,
    address_of,
    checked_token,
    greet,
    prepare,
    read_token,
    receive,
    send,
)
from rl_platform.interrupts import wake_main_thread
from rl_platform.runtime.child import Child, Death
from rl_platform.standard_streams import never_fail

logger = logging.getLogger(__name__)
BUILD_TIMEOUT_S = 120.0
INSTANCES = 1024  # default for environments without a stop()
STEP_TIMEOUT_S = 10.0  # default for environments with a stop(): no longer than without a command
MOST_GREETINGS = 32  # at the same time
_TASK_NAME = re.compile(r"[\w.-]+")  # as in env.tasks
_PAUSE_S = 0.2
_FAREWELL_S = 2.0
END_S = 4.0  # longer than a `stop()` may take
_DESCRIBE = "from rl_platform.envs.embodied.remote.served_environments import describe; describe()"
_SERVE = "from rl_platform.envs.embodied.remote.served_environments import main; main()"
# more threads than one would compete with the processes of other connections
_THREAD_LIMITS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "LP_NUM_THREADS")
_DRAWING = {"MUJOCO_GL": "egl", "PYOPENGL_PLATFORM": "egl", "SDL_VIDEODRIVER": "dummy"}  # without a screen


class Refusal(Exception):
    """The reason that is sent to a trainer. busy: other connections have the environments, so it may try again."""

    def __init__(self, reason: str, *, busy: bool = False) -> None:
        super().__init__(reason)
        self.busy = busy


class EnvironmentServer:
    """Accepts trainers and starts the processes of their environments.

    environment: id, kwargs, pixels, tasks and task_names. instances: the most environments of all connections.
    silence_s: seconds without a command after which environments with a `stop` are stopped. step_timeout_s: the longest
    step in seconds, whatever a trainer allows; None: the trainer alone chooses.
    """

    def __init__(
        self,
        environment: Mapping[str, object],
        facts: ServedFacts,
        token: str,
        instances: int,
        silence_s: float,
        step_timeout_s: float | None,
    ) -> None:
        self._environment, self._facts, self._token = dict(environment), facts, token
        self._instances, self._silence_s, self._step_timeout_s = instances, silence_s, step_timeout_s
        self._lock, self._greetings = threading.Lock(), threading.BoundedSemaphore(MOST_GREETINGS)
        self._children: dict[Child, int] = {}
        self._in_use, self._closing = 0, False

    def serve(self, listener: socket.socket) -> None:
        """Accepts connections until the process is interrupted."""
        while True:
            try:
                sock, (host, port, *_) = listener.accept()
            except OSError as error:  # as of too many open files, which others close again
                logger.warning("a connection cannot be accepted: %s", error)
                time.sleep(_PAUSE_S)
                continue
            if not self._greetings.acquire(blocking=False):
                sock.close()
                continue
            threading.Thread(target=self._connect, args=(sock, address_of(host, port)), daemon=True).start()

    def close(self) -> None:
        """Ends the processes, which stop their environments first."""
        with self._lock:
            self._closing, children = True, list(self._children)
            for child in children:
                child.socket.close()
        for child in children:
            child.end(END_S)

    def _connect(self, sock: socket.socket, peer: str) -> None:
        child, count = None, 0
        with sock:
            try:
                request = self._greeted(sock)
                if request is None:
                    return
                count = self._take(request["num_envs"])
                if (limit := self._step_timeout_s) is not None:
                    request["step_timeout_s"] = min(request["step_timeout_s"], limit)
                granted = {} if limit is None else {"step_timeout_s": limit}
                send(sock, Kind.GRANTED, granted, deadline=time.monotonic() + GREETING_TIMEOUT_S)
                sock.settimeout(None)
                child = self._start(sock, request, count)
            except Refusal as refusal:
                logger.warning("%s is refused: %s", peer, refusal)
                _refuse(sock, refusal)
            except WireError as error:
                logger.warning("%s is refused: it sent %s", peer, error)
                _refuse(sock, Refusal(f"the server received {error}"))
            except (EOFError, OSError) as error:
                logger.warning("the connection of %s was lost: %s", peer, error)
            finally:
                self._greetings.release()
                if child is None:
                    self._give_back(count)
        if child is not None:
            self._await(child, peer, count)

    def _greeted(self, sock: socket.socket) -> Fields | None:
        """Returns the request of a trainer that has the token; None if it closes after the facts."""
        prepare(sock)
        if reason := greet(sock, self._token):
            raise Refusal(reason)
        send(sock, Kind.WELCOME, self._facts.fields(), deadline=time.monotonic() + GREETING_TIMEOUT_S)
        try:
            fields = receive(sock, (Kind.OPEN,), deadline=time.monotonic() + GREETING_TIMEOUT_S).fields
        except EOFError:
            return None
        request = {name: fields.get(name) for name in ("num_envs", "restarts", "step_timeout_s", "max_episode_steps")}
        for name, value in request.items():
            kinds, least = {"restarts": (int, 0), "step_timeout_s": (int | float, 0.001)}.get(name, (int, 1))
            given = value is not None or name != "max_episode_steps"
            if given and (not isinstance(value, kinds) or not least <= value < 1e9):
                raise WireError(f"{name}: {str(value)[:80]}")
        request |= {name: fields.get(name) is True for name in ("render", "draws")}
        if request["render"] and not self._facts.render_rate:
            raise Refusal("this server draws no pictures")
        if self._facts.tasks:  # the number of an environment in the run determines its task
            numbers = request["numbers"] = fields.get("numbers")
            if not isinstance(numbers, list) or len(numbers) != request["num_envs"]:
                raise WireError(f"numbers: {str(numbers)[:80]}")
            if not all(type(number) is int and 0 <= number < 1e9 for number in numbers):
                raise WireError(f"numbers: {str(numbers)[:80]}")
        return request

    def _take(self, count: int) -> int:
        with self._lock:
            if count > self._instances:
                wanted = f"{count} environments in one connection; this server has {self._instances}"
                raise Refusal(f"{wanted}: --instances, or fewer in env.num_envs")
            if self._in_use + count > self._instances:
                taken = f"{self._in_use} of {self._instances} environments are in use"
                raise Refusal(f"{taken}, {count} more were requested: --instances", busy=True)
            self._in_use += count
        return count

    def _give_back(self, count: int) -> None:
        with self._lock:
            self._in_use -= count

    def _start(self, sock: socket.socket, request: Fields, count: int) -> Child:
        environment = self._environment | {"max_episode_steps": request.pop("max_episode_steps")}
        request |= {"environment": environment, "facts": self._facts.fields(), "silence_s": self._silence_s}
        descriptor = sock.fileno()
        defaults = dict.fromkeys(_THREAD_LIMITS, "1") | (_DRAWING if request.pop("draws") else {})
        variables = {name: os.environ.get(name, value) for name, value in defaults.items()}
        with self._lock:
            if self._closing:
                raise Refusal("the server ends")
            child = Child(_SERVE, Death.HANG_UP, [descriptor, json.dumps(request)], variables, [descriptor])
            self._children[child] = count
        return child

    def _await(self, child: Child, peer: str, count: int) -> None:
        logger.info("%s has %d environments (process %d)", peer, count, child.pid)
        while not child.ends_within(3600.0):
            pass
        with self._lock:
            self._children.pop(child)
        self._give_back(count)
        logger.info("%s has left", peer)


def _refuse(sock: socket.socket, refusal: Refusal) -> None:
    """Sends the reason, and reads what is left: a socket closed with unread data resets the connection, and the other
    side could lose the reason."""
    deadline = time.monotonic() + _FAREWELL_S
    with contextlib.suppress(OSError):
        sock.settimeout(_FAREWELL_S)
        send(sock, Kind.REFUSED, {"reason": str(refusal), "busy": refusal.busy})
        sock.shutdown(socket.SHUT_WR)
        while (left := deadline - time.monotonic()) > 0:
            sock.settimeout(left)
            if not sock.recv(1 << 16):
                return


def main(arguments: list[str] | None = None) -> None:
    """Serves environments until SIGINT or SIGTERM. Exits with code 2 for wrong arguments."""
    never_fail()
    options = _options(arguments)
    parser, token = options.parser, _token(options)
    names, tasks = _tasks(options)
    environment = {"id": options.env, "kwargs": _kwargs(options), "pixels": _pixels(options)}
    environment |= {"tasks": tasks, "task_names": names}
    asked = options.host.removeprefix("[").removesuffix("]")
    try:
        family = socket.AF_INET6 if ":" in asked else socket.AF_INET
        listener = socket.create_server((asked, options.port), family=family)
    except OSError as error:
        port = error.errno in (errno.EADDRINUSE, errno.EACCES)
        hint = "name another port" if port else "--host is an address of this machine, or 0.0.0.0 for all of them"
        _wrong(parser, f"--host {options.host} --port {options.port}: {error.strerror or error}; {hint}")
    facts, stops = _facts(environment, parser)
    instances = options.instances or (1 if stops else INSTANCES)
    step_timeout_s = options.step_timeout_s or (STEP_TIMEOUT_S if stops else None)
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    wake_main_thread()
    server = EnvironmentServer(environment, facts, token, instances, options.silence_s, step_timeout_s)
    host, port = listener.getsockname()[:2]
    if not ipaddress.ip_address(host).is_loopback:
        print("messages are not encrypted: use it in a trusted network, or --host 127.0.0.1 and ssh -L", flush=True)
    shown = address_of(socket.gethostname() if host in ("0.0.0.0", "::") else host, port)
    print(f"{options.env} is served: env.id={options.env} env.address={shown}", flush=True)
    try:
        server.serve(listener)
    except KeyboardInterrupt:
        pass
    finally:
        listener.close()
        server.close()


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Serves environments to a trainer: env.address=HOST:PORT.")
    parser.add_argument("--env", required=True, metavar="ID", help="as CartPole-v1, my_robot.py:Arm or module:id")
    parser.add_argument("--kwargs", default="{}", metavar="JSON", help="arguments of the environment, as a JSON object")
    tasks = 'several tasks, as \'[{"name": "reach", "kwargs": {"env_name": "reach-v3"}}, ...]\'; env.tasks: their names'
    parser.add_argument("--tasks", default="[]", metavar="JSON", help=tasks)
    pixels = "images as observations, as a JSON object of env.pixels; default: the environment's own observations"
    parser.add_argument("--pixels", metavar="JSON", help=pixels)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at; default: this machine alone")
    parser.add_argument("--port", type=int, default=0, help="default: a free one, which is printed")
    secret = f"the shared secret, made if FILE is missing; default: the variable {TOKEN_VARIABLE}"
    parser.add_argument("--token-file", metavar="FILE", help=secret)
    most = f"most environments at once; default: 1 with a stop(), else {INSTANCES}"
    parser.add_argument("--instances", type=int, help=most)
    parser.add_argument(
        "--silence-s", type=float, default=10.0, help="seconds without a command after which stop() is called"
    )
    longest = (
        "seconds after which a step or reset is stopped and its process ended, also if env.step_timeout_s of the "
        f"trainer is longer; default: {STEP_TIMEOUT_S:g} with a stop(), else that of the trainer"
    )
    parser.add_argument("--step-timeout-s", type=float, help=longest)
    options = parser.parse_args(arguments, argparse.Namespace(parser=parser))
    for name, good in (
        ("port", 0 <= options.port < 65536),
        ("instances", options.instances is None or options.instances >= 1),
        ("silence_s", 0.1 <= options.silence_s < 1e6),
        ("step_timeout_s", options.step_timeout_s is None or 0.001 <= options.step_timeout_s < 1e6),
    ):
        if not good:
            _wrong(parser, f"--{name.replace('_', '-')} {getattr(options, name)}: out of range")
    return options


def _wrong(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    parser.error(message)


def _kwargs(options: argparse.Namespace) -> dict[str, object]:
    kwargs = _object(options.kwargs)
    if kwargs is None:
        _wrong(options.parser, f"--kwargs {options.kwargs}: not a JSON object; as --kwargs '{{\"speed\": 0.5}}'")
    return kwargs


def _tasks(options: argparse.Namespace) -> tuple[list[str], list[dict[str, object]]]:
    """Returns the names of the tasks and their additions to the arguments of the environment."""
    try:
        given = json.loads(options.tasks)
        tasks = [(task["name"], task.get("kwargs", {})) for task in given]
        fit = all(_TASK_NAME.fullmatch(name) and isinstance(kwargs, dict) for name, kwargs in tasks)
        alone = len(dict(tasks)) == len(tasks) and all(task.keys() <= {"name", "kwargs"} for task in given)
        if isinstance(given, list) and fit and alone:
            return [name for name, _ in tasks], [kwargs for _, kwargs in tasks]
    except (ValueError, TypeError, KeyError, AttributeError):
        pass
    example = (
        '--tasks \'[{"name": "reach", "kwargs": {"env_name": "reach-v3"}}]\', each with another name without spaces'
    )
    _wrong(options.parser, f"--tasks {options.tasks}: not a JSON list of tasks; as {example}")


def _pixels(options: argparse.Namespace) -> dict[str, object] | None:
    """Returns the fields of a `PixelFormat`."""
    if options.pixels is None:
        return None
    try:
        pixels = PixelFormat(**(_object(options.pixels) or {}))
        sizes = (pixels.width, pixels.height, 8 * pixels.frame_stack)
        if all(isinstance(size, int) and 8 <= size <= 1024 for size in sizes):
            return asdict(pixels)
    except TypeError:
        pass
    example = '--pixels \'{"width": 64, "height": 64, "frame_stack": 3}\', from 8 to 1024'
    _wrong(options.parser, f"--pixels {options.pixels}: not a size of images; as {example}")


def _object(text: str) -> Fields | None:
    """Returns a JSON object; None if the text is none."""
    try:
        given = json.loads(text)
    except ValueError:
        return None
    return given if isinstance(given, dict) else None


def _token(options: argparse.Namespace) -> str:
    """Returns the token. Makes the file if it is missing."""
    path = options.token_file
    try:
        if path is None:
            if TOKEN_VARIABLE not in os.environ:
                _wrong(options.parser, "there is no token: --token-file token makes one")
            path = TOKEN_VARIABLE
            return checked_token(os.environ[TOKEN_VARIABLE].strip())
        if not os.path.exists(path):
            token = secrets.token_urlsafe(32)
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(token + "\n")
            print(f"{path}: new token; copy this file to the trainer and name it in env.token_file", flush=True)
            return token
        return read_token(path)
    except (OSError, ValueError) as error:
        _wrong(options.parser, f"{path}: {getattr(error, 'strerror', None) or error}")


def _facts(environment: Mapping[str, object], parser: argparse.ArgumentParser) -> tuple[ServedFacts, bool]:
    """Returns the facts of the environment, which a process of its own builds once, and whether it has a `stop`."""
    child = Child(_DESCRIBE, Death.HANG_UP, [json.dumps(environment)])
    try:
        deadline = time.monotonic() + BUILD_TIMEOUT_S
        message = receive(child.socket, (Kind.WELCOME, Kind.REFUSED), deadline=deadline)
        facts = ServedFacts.of(message.fields) if message.kind == Kind.WELCOME else None
    except TimeoutError:
        _wrong(parser, f"--env {environment['id']}: was not built within {BUILD_TIMEOUT_S:g} s")
    except (EOFError, OSError, WireError):
        _wrong(parser, f"--env {environment['id']}: its process ended: {child.exit_reason()}")
    finally:
        child.kill()
    if facts is None:
        reason = str(message.fields.get("reason"))
        for key, option in (
            ("~env.kwargs.", ""),
            ("env.id", "--env"),
            ("env.kwargs", "--kwargs"),
            ("env.pixels", "--pixels"),
        ):
            reason = reason.replace(key, option)
        _wrong(parser, reason)
    return facts, message.fields.get("stops") is True


if __name__ == "__main__":
    main()
