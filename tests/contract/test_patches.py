"""patches/: each file applied to every published release that it says it is for, and run on those at hand."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import os
import re
import shutil
import stat
import subprocess
import sys
import types
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

from sglang_pp_mla.fixes import Fix
from sglang_pp_mla.releases import RELEASES

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.release("0.5.11")
PATCHES = ROOT / "patches"
PROBE = ROOT / "upstream_repro" / "buffer-probe" / "repro.py"
RAY = ROOT / "upstream_repro" / "ray-plugins" / "repro.py"
INSTALLED = version("sglang")


def load(name: str) -> ModuleType:
    """A tool as a module, which leaves nothing behind in this process but itself."""
    loader = importlib.machinery.SourceFileLoader(f"tools_{name}", str(ROOT / "tools" / name))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as here:
        here.setattr(sys, "path", list(sys.path))
        here.setattr(sys, "dont_write_bytecode", True)
        loader.exec_module(module)
    return module


TOOL, OVERLAY = load("patches"), load("overlay")
FAULTS = [fix for fix in TOOL.FIXES if fix.name not in TOOL.NOT_FAULTS]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return TOOL


@pytest.fixture(scope="module")
def packages(tool: ModuleType) -> dict[str, Path]:
    """The published `sglang` package of every release."""
    return dict(tool.wheels(RELEASES))


def patches_for(release: str, fault: str) -> list[Path]:
    """The files whose name covers a release, whatever the tool thinks."""
    found = []
    for path in (PATCHES / fault).glob("*.patch"):
        first, _, last = path.stem.partition("-")
        if release in RELEASES[RELEASES.index(first) : RELEASES.index(last or first) + 1]:
            found.append(path)
    return found


def files_in(patch: Path) -> list[str]:
    """Paths inside the `sglang` package."""
    prefix = "+++ b/python/sglang/"
    return [line.removeprefix(prefix) for line in patch.read_text().splitlines() if line.startswith(prefix)]


def lay_out(package: Path, files: list[str], folder: Path) -> None:
    for path in files:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(package / path, folder / path)


def run(command: list[object], folder: Path) -> None:
    done = subprocess.run([str(word) for word in command], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, (command, done.stdout + done.stderr)


def apply(patch: Path, package: Path, folder: Path) -> dict[str, str]:
    """The files a patch changes, as they are after `git apply` in a repository laid out as SGLang's."""
    checkout = folder / "checkout"
    lay_out(package, files_in(patch), checkout / "python" / "sglang")
    run(["git", "init", "--quiet"], checkout)
    run(["git", "apply", "--check", patch], checkout)
    run(["git", "apply", patch], checkout)
    return {path: (checkout / "python" / "sglang" / path).read_text() for path in files_in(patch)}


# --- The files ---------------------------------------------------------------------------------------


def test_every_fault_has_a_rule(tool: ModuleType) -> None:
    assert set(tool.RULES) == {fix.name for fix in FAULTS}


def test_the_repository_holds_what_the_tool_writes(tool: ModuleType, packages: dict[str, Path]) -> None:
    assert tool.out_of_date(tool.wanted(tool.all_patches(packages))) == []


def test_files_are_plain() -> None:
    for path in [*PATCHES.glob("*/*.patch"), PATCHES / "README.md"]:
        data = path.read_bytes()
        assert data.endswith(b"\n")
        assert b"\r" not in data
        assert stat.S_IMODE(path.stat().st_mode) & 0o111 == 0
        data.decode("ascii" if path.suffix == ".patch" else "utf-8")


@pytest.mark.parametrize("fix", FAULTS, ids=lambda fix: fix.name)
@pytest.mark.parametrize("release", RELEASES)
def test_a_release_with_a_fault_has_one_patch_that_mends_it(
    release: str, fix: Fix, tool: ModuleType, packages: dict[str, Path], tmp_path: Path
) -> None:
    package = packages[release]
    found = patches_for(release, fix.name)
    if not fix.evidence(package):
        assert found == []
        return
    (patch,) = found
    mended = apply(patch, package, tmp_path)
    for path, text in mended.items():
        compile(text, path, "exec")
    # What fixes look at beside the files they find faulty.
    (tmp_path / "checkout/python/sglang/srt").mkdir(exist_ok=True)
    (tmp_path / "checkout/python/sglang/srt/plugins").symlink_to(package / "srt/plugins")
    assert fix.evidence(tmp_path / "checkout/python/sglang") == []
    if shutil.which("patch"):  # what the README says for an installed SGLang
        site = tmp_path / "site-packages"
        lay_out(package, files_in(patch), site / "sglang")
        run(["patch", "-p2", "-d", site, "-i", patch], tmp_path)
        assert {path: (site / "sglang" / path).read_text() for path in mended} == mended
        run(["patch", "-p2", "-R", "-d", site, "-i", patch], tmp_path)
        assert all((site / "sglang" / path).read_text() == (package / path).read_text() for path in mended)


