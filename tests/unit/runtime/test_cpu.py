import os
import subprocess
import sys

import pytest
import torch

PROGRAM = """
import os, threading
import torch
from rl_platform.runtime import ComponentSpec
from rl_platform.runtime.worker_group import Handle
from rl_platform.runtime.host import ComponentContext, RankThread

torch.set_num_threads(4)

class Adder:
    def __init__(self, context):
        pass

    def add(self):
        return float(torch.ones(1 << 20).add(1.0)[0]), len(os.listdir("/proc/self/task"))

context = ComponentContext("adder", 0, 1, (), 0)
rank = RankThread("host", context, ComponentSpec(Adder), lambda label, error: None)
rank.construct().result()
idle = len(os.listdir("/proc/self/task"))
for _ in range(2):
    result, computing = rank.submit("add", (), {}).result()
    assert result == 2.0
    print(computing - idle, len(os.listdir("/proc/self/task")) - idle)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="libgomp is what torch uses on Linux")
def test_the_team_of_a_call_ends_with_it() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["3 0", "3 0"], done.stderr


ALONE = """
import threading
import torch
from rl_platform.runtime.cpu import compute_alone

torch.set_num_threads(3)
threads = []

def alone():
    compute_alone()
    threads.append(torch.get_num_threads())

for function in (alone, lambda: threads.append(torch.get_num_threads())):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()
print(*threads, torch.get_num_threads())
"""


def test_only_the_thread_that_asks_computes_alone() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["1", "3", "3"], done.stderr


MKL = """
import ctypes, os, sys
import torch
from rl_platform.runtime.ray.host_process import prepare_process

library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))
for threads in (2, 3):
    if (host := os.fork()) == 0:
        prepare_process({}, threads, [os.getcwd()], False, False)
        torch.ones(64, 64) @ torch.ones(64, 64)
        print(torch.get_num_threads(), library.mkl_serv_get_dynamic(), flush=True)
        os._exit(0)
    os.waitpid(host, 0)
"""


@pytest.mark.skipif(
    sys.platform != "linux" or not torch.backends.mkl.is_available(), reason="asks the MKL inside torch's library"
)
def test_a_host_that_begins_with_its_threads_lets_mkl_use_fewer() -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", MKL], capture_output=True, text=True, timeout=60, env=environment)
    assert done.stdout.splitlines() == ["2 1", "3 0"], done.stderr


FREED = """
import os, sys
from rl_platform.runtime.ray import host_process

host_process.keep_freed_memory = lambda: print("kept")
host_process.prepare_process({}, 1, [os.getcwd()], False, sys.argv[1] == "accelerated")
"""


@pytest.mark.parametrize(("kind", "printed"), [("plain", "kept\n"), ("accelerated", "")])
def test_a_host_with_accelerators_returns_freed_memory(kind: str, printed: str) -> None:
    done = subprocess.run([sys.executable, "-c", FREED, kind], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == (printed, 0), done.stderr
