"""Run the real engine, or the real HTTP server, on a CPU, and get back what it answered or why it died."""

from __future__ import annotations

import json
import os
import queue
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_pp_mla.geometry import read_config, text_config
from sglang_pp_mla.rehearsal.environment import RehearsalError, find_sglang, rehearsal_environment
from sglang_pp_mla.rehearsal.processes import KeptProcess
from sglang_pp_mla.rehearsal.progress import Progress, find_death, rank_of, stage_step
from sglang_pp_mla.stage import parse_partition

OnProgress = Callable[[Progress], None]

_WORKER = Path(__file__).with_name("worker.py")
DEFAULT_TIMEOUT_S = 600.0

ENGINE_ARGUMENTS: Mapping[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "mem_fraction_static": 0.3,
    "max_total_tokens": 4096,
    "max_running_requests": 8,
    "context_length": 1024,
    "chunked_prefill_size": -1,
    "watchdog_timeout": 3600,
}
"""What a rehearsal passes to SGLang unless told otherwise, under the names of ``sglang.Engine``."""


@dataclass(frozen=True)
class EngineAnswer:
    """Greedy continuation of one prompt: token ids, the natural log-probability of each, and how many
    tokens of the prompt came from the prefix cache."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached_tokens: int


@dataclass(frozen=True)
class EngineRun:
    """How one rehearsal went. Times are seconds; ``ready_s`` is None if the engine never took requests.

    A failed one has ``error``, one sentence, and, where the log shows a stage dying, ``rank``, its
    pipeline rank, and ``traceback``, its scheduler's. ``log`` is all the processes wrote.
    """

    ready_s: float | None
    answers: tuple[EngineAnswer, ...]
    answers_s: float | None
    failed: bool
    timed_out: bool
    error: str
    rank: int | None
    traceback: str
    log: str


class EngineFailure(RehearsalError):
    """The engine or server died or took too long. Attributes as in :class:`EngineRun`."""

    def __init__(self, message: str, *, log: str, rank: int | None, traceback: str, timed_out: bool = False) -> None:
        super().__init__(message)
        self.log = log
        self.rank = rank
        self.traceback = traceback
        self.timed_out = timed_out


def _failure(lines: Sequence[str], what: str, code: int | None) -> EngineFailure:
    death = find_death(lines)
    if death is None:
        last = next((line for line in reversed(lines) if line.strip()), "nothing was logged")
        return EngineFailure(
            f"{what} ended with status {code} and no traceback; the last line of its log is: {last}",
            log="\n".join(lines),
            rank=None,
            traceback="",
        )
    reason = death.traceback.rstrip().splitlines()[-1]
    where = f"stage PP{death.rank}" if death.rank is not None else "a process of it"
    return EngineFailure(
        f"{what} died: {where} raised {reason}; the traceback has the place.",
        log="\n".join(lines),
        rank=death.rank,
        traceback=death.traceback,
    )


def _too_slow(lines: Sequence[str], what: str, timeout_s: float) -> EngineFailure:
    # A stage may have died without the others noticing.
    death = find_death(lines, of_stages_only=True)
    remedy = "give it more time or fewer layers"
    if death is not None:
        rank = "a stage" if death.rank is None else f"stage PP{death.rank}"
        remedy = f"{rank} had raised {death.traceback.rstrip().splitlines()[-1]} before"
    return EngineFailure(
        f"{what} took longer than {timeout_s:g} s and was ended; {remedy}.",
        log="\n".join(lines),
        rank=death.rank if death else None,
        traceback=death.traceback if death else "",
        timed_out=True,
    )


def _prepare(
    model: str | os.PathLike[str],
    pp_size: int,
    tp_size: int,
    partition: str | None,
    python: str,
    env: Mapping[str, str] | None,
) -> dict[str, str]:
    """Check what can be checked before anything is started, and work out the environment."""
    if pp_size < 1:
        raise ValueError(f"A pipeline has at least one stage, not {pp_size}; pass pp_size=1 or more.")
    path = Path(model, "config.json")
    layers = text_config(read_config(path)).get("num_hidden_layers")
    if not isinstance(layers, int):
        raise ValueError(f"{path} names no num_hidden_layers, so it cannot be split over {pp_size} stages.")
    if partition is not None:
        parse_partition(partition, layers, pp_size)
    elif layers < pp_size:
        raise ValueError(
            f"{layers} layers cannot fill {pp_size} stages, rank {layers} would have none; "
            f"use a pipeline size of at most {layers}."
        )
    installation = find_sglang(python, env)
    return rehearsal_environment(installation, pp_size=pp_size, tp_size=tp_size, partition=partition, extra=env)


def _line_handler(on_progress: OnProgress | None, began: float) -> Callable[[str], None] | None:
    if on_progress is None:
        return None

    def handle(line: str) -> None:
        seconds = time.monotonic() - began
        on_progress(Progress("log", seconds, line, rank_of(line)))
        step = stage_step(line)
        if step is not None:
            on_progress(Progress("stage", seconds, step[1], step[0]))

    return handle


class EngineSession:
    """A running engine. Made by :func:`engine`."""

    def __init__(
        self,
        process: KeptProcess,
        requests: int,
        events: queue.Queue[dict[str, Any] | None],
        deadline: float,
        timeout_s: float,
        began: float,
        on_progress: OnProgress | None,
    ) -> None:
        self._process = process
        self._requests = requests
        self._events = events
        self._deadline = deadline
        self._timeout_s = timeout_s
        self._began = began
        self._on_progress = on_progress
        self.ready_s = 0.0
        """Seconds from the start to the first moment requests are taken."""
        self.answers_s = 0.0
        """Seconds the last :meth:`generate` took."""

    @property
    def log(self) -> str:
        return self._process.log

    def pids(self) -> list[int]:
        """Living processes of the engine."""
        return self._process.pids()

    def generate(
        self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int = 4, **sampling: Any
    ) -> tuple[EngineAnswer, ...]:
        """Greedy continuations of ``prompts`` (token ids), sent as one batch, in their order.

        ``sampling`` is added to SGLang's sampling parameters. Raises :class:`EngineFailure`.
        """
        parameters = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True, **sampling}
        self._send({"input_ids": [list(prompt) for prompt in prompts], "sampling_params": parameters})
        event = self._expect("answers")
        self.answers_s = float(event["seconds"])
        return tuple(
            EngineAnswer(tuple(one["tokens"]), tuple(one["logprobs"]), int(one["cached_tokens"]))
            for one in event["answers"]
        )

    def _send(self, request: dict[str, Any]) -> None:
        data = (json.dumps(request) + "\n").encode()
        try:
            while data:
                data = data[os.write(self._requests, data) :]
        except BrokenPipeError:
            pass  # the death is found, and its reason, by whoever waits for the answer

    def _expect(self, wanted: str) -> dict[str, Any]:
        while True:
            try:
                event = self._events.get(timeout=max(0.0, self._deadline - time.monotonic()))
            except queue.Empty:
                self._process.stop()
                raise _too_slow(self._process.lines, "The engine", self._timeout_s) from None
            if event is None:
                # SGLang's processes end one by one; the traceback may come after the pipe's end.
                code = self._process.wait(30)
                self._process.stop()
                raise _failure(self._process.lines, "The engine", code)
            if event["event"] == "error":
                self._process.stop()
                failure = _failure(self._process.lines, "The engine", None)
                if failure.rank is None:
                    reason = event["traceback"].rstrip().splitlines()[-1]
                    failure = EngineFailure(
                        f"The engine refused to start or to answer: {reason}",
                        log=failure.log,
                        rank=None,
                        traceback=event["traceback"],
                    )
                raise failure
            if self._on_progress is not None:
                seconds = time.monotonic() - self._began
                self._on_progress(Progress(event["event"], seconds, f"after {event['seconds']:.1f} s"))
            if event["event"] == wanted:
                return event


def _read_events(stream: int, events: queue.Queue[dict[str, Any] | None]) -> None:
    with os.fdopen(stream, "r", encoding="utf-8") as lines:
        for line in lines:
            events.put(json.loads(line))
    events.put(None)


@contextmanager
def engine(
    model: str | os.PathLike[str],
    *,
    pp_size: int = 1,
    partition: str | None = None,
    attention_backend: str = "triton_pp",
    python: str = sys.executable,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    engine_args: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    on_progress: OnProgress | None = None,
) -> Iterator[EngineSession]:
    """Hold ``sglang.Engine`` in a child interpreter for the length of a ``with`` block.

    ``model`` is a folder with a ``config.json`` and, unless ``engine_args`` has ``load_format="dummy"``,
    weights. ``partition`` is layer counts joined by commas, one a stage. ``engine_args`` go over
    :data:`ENGINE_ARGUMENTS`; ``env`` over the rehearsal's environment. ``timeout_s`` seconds are for the
    whole block. ``on_progress`` is called from other threads.

    Raises ``ValueError`` for arguments that cannot work, :class:`RehearsalError` if there is no SGLang,
    :class:`EngineFailure` if the engine dies or takes too long, at the start or in ``generate``. No
    process is left, however the block ends.
    """
    arguments = {**ENGINE_ARGUMENTS, **(engine_args or {})}
    tp_size = int(arguments.get("tp_size", 1))
    environment = _prepare(model, pp_size, tp_size, partition, python, env)
    arguments.setdefault("skip_tokenizer_init", True)
    arguments.setdefault("log_level", "info")
    arguments |= {"model_path": os.fspath(model), "pp_size": pp_size, "attention_backend": attention_backend}
    began = time.monotonic()
    requests_read, requests = os.pipe()
    events_read, events_write = os.pipe()
    process = None
    try:
        try:
            process = KeptProcess(
                [python, str(_WORKER), str(requests_read), str(events_write)],
                env=environment,
                on_line=_line_handler(on_progress, began),
                pass_fds=(requests_read, events_write),
            )
        except BaseException:
            os.close(events_read)
            raise
        finally:
            os.close(requests_read)
            os.close(events_write)
        events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=_read_events, args=(events_read, events), daemon=True).start()
        session = EngineSession(process, requests, events, began + timeout_s, timeout_s, began, on_progress)
        session._send(arguments)
        session._expect("ready")
        session.ready_s = time.monotonic() - began
        yield session
    finally:
        if process is not None:
            process.stop()
        os.close(requests)


def run_engine(
    model: str | os.PathLike[str],
    prompts: Sequence[Sequence[int]],
    *,
    pp_size: int = 1,
    partition: str | None = None,
    attention_backend: str = "triton_pp",
    python: str = sys.executable,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    engine_args: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    max_new_tokens: int = 4,
    on_progress: OnProgress | None = None,
) -> EngineRun:
    """Start an engine, have it continue ``prompts`` (token ids), end it, and say how that went.

    Arguments as for :func:`engine`. An engine that dies or takes too long is a result, not an error; only
    wrong arguments (``ValueError``) and a missing SGLang (:class:`RehearsalError`) raise.
    """
    ready_s: float | None = None
    try:
        with engine(
            model,
            pp_size=pp_size,
            partition=partition,
            attention_backend=attention_backend,
            python=python,
            timeout_s=timeout_s,
            engine_args=engine_args,
            env=env,
            on_progress=on_progress,
        ) as session:
            ready_s = session.ready_s
            answers = session.generate(prompts, max_new_tokens=max_new_tokens)
            return EngineRun(ready_s, answers, session.answers_s, False, False, "", None, "", session.log)
    except EngineFailure as failure:
        return EngineRun(
            ready_s,
            (),
            None,
            True,
            failure.timed_out,
            str(failure),
            failure.rank,
            failure.traceback,
            failure.log,
        )


class Server:
    """A running HTTP server. Made by :func:`server`."""

    def __init__(self, process: KeptProcess, url: str) -> None:
        self._process = process
        self.url = url
        """``http://127.0.0.1:PORT``; the OpenAI API is below ``/v1``."""
        self.ready_s = 0.0
        """Seconds from the start to the first good answer of ``/health``."""

    @property
    def log(self) -> str:
        return self._process.log

    def pids(self) -> list[int]:
        """Living processes of the server."""
        return self._process.pids()

    def failure(self) -> EngineFailure | None:
        """Why the server died, or None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        self._process.wait(5)
        return _failure(self._process.lines, "The server", code)


def _free_port() -> int:
    """A port that is free, and that leaves room for SGLang's own choice of another: 10,000 above, for gRPC."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port + 10_000 < 2**16:
            return port


