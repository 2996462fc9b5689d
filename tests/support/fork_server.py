"""Starts processes of batchline in a few milliseconds: a process that has imported all of it is forked for each.

The tests start hundreds of services, and each would spend more time on its imports than on the test. A forked process
has its own id, environment, output and memory, and dies and is killed as any other. Tests of what happens before the
imports, and those of the documents, start their processes anew, as a user does.

The server gets a request and the files to write to over a socket, forks, and replies with the process id. When the
process has ended it sends the exit code. It ends with the process of the tests, and its processes end with it.
"""

import atexit
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from threading import Condition, Thread
from typing import IO, Any

_MAX_MESSAGE_BYTES = 1 << 20
_IMPORTED = (
    "batchline.app",
    "batchline.cli.connection.session",
    "batchline.cli.mock",
    "batchline.cli.roles",
    "batchline.cli.run.command",
    "batchline.cli.run.runner",
    "batchline.upstream.mock.server",
)
"""The modules that any role or a run imports, with all that these import."""


class ForkedProcess:
    """A process of batchline, with the methods of ``subprocess.Popen`` that the tests use."""

    def __init__(self, server: "_ForkServer", pid: int) -> None:
        self._server = server
        self.pid = pid

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        return self._server.exit_codes.get(self.pid)

    def wait(self, timeout: float) -> int:
        with self._server.ended:
            if not self._server.ended.wait_for(lambda: self.pid in self._server.exit_codes, timeout):
                raise subprocess.TimeoutExpired("batchline", timeout)
        return self._server.exit_codes[self.pid]

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            # It may have ended a moment ago, and the server has not said so yet.
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


class _ForkServer:
    """The server, as the process of the tests sees it."""

    def __init__(self) -> None:
        self.exit_codes: dict[int, int] = {}
        self.ended = Condition()
        self._started: dict[str, int] = {}
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        Thread(target=self._read, daemon=True).start()
        atexit.register(self._end)

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], cwd: Path, outputs: Sequence[int]) -> int:
        """Return the id of a new process that writes to two files, of which this process keeps its own descriptors."""
        name = os.urandom(8).hex()
        request = {"name": name, "arguments": list(arguments), "environment": dict(environment), "cwd": str(cwd)}
        socket.send_fds(self._socket, [json.dumps(request).encode()], outputs)
        with self.ended:
            self.ended.wait_for(lambda: name in self._started)
        return self._started[name]

    def _end(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._process.wait()

    def _read(self) -> None:
        while message := self._socket.recv(_MAX_MESSAGE_BYTES):
            news = json.loads(message)
            with self.ended:
                if "name" in news:
                    self._started[news["name"]] = news["pid"]
                    # The machine gives the id of a process that ended to another one.
                    self.exit_codes.pop(news["pid"], None)
                else:
                    self.exit_codes[news["pid"]] = news["exit_code"]
                self.ended.notify_all()


_server: _ForkServer | None = None


def fork(
    arguments: Sequence[str], environment: Mapping[str, str], *, cwd: Path, stdout: IO[Any], stderr: IO[Any]
) -> ForkedProcess:
    """Start a process with these arguments of Python in a folder, with files for its output."""
    server = _the_server()
    return ForkedProcess(server, server.start(arguments, environment, cwd, (stdout.fileno(), stderr.fileno())))


def _the_server() -> _ForkServer:
    """Return the server of this process. The first call starts it."""
    global _server  # noqa: PLW0603
    _server = _server or _ForkServer()
    return _server


def _serve(requests: socket.socket) -> None:
    for module in _IMPORTED:
        import_module(module)
    gc.collect()
    gc.freeze()
    running: dict[int, int] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(requests, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is not requests:
                    pid = running.pop(key.fd)
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    _send(requests, {"pid": pid, "exit_code": code})
                    continue
                message, files, _, _ = socket.recv_fds(requests, _MAX_MESSAGE_BYTES, 2)
                if not message:
                    for pid in running.values():
                        os.kill(pid, signal.SIGKILL)
                    return
                request = json.loads(message)
                if not (pid := os.fork()):
                    _run(request, *files)
                for file in files:
                    os.close(file)
                pidfd = os.pidfd_open(pid)
                running[pidfd] = pid
                selector.register(pidfd, selectors.EVENT_READ)
                _send(requests, {"name": request["name"], "pid": pid})


def _send(requests: socket.socket, news: dict[str, Any]) -> None:
    requests.send(json.dumps(news).encode())


def _run(request: dict[str, Any], stdout: int, stderr: int) -> None:
    """Become the process that was asked for. This does not return."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for number, fd in enumerate((nothing, stdout, stderr)):
            os.dup2(fd, number)
        os.closerange(3, 1024)
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["environment"])
        _run_arguments(request["arguments"])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - printed, as the interpreter does
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_arguments(arguments: list[str]) -> None:
    """Run a module, named after ``-m``, or a script, as the interpreter does with these arguments."""
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).parent))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    # The modules beside this file are not for the program.
    del sys.path[0]
    # Ctrl-C ends the tests, which end the server.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _serve(socket.socket(fileno=int(sys.argv[1])))
