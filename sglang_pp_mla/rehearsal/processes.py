"""Child processes that cannot be left behind, whatever becomes of them or of the process that asks.

Between the caller and the command stands :mod:`.keeper`. A variable in the environment marks every
process of the group, so that what remains can be found even if the keeper itself was killed.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

MARKER = "SGLANG_PP_MLA_REHEARSAL_ID"
_KEEPER = Path(__file__).with_name("keeper.py")
_STOP_S = 30.0

logger = logging.getLogger("sglang_pp_mla")


def marked(identity: str) -> list[int]:
    """Pids of the living processes whose environment carries ``MARKER=identity``."""
    wanted = f"{MARKER}={identity}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            if wanted in Path("/proc", entry, "environ").read_bytes().split(b"\0"):
                found.append(int(entry))
        except OSError:
            continue
    return found


def _kill(pids: Sequence[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass


class KeptProcess:
    """A command under a keeper, its output collected line by line.

    ``on_line`` is called from a thread of this object, once a line, without the line's end, until it raises.
    ``pass_fds`` are handed to the command under the same numbers. The command sees ``TMPDIR``, a short
    path to a folder of its own that goes when it ends.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        on_line: Callable[[str], None] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.identity = uuid.uuid4().hex
        self.lines: list[str] = []
        self._on_line = on_line
        self._name = os.fspath(command[0])
        # Unix socket paths hold 107 characters, and SGLang puts its sockets here.
        self._scratch = scratch = tempfile.mkdtemp(prefix="ppmla-", dir="/tmp")
        control, self._hold = os.pipe()
        try:
            self._keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_KEEPER), str(os.getpid()), scratch, *command],
                stdin=control,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**env, MARKER: self.identity, "TMPDIR": scratch},
                pass_fds=tuple(pass_fds),
                start_new_session=True,
            )
        except BaseException:
            os.close(self._hold)
            os.rmdir(scratch)
            raise
        finally:
            os.close(control)
        self._reader = threading.Thread(target=self._read, name="rehearsal-log", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        stream = self._keeper.stdout
        assert stream is not None
        for raw in stream:
            line = raw.decode("utf-8", "replace").rstrip("\r\n")
            self.lines.append(line)
            if self._on_line is None:
                continue
            try:
                self._on_line(line)
            except Exception:  # left unread, the command would come to a stop at a full pipe
                logger.exception("A listener to the output of %s failed and is told no more of it.", self._name)
                self._on_line = None

    @property
    def log(self) -> str:
        """All output so far, standard output and error together."""
        return "\n".join(self.lines)

    def poll(self) -> int | None:
        """Exit status of the command, 128 + N if signal N ended it; None while it runs."""
        return self._keeper.poll()

    def pids(self) -> list[int]:
        """Living processes of the group, the keeper among them."""
        return marked(self.identity)

    def wait(self, timeout_s: float) -> int | None:
        """Exit status once the command and all it started are gone, or None after ``timeout_s`` seconds."""
        try:
            code = self._keeper.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        self._reader.join(5)
        return code

    def stop(self) -> None:
        """End the command and everything it started; returns when none of it is left. May be repeated."""
        if self._hold >= 0:
            os.close(self._hold)
            self._hold = -1
        try:
            self._keeper.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()
        deadline = time.monotonic() + _STOP_S
        while (left := marked(self.identity)) and time.monotonic() < deadline:
            _kill(left)
            time.sleep(0.05)
        self._reader.join(5)
        shutil.rmtree(self._scratch, ignore_errors=True)  # the keeper's work, unless it was killed
