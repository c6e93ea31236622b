"""What is installed here, what was done about each fault, and what would stop a server: gathered, not printed.

SGLang is not imported: its release, its faults and its packages are read from files, and what a Python process
of this environment starts with is asked of one. With ``deep`` a child imports SGLang, for the states that fixes
take when they meet it and for SGLang's own list of backends.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from sglang_pp_mla import releases
from sglang_pp_mla.fixes import BUILT_IN, Fix
from sglang_pp_mla.wiring.arming import DISABLE, copies_on, is_disabled

ENTRY_POINTS = "sglang.srt.plugins"
_GPU_S = 5.0
_DEEP_S = 600.0
_IMPORTER = Path(__file__).parent / "rehearsal" / "importer.py"

# Run as every Python process of this environment is, the .pth files first. What they raise is on standard error.
_START = """
import sys
armed = any(getattr(finder, "__name__", "") == "ArmOnSGLang" for finder in sys.meta_path)
import ctypes, importlib.util, json, sysconfig
def folder(name):
    spec = importlib.util.find_spec(name)
    places = list(spec.submodule_search_locations or []) if spec else []
    return places[0] if places else None
def loads(library):
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
print(json.dumps({
    "armed": armed, "path": sys.path, "sglang": folder("sglang"), "ours": folder("sglang_pp_mla"),
    "libcuda": loads("libcuda.so.1"), "site": [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")],
}))
"""


class DoctorError(RuntimeError):
    """Nothing can be found out. The message is one sentence and says what to do."""


@dataclass(frozen=True)
class FixState:
    """A fix, its state as in :class:`sglang_pp_mla.wiring.arming.Decision`, and why it is in it."""

    name: str
    state: str
    why: str
    upstream: tuple[str, ...]


@dataclass(frozen=True)
class Finding:
    """One thing looked at. ``status`` is pass, warn, fail (it would stop a server) or skip (it does not apply).

    ``found`` is what was seen; ``remedy`` a sentence with what to do, empty where nothing is to be done.
    """

    id: str
    status: str
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Report:
    """All that the doctor found; ``sglang`` is the release, None without one."""

    sglang: str | None
    fixes: tuple[FixState, ...]
    installation: tuple[Finding, ...]

    @property
    def serves(self) -> bool:
        """Whether nothing found would stop a server."""
        return all(each.status != "fail" for each in self.installation) and all(
            each.state != "unrecognised" for each in self.fixes
        )


@dataclass(frozen=True)
class Start:
    """What a Python process of this environment has when it starts."""

    armed: bool
    path: tuple[str, ...]
    sglang: Path | None
    ours: Path | None
    libcuda: bool = False
    site: tuple[str, ...] = ()
    """Where an installer puts packages."""
    said: str = ""
    """Standard error."""


def examine(*, deep: bool = False, python: str = sys.executable) -> Report:
    """Look at the environment of ``python``. Raises :class:`DoctorError` if that does not run."""
    gpus = _ask_for_gpus()
    start = ask_start(python)
    release = release_of(start.sglang, start.path) if start.sglang else None
    all_fixes, disabled = _all_fixes(), os.environ.get(DISABLE, "")
    fixes = states(start.sglang, all_fixes, disabled)
    findings = [sglang_origin(start, release), arming(start, release, disabled)]
    findings += [copies(start), pth_files(start), plugins(start, release)]
    findings += [kernels_pin(start.path), requirements(start), interpreter_numpy(start.path)]
    if deep and start.sglang:
        imported = import_sglang(python, start.sglang, [module for fix in all_fixes for module in fix.changes])
        findings += imported_findings(imported, disabled)
        fixes = tuple(_as_imported(fix, imported.get("decisions", {})) for fix in fixes)
    found = gpu(gpus)
    findings += [found, driver_library(start, there=found.status != "skip")]
    return Report(release, fixes, tuple(findings))


def _all_fixes() -> tuple[Fix, ...]:
    from sglang_pp_mla.wiring.plugins import fixes_of_plugins

    return (*BUILT_IN, *fixes_of_plugins())


# The start of a process


def ask_start(python: str) -> Start:
    """Start ``python`` as a server's processes are started and ask what it has, without importing SGLang."""
    try:
        done = subprocess.run([python, "-c", _START], capture_output=True, text=True, timeout=60, check=True)
        answer = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise DoctorError(
            f"The interpreter {python} could not be started ({type(error).__name__}); run the doctor with the Python "
            "that runs SGLang, as `python -m sglang_pp_mla.cli doctor`."
        ) from error
    sglang, ours = (Path(answer[name]).resolve() if answer[name] else None for name in ("sglang", "ours"))
    return Start(
        answer["armed"],
        tuple(answer["path"]),
        sglang,
        ours,
        libcuda=answer["libcuda"],
        site=tuple(answer["site"]),
        said=done.stderr,
    )


def _distribution(name: str, path: Sequence[str]) -> Distribution | None:
    return next(iter(distributions(name=name, path=[entry or os.curdir for entry in path])), None)


def _version(name: str, path: Sequence[str]) -> Version | None:
    found = _distribution(name, path)
    # Distribution.version parses all of the metadata, a package's long description too. An .egg-info has PKG-INFO.
    text = (found.read_text("METADATA") or found.read_text("PKG-INFO") or "") if found else ""
    line = re.search(r"^Version: (.+)$", text, re.M)
    try:
        return Version(line[1].strip()) if line else None
    except InvalidVersion:
        return None


def _folder(name: str, path: Sequence[str]) -> Path | None:
    """The first folder of a top-level package on ``path``."""
    return next((Path(entry, name) for entry in path if Path(entry, name, "__init__.py").is_file()), None)


# SGLang


_VERSION = re.compile(r"^__version__\s*=\s*(?:version\s*=\s*)?[\"']([^\"']+)[\"']", re.M)


def release_of(folder: Path, path: Sequence[str]) -> str | None:
    """The release that the source in ``folder`` gives itself, or else that of its package's metadata."""
    for name in ("_version.py", "version.py"):
        try:
            match = _VERSION.search((folder / name).read_text(encoding="utf-8"))
        except OSError:
            continue
        if match:
            return match[1]
    found = _distribution("sglang", (str(folder.parent), *path))
    return found.version if found else None


def sglang_origin(start: Start, release: str | None) -> Finding:
    """Where SGLang comes from: a wheel, an editable or source build, or a folder put on PYTHONPATH over one."""
    if start.sglang is None:
        return Finding(
            "sglang",
            "fail",
            "not installed for this Python",
            "SGLang is not installed for this Python; run `python -m pip install sglang`, or run the doctor with the "
            "Python that has it.",
        )
    installed = _distribution("sglang", start.site)
    origin = _origin(start.sglang, installed)
    found = f"{release or 'of unknown release'}, {origin}, in {start.sglang}"
    others = [
        Path(entry, "sglang").resolve()
        for entry in start.path
        if Path(entry, "sglang", "__init__.py").is_file() and Path(entry, "sglang").resolve() != start.sglang
    ]
    if others:
        return Finding(
            "sglang",
            "warn",
            f"{found}; not used: {', '.join(map(str, dict.fromkeys(others)))}",
            "SGLang is on the path more than once; take the folder off PYTHONPATH if the other is meant.",
        )
    return Finding("sglang", "pass", found)


def _origin(folder: Path, installed: Distribution | None) -> str:
    direct = json.loads((installed.read_text("direct_url.json") if installed else None) or "{}")
    here = installed is not None and Path(str(installed.locate_file("sglang"))).resolve() == folder
    if here and "vcs_info" in direct:
        return f"built from source at {str(direct['vcs_info'].get('commit_id', '?'))[:12]}"
    if here and "dir_info" in direct:
        return "built from a folder of sources"
    if here:
        return "a wheel"
    if direct.get("dir_info", {}).get("editable"):
        return "an editable install"
    on_pythonpath = [Path(entry).resolve() for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if folder.parent in on_pythonpath:
        return "an overlay on PYTHONPATH"
    return "a folder that no installer put there"


# Fixes


def states(sglang: Path | None, fixes: Iterable[Fix], disabled: str) -> tuple[FixState, ...]:
    """The state of each fix in a process that has not imported what it changes, from the source in ``sglang``."""
    found = []
    for fix in fixes:
        if is_disabled(fix.name, disabled):
            state, why = "disabled", f"by {DISABLE}={disabled}"
        elif sglang is None:
            state, why = "armed", "waits for SGLang, which is not installed"
        else:
            try:
                places = fix.evidence(sglang)
            except Exception as error:  # as when arming: of another package, or of a source nobody has seen
                state, why = "unrecognised", f"its evidence cannot be read ({type(error).__name__}: {error})"
            else:
                state = "armed" if places else "not needed"
                why = "found in " + ", ".join(places) if places else "its fault is not in this SGLang"
        found.append(FixState(fix.name, state, why, fix.upstream))
    return tuple(found)


def _as_imported(fix: FixState, decisions: Mapping[str, Sequence[str]]) -> FixState:
    state, why = decisions.get(fix.name, (fix.state, fix.why))
    return FixState(fix.name, state, why if state != "armed" else fix.why, fix.upstream)


# This package


def arming(start: Start, release: str | None, disabled: str) -> Finding:
    """Whether a process that imports SGLang gets ``triton_pp``, by the .pth or by SGLang's plugins."""
    if is_disabled("triton-pp", disabled):
        return Finding(
            "triton_pp",
            "warn",
            f"switched off by {DISABLE}={disabled}",
            f"triton_pp is off and SGLang refuses the name; unset {DISABLE}, or serve with triton.",
        )
    if start.armed:
        return Finding("triton_pp", "pass", "armed in every Python process of this environment")
    reinstall = "install this package with the Python that runs SGLang: `python -m pip install --force-reinstall .`"
    by_plugin = any(point.group == ENTRY_POINTS and point.name == "sglang_pp_mla" for point in _entry_points(start))
    if by_plugin and release is not None and release in releases.PLUGINS:
        return Finding(
            "triton_pp",
            "warn",
            "no .pth file runs; SGLang's plugins alone arm it, and Ray's actors do not load them",
            f"The .pth file of this package does not run, so Ray's actors stay stock; {reinstall}.",
        )
    return Finding(
        "triton_pp",
        "fail",
        "nothing arms it: neither a .pth file nor SGLang's plugins",
        f"SGLang would not know triton_pp; {reinstall}.",
    )


def copies(start: Start) -> Finding:
    """Whether this package is on the path more than once."""
    others = copies_on(start.path, start.ours) if start.ours else []
    if not others:
        return Finding("copies", "pass", f"one copy of this package, in {start.ours}")
    return Finding(
        "copies",
        "warn",
        f"used is {start.ours}, not used {', '.join(map(str, others))}",
        "sglang-pp-mla is on the path twice; uninstall one or take it off PYTHONPATH.",
    )


_PTH_ERROR = re.compile(r"^Error processing line \d+ of (?P<file>.*):$", re.M)


def pth_files(start: Start) -> Finding:
    """Whether each .pth file runs; Python says so on standard error and goes on without the rest of the file."""
    broken = list(dict.fromkeys(match["file"] for match in _PTH_ERROR.finditer(start.said)))  # a venv reads twice
    if not broken:
        return Finding("pth", "pass", "every .pth file runs")
    ours = any(Path(file).name == "sglang_pp_mla.pth" for file in broken)
    return Finding(
        "pth",
        "fail" if ours and not start.armed else "warn",
        f"does not run: {', '.join(broken)}",
        "A .pth file raises in every Python process; reinstall or uninstall the package that it belongs to.",
    )


def _entry_points(start: Start) -> list[Any]:
    seen: dict[tuple[str, str], Any] = {}
    for distribution in distributions(path=[entry or os.curdir for entry in start.path]):
        for point in distribution.entry_points:
            if point.group == ENTRY_POINTS:
                seen.setdefault((point.name, point.value), point)
    return list(seen.values())


def plugins(start: Start, release: str | None) -> Finding:
    """SGLang's other plugins, and whether one of them names what our fixes change."""
    if release is None or release not in releases.PLUGINS:
        return Finding("plugins", "skip", "this SGLang loads none")
    others = [point for point in _entry_points(start) if point.name != "sglang_pp_mla"]
    allowed = {name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",") if name.strip()}
    touching = [point.name for point in others if _names_what_we_change(point, start)]
    found = ", ".join(f"{point.name} ({point.value})" for point in others) or "none but this package"
    if allowed and "sglang_pp_mla" not in allowed and not start.armed:
        return Finding(
            "plugins", "fail", found, "SGLANG_PLUGINS leaves this package out; add sglang_pp_mla to it or unset it."
        )
    if touching:
        return Finding(
            "plugins",
            "warn",
            found,
            f"{', '.join(touching)} may change what this package changes; where a stage misbehaves, serve once with "
            "SGLANG_PLUGINS=sglang_pp_mla and compare.",
        )
    return Finding("plugins", "pass", found)


# What a plugin must name to stand where we do: the modules that fixes change, or what is changed in them.
_CHANGED = re.compile(
    r"attention_registry|ATTENTION_BACKEND|register_attention_backend|init_attention_backend|_get_attention_backend|"
    r"model_runner\b.*attention|triton_backend|decode_attention_fwd|triton_pp"
)


def _names_what_we_change(point: Any, start: Start) -> bool:
    """Read from the plugin's module; importing it is SGLang's to do."""
    relative = point.value.partition(":")[0].strip().replace(".", "/")
    for entry in start.path:
        for file in (Path(entry, f"{relative}.py"), Path(entry, relative, "__init__.py")):
            if file.is_file():
                return _CHANGED.search(file.read_text(encoding="utf-8", errors="replace")) is not None
    return False


# Packages that are known to bite


def kernels_pin(path: Sequence[str]) -> Finding:
    """Whether ``transformers`` names hub kernels in a way that ``kernels`` refuses, at the import of SGLang."""
    kernels, transformers = _folder("kernels", path), _folder("transformers", path)
    if kernels is None or transformers is None:
        return Finding("import-kernels", "skip", "kernels or transformers is not installed")
    found = f"kernels {_version('kernels', path)}, transformers {_version('transformers', path)}"
    refusing = any(
        "Either a revision or a version must be specified." in source
        for source in _sources((kernels / "layer" / "layer.py", kernels / "layer.py"))
    )
    if refusing and any(map(_names_no_version, _sources((transformers / "integrations" / "hub_kernels.py",)))):
        return Finding(
            "import-kernels",
            "fail",
            found,
            f"Importing SGLang raises ValueError with {found}; run `python -m pip install 'kernels>=0.12,<0.15'`.",
        )
    return Finding("import-kernels", "pass", found)


def _sources(files: Iterable[Path]) -> Iterator[str]:
    for file in files:
        if file.is_file():
            yield file.read_text(encoding="utf-8", errors="replace")


def _names_no_version(source: str) -> bool:
    calls = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "LayerRepository"
    ]
    return any(not {"version", "revision"} & {keyword.arg for keyword in call.keywords} for call in calls)


