"""The audit finds what it is for, judges it as written down, and its record is what the wheels say today."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sglang_pp_mla.releases import RELEASES

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.release("0.5.23")


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("audit_tool", str(ROOT / "tools" / "audit"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("audit_tool", loader))  # type: ignore[arg-type]
    sys.modules["audit_tool"] = module
    loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def found(tool) -> Any:
    """What all wheels have."""
    return tool.audit(RELEASES)


def pool(body: str, arguments: str = "self, layer_id") -> str:
    return f"class Pool:\n    def use({arguments}):\n        {body}\n"


SNIPPETS = {
    "srt/a.py": [
        (pool("return self.pool.get_key_buffer(0).shape"), "faulty"),
        (pool("return self.pool.get_kv_buffer(layer_id=0)"), "faulty"),
        (pool("return [p.get_value_buffer(i) for i in range(self.config.num_hidden_layers)]"), "faulty"),
        (pool("return self.kv_buffer[layer_id]"), "unclear"),
        (pool("self.layer_transfer_counter.wait_until(layer_id)"), "unclear"),
        (pool("return self.pool.get_key_buffer(self.pool.start_layer + 1)"), "unclear"),
        (pool("return [self.pool.get_key_buffer(i) for i in range(self.layer_num)]"), "unclear"),
        (pool("return self.kv_buffer[layer_id - self.start_layer]"), "safe"),
        (pool("at = layer_id - self.start_layer\n        return self.kv_buffer[at]"), "safe"),
        (pool("self.layer_transfer_counter.wait_until(layer_id - self.start_layer)"), "safe"),
        (pool("return self.pool.get_key_buffer(layer.layer_id)", "self, layer"), "safe"),
        (pool("return self.pool.get_key_buffer(self.pool.start_layer)"), "safe"),
        (
            pool("return [self.get_key_buffer(i) for i in range(self.start_layer, self.start_layer + self.layer_num)]"),
            "safe",
        ),
        (pool("return [self.kv_buffer[i] for i in range(self.layer_num)]"), "safe"),
        (pool("return self.kv_buffer[0].shape"), "safe"),
        (pool("return self.inner.get_key_buffer(self.mamba_map[layer_id])"), "safe"),
    ],
    "srt/layers/attention/triton_backend.py": [
        ("class B:\n    def __init__(self, runner):\n        runner.pool.get_value_buffer(0)\n", "faulty"),
        ("class B:\n    def forward(self, layer):\n        self.pool.get_value_buffer(0)\n", "faulty"),
    ],
    "srt/managers/hisparse_coordinator.py": [
        (pool("return self.lru_slots[layer_id]"), "faulty"),
        (pool("layer_id = layer_id - self.start_layer\n        return self.lru_slots[layer_id]"), "safe"),
    ],
    "srt/mem_cache/memory_pool_host.py": [
        (pool("return self.kv_buffer[layer_id]"), "safe"),
    ],
    "srt/disaggregation/nixl/conn.py": [
        (pool("return [dst_kv_ptrs[layer_id] for layer_id in range(num_layers)]"), "faulty"),
    ],
}


@pytest.mark.parametrize(
    ("path", "source", "verdict"), [(path, *case) for path, cases in SNIPPETS.items() for case in cases]
)
def test_a_place_is_found_and_judged(tool, path, source, verdict):
    assert {tool.judge(path, place).verdict for place in tool.places_in(source)} == {verdict}


def test_what_no_layer_numbers_is_no_place(tool):
    source = pool(
        "return x.get_kv_buffer_shape(), self.kv_buffer[start:end], k_buffer[index]", "self, start, end, index"
    )
    assert tool.places_in(source) == []


def test_a_string_that_looks_like_code_does_not_hide_a_place(tool):
    source = 'TEXT = """\nclass Odd:\n  (\n"""\n' + pool("return self.pool.get_key_buffer(0)")
    assert [str(place) for place in tool.places_in(source)] == ["get_key_buffer(0)"]


KNOWN = {
    "srt/layers/attention/triton_backend.py: TritonAttnBackend.__init__: get_value_buffer(0)": ("0.5.3", "0.5.17"),
    "srt/mem_cache/memory_pool.py: MiniMaxSparseKVPool.get_v_head_dim: get_value_buffer(0)": ("0.5.15", "0.5.17"),
    "srt/layers/attention/aiter_backend.py: AiterAttnBackend.__init__: get_value_buffer(0)": ("0.5.3", "0.5.23"),
    "srt/layers/attention/wave_backend.py: WaveAttnBackend.__init__: get_value_buffer(0)": ("0.5.3", "0.5.23"),
}
DASH = " \N{EN DASH} "


@pytest.mark.parametrize("where", KNOWN)
def test_a_known_fault_is_listed_in_exactly_its_releases(tool, found, where):
    (record,) = [each for each in tool.as_records(found) if each["where"] == where]
    assert (record["verdict"], record["releases"], record["fix"]) == ("faulty", DASH.join(KNOWN[where]), "buffer-probe")


def test_no_release_probes_layer_0_in_a_forward_pass(found):
    """What an initialiser asks is answered by the probe fix; a forward pass would need a fix of its own."""
    literal = [where for (where, fragment, _verdict) in found if fragment.endswith("(0)") and "_buffer" in fragment]
    assert literal
    assert [where for where in literal if not where.endswith(("__init__", "get_v_head_dim"))] == []


def test_hybrid_hicache_is_faulty_where_its_fix_finds_it(tool, found):
    from sglang_pp_mla.fixes.hybrid_hicache import FIX

    (record,) = [each for each in tool.as_records(found) if each["fix"] == FIX.name]
    packages = dict(zip(RELEASES, tool.wheels(RELEASES), strict=True))
    assert record["releases"] == tool.ranges(each for each in RELEASES if FIX.evidence(packages[each]))


def test_every_fix_named_is_one_of_ours(tool, found):
    from sglang_pp_mla.fixes import BUILT_IN

    assert {verdict.fix for (_, _, verdict) in found} <= {"", *(fix.name for fix in BUILT_IN)}


def test_nothing_is_unclear_and_no_rule_is_idle(tool, found):
    from audit_rules import RULES

    used = {verdict for (_, _, verdict) in found}
    # Two rules wait for what a newer release may bring; their snippets show that they work.
    snippets = [(path, code) for path, cases in SNIPPETS.items() for code, _ in cases]
    used |= {tool.judge(path, place) for path, code in snippets for place in tool.places_in(code)}
    assert [where for (where, _, verdict) in found if verdict.verdict == "unclear"] == []
    assert [rule.verdict.reason for rule in RULES if rule.verdict not in used] == []


def test_the_record_is_what_the_wheels_say(tool, found):
    assert json.loads(tool.RECORD.read_text("utf-8")) == tool.as_records(found), "run: tools/audit --write"


def test_each_known_release_by_itself_brings_nothing_new(tool, found):
    assert tool.unrecorded(found) == []
    (hisparse,) = [key for key in found if "swap_in_selected_pages" in key[0] and key[1] == "lru_slots[layer_id]"]
    assert tool.unrecorded({hisparse: {"0.5.11"}}) == []


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("return self.pool.get_key_buffer(0)", 1),
        ("return self.kv_buffer[layer_id]", 1),
        ("return self.kv_buffer[layer_id - self.start_layer]", 0),
    ],
)
def test_a_newer_release_is_judged(tool, tmp_path, monkeypatch, capsys, body, code):
    file = tmp_path / "srt" / "layers" / "attention" / "new_backend.py"
    file.parent.mkdir(parents=True)
    file.write_text(pool(body))
    monkeypatch.setattr(tool, "wheels", lambda releases: [tmp_path])
    monkeypatch.setattr(tool, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(sys, "argv", ["tools/audit", "0.9.9"])
    assert tool.main() == code
    output = capsys.readouterr()
    assert ("new_backend.py" in output.err) == bool(code)


def test_ranges_follow_the_order_of_releases(tool):
    assert tool.ranges(["0.5.4", "0.5.3.post3", "0.5.20", "0.9.9"]) == f"0.5.3.post3{DASH}0.5.4, 0.5.20, 0.9.9"
