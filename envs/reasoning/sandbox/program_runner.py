"""The program inside a sandbox, process 1 of its namespaces: runs a model's program once per test.

Each test has a process of its own, forked from this one, which confines itself before it compiles the program. This
process reads frames from descriptor 0 and writes frames to descriptor 1 (`process.py`). It never receives an expected
output. It imports nothing of the platform, because the sandbox contains only Python's standard library. It imports few
modules of that, because imports would take more time than many programs.
"""

import atexit
import builtins
import ctypes
import marshal
import os
import resource
import select
import signal
import struct
import sys
import time

DONE, CRASHED, TIMEOUT, MEMORY, OUTPUT, UNCONFINED = b"D", b"C", b"T", b"M", b"O", b"U"
NOBODY = 65534
LENGTH, REPLY = struct.Struct("!I"), struct.Struct("!cfII")  # status, CPU seconds, bytes of the result, of the note
LONGEST_NOTE = 1000  # bytes of the error output's end
CONFINED_S = 10.0  # until a process has confined itself, on a busy machine; then the time of its program begins
SPARE_S = 0.005  # between two looks at a process that has closed its output
FILES, THREADS = 64, 64
NEW_USER = 0x10000000
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # Landlock's system calls, the same on all processors
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, MAKE_CHAR, MAKE_SOCK, MAKE_FIFO, MAKE_BLOCK, TRUNCATE, IOCTL = (
    1 << bit for bit in (0, 1, 2, 3, 6, 9, 10, 11, 14, 15)
)
FORBIDDEN = EXECUTE | MAKE_CHAR | MAKE_SOCK | MAKE_FIFO | MAKE_BLOCK | IOCTL  # in the writable folder too