def requirements(start: Start) -> Finding:
    """What SGLang requires and is absent or of another version."""
    distribution = _distribution("sglang", (str(start.sglang.parent), *start.path)) if start.sglang else None
    if distribution is None:
        return Finding("requirements", "skip", "SGLang has no metadata here")
    wrong = []
    for line in distribution.requires or ():
        try:
            wanted = Requirement(line)
        except InvalidRequirement:
            continue
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        have = _version(wanted.name, start.path)
        if have is None:
            wrong.append(f"{wanted.name} (absent)")
        elif not wanted.specifier.contains(have, prereleases=True):
            wrong.append(f"{wanted.name} {have} (wants {wanted.specifier})")
    if not wrong:
        return Finding("requirements", "pass", "all that SGLang requires is there")
    return Finding(
        "requirements",
        "warn",
        ", ".join(wrong),
        f"SGLang requires other packages than are here: {', '.join(wrong)}; if it fails to import, install that "
        "release of SGLang again.",
    )


def interpreter_numpy(path: Sequence[str]) -> Finding:
    """Whether Triton's interpreter, with which rehearsals run kernels, gets along with NumPy."""
    triton, numpy = _folder("triton", path), _version("numpy", path)
    if triton is None or numpy is None:
        return Finding("triton-numpy", "skip", "Triton or NumPy is not installed")
    found = f"triton {_version('triton', path)}, numpy {numpy}"
    one_for_a_number = any(
        "int(self.handle.data)" in source for source in _sources((triton / "runtime" / "interpreter.py",))
    )
    if one_for_a_number and numpy >= Version("2.4"):
        return Finding(
            "triton-numpy",
            "warn",
            found,
            "Rehearsals fail, serving does not: this Triton's interpreter takes an array of one for a number, which "
            "NumPy 2.4 refuses; run `python -m pip install 'numpy<2.4'` to rehearse.",
        )
    return Finding("triton-numpy", "pass", found)


