"""What is said of a host that is missing or lacks the package, over torch's real rendezvous and store."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import sglang_pp_mla
from sglang_pp_mla.fixes.missing_host import Layout

# A rank as SGLang makes it, but for the model: ``python -c RANK rank port nnodes world_size version``.
# An empty version stands for a host without the package.
RANK = """
import datetime, logging, sys, types
import torch.distributed
from sglang_pp_mla.fixes import missing_host

def init_distributed_environment(world_size, rank, distributed_init_method, timeout):
    torch.distributed.init_process_group(
        "gloo", distributed_init_method, datetime.timedelta(seconds=timeout), world_size, rank
    )

logging.basicConfig(format="%(message)s")
rank, port, nnodes, world_size = map(int, sys.argv[1:5])
missing_host.ANSWER_S = 3
missing_host.__version__ = sys.argv[5]
server_args = types.SimpleNamespace(nnodes=nnodes, pp_size=world_size)
missing_host._remember(lambda server_args: None, None, (server_args,), {})
method = f"tcp://127.0.0.1:{port}"
given = {"world_size": world_size, "rank": rank, "distributed_init_method": method, "timeout": TIMEOUT}
if sys.argv[5]:
    missing_host._watch(init_distributed_environment, None, (), given)
else:
    init_distributed_environment(**given)
# None leaves before the one that holds the store has read it.
torch.distributed.barrier()
"""


def ranks(versions: list[str], nnodes: int = 2, absent: int = 0, timeout_s: int = 100) -> list[tuple[int, list[str]]]:
    """Run ranks that say they have these versions; exit status and the lines about hosts of each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = RANK.replace("TIMEOUT", str(timeout_s))
    running = [
        subprocess.Popen(
            [sys.executable, "-c", script, *map(str, (rank, port, nnodes, len(versions) + absent)), version],
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(sglang_pp_mla.__file__).parents[1],
        )
        for rank, version in enumerate(versions)
    ]
    said = [process.communicate(timeout=300)[1] for process in running]
    return [
        (process.returncode, [line for line in text.splitlines() if line.startswith("Node ")])
        for process, text in zip(running, said, strict=True)
    ]


@pytest.mark.parametrize(
    ("layout", "node", "name"),
    [
        (Layout(2, 2, 2), 1, "node 1 of 2 (PP1)"),
        (Layout(2, 4, 4), 1, "node 1 of 2 (PP2, PP3)"),
        (Layout(2, 4, 8), 0, "node 0 of 2 (PP0, PP1)"),
        # Two hosts a stage, as SGLang lays out a stage wider than a host.
        (Layout(4, 2, 16), 1, "node 1 of 4 (PP0)"),
        (Layout(4, 2, 16), 2, "node 2 of 4 (PP1)"),
    ],
)
def test_a_host_is_named_with_its_stages(layout: Layout, node: int, name: str) -> None:
    assert layout.name(node) == name
    assert layout.node(layout.first_rank(node)) == node
    assert layout.node(layout.first_rank(node) - 1) == max(node - 1, 0) or node == 0


def test_a_host_that_does_not_join_is_named_while_waiting_and_when_giving_up() -> None:
    ((status, said),) = ranks(["1.0"], absent=1, timeout_s=8)
    assert status == 1
    assert len(said) == 2
    assert re.match(r"Node 1 of 2 \(PP1\) has not joined at 127\.0\.0\.1:\d+ after 4 s, where no other host", said[0])
    assert "`pip show sglang-pp-mla`" in said[0]


def test_hosts_that_all_have_the_package_are_left_in_peace() -> None:
    assert ranks(["1.0", "1.0"]) == [(0, [])] * 2


def test_a_host_without_the_package_is_named_by_the_other() -> None:
    (status, (line,)), (other, nothing) = ranks(["1.0", ""])
    assert line.startswith("Node 1 of 2 (PP1) runs without sglang-pp-mla")
    assert (status, other, nothing) == (0, 0, [])


def test_hosts_with_different_releases_are_named() -> None:
    (_, first), (_, second) = ranks(["1.0", "1.1"])
    assert [line[:50] for line in first] == ["Node 1 of 2 (PP1) runs sglang-pp-mla 1.1 and this "]
    assert [line[:50] for line in second] == ["Node 0 of 2 (PP0) runs sglang-pp-mla 1.0 and this "]
