"""Serve ranks: import a framework once, and fork a process for each rank that asks for one.

The import of TensorFlow takes 7 s of processor time, that of PyTorch 4 s, more than most jobs of
the tests do. A launcher starts ``served_rank.py SERVER SCRIPT ARGUMENTS...`` in place of
``python SCRIPT ARGUMENTS...``. That process passes its arguments, environment, directory and open
files to a server. The server forks a process that has imported the framework, and nothing else, and
this process runs the script.

    python rank_server.py SOCKET MODULE...

The server ends when its standard input ends. A rank is killed when its ``served_rank.py`` is gone.
"""

import array
import contextlib
import gc
import importlib
import json
import os
import pathlib
import select
import signal
import socket
import sys
import types


class Server:
    """Forks ranks, passes signals to them and reports how they end.

    Args:
        listener: socket at which ``served_rank.py`` connects.
    """

    def __init__(self, listener):
        self._listener = listener
        self._ranks = {}  # connection -> process id
        self._wake, ended = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(ended)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self):
        """Serve until standard input ends.

        Returns:
            None in the server, and in a forked process what the rank has to run.
        """
        while True:
            ready, _, _ = select.select([0, self._wake, self._listener, *self._ranks], [], [])
            if 0 in ready and not os.read(0, 1):
                for process in self._ranks.values():
                    os.kill(process, signal.SIGKILL)
                return None
            if self._wake in ready:
                os.read(self._wake, 1000)
                self._report_ended()
            for connection in set(ready) & set(self._ranks):
                self._pass_on(connection)
            if self._listener in ready:
                connection, _ = self._listener.accept()
                job, files = _receive(connection)
                process = os.fork()
                if not process:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for other in (connection, self._listener, *self._ranks):
                        other.close()
                    return job, files
                for file in files:
                    os.close(file)
                self._ranks[connection] = process

    def _report_ended(self):
        while True:
            try:
                process, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not process:
                return
            for connection, of_rank in list(self._ranks.items()):
                if of_rank == process:
                    del self._ranks[connection]
                    with contextlib.suppress(OSError):  # nobody waits for it any more
                        connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
                    connection.close()

    def _pass_on(self, connection):
        try:
            signals = connection.recv(100)
        except ConnectionError:
            signals = b""
        for number in signals or [signal.SIGKILL]:
            os.kill(self._ranks[connection], number)
        if not signals:
            # the rank is gone when its end is reported
            self._ranks[_Nobody()] = self._ranks.pop(connection)
            connection.close()


class _Nobody:
    """Stands for the connection of a rank whose ``served_rank.py`` is gone."""

    def __init__(self):
        self._read, self._write = os.pipe()  # never ready

    def fileno(self):
        return self._read

    def sendall(self, _):
        raise BrokenPipeError

    def close(self):
        os.close(self._read)
        os.close(self._write)


def _receive(connection):
    """Return what a rank has to run, and its standard input, output and error."""
    files = array.array("i")
    text, ancillary, _, _ = connection.recvmsg(1 << 20, socket.CMSG_SPACE(3 * files.itemsize))
    for _, _, data in ancillary:
        files.frombytes(data)
    while not text.endswith(b"\n"):
        text += connection.recv(1 << 20)
    return json.loads(text), files


def run(job, files, path):
    """Become the rank: run its script as Python's own start would.

    Args:
        job: dictionary with ``arguments`` (the script first), ``environment`` and ``directory``.
        files: standard input, output and error.
        path: folders of modules that do not depend on the rank.
    """
    os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(job["environment"])
    os.chdir(job["directory"])
    script = job["arguments"][0]
    sys.argv = job["arguments"]
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [str(pathlib.Path(script).resolve().parent), *filter(None, folders), *path]
    importlib.invalidate_caches()
    module = types.ModuleType("__main__")
    module.__file__ = script
    sys.modules["__main__"] = module
    exec(compile(pathlib.Path(script).read_bytes(), script, "exec"), module.__dict__)


def main():
    place, *modules = sys.argv[1:]
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(place)
    listener.listen(64)  # ranks wait here while the framework is imported
    own = {str(pathlib.Path(__file__).resolve().parent), ""}
    own.update(os.environ.get("PYTHONPATH", "").split(os.pathsep))
    path = [folder for folder in sys.path if folder not in own]
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the processes share the imported modules
    job = Server(listener).serve()
    if job is not None:
        run(*job, path)
        return
    # a process of pytest-xdist does not remove its temporary folders
    with contextlib.suppress(OSError):  # the folder has other sockets, or the tests removed it
        os.unlink(place)
        os.rmdir(os.path.dirname(place))


if __name__ == "__main__":
    main()
