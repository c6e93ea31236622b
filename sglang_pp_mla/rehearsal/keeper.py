"""Run one command and make sure that nothing of it outlives the process that asked for it.

Started by :mod:`.processes` as ``python -I -S keeper.py CALLER SCRATCH COMMAND...`` in a session of its
own, with a pipe as standard input whose other end only the caller holds. Linux only, standard library
only. All descendants are killed, and SCRATCH (a folder) is removed, when

* the command ends (its exit status is then the keeper's),
* the pipe closes, which the kernel does however the caller dies,
* the caller is no longer the parent, should a fork of it hold the pipe open, or
* the keeper is told to end (SIGTERM, SIGHUP).
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
GRACE_S = 2.0
GIVE_UP_S = 20.0


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _descendants(root: int) -> list[int]:
    """Pids below ``root``, by parent pid; zombies left out."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                # The command's name is in brackets and may itself hold spaces and brackets.
                state, parent = file.read().rpartition(b")")[2].split()[:2]
        except OSError:
            continue
        if state not in (b"Z", b"X"):
            children.setdefault(int(parent), []).append(int(entry))
    found: list[int] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(), [])
        found.extend(below)
        queue.extend(below)
    return found


def _is_resource_tracker(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"resource_tracker" in file.read()
    except OSError:
        return False


def _reap() -> dict[int, int]:
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = os.waitstatus_to_exitcode(status)


def _end_all() -> None:
    """Kill every descendant. multiprocessing's trackers get a moment, for they unlink shared memory."""
    began = time.monotonic()
    while time.monotonic() - began < GIVE_UP_S:
        _reap()
        alive = _descendants(os.getpid())
        if not alive:
            return
        patient = time.monotonic() - began < GRACE_S
        for pid in alive:
            if not (patient and _is_resource_tracker(pid)):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        time.sleep(0.02)


def main(arguments: list[str]) -> int:
    caller, scratch, command = int(arguments[0]), arguments[1], arguments[2:]
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _frame: asked.append(received))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    keeper = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            # Should the keeper itself be killed, the command goes too.
            _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != keeper:
                os._exit(1)
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            nothing = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nothing, 0)
            os.execvp(command[0], command)
        except BaseException as error:
            os.write(2, f"cannot run {command[0]}: {error}\n".encode())
            os._exit(127)
    code = 1
    try:
        while not asked:
            readable, _, _ = select.select([0], [], [], 0.1)
            if readable and not os.read(0, 1):
                break
            if os.getppid() != caller:
                break
            ended = _reap()
            if child in ended:
                code = ended[child]
                break
    finally:
        _end_all()
        if scratch:
            shutil.rmtree(scratch, ignore_errors=True)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
