"""A worker of pytest that is forked from the fork server of `warm_start`, with its imports in memory.

xdist runs this script in place of the interpreter. It has the server fork a process that takes over the standard files
and runs this script again, to do there what xdist wanted; then it waits for its end. It imports little, to start fast.
"""

import json
import os
import signal
import socket
import struct
import sys

LENDER = "NOLOCO_TESTS_FORK_SERVER"
"""Environment variable: the path of a socket that gives the control socket of the server to whoever connects."""


def borrowed(path: str) -> socket.socket:
    """The control socket of the server."""
    with socket.socket(socket.AF_UNIX) as lender:
        lender.connect(path)
        return socket.socket(fileno=socket.recv_fds(lender, 1, 1)[1][0])


def main() -> int:
    """Have the worker forked. Returns its exit code."""
    request = {"name": "pytest", "program": [__file__], "environment": {**os.environ}, "directory": os.getcwd()}
    number = struct.Struct("<i")
    ours, theirs = socket.socketpair()
    with borrowed(os.environ[LENDER]) as control, theirs:
        socket.send_fds(control, [b"f"], [0, 1, 2, theirs.fileno()])
    ours.sendall(json.dumps(request).encode() + b"\n")
    assert number.unpack(ours.recv(number.size))[0] > 0, "not forked"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # xdist ends the worker
    os.close(0)
    os.close(1)
    code: int = number.unpack(ours.recv(number.size))[0]
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    if len(sys.argv) > 1:
        os._exit(main())
    exec(eval(sys.stdin.readline()))  # what xdist passes to any interpreter