# GPU


def _ask_for_gpus() -> subprocess.Popen[str] | None:
    """Begin asking; the answer may take a second, in which the rest is looked at."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        return subprocess.Popen(query, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except OSError:
        return None


def gpu(asked: subprocess.Popen[str] | None) -> Finding:
    """The GPUs that the driver reports, as ``2 x NAME, memory, driver VERSION``."""
    if asked is None:
        return Finding("gpu", "skip", "none: there is no nvidia-smi here")
    try:
        said, _ = asked.communicate(timeout=_GPU_S)
    except subprocess.TimeoutExpired:
        asked.kill()
        asked.communicate()
        said = f"no answer in {_GPU_S:g} s"
    else:
        if asked.returncode == 0 and said.strip():
            return Finding("gpu", "pass", describe_gpus(said))
    return Finding(
        "gpu",
        "fail",
        f"nvidia-smi: {' '.join(said.split()) or 'no GPU'}",
        "The NVIDIA driver reports no GPU, so nothing can be served here; run `nvidia-smi` and mend what it says.",
    )


def describe_gpus(answer: str) -> str:
    """The lines ``name, driver, memory`` of nvidia-smi, like GPUs together."""
    counted: dict[tuple[str, ...], int] = {}
    for line in answer.strip().splitlines():
        key = tuple(part.strip() for part in line.split(","))
        counted[key] = counted.get(key, 0) + 1
    described = []
    for (name, *rest), count in counted.items():
        driver, memory = (*rest, "?", "?")[:2]
        described.append(f"{count} x {name}, {memory}, driver {driver}")
    return "; ".join(described)


def driver_library(start: Start, *, there: bool) -> Finding:
    """Whether the CUDA driver's library loads, without which the build of ``sgl_kernel`` for CUDA does not."""
    if start.libcuda:
        return Finding("import-libcuda", "pass", "libcuda.so.1 loads")
    if not there and not Path("/dev/nvidiactl").exists():
        return Finding("import-libcuda", "skip", "no driver: preflight, plan and diagnose need none")
    return Finding(
        "import-libcuda",
        "fail",
        "libcuda.so.1 does not load, though there is a GPU",
        "sgl_kernel cannot be imported without libcuda.so.1; install the driver's libraries, or start the container "
        "with `--gpus all` and NVIDIA_DRIVER_CAPABILITIES=compute,utility.",
    )


