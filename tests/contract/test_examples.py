"""The examples: each file is taken by what reads it, or by its published schema, and they agree with each other.

That SGLang's own parser takes what they start is asked in ``test_arguments.py``, where it is imported already.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from sglang_pp_mla.releases import RELEASES
from tests.contract.examples import (
    EXAMPLES,
    INSTALLED,
    UNIT,
    commands,
    compose,
    container,
    environment,
    flags,
    manifests,
    unit,
)

ROOT = EXAMPLES.parent
KIMI = ROOT / "sglang_pp_mla/rehearsal/models/kimi-k2.6-text.json"


def run(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def publish() -> Path:
    """The folder with the commands of the environment that checks releases and examples."""
    made = run(sys.executable, ROOT / "tools/env", "publish")
    assert made.returncode == 0, made.stderr
    return Path(made.stdout.strip()).parent


# What reads them


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze, which reads units, is not here")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("python", "sglang-pp-mla"):  # it looks whether what is started is there
        (tmp_path / "bin" / name).touch(mode=0o755)
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/sglang/", f"{tmp_path}/"))
    verified = run("systemd-analyze", "verify", copy)
    said = [line for line in verified.stderr.splitlines() if UNIT.name in line]
    assert (verified.returncode, said) == (0, []), verified.stderr


def test_the_compose_file_is_of_the_published_schema(publish: Path) -> None:
    checked = run(publish / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", EXAMPLES / "compose.yaml")
    assert checked.returncode == 0, checked.stdout


def test_kubernetes_takes_the_manifests(publish: Path) -> None:
    manifest = EXAMPLES / "kubernetes" / "two-nodes.yaml"
    checked = run(publish / "kubernetes-validate", "--strict", manifest)
    assert checked.returncode == 0, checked.stdout
    assert checked.stderr.count(" passed for resource ") + checked.stdout.count(" passed for resource ") == 3


@pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl, which puts the parts together, is not here")
def test_kustomize_puts_the_parts_together() -> None:
    made = run("kubectl", "kustomize", EXAMPLES)
    assert made.returncode == 0, made.stderr
    objects = {each["kind"]: each for each in yaml.safe_load_all(made.stdout) if each["kind"] != "ConfigMap"}
    maps = {each["metadata"]["name"]: each["data"] for each in yaml.safe_load_all(made.stdout) if "data" in each}
    spec = objects["StatefulSet"]["spec"]["template"]["spec"]
    (named,) = [volume["configMap"]["name"] for volume in spec["volumes"] if "configMap" in volume]
    assert maps[named] == {Path(INSTALLED).name: (EXAMPLES / "sglang.yaml").read_text()}
    (started,) = spec["containers"]
    assert maps[started["envFrom"][0]["configMapRef"]["name"]] == environment()
    assert started["image"].endswith(f"/{compose()['services']['sglang']['image']}")
    assert {probe: started[probe]["httpGet"]["path"] for probe in started if probe.endswith("Probe")} == {
        "startupProbe": "/health",
        "readinessProbe": "/health",
        "livenessProbe": "/health",
    }


# That they are of one piece


def test_the_partition_is_what_the_plan_prints() -> None:
    given = flags()
    done = run(
        *(sys.executable, "-m", "sglang_pp_mla.cli", "plan", KIMI, "--pp-size", given["pp-size"]),
        *("--gpu-memory", 96, "--mem-fraction-static", given["mem-fraction-static"]),
        *("--context", given["context-length"], "--release", RELEASES[-1], "--json"),
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["env"] == environment()
    comment = " ".join((EXAMPLES / "sglang.env").read_text().split("SGLANG_")[0].replace("#", "").split())
    assert (
        f"plan {given['model-path']} --pp-size {given['pp-size']} --gpu-memory 96 --mem-fraction-static "
        f"{given['mem-fraction-static']} --context {given['context-length']}"
    ) in comment


def test_one_release_and_the_newest_that_is_known() -> None:
    files = [path for path in EXAMPLES.rglob("*") if path.is_file()]
    named = {tag for path in files for tag in re.findall(r"\bv?(\d+\.\d+\.\d+(?:\.post\d+)?)\b", tags(path))}
    assert named == {RELEASES[-1]}
    assert f"FROM lmsysorg/sglang:v{RELEASES[-1]}\n" in (EXAMPLES / "Dockerfile").read_text()
    (image,) = yaml.safe_load((EXAMPLES / "kustomization.yaml").read_text())["images"]
    assert f"{image['name']}:{image['newTag']}" == compose()["services"]["sglang"]["image"]
    assert container()["image"] == image["name"]


def tags(path: Path) -> str:
    """A file without the addresses in it, which have three dots."""
    return re.sub(r"\d+\.\d+\.\d+\.\d+", "", path.read_text())


@pytest.mark.parametrize("name", commands())
def test_each_starts_sglang_with_the_file_of_flags(name: str) -> None:
    words = commands()[name]
    assert words[words.index("--config") + 1] == INSTALLED  # --config=… is not looked for by SGLang
    assert words[:3] == [words[0], "-m", "sglang.launch_server"]


def test_one_port_throughout() -> None:
    port = flags()["port"]
    service = unit()["Service"]
    assert f"http://{flags()['host']}:{port}/health" in service["ExecStartPost"]
    of_compose = compose()["services"]["sglang"]
    assert of_compose["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert of_compose["healthcheck"]["test"][-1] == f"http://127.0.0.1:{port}/health"
    ports = {each["name"]: each["containerPort"] for each in container()["ports"]}
    assert ports["http"] == port
    assert manifests()["Service", "sglang"]["spec"]["ports"][0]["port"] == port
    (address,) = [word for word in container()["args"] if "dist-init-addr" in word]
    assert address == f"--dist-init-addr=sglang-0.sglang-nodes:{ports['rendezvous']}"


def test_the_weights_are_where_the_flags_say() -> None:
    model = flags()["model-path"]
    assert f"{model}:{model}:ro" in compose()["services"]["sglang"]["volumes"]
    (mounted,) = [each for each in container()["volumeMounts"] if each["name"] == "model"]
    assert mounted == {"name": "model", "mountPath": model, "readOnly": True}


def test_as_many_gpus_as_stages() -> None:
    (devices,) = compose()["services"]["sglang"]["deploy"]["resources"]["reservations"]["devices"]
    assert (devices["count"], devices["capabilities"]) == (flags()["pp-size"], ["gpu"])
    nodes = manifests()["StatefulSet", "sglang"]["spec"]["replicas"]
    assert nodes * container()["resources"]["limits"]["nvidia.com/gpu"] == flags()["pp-size"]
    assert f"--nnodes={nodes}" in container()["args"]
    assert len(environment()["SGLANG_PP_LAYER_PARTITION"].split(",")) == flags()["pp-size"]


# What each of them must not do


def test_the_unit_neither_loads_in_a_loop_nor_leaves_a_stage_behind() -> None:
    head, service = unit()["Unit"], unit()["Service"]
    assert (service["Restart"], head["StartLimitBurst"]) == ("on-failure", "2")
    assert head["StartLimitIntervalSec"] == "3h" > service["TimeoutStartSec"]
    assert (service["KillMode"], service["RemoveIPC"]) == ("mixed", "yes")
    assert service["EnvironmentFile"] == "/etc/sglang/sglang.env"
    assert service["ExecStartPre"].endswith("/sglang-pp-mla doctor")


def test_the_unit_takes_no_gpu_and_no_compiler_away() -> None:
    takes = {"PrivateDevices", "DevicePolicy", "DeviceAllow", "ProtectClock", "MemoryDenyWriteExecute", "PrivateIPC"}
    assert takes.isdisjoint(unit()["Service"])
    assert "AF_NETLINK" in unit()["Service"]["RestrictAddressFamilies"].split()  # NCCL looks for interfaces


def test_compose_stops_trying() -> None:
    assert re.fullmatch(r"on-failure:[1-3]", compose()["services"]["sglang"]["restart"])


def test_the_nodes_start_together_and_meet_before_they_are_ready() -> None:
    stateful, nodes = manifests()["StatefulSet", "sglang"]["spec"], manifests()["Service", "sglang-nodes"]["spec"]
    assert stateful["podManagementPolicy"] == "Parallel"
    assert (nodes["clusterIP"], nodes["publishNotReadyAddresses"]) == ("None", True)
    assert stateful["serviceName"] == "sglang-nodes"
    labels = stateful["template"]["metadata"]["labels"]
    assert stateful["selector"]["matchLabels"] == labels == nodes["selector"]
    assert manifests()["Service", "sglang"]["spec"]["selector"] == {**labels, "apps.kubernetes.io/pod-index": "0"}
    assert {volume["name"] for volume in stateful["template"]["spec"]["volumes"]} == {
        mount["name"] for mount in container()["volumeMounts"]
    }


def test_the_image_is_built_of_what_the_wheel_needs(tmp_path: Path) -> None:
    """What the Dockerfile copies, and no more, gives the whole wheel."""
    copies = re.findall(r"^COPY (.+) (\S+)$", (EXAMPLES / "Dockerfile").read_text(), re.M)
    for sources, target in copies:
        place = tmp_path / target.removeprefix("/tmp/")
        for source in map(Path, sources.split()):
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, place, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                place.mkdir(exist_ok=True)
                shutil.copy(ROOT / source, place)
    builder = run(sys.executable, ROOT / "tools/env", "build").stdout.strip()
    built = {}
    for folder in (ROOT, tmp_path / "sglang-pp-mla"):
        done = subprocess.run(
            [builder, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path / f"dist{len(built)}"],
            cwd=folder,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        (wheel,) = (tmp_path / f"dist{len(built)}").glob("*.whl")
        built[folder] = wheel.read_bytes()
    assert len(set(built.values())) == 1