def pools_without_start(text: str) -> list[str]:
    """Pools whose initialiser neither sets `start_layer` nor leaves it to the base class."""
    found = []
    for each in re.split(r"^class ", text, flags=re.M):
        pool = re.match(r"(\w+)\(KVCache\)", each)
        if pool and "def __init__" in each and not re.search(r"super\(\).__init__|self\.start_layer = ", each):
            found.append(pool[1])
    return found


def test_a_pool_that_is_asked_where_it_starts_can_say_so(packages: dict[str, Path], tmp_path: Path) -> None:
    """Two pools of the first releases cannot as published: a backend that asks them would break where it worked."""
    mute = {}
    for release, package in packages.items():
        for path in (package / "srt/mem_cache").glob("*.py"):
            if pools := pools_without_start(path.read_text()):
                mute[release] = pools
                (patch,) = patches_for(release, "buffer-probe")
                mended = apply(patch, package, tmp_path / release)
                assert pools_without_start(mended[f"srt/mem_cache/{path.name}"]) == []
    expected = ["HybridLinearKVPool", "SWAKVPool"]
    assert mute == dict.fromkeys(("0.5.3", "0.5.3.post1", "0.5.3.post2"), expected)


def probes(text: str) -> set[str]:
    """Every head size that is read off a buffer, layout and comments aside."""
    nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Subscript))
    return {text for text in map(ast.unparse, nodes) if "get_value_buffer(" in text and text.endswith(".shape[-1]")}


@pytest.mark.parametrize("path", ["srt/layers/attention/triton_backend.py", "srt/mem_cache/memory_pool.py"])
def test_what_upstream_repaired_is_asked_as_upstream_asks_it(
    path: str, packages: dict[str, Path], tmp_path: Path
) -> None:
    (patch,) = patches_for("0.5.17", "buffer-probe")
    assert probes(apply(patch, packages["0.5.17"], tmp_path)[path]) == probes((packages["0.5.18"] / path).read_text())


@pytest.mark.parametrize("release", ["0.5.11", "0.5.20"])
def test_hicache_numbers_a_later_stages_layers_from_its_first(
    release: str, packages: dict[str, Path], tmp_path: Path
) -> None:
    (patch,) = patches_for(release, "hicache-hybrid-layers")
    (text,) = apply(patch, packages[release], tmp_path).values()
    maps: dict[str, list[ast.Assign]] = {"full_layer_mapping": [], "mamba_layer_mapping": []}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Assign) and ".start_layer: index for" in ast.unparse(node.value):
            maps[ast.unparse(node.targets[0])].append(node)
    pool = types.SimpleNamespace(start_layer=4, full_attention_layer_id_mapping={5: 0, 7: 1})
    requests = types.SimpleNamespace(mamba_map={4: 0, 6: 1, 8: 2})
    names = {
        "kvcache": pool,
        "hybrid_kv": pool,
        "params": types.SimpleNamespace(req_to_token_pool=requests),
    }
    for name, numbers in (("full_layer_mapping", {1: 0, 3: 1}), ("mamba_layer_mapping", {0: 0, 2: 1, 4: 2})):
        assert maps[name]
        assert [eval(ast.unparse(node.value), names) for node in maps[name]] == [numbers] * len(maps[name])


