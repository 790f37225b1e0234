"""The process of an environment worker: builds its environments and executes the commands of `EnvWorker`.

Nothing here imports torch, so a process starts quickly.
"""

from __future__ import annotations

import mmap
import os
import pickle
import sys
import traceback
from multiprocessing.connection import Connection

from rl_platform.envs.embodied.block import EnvBlock, EnvFailure
from rl_platform.envs.embodied.buffers import Buffers
from rl_platform.envs.embodied.descriptions import EnvSetup
from rl_platform.standard_streams import never_fail
from rl_platform.user_code import import_user_module

STEP, CALL = b"s", b"c"
DONE, RESULT, FAILED = b"d", b"r", b"f"


def main() -> None:
    """Executes commands until the learner closes the connection.

    Arguments of the process: the descriptors of the connection and of the shared memory.
    """
    never_fail()  # an environment may print
    connection, memory_fd = Connection(int(sys.argv[1])), int(sys.argv[2])
    del sys.argv[1:]  # an environment may parse the command line
    try:
        block = _build(connection, memory_fd)
        if block is not None:
            _serve(connection, block)
            block.close()
    except (EOFError, ConnectionError):  # the learner's process has ended or has closed the connection
        pass


def _build(connection: Connection, memory_fd: int) -> EnvBlock | None:
    files, pickled, first, last, worker, threads = pickle.loads(connection.recv_bytes())
    try:
        for file in files:  # the setup may hold classes of these
            import_user_module(file)
        setup: EnvSetup = pickle.loads(pickled)
        num_envs = len(setup.numbers)
        memory = mmap.mmap(memory_fd, Buffers.size(num_envs, setup.spaces))
        os.close(memory_fd)
        block = EnvBlock(setup, Buffers(num_envs, setup.spaces, memory), first, last, worker, threads)
    except Exception:
        _reply(connection, FAILED, (first, "start", traceback.format_exc()))
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


def _reply(connection: Connection, kind: bytes, content: object = None) -> None:
    os.write(connection.fileno(), kind)
    if kind != DONE:
        connection.send_bytes(pickle.dumps(content))
