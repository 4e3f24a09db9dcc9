"""Run a script in a process of a rank server (rank_server.py) as if it were this process.

    python -I -S served_rank.py SERVER SERVER SCRIPT ARGUMENTS...

Two servers have different seeds of hash(), as the processes of different ranks do. Ranks with an
even number use the first one. Signals are passed on, and the exit status is that of the script.
"""

import array
import json
import os
import signal
import socket
import sys

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main():
    rank = next(
        (int(os.environ[name]) for name in ("HOROVOD_RANK", "RANK") if name in os.environ),
        os.getpid(),
    )
    server = sys.argv[1 + rank % 2]
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(server)
    job = {"arguments": sys.argv[3:], "environment": dict(os.environ), "directory": os.getcwd()}
    for number in _PASSED_ON:
        signal.signal(number, lambda number, _: connection.send(bytes([number])))
    text = json.dumps(job).encode() + b"\n"
    files = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))]
    sent = connection.sendmsg([text], files)
    connection.sendall(text[sent:])
    for number in (0, 1, 2):
        os.close(number)  # whoever reads the output sees its end when the script ends
    status = int(connection.makefile().readline() or 1)
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
        os.kill(os.getpid(), -status)
    os._exit(status)


main()