# With SGLang imported


def import_sglang(python: str, sglang: Path, modules: Iterable[str]) -> dict[str, Any]:
    """Import SGLang in a child that sees no GPU, with all that fixes change, and ask what came of it.

    Returns ``{"decisions": {name: [state, why]}, "choices", "registered", "failed": {module: error}}``.
    """
    from sglang_pp_mla.rehearsal.environment import Installation, rehearsal_environment

    wanted = [module for module in dict.fromkeys(modules) if _is_there(module, sglang)]
    environment = rehearsal_environment(Installation(python, None, sglang), pp_size=1)
    environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [python, str(_IMPORTER), *wanted]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_DEEP_S, check=True, errors="replace"
        )
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"failed": {"sglang": f"not imported within {_DEEP_S:g} s"}}
    except (OSError, subprocess.CalledProcessError, ValueError, IndexError) as error:
        said = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        return {"failed": {"sglang": said[-1] if said else type(error).__name__}}
    return answer


def _is_there(module: str, sglang: Path) -> bool:
    relative = module.partition(".")[2].replace(".", "/")
    return (sglang / f"{relative}.py").is_file() or (sglang / relative / "__init__.py").is_file()


def imported_findings(imported: Mapping[str, Any], disabled: str) -> list[Finding]:
    """Whether SGLang imports, and whether its own argument check and registry know the backends."""
    failed = imported["failed"]
    # Ray is an extra of SGLang's.
    failed = {
        name: error for name, error in failed.items() if ".ray." not in name or "No module named 'ray" not in error
    }
    findings = [Finding("import", "pass", "SGLang imports")]
    if failed:
        name, error = next(iter(failed.items()))
        findings = [
            Finding(
                "import",
                "fail",
                "; ".join(f"{name}: {error}" for name, error in failed.items()),
                f"{name} cannot be imported ({error}); install SGLang's requirements again.",
            )
        ]
    if "choices" in imported:
        known = "triton_pp" in imported["choices"]
        factory = imported.get("registered", {}).get("triton", "absent")
        found = f"{'among' if known else 'not among'} SGLang's choices; its triton is built by {factory}"
        if known or is_disabled("triton-pp", disabled):
            findings.append(Finding("registered", "pass", found))
        else:
            remedy = "SGLang refuses triton_pp in this interpreter; see the state of the fix triton-pp."
            findings.append(Finding("registered", "fail", found, remedy))
    return findings
