"""One pipeline over two hosts, on one machine: each host has a network, a name and a view of the files.

A host is a set of Linux namespaces (network, hostname, mounts) that a sleeping process holds open; a veth
pair is the cable between the two. Nothing of it has a name outside, so it is gone when the processes are,
and those cannot outlive the caller (:mod:`.keeper`). Needs ``unshare``, ``nsenter`` and ``ip``, and root or
unprivileged user namespaces.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_pp_mla.rehearsal.environment import KERNEL_LIBRARY, RehearsalError
from sglang_pp_mla.rehearsal.processes import KeptProcess
from sglang_pp_mla.rehearsal.progress import Progress, find_death
from sglang_pp_mla.rehearsal.runner import (
    DEFAULT_TIMEOUT_S,
    ENGINE_ARGUMENTS,
    EngineFailure,
    OnProgress,
    _flags,
    _line_handler,
    _prepare,
)

ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = 30000
DIST_PORT = 20000
_CABLE = "eth-pp"
_SETUP_S = 30.0
_REMEDY = (
    "two hosts need root, or user namespaces switched on (sysctl user.max_user_namespaces; in a container, "
    "also the right to unshare)"
)

# Holds namespaces open: names its host, says its pid and sleeps.
_HOLD = """
import os, socket, sys, time
if sys.argv[1]:
    socket.sethostname(sys.argv[1])
print(os.getpid(), flush=True)
time.sleep(1e9)
"""

_ASK = """
import sys, urllib.error, urllib.request
url, timeout = sys.argv[1], float(sys.argv[2])
body = sys.stdin.buffer.read() or None
request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a host has no way to a proxy
try:
    with opener.open(request, timeout=timeout) as answer:
        print(answer.read().decode())
except urllib.error.HTTPError as error:
    sys.exit(f"HTTP {error.code}: {error.read().decode(errors='replace')}")
except OSError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""

# Run in a host's own view: an overlay over the site-packages, from which the package's files are then
# deleted. The other host, and the machine, see nothing of it.
_TAKE_AWAY = """
mount -t overlay overlay -o "lowerdir=$1,upperdir=$2,workdir=$3" "$1"
cd "$1"
rm -r sglang_pp_mla sglang_pp_mla.pth sglang_pp_mla-*.dist-info
"""


class NoNamespaces(RehearsalError):
    """This machine does not let us make the namespaces; the message has the reason and the remedy."""


@dataclass(frozen=True)
class Host:
    """One of the two: its node rank, hostname, address and pipeline ranks, and the server it runs."""

    node_rank: int
    name: str
    address: str
    stages: range
    enter: tuple[str, ...]
    server: KeptProcess

    def __str__(self) -> str:
        ranks = ", ".join(f"PP{rank}" for rank in self.stages)
        return f"Host {self.node_rank} ({self.name}, {self.address}; {ranks})"

    def kill(self) -> None:
        """SIGKILL to every process of the host's server; the host's network stays."""
        for pid in self.server.pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # gone with its parent