@pytest.mark.parametrize("release", ["0.5.12", "0.5.17", "0.5.23"])
def test_the_cap_of_kv_splits_counts_head_tiles(release: str, packages: dict[str, Path], tmp_path: Path) -> None:
    (patch,) = patches_for(release, "kv-splits")
    (text,) = apply(patch, packages[release], tmp_path).values()
    (lift,) = (node for node in ast.parse(text).body if getattr(node, "name", "") == "_mla_decode_kv_splits_cap")
    names = {
        "_MLA_DECODE_MIN_BLOCK_KV": 32,
        "next_power_of_2": lambda number: 1 << (number - 1).bit_length(),
        "triton": types.SimpleNamespace(cdiv=lambda one, other: -(-one // other)),
    }
    exec(ast.unparse(lift), names)
    cap = names["_mla_decode_kv_splits_cap"]
    assert [cap(8, 188, 262144, heads) for heads in (8, 16, 32, 64, 128)] == [256, 256, 128, 64, 32]
    assert cap(8, 188, 262144) == 256
    assert cap(100, 188, 262144, 128) == 100  # what the user asked for
    assert cap(8, 0, 262144, 64) == 8
    assert "                self.max_context_len,\n                self.num_head,\n            )" in text


# --- The tool ----------------------------------------------------------------------------------------


class TestTool:
    @pytest.fixture
    def few(self, tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
        """The tool with two known faults, two known releases and a folder of its own to write to."""
        folder = tmp_path / "patches"
        folder.mkdir()
        (folder / "README.md").write_text(f"before\n{tool.BEGIN}{tool.END}after\n")
        monkeypatch.setattr(tool, "PATCHES", folder)
        fixes = [fix for fix in tool.FIXES if fix.name in ("buffer-probe", "ray-plugins")]
        monkeypatch.setattr(tool, "FIXES", fixes)
        monkeypatch.setattr(tool, "RELEASES", ("0.5.11", "0.5.12"))
        return tool

    def written(self, tool: ModuleType) -> list[str]:
        return sorted(str(path.relative_to(tool.PATCHES)) for path in tool.PATCHES.rglob("*.patch"))

    def test_check_sees_what_is_missing_changed_or_left_over(
        self, few: ModuleType, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert few.carry_out([], check=True) == 1
        assert self.written(few) == []
        assert few.carry_out([], check=False) == 0
        patches = ["buffer-probe/0.5.11-0.5.12.patch", "ray-plugins/0.5.11-0.5.12.patch"]
        assert self.written(few) == patches
        readme = few.PATCHES / "README.md"
        assert readme.read_text().startswith("before\n")
        assert readme.read_text().endswith("after\n")
        assert few.carry_out([], check=True) == 0

        (few.PATCHES / patches[0]).unlink()
        shutil.copy(few.PATCHES / patches[1], few.PATCHES / "ray-plugins/0.5.10.patch")
        for path in (few.PATCHES / patches[1], readme):
            path.write_text(path.read_text().replace("0.5.12", "0.5.13"))
        capsys.readouterr()
        assert few.carry_out([], check=True) == 1
        named = [line.split()[1] for line in capsys.readouterr().err.splitlines()]
        assert named == [
            "patches/README.md",
            *(f"patches/{p}" for p in [patches[0], "ray-plugins/0.5.10.patch", patches[1]]),
        ]
        assert few.carry_out([], check=False) == 0
        assert few.carry_out([], check=True) == 0
        assert self.written(few) == patches

    def test_a_new_release_extends_the_last_file_or_gets_one(
        self, few: ModuleType, capsys: pytest.CaptureFixture[str]
    ) -> None:
        few.carry_out([], check=False)
        assert few.carry_out(["0.5.13"], check=False) == 0
        expected = ["buffer-probe/0.5.11-0.5.13.patch", "ray-plugins/0.5.11-0.5.13.patch"]
        assert self.written(few) == expected
        captured = capsys.readouterr()
        assert captured.out.splitlines() == [f"patches/{path}" for path in expected]
        assert "add 0.5.13 to sglang_pp_mla/releases.py" in captured.err
        assert few.carry_out(["0.5.15"], check=False) == 0
        assert self.written(few) == [
            "buffer-probe/0.5.11-0.5.12.patch",
            "buffer-probe/0.5.15.patch",
            "ray-plugins/0.5.11-0.5.15.patch",
        ]

    def test_a_fault_that_the_rule_does_not_mend_is_refused(
        self, few: ModuleType, packages: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A newer release in which the probe is written in a way that the rule has not met."""
        path = "srt/layers/attention/wave_backend.py"
        text = (packages["0.5.23"] / path).read_text().replace("get_value_buffer(0)", "get_value_buffer(layer_id=0)")
        (tmp_path / "sglang-pp-mla/wheels").mkdir(parents=True)
        wheels = tmp_path / "sglang-pp-mla/wheels"
        shadow(packages["0.5.23"], wheels / "9.9.9" / "sglang", {path: text})
        monkeypatch.setattr(few, "RELEASES", ())
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        with pytest.raises(few.Refusal, match=r"SGLang 9\.9\.9 shows buffer-probe at .*wave_backend\.py:\d+, which"):
            few.carry_out(["9.9.9"], check=False)
        assert self.written(few) == []

    def test_a_wrong_call(self) -> None:
        command = [sys.executable, ROOT / "tools" / "patches"]
        assert subprocess.run([*command, "--check", "0.5.11"], capture_output=True).returncode == 2
        answer = subprocess.run([*command, "x"], capture_output=True, text=True)
        assert answer.returncode == 2
        assert "'x' is not a release" in answer.stderr


# --- Running what was patched, without the package ---------------------------------------------------


def shadow(package: Path, place: Path, files: dict[str, str]) -> None:
    """`package` at `place` with other texts for some files; the rest are links into it, never to be written to."""
    place.mkdir(parents=True)
    inside: dict[str, dict[str, str]] = {}
    for path, text in files.items():
        name, _, rest = path.partition("/")
        if rest:
            inside.setdefault(name, {})[rest] = text
        else:
            (place / name).write_bytes(text.encode())
    for entry in package.iterdir():
        # A folder of bytecode that is used in both places must not be one folder.
        if entry.name in inside or entry.name == "__pycache__":
            shadow(entry, place / entry.name, inside.get(entry.name, {}))
        elif entry.name not in files:
            (place / entry.name).symlink_to(entry)


def patched(tool: ModuleType, package: Path, release: str, folder: Path) -> Path:
    """A folder for PYTHONPATH with this SGLang, all patches applied and the rest links."""
    files: dict[str, str] = {}
    for fix in FAULTS:
        for patch in patches_for(release, fix.name):
            files |= apply(patch, package, folder / fix.name)
    shadow(package, folder / "path" / "sglang", files)
    return folder / "path"


def run_python(*command: object, path: list[Path]) -> subprocess.CompletedProcess[str]:
    unwanted = ("PYTHONDONTWRITEBYTECODE", "SGLANG_PLUGINS")
    environment = {name: value for name, value in os.environ.items() if name not in unwanted}
    environment |= {"SGLANG_PP_MLA_DISABLE": "1", "PYTHONPATH": os.pathsep.join(map(str, path))}
    words = [sys.executable, *map(str, command)]
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=900)


def installed_package() -> Path:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


BACKENDS = [("triton", "mla"), ("wave", "mla"), ("aiter", "mha")]


@pytest.mark.parametrize(("backend", "kv"), BACKENDS)
def test_upstream_repro_passes_on_the_patched_tree(backend: str, kv: str, tool: ModuleType, tmp_path: Path) -> None:
    """What it says of the untouched one, test_upstream_repro.py holds against the source."""
    path = patched(tool, installed_package(), INSTALLED, tmp_path)
    done = run_python(PROBE, "--backend", backend, "--kv", kv, path=[path])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"SGLang {INSTALLED}, {backend} backend")


def test_the_patched_ray_actor_loads_plugins(tool: ModuleType, tmp_path: Path) -> None:
    """That the untouched one does not is for test_upstream_repro.py."""
    path = patched(tool, installed_package(), INSTALLED, tmp_path)
    done = run_python(RAY, path=[path])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == f"SGLang {INSTALLED}: the Ray actor loads the plugin\n"


OVERLAYS = [release for release, overlay in OVERLAY.KNOWN.items() if overlay.base == INSTALLED]


@pytest.mark.longest
@pytest.mark.parametrize("release", OVERLAYS)
def test_upstream_repro_on_other_releases_untouched_and_patched(release: str, tool: ModuleType, tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "tools" / "overlay", release]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    overlay = Path(printed.split()[0].removeprefix("PYTHONPATH="))
    path = patched(tool, overlay / "sglang", release, tmp_path)
    (patch,) = patches_for(release, "buffer-probe")
    for backend, kv in BACKENDS:
        done = run_python(PROBE, "--backend", backend, "--kv", kv, path=[path, overlay])
        assert done.returncode == 0, done.stdout + done.stderr
        # From 0.5.18 on the MHA pool itself tells AITER the head size.
        asks = backend != "aiter" or RELEASES.index(release) < RELEASES.index("0.5.18")
        if asks and f"srt/layers/attention/{backend}_backend.py" in files_in(patch):
            done = run_python(PROBE, "--backend", backend, "--kv", kv, path=[overlay])
            assert done.returncode == 1, done.stdout + done.stderr
