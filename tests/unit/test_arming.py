"""Arming in a fresh interpreter: what each kind of SGLang, and each setting, comes to.

The SGLangs here are small packages of the layout that the fixes look at, each a variation that a fork or a
later release could be; the real ones are in the other tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import sglang_pp_mla

ROOT = Path(sglang_pp_mla.__file__).parents[1]

FAULTY = {
    "sglang/__init__.py": "",
    "sglang/srt/__init__.py": "",
    "sglang/srt/mem_cache/__init__.py": "",
    "sglang/srt/layers/__init__.py": "",
    "sglang/srt/layers/attention/__init__.py": "",
    "sglang/srt/layers/attention/triton_backend.py": """
        class TritonAttnBackend:
            def __init__(self, runner):
                self.v_head_dim = runner.token_to_kv_pool.get_value_buffer(0)
        """,
    "sglang/srt/layers/attention/attention_registry.py": """
        ATTENTION_BACKENDS = {"triton": lambda runner: "stock"}
        """,
    "sglang/srt/model_executor/__init__.py": "",
    "sglang/srt/model_executor/model_runner.py": """
        class ModelRunner:
            def init_attention_backend(self):
                return self.token_to_kv_pool.get_value_buffer(0)

            def _get_attention_backend(self):
                return self.token_to_kv_pool.get_value_buffer(0)
        """,
    "sglang/srt/server_args.py": """
        ATTENTION_BACKEND_CHOICES = ["triton", "fa3"]

        class ServerArgs:
            def __post_init__(self):
                pass
        """,
}

POOL = """
class Pool:
    start_layer, layer_num = 4, 3

    def get_value_buffer(self, layer_id):
        return list(range(self.start_layer, self.start_layer + self.layer_num))[layer_id - self.start_layer]

class Runner:
    token_to_kv_pool = None