def main():
    """Runs the tests that arrive on stdin, each in a folder of its own, and writes their results to stdout."""
    setup = read_frame(0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # process 1 ignores signals of its namespace without a handler
    if setup["isolated"]:
        become_nobody()
    os.write(1, b"R")
    number = 0
    while (test := read_frame(0)) is not None:
        folder = os.path.join(setup["folder"], str(number))
        os.mkdir(folder)
        reply(*run(setup, test, folder))
        number += 1


def become_nobody():
    """Drops root and all capabilities. Without root outside, the only user of the sandbox already is `nobody`."""
    assert os.getpid() == 1
    libc = ctypes.CDLL(None, use_errno=True)
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        check(libc.unshare(NEW_USER), "unshare")  # counts processes of this sandbox alone
    header = struct.pack("=Ii", 0x20080522, 0)  # capabilities, version 3: none
    check(libc.capset(header, bytes(24)), "capset")


def run(setup, test, folder):
    """Returns status, CPU seconds, result and note of one test."""
    if "entry_point" in test:
        import json  # noqa: F401  before the fork, so that later tests need not import it
    stdin = os.open(folder + ".in", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    os.unlink(folder + ".in")
    with open(os.dup(stdin), "wb") as file:
        file.write(test.get("input", "").encode("utf-8", "surrogatepass"))
    os.lseek(stdin, 0, os.SEEK_SET)
    results, errors, confined = os.pipe(), os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        calls = "entry_point" in test
        output = os.open(os.devnull, os.O_WRONLY) if calls else results[1]
        wanted = [stdin, output, errors[1], results[1] if calls else output, confined[1]]
        safe = [os.dup2(each, 100 + number) for number, each in enumerate(wanted)]
        for number, each in enumerate(safe):
            os.dup2(each, number)
        os.closerange(5, 256)
        os.chdir(folder)
        confine(setup, test["cpu_s"], folder)
        os.write(4, b"confined")
        os.closerange(4 if calls else 3, 5)
        leave(execute(setup["program"], test))
    for each in (stdin, results[1], errors[1], confined[1]):
        os.close(each)
    try:
        ready = select.select([confined[0]], [], [], CONFINED_S)[0] and os.read(confined[0], 8) == b"confined"
        result, note, in_time = listen(results[0], errors[0], setup["longest_output"], test["wall_s"])
    finally:
        for each in (results[0], errors[0], confined[0]):
            os.close(each)
    status, usage = wait(child, time.monotonic() + (in_time if result is not None else 0.0))
    end_others(setup["isolated"], child)
    cpu = usage.ru_utime + usage.ru_stime
    if not ready:
        return UNCONFINED, cpu, b"", note
    if result is None:
        return OUTPUT, cpu, b"", note
    if status is None or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):  # by RLIMIT_CPU
        return TIMEOUT, cpu, b"", note
    if status != 0:
        memory = note.rstrip().rpartition(b"\n")[2].startswith(b"MemoryError")
        return MEMORY if memory else CRASHED, cpu, b"", note or b"exit code %d" % os.waitstatus_to_exitcode(status)
    return DONE, cpu, result, note


def listen(results, errors, longest, seconds):
    """Reads both pipes to their end or for so many seconds.

    Returns the result (None if it is too long), the end of the error output, and the seconds left.
    """
    end = time.monotonic() + seconds
    parts, size, note = [], 0, b""
    poller = select.poll()
    open_pipes = {results, errors}
    for each in open_pipes:
        poller.register(each, select.POLLIN)
    while open_pipes and (left := end - time.monotonic()) > 0:
        for each, _ in poller.poll(1000 * left + 1):
            arrived = os.read(each, 1 << 16)
            if not arrived:
                poller.unregister(each)
                open_pipes.discard(each)
            elif each == errors:
                note = (note + arrived)[-LONGEST_NOTE:]
            else:
                parts.append(arrived)
                size += len(arrived)
        if size > longest:
            return None, note, 0.0
    return b"".join(parts), note, max(end - time.monotonic(), 0.0)


def wait(child, end):
    """Returns the exit status, None if the process had to be killed, and the resources that it used."""
    while True:
        ended, status, usage = os.wait4(child, os.WNOHANG)
        if ended:
            return status, usage
        if time.monotonic() >= end:
            break
        time.sleep(SPARE_S)
    os.kill(child, signal.SIGKILL)
    return None, os.wait4(child, 0)[2]


def end_others(isolated, child):
    """Kills what the test started. In a namespace that is everything but this process."""
    try:
        if isolated:
            os.kill(-1, signal.SIGKILL)
        else:
            os.killpg(child, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    try:
        while os.waitpid(-1, 0 if isolated else os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def confine(setup, cpu_s, folder):
    """Raises OSError if a layer is missing; the program does not run then."""
    limits = {"RLIMIT_CPU": cpu_s, "RLIMIT_FSIZE": setup["disk_bytes"], "RLIMIT_NOFILE": FILES, "RLIMIT_CORE": 0}
    if setup["isolated"]:
        limits |= {"RLIMIT_NPROC": THREADS, "RLIMIT_MEMLOCK": 0, "RLIMIT_MSGQUEUE": 0}
    if sys.platform == "linux":
        limits["RLIMIT_AS"] = setup["memory_bytes"]
    for name, limit in limits.items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, limit))
    if not setup["isolated"]:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    check(libc.prctl(38, 1, 0, 0, 0), "no_new_privs")
    landlock(libc, setup["reads"], folder)
    bpf = bytes.fromhex(setup["filter"])
    program = ctypes.create_string_buffer(bpf, len(bpf))
    pointer = struct.pack("@HP", len(bpf) // 8, ctypes.addressof(program))
    check(libc.prctl(22, 2, pointer, 0, 0), "seccomp")


def landlock(libc, reads, folder):
    """Allows to read `reads` and to write files in `folder`; covers all rights that this kernel's Landlock has."""
    version = check(libc.syscall(CREATE_RULESET, None, 0, 1), "Landlock")
    files = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    attributes = struct.pack("=QQQ", files, 3, 3)  # files, TCP, abstract sockets and signals
    size = 8 if version < 4 else 16 if version < 6 else 24
    ruleset = check(libc.syscall(CREATE_RULESET, attributes, size, 0), "Landlock's ruleset")
    rules = [(path, READ_FILE | READ_DIR if os.path.isdir(path) else READ_FILE) for path in reads]
    rules += [(os.devnull, READ_FILE | WRITE_FILE | TRUNCATE), (folder, ~FORBIDDEN)]
    for path, allowed in rules:
        descriptor = os.open(path, os.O_PATH)
        rule = struct.pack("=Qi", allowed & files, descriptor)
        check(libc.syscall(ADD_RULE, ruleset, 1, rule, 0), f"Landlock's rule of {path}")
        os.close(descriptor)
    check(libc.syscall(RESTRICT_SELF, ruleset, 0), "Landlock's restriction")
    os.close(ruleset)


def execute(source, test):
    """Runs the program and returns its exit code; of a call, writes the result as JSON to descriptor 3 and ends the
    process at once."""
    calls = "entry_point" in test
    module = type(sys)("program" if calls else "__main__")
    sys.modules[module.__name__] = module
    sys.argv = ["program.py"]
    builtins.exit = builtins.quit = sys.exit  # as the module `site` does, which is not imported
    try:
        exec(compile(source, "program.py", "exec"), module.__dict__)
        if calls:
            first, *names = test["entry_point"].split(".")
            function = module.__dict__[first]
            for name in names:
                function = getattr(function() if isinstance(function, type) else function, name)
            arguments = test["arguments"]
            result = function(**arguments) if isinstance(arguments, dict) else function(*arguments)
            import json

            text = json.dumps(result).encode()
            while text:
                text = text[os.write(3, text) :]
            os._exit(0)
    except SystemExit as error:
        if calls:
            os.write(2, b"the program called exit\n")
            os._exit(1)
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 255
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:
        if error.__traceback__ is not None:
            error = error.with_traceback(error.__traceback__.tb_next)  # without the frame of this file
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def leave(code):
    """Ends the process as the interpreter does, without freeing its memory piece by piece, which takes longer."""
    try:
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()  # waits for threads
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException as error:
        os.write(2, repr(error).encode(errors="replace"))
        code = code or 120
    finally:
        os._exit(code)


def check(result, what):
    """Returns the result of a C function; raises OSError with errno if it is negative."""
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def read_frame(descriptor):
    """Returns the next message, None at the end of the stream."""
    head = read_exactly(descriptor, LENGTH.size)
    return None if head is None else marshal.loads(read_exactly(descriptor, LENGTH.unpack(head)[0]))


def read_exactly(descriptor, size):
    """Returns `size` bytes of the descriptor, None if it ends before."""
    parts = []
    while size:
        part = os.read(descriptor, min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def reply(status, cpu_s, result, note):
    """Writes one result to stdout. cpu_s: CPU time in seconds; result, note: bytes."""
    frame = REPLY.pack(status, cpu_s, len(result), len(note)) + result + note
    while frame:
        frame = frame[os.write(1, frame) :]


if __name__ == "__main__":
    main()
