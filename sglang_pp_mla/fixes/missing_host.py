"""Name the host that a pipeline over several hosts waits for, or that lacks this package.

A host without the package refuses ``--attention-backend triton_pp`` and ends. The others wait for it in
torch's rendezvous, ten minutes under NCCL and thirty under Gloo unless ``--dist-timeout`` says otherwise,
and then learn how many clients have joined, not which host has not. With ``triton`` such a host does join,
and its stages die later, each on a host whose log nobody may be reading.

So the first rank of a host that has the package says what is missing: while it waits, when it gives up, and
once the group is up. What each rank says of itself goes through the group's own key-value store: a rank
without the package takes part in nothing.
"""

from __future__ import annotations

import inspect
import logging
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

from sglang_pp_mla import __version__
from sglang_pp_mla.fixes.fix import Changes, Fix, lines_matching

JOIN_S = 60.0
"""How long a host may take to join before its absence is logged; half of ``--dist-timeout`` if that is less."""
ANSWER_S = 10
"""How long a rank that has joined may take to say that it has the package. It does so as soon as it has joined."""

logger = logging.getLogger("sglang_pp_mla")

# What the scheduler of this process was given; SGLang passes the rendezvous no number of hosts.
_server_args: Any = None


@dataclass(frozen=True)
class Layout:
    """Which ranks are on which host. SGLang gives each the same number of ranks, in order."""

    nnodes: int
    pp_size: int
    world_size: int

    def node(self, rank: int) -> int:
        return rank * self.nnodes // self.world_size

    def first_rank(self, node: int) -> int:
        return node * self.world_size // self.nnodes

    def name(self, node: int) -> str:
        stages = sorted(
            {rank * self.pp_size // self.world_size for rank in range(self.world_size) if self.node(rank) == node}
        )
        return f"node {node} of {self.nnodes} ({', '.join(f'PP{stage}' for stage in stages)})"


def _connected(port: int) -> list[str]:
    """Addresses of the other hosts that have a connection to our ``port``."""
    import psutil

    return sorted(
        {
            one.raddr.ip
            for one in psutil.net_connections("tcp")
            if one.status == psutil.CONN_ESTABLISHED and one.laddr.port == port and one.raddr.ip != one.laddr.ip
        }
    )


def missing_at_rendezvous(layout: Layout, node: int, address: str, waited_s: float) -> str:
    """What to say on ``node`` while the rendezvous at ``address`` is not complete."""
    if node == 0:
        peers = " or ".join(layout.name(other) for other in range(1, layout.nnodes))
        port = re.search(r":(\d+)$", address)
        seen = ", ".join(_connected(int(port[1])) if port else []) or "no other host"
        what = f"{peers} has not joined at {address} after {waited_s:.0f} s, where {seen} has connected"
    else:
        what = f"{layout.name(0)} at {address} has not brought all hosts together after {waited_s:.0f} s"
    return (
        f"{what[0].upper()}{what[1:]}; on that host see that SGLang runs with its --node-rank and reaches the address, "
        "and that `pip show sglang-pp-mla` finds this package: without it, SGLang refuses triton_pp and ends."
    )


def without_package(layout: Layout, rank: int, store: Any, answer_s: float) -> list[str]:
    """Say to the other hosts that this rank has the package; what is wrong with those that do not say so."""
    from torch.distributed import DistStoreError

    key = "sglang_pp_mla/{}".format
    store.set(key(rank), __version__)
    node = layout.node(rank)
    if rank != layout.first_rank(node):
        return []
    others = [layout.first_rank(other) for other in range(layout.nnodes) if other != node]
    try:
        store.wait([key(other) for other in others], timedelta(seconds=answer_s))
    except DistStoreError:
        pass  # at least one is silent, and is found below
    wrong = []
    for other in others:
        where = layout.name(layout.node(other))
        if not store.check([key(other)]):
            wrong.append(
                f"{where[0].upper()}{where[1:]} runs without sglang-pp-mla, so no fix acts "
                "on its stages; install the package there, with the Python that runs SGLang (`pip show "
                "sglang-pp-mla` must find it), and see that SGLANG_PP_MLA_DISABLE is not set."
            )
        elif (version := store.get(key(other)).decode()) != __version__:
            wrong.append(
                f"{where[0].upper()}{where[1:]} runs sglang-pp-mla {version} and this one {__version__}; "
                "install the same release on every host."
            )
    return wrong


def _remember(wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> Any:
    global _server_args
    _server_args = kwargs.get("server_args", args[0] if args else None)
    return wrapped(*args, **kwargs)


def _layout(given: Mapping[str, Any]) -> Layout | None:
    """The layout of a pipeline over several hosts, from what the rendezvous was given; None for any other."""
    if _server_args is None:
        return None
    layout = Layout(_server_args.nnodes, _server_args.pp_size, given["world_size"])
    # Hosts that share a stage by tensor parallelism alone are no matter of this package's.
    return layout if layout.nnodes > 1 and layout.pp_size > 1 and layout.world_size >= layout.nnodes else None


def _watch(wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> Any:
    try:
        bound = inspect.signature(wrapped).bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        layout = _layout(given)
        rank, wait_s = given["rank"], min(JOIN_S, (given["timeout"] or 2 * JOIN_S) / 2)
        address = str(given["distributed_init_method"]).removeprefix("tcp://")
    except (AttributeError, KeyError, TypeError):
        logger.exception("This SGLang's rendezvous is not the one that is known; missing hosts will not be named.")
        layout = None
    if layout is None:
        return wrapped(*args, **kwargs)
    import torch

    node = layout.node(rank)
    speaks = rank == layout.first_rank(node)
    began = time.monotonic()

    def report(level: int) -> None:
        try:
            logger.log(level, "%s", missing_at_rendezvous(layout, node, address, time.monotonic() - began))
        except Exception:
            logger.exception("The hosts that are missing could not be looked for.")

    timer = threading.Timer(wait_s, report, [logging.WARNING])
    timer.daemon = True
    if speaks:
        timer.start()
    try:
        made = wrapped(*args, **kwargs)
    except Exception:
        # Another failure, a taken port say, is nobody's absence.
        if speaks and time.monotonic() - began >= wait_s and not torch.distributed.is_initialized():
            report(logging.ERROR)
        raise
    finally:
        timer.cancel()
    try:
        from torch.distributed.distributed_c10d import _get_default_store

        for line in without_package(layout, rank, _get_default_store(), min(ANSWER_S, wait_s)):
            logger.warning("%s", line)
    except Exception:
        logger.exception("The other hosts could not be asked whether they have sglang-pp-mla.")
    return made


def change_scheduler(module: ModuleType, changes: Changes) -> None:
    changes.wrap(module.Scheduler, "__init__", _remember)


def change_rendezvous(module: ModuleType, changes: Changes) -> None:
    changes.wrap(module, "init_distributed_environment", _watch)


def evidence(root: Path) -> list[str]:
    """A wait that names nobody: there in every release that has the rendezvous."""
    return lines_matching(root, "srt/distributed", re.compile(r"^def init_distributed_environment\b", re.M))


FIX = Fix(
    name="missing-host",
    why="A pipeline waits in silence for a host that is missing or lacks this package; this names it.",
    upstream=(),
    goes_away="when this package is uninstalled",
    evidence=evidence,
    changes={
        "sglang.srt.managers.scheduler": change_scheduler,
        "sglang.srt.distributed.parallel_state": change_rendezvous,
    },
)