"""


def python(tmp_path: Path, *script: str, files: dict[str, str] = FAULTY, **env: str):
    """Run a script in a fresh interpreter that sees these files as SGLang and reads us as the .pth does."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
    armed = "\n".join(map(textwrap.dedent, ("import sglang_pp_mla.wiring.autoload", POOL, *script)))
    return subprocess.run(
        [sys.executable, "-c", armed],
        env={
            **{name: value for name, value in os.environ.items() if name != "SGLANG_PP_MLA_DISABLE"},
            "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
            **env,
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def output(run: subprocess.CompletedProcess[str]) -> list[str]:
    assert run.returncode == 0, run.stderr
    return run.stdout.split("\n")[:-1]


STATES = """
from sglang_pp_mla.wiring.arming import decisions
for decision in decisions():
    print(decision.fix.name, decision.state)
"""
IMPORT_ALL = """
import sglang.srt.server_args, sglang.srt.layers.attention.attention_registry
import sglang.srt.model_executor.model_runner
"""


def test_a_faulty_sglang_is_mended_when_its_module_is_imported(tmp_path):
    run = python(
        tmp_path,
        """
        import sglang.srt
        """,
        STATES,
        IMPORT_ALL,
        STATES,
        """
from sglang.srt.model_executor.model_runner import ModelRunner
runner = ModelRunner()
runner.token_to_kv_pool = Pool()
print(runner.init_attention_backend(), runner._get_attention_backend())
""",
    )
    assert output(run) == [
        "triton-pp armed",
        "buffer-probe armed",
        "triton-pp applied",
        "buffer-probe applied",
        "4 4",
    ]


def test_an_sglang_without_the_fault_is_not_changed(tmp_path):
    fixed = "class TritonAttnBackend:\n    pass\n"
    run = python(
        tmp_path,
        IMPORT_ALL,
        STATES,
        "builders = vars(sglang.srt.model_executor.model_runner.ModelRunner)",
        "print(type(builders['init_attention_backend']).__name__)",
        files=FAULTY | {"sglang/srt/layers/attention/triton_backend.py": fixed},
    )
    assert output(run) == ["triton-pp applied", "buffer-probe not needed", "function"]


@pytest.mark.parametrize(
    ("module", "text", "fix", "missing"),
    [
        (
            "model_executor/model_runner",
            "class ModelRunner:\n    def build_it(self):\n        return 1\n",
            "buffer-probe",
            "ModelRunner has none of init_attention_backend",
        ),
        ("server_args", "CHOICES = []\n", "triton-pp", "no ATTENTION_BACKEND_CHOICES"),
        ("layers/attention/attention_registry", "BACKENDS = {}\n", "triton-pp", "no ATTENTION_BACKENDS"),
        ("model_executor/model_runner", "x = 1\n", "buffer-probe", "AttributeError"),
    ],
)
def test_an_unrecognised_sglang_is_left_alone_with_one_warning(tmp_path, module, text, fix, missing):
    name = "sglang.srt." + module.replace("/", ".")
    run = python(
        tmp_path,
        f"""
        import importlib
        module = importlib.import_module("{name}")
        print(all(type(value).__name__ != "FunctionWrapper" for cls in vars(module).values()
                  if isinstance(cls, type) for value in vars(cls).values()))
        """,
        STATES,
        files=FAULTY | {f"sglang/srt/{module}.py": text},
    )
    assert output(run)[0] == "True"
    assert f"{fix} unrecognised" in output(run)
    assert run.stderr.count("does not recognise this SGLang") == 1
    assert fix in run.stderr
    assert missing in run.stderr
    assert f"SGLANG_PP_MLA_DISABLE={fix}" in run.stderr


def test_a_fix_that_raises_leaves_sglang_as_it_was(tmp_path):
    run = python(
        tmp_path,
        """
        from sglang_pp_mla.fixes import Fix
        from sglang_pp_mla.wiring.arming import arm_fix, arm
        import sglang.srt

        def half_a_change(module, changes):
            changes.wrap(module.ModelRunner, "init_attention_backend", lambda wrapped, *rest: None)
            module.NAMES = ["a"]
            changes.append(module.NAMES, "b")
            module.TABLE = {"a": 1}
            changes.put(module.TABLE, "a", 2)
            changes.put(module.TABLE, "b", 2)
            raise RuntimeError("half way")

        arm_fix(Fix("breaks", "", (), "", lambda root: ["here"],
                    {"sglang.srt.model_executor.model_runner": half_a_change}))
        """,
        IMPORT_ALL,
        STATES,
        """
module = sglang.srt.model_executor.model_runner
print(module.NAMES, module.TABLE)
runner = module.ModelRunner()
runner.token_to_kv_pool = Pool()
print(runner.init_attention_backend())
""",
    )
    assert output(run)[2:] == ["breaks unrecognised", "['a'] {'a': 1}", "4"]
    assert "RuntimeError: half way" in run.stderr
    assert "Traceback" in run.stderr


@pytest.mark.parametrize(
    ("setting", "states"),
    [
        ("1", ["triton-pp disabled", "buffer-probe disabled"]),
        ("all", ["triton-pp disabled", "buffer-probe disabled"]),
        ("buffer-probe", ["triton-pp applied", "buffer-probe disabled"]),
        ("triton-pp, buffer-probe", ["triton-pp disabled", "buffer-probe disabled"]),
        ("another-fix", ["triton-pp applied", "buffer-probe applied"]),
        ("", ["triton-pp applied", "buffer-probe applied"]),
        ("0", ["triton-pp applied", "buffer-probe applied"]),
    ],
)
def test_fixes_are_disabled_by_name(tmp_path, setting, states):
    run = python(tmp_path, IMPORT_ALL, STATES, SGLANG_PP_MLA_DISABLE=setting)
    assert output(run) == states


def test_a_name_that_is_no_fix_is_mentioned(tmp_path):
    run = python(tmp_path, IMPORT_ALL, SGLANG_PP_MLA_DISABLE="bufer-probe")
    assert "bufer-probe" in run.stderr
    assert "buffer-probe" in run.stderr


def test_an_interpreter_without_sglang_loads_nothing_else(tmp_path):
    run = python(
        tmp_path,
        """
        import sys
        print(sorted(name for name in sys.modules if name.split(".")[0] in
                     ("sglang_pp_mla", "wrapt", "pluggy", "logging", "importlib.metadata", "typing")))
        """,
        files={},
    )
    assert output(run) == [
        "['sglang_pp_mla', 'sglang_pp_mla.wiring', 'sglang_pp_mla.wiring.autoload']",
    ]


def test_an_import_of_another_thread_misses_no_finder(tmp_path):
    """A search walks the live list of finders: one taken out meanwhile would make it skip the next."""
    run = python(
        tmp_path,
        """
        import importlib.machinery, sys, threading, types
        searching, imported = threading.Event(), threading.Event()

        class Slow:
            @staticmethod
            def find_spec(name, path=None, target=None):
                if name == "behind":
                    searching.set()
                    imported.wait(30)

        class Behind:
            @staticmethod
            def find_spec(name, path=None, target=None):
                if name == "behind":
                    return importlib.machinery.ModuleSpec(name, Behind)
            create_module = staticmethod(lambda spec: types.ModuleType(spec.name))
            exec_module = staticmethod(lambda module: None)

        sys.meta_path += [Slow, Behind]
        thread = threading.Thread(target=lambda: print(__import__("behind").__name__))
        thread.start()
        searching.wait(30)
        import sglang.srt
        imported.set()
        thread.join()
        """,
    )
    assert output(run) == ["behind"]


def test_a_missing_pluggy_does_not_stop_sglang(tmp_path):
    run = python(tmp_path, "import sys; sys.modules['pluggy'] = None", IMPORT_ALL, STATES)
    assert output(run) == ["triton-pp applied", "buffer-probe applied"]
    assert "could not be looked for" in run.stderr


def test_sglang_starts_without_us_when_we_cannot(tmp_path):
    run = python(tmp_path, "import sys; sys.modules['wrapt'] = None\nimport sglang.srt.server_args; print('ok')")
    assert output(run) == ["ok"]
    assert "could not be armed" in run.stderr
    assert "wrapt" in run.stderr


def test_arming_twice_and_from_many_threads_wraps_once(tmp_path):
    run = python(
        tmp_path,
        """
        import threading
        from sglang_pp_mla.wiring import arm
        def everything():
            arm()
            import sglang.srt.model_executor.model_runner
            import sglang.srt.server_args
        threads = [threading.Thread(target=everything) for _ in range(16)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        arm()
        import sglang.srt.model_executor.model_runner as module
        builder = vars(module.ModelRunner)["init_attention_backend"]
        print(type(builder).__name__, type(builder.__wrapped__).__name__)
        """,
        STATES,
    )
    assert output(run) == ["FunctionWrapper function", "triton-pp applied", "buffer-probe applied"]


def test_children_read_the_setting_too(tmp_path):
    child = "import sglang_pp_mla.wiring.autoload" + IMPORT_ALL + STATES
    run = python(
        tmp_path,
        f"""
        import subprocess, sys
        print(subprocess.run([sys.executable, "-c", {child!r}], capture_output=True, text=True).stdout, end="")
        """,
        SGLANG_PP_MLA_DISABLE="buffer-probe",
    )
    assert output(run) == ["triton-pp applied", "buffer-probe disabled"]


def test_a_broken_plugin_of_ours_is_reported_and_left_out(tmp_path):
    plugin = {
        "broken_plugin-1.dist-info/METADATA": "Name: broken-plugin\nVersion: 1\n",
        "broken_plugin-1.dist-info/entry_points.txt": "[sglang_pp_mla]\nbroken = broken_plugin\n",
        "broken_plugin.py": "raise RuntimeError('cannot load')\n",
        "good_plugin-1.dist-info/METADATA": "Name: good-plugin\nVersion: 1\n",
        "good_plugin-1.dist-info/entry_points.txt": "[sglang_pp_mla]\ngood = good_plugin\n",
        "good_plugin.py": """
            from sglang_pp_mla.fixes import Fix
            from sglang_pp_mla.hookspecs import hookimpl

            @hookimpl
            def sglang_pp_mla_fixes():
                return [Fix("theirs", "", (), "", lambda root: [], {"sglang.srt.server_args": None})]
            """,
    }
    run = python(tmp_path, IMPORT_ALL, STATES, files=FAULTY | plugin)
    assert output(run) == ["triton-pp applied", "buffer-probe applied", "theirs not needed"]
    assert "broken" in run.stderr
    assert "cannot load" in run.stderr