class Hosts:
    """Two running hosts. Made by :func:`two_hosts`."""

    def __init__(self, hosts: tuple[Host, Host], began: float, on_progress: OnProgress | None) -> None:
        self.hosts = hosts
        self._began = began
        self._on_progress = on_progress
        self.ready_s = 0.0
        """Seconds from the start to the first good answer of ``/health`` on host 0."""

    def wait_until_ready(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Wait for host 0 to take requests; :class:`EngineFailure` if a host ends first or time is up."""
        while True:
            done = self._client("/health", b"", 5)
            while done.poll() is None:
                time.sleep(0.05)
            if done.returncode == 0:
                break
            self._raise_if_one_ended("before it was ready")
            if time.monotonic() - self._began > timeout_s:
                raise self._failure(f"The hosts were not ready after {timeout_s:g} s.", self.hosts[0], timed_out=True)
            time.sleep(0.5)
        self.ready_s = time.monotonic() - self._began
        if self._on_progress is not None:
            self._on_progress(Progress("ready", self.ready_s, f"http://{self.hosts[0].address}:{PORT}"))

    def post(self, path: str, request: Mapping[str, Any], timeout_s: float = DEFAULT_TIMEOUT_S) -> Any:
        """Send a request to host 0 from inside its network; the decoded answer.

        Raises :class:`EngineFailure` that names the host as soon as one ends, and when time is up.
        """
        with self._client(path, json.dumps(request).encode(), timeout_s) as client:
            try:
                while client.poll() is None:
                    self._raise_if_one_ended("during a request")
                    time.sleep(0.05)
            finally:
                client.kill()
            assert client.stdout is not None
            answer = client.stdout.read()
        if client.returncode:
            # A host that ends takes the connection along first.
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline:
                self._raise_if_one_ended("during a request")
                time.sleep(0.1)
            raise self._failure(f"Host 0 did not answer {path}: {answer.strip()}", self.hosts[0])
        return json.loads(answer)

    def pids(self) -> list[int]:
        """Living processes of both servers."""
        return [pid for host in self.hosts for pid in host.server.pids()]

    def _client(self, path: str, body: bytes, timeout_s: float) -> subprocess.Popen[str]:
        host = self.hosts[0]
        url = f"http://{host.address}:{PORT}{path}"
        with tempfile.TemporaryFile() as file:
            file.write(body)
            file.seek(0)
            return subprocess.Popen(
                [*host.enter, sys.executable, "-I", "-S", "-c", _ASK, url, str(timeout_s)],
                stdin=file,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def _raise_if_one_ended(self, when: str) -> None:
        for host in self.hosts:
            code = host.server.poll()
            if code is not None:
                host.server.wait(5)
                raise self._failure(f"{host} ended with status {code} {when}", host)

    def _failure(self, message: str, host: Host, timed_out: bool = False) -> EngineFailure:
        death = find_death(host.server.lines, of_stages_only=True)
        if death is not None:
            message += f"; it had raised {death.traceback.rstrip().splitlines()[-1]}"
        log = "\n".join(f"[host {one.node_rank}] {line}" for one in self.hosts for line in one.server.lines)
        return EngineFailure(
            message,
            log=log,
            rank=death.rank if death else host.stages[0],
            traceback=death.traceback if death else "",
            timed_out=timed_out,
        )


def _tool(name: str) -> str:
    # Not every user has the sbin folders on the path.
    found = shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"]))
    if found is None:
        package = "iproute2" if name == "ip" else "util-linux"
        raise NoNamespaces(f"Two hosts need the command {name}, which is not here; install {package}.")
    return found


def _run(command: Sequence[str], what: str) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise NoNamespaces(f"{what} failed ({(done.stderr or done.stdout).strip()}); {_REMEDY}.")


def _hold(stack: ExitStack, command: Sequence[str], name: str) -> str:
    """Run ``command``, which makes namespaces, with a process that holds them open; that process's pid."""
    said = threading.Event()
    holder = KeptProcess(
        [*command, sys.executable, "-I", "-S", "-c", _HOLD, name], env=os.environ, on_line=lambda _line: said.set()
    )
    stack.callback(holder.stop)
    said.wait(_SETUP_S)
    if not holder.log.isdigit():
        raise NoNamespaces(f"Namespaces cannot be made ({holder.log.strip() or 'no answer'}); {_REMEDY}.")
    return holder.log


def _network(stack: ExitStack, own_user: bool) -> tuple[tuple[str, ...], ...]:
    """Two hosts joined by a cable; for each, what to put before a command that is to run there.

    ``own_user``: inside a user namespace, where this process's user may do what else only root may.
    """
    unshare, nsenter, ip = _tool("unshare"), _tool("nsenter"), _tool("ip")
    around: tuple[str, ...] = ()
    if own_user:
        user = _hold(stack, [unshare, "--user", "--map-root-user"], "")
        around = (nsenter, f"--target={user}", "--user", "--preserve-credentials")
    pids = [
        _hold(stack, [*around, unshare, "--net", "--uts", "--mount"], f"pp-host-{node_rank}") for node_rank in (0, 1)
    ]
    enter = around or (nsenter,)
    hosts = tuple(
        (*enter, f"--net=/proc/{pid}/ns/net", f"--uts=/proc/{pid}/ns/uts", f"--mount=/proc/{pid}/ns/mnt")
        for pid in pids
    )
    cable = f"link add {_CABLE} type veth peer name {_CABLE} netns {pids[1]}"
    _run([*hosts[0], ip, *cable.split()], "Joining two network namespaces")
    for host, address in zip(hosts, ADDRESSES, strict=True):
        for what in (f"addr add {address}/24 dev {_CABLE}", f"link set {_CABLE} up", "link set lo up"):
            _run([*host, ip, *what.split()], "Setting up a network namespace")
    return hosts


@contextmanager
def two_networks() -> Iterator[tuple[tuple[str, ...], ...]]:
    """Two hosts without servers, for a ``with`` block: for each, what to put before a command to run there.

    As root if we are, else (or where root may not) in a user namespace. Raises :class:`NoNamespaces`.
    """
    if os.geteuid() == 0:
        with ExitStack() as stack:
            try:
                hosts = _network(stack, own_user=False)
            except NoNamespaces:
                stack.close()
                hosts = _network(stack, own_user=True)
            yield hosts
    else:
        with ExitStack() as stack:
            yield _network(stack, own_user=True)


def _take_away(enter: Sequence[str], python: str, scratch: Path) -> None:
    """Leave the host without this package, as if it had never been installed there."""
    question = "from importlib.metadata import distribution; print(distribution('sglang-pp-mla').locate_file(''))"
    found = subprocess.run([python, "-P", "-c", question], capture_output=True, text=True, timeout=60)
    if found.returncode:
        raise RehearsalError(f"{python} has no sglang-pp-mla that could be taken away; install the package there.")
    upper, work = scratch / "upper", scratch / "work"
    upper.mkdir(parents=True)
    work.mkdir()
    site_packages = Path(found.stdout.strip())
    _run(
        [*enter, "sh", "-ec", _TAKE_AWAY, "sh", str(site_packages), str(upper), str(work)],
        "Taking the package away from a host",
    )


@contextmanager
def two_hosts(
    model: str | os.PathLike[str],
    *,
    pp_size: int = 2,
    partition: str | None = None,
    attention_backend: str = "triton_pp",
    python: str = sys.executable,
    engine_args: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    without_package: Collection[int] = (),
    on_progress: OnProgress | None = None,
) -> Iterator[Hosts]:
    """Start SGLang's server on two hosts, ``--nnodes 2``, half of the stages on each.

    The block begins when both are starting; :meth:`Hosts.wait_until_ready` waits. Arguments as for
    :func:`.runner.server`. The hosts whose node ranks are in ``without_package`` lack this package.
    Raises :class:`NoNamespaces` where there can be no two hosts. No process is left, however the block ends.
    """
    if pp_size % 2:
        raise ValueError(f"{pp_size} stages cannot be halved; pass an even pp_size.")
    arguments = {**ENGINE_ARGUMENTS, **(engine_args or {})}
    environment = _prepare(model, pp_size, 1, partition, python, env)
    environment.setdefault("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "false")
    # What several hosts need: Gloo would else resolve the hostname, SGLang ask for a route to the internet.
    environment["GLOO_SOCKET_IFNAME"] = _CABLE
    arguments.setdefault("skip_server_warmup", True)
    arguments |= {
        "model_path": os.fspath(model),
        "pp_size": pp_size,
        "attention_backend": attention_backend,
        "nnodes": 2,
        "dist_init_addr": f"{ADDRESSES[0]}:{DIST_PORT}",
        "host": "0.0.0.0",
        "port": PORT,
    }
    cpu_sets = environment.get("SGLANG_CPU_OMP_THREADS_BIND", "").split("|")
    each = pp_size // 2
    began = time.monotonic()
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ppmla-hosts-", dir="/tmp")))
        networks = stack.enter_context(two_networks())
        hosts = []
        for node_rank, enter in enumerate(networks):
            stages = range(node_rank * each, (node_rank + 1) * each)
            own = {**environment, "SGLANG_HOST_IP": ADDRESSES[node_rank]}
            if len(cpu_sets) == pp_size:
                # A host counts its ranks from nought.
                own["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(cpu_sets[rank] for rank in stages)
            if node_rank in without_package:
                # The stand-in for the kernel library is no part of what is taken away.
                kept = shutil.copytree(KERNEL_LIBRARY, scratch / "kernel_library")
                own["PYTHONPATH"] = own["PYTHONPATH"].replace(str(KERNEL_LIBRARY), str(kept), 1)
                _take_away(enter, python, scratch / "files")
            flags = _flags({**arguments, "node_rank": str(node_rank)})
            server = KeptProcess(
                # Elsewhere than here, where a clone would bring the package back.
                [*enter, f"--wd={scratch}", python, "-m", "sglang.launch_server", *flags],
                env=own,
                on_line=_line_handler(on_progress, began),
            )
            stack.callback(server.stop)
            hosts.append(Host(node_rank, f"pp-host-{node_rank}", ADDRESSES[node_rank], stages, enter, server))
        yield Hosts((hosts[0], hosts[1]), began, on_progress)