open_here = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
"""``urllib.request.urlopen`` of a server of this machine, to which no proxy of the environment knows the way."""


def _healthy(url: str) -> bool:
    try:
        with open_here(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _flags(arguments: Mapping[str, Any]) -> list[str]:
    flags = []
    for name, value in arguments.items():
        if value is False or value is None:
            continue
        flags.append("--" + name.replace("_", "-"))
        if value is not True:
            flags.append(str(value))
    return flags


@contextmanager
def server(
    model: str | os.PathLike[str],
    *,
    pp_size: int = 1,
    partition: str | None = None,
    attention_backend: str = "triton_pp",
    python: str = sys.executable,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    engine_args: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    on_progress: OnProgress | None = None,
    served_by: Sequence[str] = ("-m", "sglang.launch_server"),
) -> Iterator[Server]:
    """Hold SGLang's HTTP server for the length of a ``with`` block, on a free port of 127.0.0.1.

    Arguments as for :func:`engine`; ``engine_args`` become flags (``page_size=16`` is ``--page-size 16``,
    ``True`` a flag alone, ``False`` and None none). ``timeout_s`` seconds are for the start. ``served_by``
    is what follows the interpreter on the command line. The model needs a tokenizer (see
    :mod:`.tokenizer`) unless ``skip_tokenizer_init`` is given.

    Raises as :func:`engine` does.
    """
    arguments = {**ENGINE_ARGUMENTS, **(engine_args or {})}
    environment = _prepare(model, pp_size, int(arguments.get("tp_size", 1)), partition, python, env)
    # Health then means that the processes are up, and costs no generated token.
    environment.setdefault("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "false")
    arguments.setdefault("skip_server_warmup", True)
    port = _free_port()
    arguments |= {
        "model_path": os.fspath(model),
        "pp_size": pp_size,
        "attention_backend": attention_backend,
        "host": "127.0.0.1",
        "port": port,
    }
    began = time.monotonic()
    process = KeptProcess(
        [python, *served_by, *_flags(arguments)], env=environment, on_line=_line_handler(on_progress, began)
    )
    try:
        running = Server(process, f"http://127.0.0.1:{port}")
        while not _healthy(running.url):
            failure = running.failure()
            if failure is not None:
                raise failure
            if time.monotonic() - began > timeout_s:
                process.stop()
                raise _too_slow(process.lines, "The server", timeout_s)
            time.sleep(0.2)
        running.ready_s = time.monotonic() - began
        if on_progress is not None:
            on_progress(Progress("ready", running.ready_s, running.url))
        yield running
    finally:
        process.stop()
