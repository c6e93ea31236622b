"""One pipeline over two hosts, each a set of namespaces with an address of its own: the real server on both."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from packaging.version import Version

from sglang_pp_mla.rehearsal import FORK, EngineAnswer, EngineFailure
from sglang_pp_mla.rehearsal.hosts import Hosts, NoNamespaces, two_hosts, two_networks
from tests.e2e.compare import assert_same
from tests.e2e.witness import NEW_TOKENS, PROMPTS, Witness, show

pytestmark = [pytest.mark.engine, pytest.mark.release("0.5.11")]

READY_S = 500
# A host that is gone is noticed within this time, and so is one that never joins after its time-out.
NOTICED_S = 60
JOIN_TIMEOUT_S = 40


@pytest.fixture(scope="module", autouse=True)
def namespaces() -> None:
    try:
        with two_networks():
            pass
    except NoNamespaces as reason:
        pytest.skip(str(reason))


def ask(hosts: Hosts, prompt: tuple[int, ...], new_tokens: int = NEW_TOKENS) -> EngineAnswer:
    parameters = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    request = {"input_ids": list(prompt), "sampling_params": parameters, "return_logprob": True}
    answer = hosts.post("/generate", request)
    logprobs = tuple(entry[0] for entry in answer["meta_info"]["output_token_logprobs"])
    return EngineAnswer(tuple(answer["output_ids"]), logprobs, answer["meta_info"]["cached_tokens"])


def batches(hosts: Hosts) -> int:
    """Prompts that host 0 has begun to work on."""
    return sum("Prefill batch" in line for line in hosts.hosts[0].server.lines)


def wait_until(condition, timeout_s: float, what: str) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} took more than {timeout_s:g} s"
        time.sleep(0.1)


def test_two_hosts_answer_and_a_killed_one_is_named(known_answers: Witness) -> None:
    prompts = PROMPTS[:3]
    with two_hosts(known_answers.folder, env=FORK, on_progress=show) as hosts:
        hosts.wait_until_ready(READY_S)
        assert_same([ask(hosts, prompt) for prompt in prompts], known_answers.of(prompts))

        begun = batches(hosts)
        with ThreadPoolExecutor(1) as thread:
            request = thread.submit(ask, hosts, prompts[1], 900)
            wait_until(lambda: batches(hosts) > begun, NOTICED_S, "The request's first batch")
            hosts.hosts[1].kill()
            with pytest.raises(EngineFailure, match=r"(?i)host 1 \(pp-host-1, 10\.77\.0\.2; PP1\) ended") as failure:
                request.result(NOTICED_S)
        assert failure.value.rank == 1
        assert not failure.value.timed_out
        # SGLang's own doing: the stage that remains is told by Gloo, and its host ends.
        status = hosts.hosts[0].server.wait(NOTICED_S)
        assert status not in (None, 0)
        assert "Connection closed by peer [10.77.0.2]" in hosts.hosts[0].server.log
    assert hosts.pids() == []

    with two_hosts(known_answers.folder, env=FORK, on_progress=show) as hosts:
        hosts.wait_until_ready(READY_S)
        assert_same([ask(hosts, prompts[0])], known_answers.of(prompts[:1]))
    assert hosts.pids() == []


def test_a_host_that_refuses_triton_pp_is_named_on_the_other(known_answers: Witness) -> None:
    """Host 1 has no package, so its SGLang knows no triton_pp; host 0 would wait half an hour in silence."""
    options = {"dist_timeout": JOIN_TIMEOUT_S}
    with two_hosts(known_answers.folder, env=FORK, engine_args=options, without_package={1}, on_progress=show) as hosts:
        assert hosts.hosts[1].server.wait(READY_S) == 2
        assert "invalid choice: 'triton_pp'" in hosts.hosts[1].server.log
        with pytest.raises(EngineFailure, match=r"Host 1 \(pp-host-1, 10\.77\.0\.2; PP1\) ended with status 2"):
            hosts.wait_until_ready(READY_S)
        assert hosts.hosts[0].server.wait(READY_S) not in (None, 0)
        said = [line for line in hosts.hosts[0].server.lines if "Node 1 of 2 (PP1) has not joined" in line]
        # Half-way, and when SGLang gives up.
        assert len(said) == 2
        assert re.search(r"after 2\d s", said[0])
        assert "10.77.0.1:20000" in said[0]
        assert "`pip show sglang-pp-mla`" in said[0]
        assert "no other host has connected" in said[0]
    assert hosts.pids() == []


@pytest.mark.longest
def test_a_host_without_the_package_that_joins_is_named(known_answers: Witness, sglang_release: Version) -> None:
    with two_hosts(
        known_answers.folder,
        partition="4,3",
        attention_backend="triton",
        env=FORK,
        without_package={1},
        on_progress=show,
    ) as hosts:
        if sglang_release < Version("0.5.18"):
            with pytest.raises(EngineFailure, match=r"PP1\) ended .*IndexError: list index out of range"):
                hosts.wait_until_ready(READY_S)
        else:
            hosts.wait_until_ready(READY_S)
        (said,) = (line for line in hosts.hosts[0].server.lines if "runs without sglang-pp-mla" in line)
        assert "Node 1 of 2 (PP1)" in said
        assert "install the package there" in said
    assert hosts.pids() == []


@pytest.mark.longest
def test_two_stages_on_each_host(known_answers: Witness) -> None:
    prompts = PROMPTS[:3]
    with two_hosts(known_answers.folder, pp_size=4, env=FORK, on_progress=show) as hosts:
        hosts.wait_until_ready(READY_S)
        assert_same([ask(hosts, prompt) for prompt in prompts], known_answers.of(prompts))
        for host in hosts.hosts:
            for stage in range(4):
                built = f"triton_pp PP{stage} of 4" in host.server.log
                assert built == (stage in host.stages)
        assert "runs without sglang-pp-mla" not in hosts.hosts[0].server.log
    assert hosts.pids() == []
