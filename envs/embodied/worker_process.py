"""The process of an environment worker: builds its environments and carries out the commands of `EnvWorker`.

Nothing here needs torch, so a process starts quickly.
"""

from __future__ import annotations

import mmap
import os
import pickle
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

from rl_platform.envs.embodied.block import EnvBlock, EnvFailure
from rl_platform.envs.embodied.buffers import Buffers
from rl_platform.standard_streams import never_fail

STEP, CALL = b"s", b"c"
DONE, RESULT, FAILED = b"d", b"r", b"f"


def main() -> None:
    """Carries out commands until the learner's side of the connection closes. Arguments: the descriptors of the
    connection and of the shared memory."""
    never_fail()  # an environment may print
    connection, memory_fd = Connection(int(sys.argv[1])), int(sys.argv[2])
    del sys.argv[1:]  # an environment may parse the command line
    try:
        block = _build(connection, memory_fd)
        if block is not None:
            _serve(connection, block)
            block.close()
    except (EOFError, ConnectionError):  # the learner's process has ended or hung up
        pass


def _build(connection: Connection, memory_fd: int) -> EnvBlock | None:
    arguments = pickle.loads(connection.recv_bytes())
    description, spec, spaces, num_envs, *where, render_mode, threads, restarts, numbers = arguments
    memory = mmap.mmap(memory_fd, Buffers.size(num_envs, spaces))
    os.close(memory_fd)
    try:
        buffers = Buffers(num_envs, spaces, memory)
        built = description, pickle.loads(spec), spaces, buffers
        block = EnvBlock(*built, *where, render_mode, threads, restarts=restarts, numbers=numbers)
    except Exception:
        _reply(connection, FAILED, (where[0], "start", traceback.format_exc()))
        return None
    _reply(connection, DONE)
    return block


def _serve(connection: Connection, block: EnvBlock) -> None:
    fd = connection.fileno()
    while message := os.read(fd, 1):
        try:
            if message == STEP:
                block.step()
                _reply(connection, DONE)
            else:
                method, arguments = pickle.loads(connection.recv_bytes())
                _reply(connection, RESULT, getattr(block, method)(*arguments))
        except EnvFailure as error:
            _reply(connection, FAILED, (error.env_index, error.doing, error.details))


def _reply(connection: Connection, kind: bytes, content: Any = None) -> None:
    os.write(connection.fileno(), kind)
    if kind != DONE:
        connection.send_bytes(pickle.dumps(content))
