"""Arming in a fresh interpreter: what each kind of SGLang, and each setting, comes to.

The SGLangs here are small ones, each a variation that a fork or a later release could be; the real ones are in
the other tests.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import sglang_pp_mla
from tests.unit.small_sglang import FAULTY, IMPORT_ALL, POOL, STATES, write

ROOT = Path(sglang_pp_mla.__file__).parents[1]


def python(tmp_path: Path, *script: str, files: dict[str, str] = FAULTY, **env: str):
    """Run a script in a fresh interpreter that sees these files as SGLang and reads us as the .pth does."""
    write(tmp_path, files)
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
        "print(type(builders['init_attention_backend'].__wrapped__).__name__)",
        files=FAULTY | {"sglang/srt/layers/attention/triton_backend.py": fixed},
    )
    by_triton_pp_alone = "function"
    assert output(run) == ["triton-pp applied", "buffer-probe not needed", by_triton_pp_alone]


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
def test_an_unrecognised_sglang_is_left_alone_with_one_warning_a_fix(tmp_path, module, text, fix, missing):
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
    assert run.stderr.count(f"The fix {fix} does not recognise this SGLang") == 1
    assert missing in run.stderr
    assert f"SGLANG_PP_MLA_DISABLE={fix}" in run.stderr


def test_hicache_maps_that_are_not_given_by_name_are_left_alone(tmp_path):
    """Else a fork's own call would fail in ours, where the fault alone does not stop it."""
    folder = "sglang/srt/mem_cache/hybrid_cache"
    assembler = """
        def build_hybrid_mamba_stack(params, full_layer_mapping):
            return full_layer_mapping

        def attach(kvcache):
            full_layer_mapping = dict(kvcache.full_attention_layer_id_mapping)
            return build_hybrid_mamba_stack(None, full_layer_mapping)
        """
    run = python(
        tmp_path,
        """
        import types
        from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import attach
        print(attach(types.SimpleNamespace(full_attention_layer_id_mapping={4: 0})))
        """,
        files=FAULTY | {f"{folder}/__init__.py": "", f"{folder}/hybrid_pool_assembler.py": assembler},
    )
    assert output(run) == ["{4: 0}"]
    assert "does not take params and full_layer_mapping and mamba_layer_mapping by name alone" in run.stderr


def test_a_builder_that_names_its_runner_otherwise_is_called_as_it_was(tmp_path):
    package = "sglang/srt/model_executor/model_runner_components"
    builders = """
        def build_attention_backends(*, runner):
            return runner.token_to_kv_pool.get_value_buffer(4)

        def get_attention_backend(runner):
            return runner.token_to_kv_pool.get_value_buffer(0)
        """
    run = python(
        tmp_path,
        """
        from sglang.srt.model_executor.model_runner_components.attention_backend_setup import *
        runner = Runner()
        runner.token_to_kv_pool = Pool()
        print(build_attention_backends(runner=runner), get_attention_backend(runner))
        """,
        files=FAULTY | {f"{package}/__init__.py": "", f"{package}/attention_backend_setup.py": builders},
    )
    assert output(run) == ["4 4"]


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
        print(*(type(each).__name__ for each in (builder, builder.__wrapped__, builder.__wrapped__.__wrapped__)))
        """,
        STATES,
    )
    once_a_fix = "FunctionWrapper FunctionWrapper function"
    assert output(run) == [once_a_fix, "triton-pp applied", "buffer-probe applied"]


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


def test_a_plugin_of_ours_that_raises_when_asked_is_reported_and_left_out(tmp_path):
    hooks = {
        "raises": "raise RuntimeError('cannot say')",
        "names_nothing": "return None",
        "names_no_fix": "return ['a fix']",
    }
    plugins = {}
    for name, body in hooks.items():
        plugins[f"{name}-1.dist-info/METADATA"] = f"Name: {name}\nVersion: 1\n"
        plugins[f"{name}-1.dist-info/entry_points.txt"] = f"[sglang_pp_mla]\n{name} = {name}_module\n"
        plugins[f"{name}_module.py"] = (
            "from sglang_pp_mla.hookspecs import hookimpl\n@hookimpl\ndef sglang_pp_mla_fixes():\n    " + body + "\n"
        )
    run = python(tmp_path, IMPORT_ALL, STATES, files=FAULTY | plugins)
    assert output(run) == ["triton-pp applied", "buffer-probe applied"]
    assert "The plugin raises failed to name its fixes" in run.stderr
    assert "cannot say" in run.stderr
    assert "The plugin names_nothing failed to name its fixes" in run.stderr
    assert "The fix a fix of another package could not be armed" in run.stderr


def test_a_change_that_imports_does_not_wait_for_a_thread_that_waits_for_it(tmp_path):
    """Thread one changes a module and imports another, which thread two has just imported and is to change."""
    run = python(
        tmp_path,
        """
        import threading
        from sglang_pp_mla.fixes import Fix
        from sglang_pp_mla.wiring.arming import arm_fix
        import sglang.srt
        changing = threading.Event()

        def first(module, changes):
            changing.set()
            import sglang.srt.second

        def second(module, changes):
            print("changed")

        arm_fix(Fix("theirs", "", (), "", lambda root: ["here"],
                    {"sglang.srt.first": first, "sglang.srt.second": second}))
        import builtins
        builtins.changing = changing
        threads = [threading.Thread(target=__import__, args=(name,), daemon=True)
                   for name in ("sglang.srt.second", "sglang.srt.first")]
        [thread.start() for thread in threads]
        [thread.join(20) for thread in threads]
        print(any(thread.is_alive() for thread in threads))
        import os, sys
        sys.stdout.flush()
        os._exit(0)
        """,
        files=FAULTY | {"sglang/srt/first.py": "", "sglang/srt/second.py": "changing.wait(10)"},
    )
    assert output(run) == ["changed", "False"]


def test_an_sglang_whose_source_cannot_be_read_is_left_alone(tmp_path):
    write(tmp_path, FAULTY)
    shutil.make_archive(str(tmp_path / "sglang"), "zip", tmp_path, "sglang")
    shutil.rmtree(tmp_path / "sglang")
    archive = str(tmp_path / "sglang.zip")
    run = python(tmp_path, f"import sys; sys.path.insert(0, {archive!r})", IMPORT_ALL, STATES, files={})
    assert output(run) == ["triton-pp unrecognised", "buffer-probe unrecognised"]
    assert f"its source cannot be read in {archive}" in run.stderr


def test_a_process_forked_between_arming_and_import_is_armed(tmp_path):
    run = python(
        tmp_path,
        """
        import os, sglang, threading
        child = os.fork()
        if child:
            os.waitpid(child, 0)  # both write into one pipe
        """,
        IMPORT_ALL,
        STATES,
        """
        import sys
        sys.stdout.flush()
        if not child:
            os._exit(0)
        """,
    )
    assert output(run) == ["triton-pp applied", "buffer-probe applied"] * 2
