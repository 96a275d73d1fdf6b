"""Commands of ppldm without the seconds of their imports: one process imports once, and forks for each command.

    with serving(folder) as program:      # program: an executable to put in the place of `ppldm`
        subprocess.run([program, "train", …])

A client passes its own standard streams, folder and environment on, and ends with the command's exit status.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

CLIENT = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as line:
    line.connect({address!r})
    socket.send_fds(line, [json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()], [0, 1, 2])
    line.shutdown(socket.SHUT_WR)
    sys.exit(int(line.recv(8) or 1))
"""


@contextmanager
def serving(folder: Path, change: str = ""):
    """The path of a program in `folder` that is `ppldm`. `change`: `module:function` of a function of the words."""
    address = str(folder / "ppldm.socket")
    program = folder / "ppldm"
    program.write_text(CLIENT.format(python=sys.executable, address=address))
    program.chmod(0o755)
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, __file__, address, change], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as server:
        server.stdout.readline()  # it listens
        try:
            yield program
        finally:
            server.terminate()


def _serve(address: str, change: str) -> None:
    import importlib

    from ppldm.utils.machine.cpu import prepare_cpu

    prepare_cpu()
    import ppldm.evaluation.job
    import ppldm.inference.pipeline
    import ppldm.training.prepare  # noqa: F401
    from ppldm.cli.main import main

    module, _, function = change.partition(":")
    changed = getattr(importlib.import_module(module), function) if change else list
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        print("listening", flush=True)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a command's process ended but its client
        while True:
            line, _ = listener.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _run(line, changed, main)
            line.close()


def _run(line: socket.socket, changed, main) -> None:
    """Be the process of a command: fork once more, and say how that one ended."""
    text, streams, _, _ = socket.recv_fds(line, 1 << 20, 3)
    while more := line.recv(1 << 20):
        text += more
    words, folder, environ = json.loads(text)
    pid = os.fork()
    if pid:
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        line.sendall(str(status if status >= 0 else 128 - status).encode())
        os._exit(0)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = ["ppldm", *changed(words)]
    status = 1
    try:
        main()
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
