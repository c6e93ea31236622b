"""Ask the installed SGLang about a deployment in one child: do its arguments pass, do its pools answer the probes.

Importing SGLang takes most of the time, so both questions go to one process. It sees no GPU and opens no port.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_pp_mla.backend_probes import Probe
from sglang_pp_mla.rehearsal.environment import Installation, RehearsalError, rehearsal_environment
from sglang_pp_mla.stage import Stage

_EXAMINER = Path(__file__).with_name("examiner.py")
_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class ProbeOutcome:
    """What the pool of one stage answered to what the backend asks.

    ``kind`` is ``own`` (a layer of its own, or nothing asked), ``crash`` (``IndexError``) or ``wrap`` (the
    buffer of ``got_layer``, which is not the layer asked for). ``repaired`` is whether the pool answers with
    its own first layer while a backend is built in the way that the fix arranges.
    """

    rank: int
    kind: str
    place: str
    got_layer: int | None
    repaired: bool


@dataclass(frozen=True)
class Examination:
    """The answers. ``refusal`` is the release's own message, empty where it accepts the arguments.

    ``split`` are the layer counts of SGLang's own split; ``fixes`` the states of the fixes in that process.
    """

    refusal: str
    split: tuple[int, ...]
    probes: tuple[ProbeOutcome, ...]
    fixes: Mapping[str, str]

    def repairs(self, backend: str) -> bool:
        """Whether ``backend`` is built in that process with its probes answered by the stage's own layers."""
        names = ("buffer-probe", "triton-pp") if backend == "triton_pp" else ("buffer-probe",)
        return any(self.fixes.get(name) in ("armed", "applied") for name in names)


def examine(
    installation: Installation,
    *,
    flags: Sequence[str],
    config: Mapping[str, Any],
    folder: Path | None,
    stages: Sequence[Stage],
    partition: str | None,
    pool: Mapping[str, int],
    probes: Sequence[Probe],
    gpu: tuple[int, int, str, int],
    gpus: int,
) -> Examination:
    """Ask. ``flags`` are SGLang's, without ``--model-path``: that is ``folder``, or one made for ``config``.

    A folder that lacks the code its configuration names (:func:`has_its_code`) is none to SGLang.
    ``pool`` is ``{"kv_lora_rank", "qk_rope_head_dim"}`` of an MLA model, or ``{"head_num", "head_dim"}``. ``gpu``
    is the one SGLang is told of ``gpus`` times: capability, name, bytes. Raises :class:`RehearsalError` where
    SGLang cannot be imported.
    """
    environment = rehearsal_environment(installation, pp_size=len(stages), partition=partition)
    environment["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory(prefix="sglang-pp-mla-") as scratch:
        model = folder if folder is not None and has_its_code(config, folder) else Path(scratch)
        if model != folder:
            Path(scratch, "config.json").write_text(json.dumps(_without_code(config)), encoding="utf-8")
        question = {
            "flags": ["--model-path", str(model), *flags],
            "stages": [[stage.start_layer, stage.end_layer] for stage in stages],
            "pool": dict(pool),
            "probes": [vars(probe) for probe in probes],
            "gpu": list(gpu),
            "gpus": gpus,
        }
        try:
            done = subprocess.run(
                [installation.python, str(_EXAMINER)],
                input=json.dumps(question),
                env={**environment, "TMPDIR": scratch},
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RehearsalError(
                f"SGLang could not be asked with {installation.python} ({type(error).__name__}); run "
                "`sglang-pp-mla doctor --deep`."
            ) from error
    if done.returncode or not done.stdout.strip():
        said = [line for line in done.stderr.splitlines() if line.strip()]
        reason = said[-1] if said else f"status {done.returncode}"
        raise RehearsalError(f"SGLang cannot be imported here ({reason}); run `sglang-pp-mla doctor --deep`.")
    answer = json.loads(done.stdout.splitlines()[-1])
    return Examination(
        refusal=answer["refusal"],
        split=tuple(answer["split"]),
        probes=tuple(ProbeOutcome(**each) for each in answer["probes"]),
        fixes=answer["fixes"],
    )


def has_its_code(config: Mapping[str, Any], folder: Path | None) -> bool:
    """Whether the Python files that a configuration's ``auto_map`` names, if any, are in the model's folder."""
    named = [str(name) for entry in (config.get("auto_map") or {}).values() for name in _listed(entry) if name]
    files = {name.rpartition("--")[2].partition(".")[0] + ".py" for name in named}
    return not files or (folder is not None and all((folder / file).is_file() for file in files))


def _listed(entry: Any) -> list[Any]:
    return entry if isinstance(entry, list) else [entry]


def _without_code(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration that SGLang can read alone: known classes in place of the model's own, which is not here."""
    known = {key: value for key, value in config.items() if key != "auto_map"}
    if known.get("model_type") == "kimi_k2":  # DeepSeek V3 under another name
        known["model_type"] = "deepseek_v3"
    return known
