"""The failures that `sglang-pp-mla diagnose` knows: what each looks like in a log, what it means, what to do. Data.

A signature is recognised where all its ``needs`` are found in one traceback with its message, or, for those
that need one text alone, in any line. Texts are those of SGLang, PyTorch, NCCL, Triton and transformers, read
from their sources or from the public reports named in ``reports``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import IntEnum

from sglang_pp_mla.releases import ALWAYS, FAULTS, RELEASES, Span


class Kind(IntEnum):
    """How much a failure explains: a cause before a consequence, a consequence before a mere death."""

    CAUSE = 0
    SYMPTOM = 1
    """May be the first thing that went wrong, or what a dead neighbour causes."""
    DEATH = 2
    """Something ended; why is said elsewhere, if at all."""


@dataclass(frozen=True)
class Text:
    """A line that must be there: ``pattern`` is searched for in lines that hold one of ``keys`` literally.

    The keys are what makes logs of any size cheap to read; every match of the pattern must hold one.
    """

    pattern: str
    keys: tuple[str, ...]
    compiled: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "compiled", re.compile(self.pattern))

    def search(self, line: str) -> re.Match[str] | None:
        return self.compiled.search(line) if any(key in line for key in self.keys) else None


def says(*texts: str) -> Text:
    """A line that holds one of these texts as they are."""
    return Text("|".join(re.escape(text) for text in texts), texts)


def matches(pattern: str, *keys: str) -> Text:
    """A line that matches a regex; ``keys`` are the literals of which each match holds at least one."""
    return Text(pattern, keys)


@dataclass(frozen=True)
class Signature:
    """One failure and how it is recognised.

    ``remedy`` says what to type and may name groups of the patterns, as in ``{limit}``; a group ``ranks`` holds the
    ranks concerned, where the line names others than its own. ``certainty`` is
    ``certain`` where the evidence leaves no other reading, else ``likely``; then ``settle`` is the one thing
    to do to be certain. ``unfinished``: the log must end, or be cut, before the traceback's exception.
    ``outlives_ready``: it is a failure even in a log that shows no process ending. ``releases`` are those that can
    have it; outside of them a likely reading is none.
    ``reports`` are public reports, ``owner/repository#number``.
    """

    name: str
    meaning: str
    remedy: str
    needs: tuple[Text, ...]
    certainty: str = "certain"
    settle: str = ""
    kind: Kind = Kind.CAUSE
    unfinished: bool = False
    outlives_ready: bool = False
    releases: Span = ALWAYS
    reports: tuple[str, ...] = ()


def frame(pattern: str) -> Text:
    """A line of a traceback that names a file and a function."""
    return Text(pattern, ('File "',))


def repaired_in(fault: str, file: str) -> str | None:
    """The first release without ``fault`` in a file of :data:`releases.FAULTS`; None while every release has it."""
    last = FAULTS[fault][file].last
    return None if last is None else RELEASES[RELEASES.index(last) + 1]


PROBE_IN_TRITON = FAULTS["buffer-probe"]["srt/layers/attention/triton_backend.py"]
PROBE_REPAIRED = repaired_in("buffer-probe", "srt/layers/attention/triton_backend.py")
MLA_GEOMETRY = FAULTS["mla-geometry"]["srt/layers/attention/triton_ops/decode_attention.py"].first
NEWEST = RELEASES[-1]

# Until the package is on an index.
_INSTALL = "`python -m pip install .` in a clone of sglang-pp-mla"
_PROBE_REMEDY = (
    f"{_INSTALL}, with the Python that runs SGLang, on every host, and start with "
    f"--attention-backend triton_pp; or upgrade SGLang: fixed upstream in {PROBE_REPAIRED} for Triton alone, AITER "
    f"and Wave still ask in {NEWEST}"
)
_SETTLE_PROBE = (
    "`{whole_log} | sglang-pp-mla diagnose -` reads the whole log, whose traceback must end in get_value_buffer"
)
_NAMES_BUILDER = matches(r"\binit_attention_backends?\b", "init_attention_backend")
_OOM = says("OutOfMemoryError", "CUDA out of memory. Tried to allocate", "HIP out of memory. Tried to allocate")
_BUILDS_BACKEND = frame(
    r"in (?:init_attention_backends?|_get_attention_backend\w*|build_attention_backends|create_\w+_backend)\b"
    r"|(?:triton|aiter|wave|intel_amx)_backend\.py\", line \d+, in __init__"
)

BUILT_IN: tuple[Signature, ...] = (
    # Pipelines
    Signature(
        "buffer-probe",
        "The attention backend asks the KV pool of a later stage for layer 0, which that stage does not hold.",
        _PROBE_REMEDY,
        (
            _BUILDS_BACKEND,
            frame(r"in (?:_?get_(?:key|value|kv)_buffer|get_v_head_dim)\b"),
            says("IndexError: list index out of range"),
        ),
        releases=ALWAYS,
        reports=("sgl-project/sglang#7044", "sgl-project/sglang#13837", "sgl-project/sglang#30335"),
    ),
    Signature(
        "buffer-probe",
        "A stage died with an index out of range while its attention backend was being built, most likely since the "
        "backend asks the KV pool for layer 0; the calls that would prove it are not in this log.",
        _PROBE_REMEDY,
        (_NAMES_BUILDER, says("IndexError: list index out of range")),
        certainty="likely",
        settle=_SETTLE_PROBE,
        releases=PROBE_IN_TRITON,
        reports=("sgl-project/sglang#30335",),
    ),
    Signature(
        "buffer-probe",
        "A stage died while its attention backend was being built, and the log ends before the error; most likely "
        "the backend asks the KV pool for layer 0, which a later stage does not hold.",
        _PROBE_REMEDY,
        (_NAMES_BUILDER,),
        certainty="likely",
        settle=_SETTLE_PROBE,
        kind=Kind.SYMPTOM,
        unfinished=True,
        releases=PROBE_IN_TRITON,
        reports=("sgl-project/sglang#30335",),
    ),
    Signature(
        "pp-unsupported-model",
        "SGLang's class for this model takes no part in a pipeline.",
        "Start with --pp-size 1 and spread the model by --tp-size, or take a release whose class accepts "
        "pp_proxy_tensors: `sglang-pp-mla preflight MODEL --pp-size N` says whether the installed one does",
        (
            matches(
                r"Pipeline Parallel is not compatible with this model|only supports a pipeline parallelism \(PP\) "
                r"value of 1|(?:does not|doesn't) support pipeline parallel|pipeline parallelism is not supported$",
                "ipeline",
            ),
        ),
        reports=("sgl-project/sglang#19503", "sgl-project/sglang#25284", "sgl-project/sglang#39393"),
    ),
    Signature(
        "bad-partition",
        "SGLANG_PP_LAYER_PARTITION does not fit: one layer count a stage, which add up to the model's layers.",
        "`sglang-pp-mla plan MODEL --pp-size N --gpu-memory GB` prints one that fits, or unset "
        "SGLANG_PP_LAYER_PARTITION for an even split",
        (
            matches(
                r"(?:len|sum)\(partitions\)=\d+ does not match|Invalid partition string: ",
                "(partitions)=",
                "Invalid partition string: ",
            ),
        ),
    ),
    Signature(
        "pp-speculative",
        "This release refuses the speculative decoding or scheduling options asked for together with a pipeline.",
        "Leave out --speculative-algorithm (and --enable-mixed-chunk before 0.5.11), or start with --pp-size 1",
        (
            says(
                "Pipeline parallelism is not compatible with",
                "Pipeline parallelism currently only supports EAGLE",
                "PP + speculative decoding (MTP) is only supported on prefill nodes",
                "SGLANG_ENABLE_PP_SPEC is not compatible with",
                "Pipeline parallel DSPARK requires",
            ),
        ),
        reports=("sgl-project/sglang#10589", "sgl-project/sglang#30775", "sgl-project/sglang#37154"),
    ),
    Signature(
        "pp-weights",
        "The model's loader looks for weights of layers that another stage holds.",
        "Upgrade SGLang, where loaders skip such weights model by model, or start with --pp-size 1",
        (
            frame(r"in (?:load_\w*weights\w*|_load\w*|load_model)\b"),
            matches(r"KeyError: '[\w.]*layers\.\d+\.", "KeyError: '"),
        ),
        certainty="likely",
        settle="start with --pp-size 1 and --load-format dummy: it is this if that starts and --pp-size 2 does not",
        reports=("sgl-project/sglang#6822", "sgl-project/sglang#11947", "sgl-project/sglang#21217"),
    ),
    Signature(
        "dsa-boundary",
        "A stage begins with a layer that reuses the top-k indices of the layer before, which another stage holds.",
        "Move the boundary with SGLANG_PP_LAYER_PARTITION so that each stage begins with a layer that computes its "
        "own indices (for 78 layers over 2 stages: 38,40), or upgrade SGLang",
        (
            frame(r"(?:dsa|nsa)_(?:backend|indexer)\.py|forward_mla\.py|deepseek_v2\.py|rotary_embedding"),
            matches(
                r"'NoneType' object has no attribute 'unsqueeze'|KeyError: 'topk_indices'"
                r"|batch_size must be equal to batch_size_k",
                "unsqueeze",
                "topk_indices",
                "batch_size_k",
            ),
        ),
        certainty="likely",
        settle="start with --pp-size 1: the error must be gone",
        reports=("sgl-project/sglang#28537", "sgl-project/sglang#29014"),
    ),
    Signature(
        "disaggregation",
        "Prefill and decode servers cannot hand over the KV cache: the other side is not reached, or is split "
        "in a way that this release cannot match.",
        "See that the decode server reaches the prefill server's --disaggregation-bootstrap-port, and give both the "
        "same --tp-size; only the prefill server may have a --pp-size above 1",
        (
            matches(
                r"KVTransferError\(|Could not fetch prefill parallel info|PD Disaggregation does NOT support",
                "KVTransferError(",
                "prefill parallel info",
                "PD Disaggregation does NOT",
            ),
        ),
        certainty="likely",
        settle="`curl http://PREFILL_HOST:BOOTSTRAP_PORT/route` from the decode host: it is the network if that fails",
        outlives_ready=True,
        reports=("sgl-project/sglang#6413", "sgl-project/sglang#8424", "sgl-project/sglang#10001"),
    ),
    # MLA and its kernels
    Signature(
        "mla-geometry",
        "The Triton decode kernel takes the values from the key tile, whose padded width is not theirs; no fault of "
        "the pipeline.",
        f"{_INSTALL}, with the Python that runs SGLang, and start again with "
        f"--attention-backend triton_pp; SGLang has this from {MLA_GEOMETRY} on, {NEWEST} included",
        (
            frame(r"decode_attention\.py"),
            says(
                "ValueError: Cannot make_shape_compatible: incompatible dimensions",
                "ValueError('Cannot make_shape_compatible: incompatible dimensions",
            ),
        ),
        releases=Span(MLA_GEOMETRY),
    ),
    Signature(
        "kv-splits",
        "No room for the partial results of split-KV decode, which a stage keeps for all heads, every CUDA-graph slot "
        "and as many splits as the GPU has multiprocessors.",
        "Start with --attention-backend triton_pp (sglang-pp-mla), which keeps room for what a stage can use; or "
        "lower --cuda-graph-max-bs",
        (frame(r"_backend\.py\", line \d+, in init_cuda_graph_state"), _OOM),
        certainty="likely",
        settle="start once with --disable-cuda-graph: it is this if the server then comes up",
        releases=Span(MLA_GEOMETRY),
        reports=("sgl-project/sglang#24762",),
    ),
    Signature(
        "shared-memory",
        "A Triton kernel needs more shared memory a block than this GPU has.",
        "It needs {required} bytes and the GPU has {limit}: take another --attention-backend, or a release whose "
        "kernel fits (`sglang-pp-mla preflight MODEL --gpu NAME` compiles them without the GPU)",
        (
            matches(
                r"out of resource: shared memory, Required: (?P<required>\d+), Hardware limit: (?P<limit>\d+)",
                "out of resource: shared memory",
            ),
        ),
        reports=("sgl-project/sglang#2384", "kvcache-ai/ktransformers#1570"),
    ),
    Signature(
        "compiler-missing",
        "Triton compiles at start-up and finds no C compiler, Python headers or ptxas.",
        "Install them where SGLang runs: `apt-get install build-essential python3-dev`, or use the image with the "
        "CUDA development tools; CC=PATH names a compiler elsewhere",
        (
            matches(
                r"Failed to find C compiler|Python\.h: No such file or directory|Cannot find ptxas"
                r"|No such file or directory: '[^']*(?:gcc|ptxas)[^']*'",
                "Failed to find C compiler",
                "Python.h: No such file",
                "Cannot find ptxas",
                "No such file or directory: '",
            ),
        ),
        reports=("sgl-project/sglang#1067",),
    ),
    Signature(
        "nvcc-missing",
        "A kernel is compiled at start-up and there is no CUDA toolkit.",
        "Install the CUDA toolkit of PyTorch's CUDA release and set CUDA_HOME to it, or use SGLang's own image",
        (
            matches(
                r"Could not find nvcc|CUDA_HOME environment variable is not set|No such file or directory: '[^']*nvcc'",
                "Could not find nvcc",
                "CUDA_HOME environment variable is not set",
                "nvcc'",
            ),
        ),
        reports=("sgl-project/sglang#5002",),
    ),
    # Refusals of this package
    Signature(
        "package-missing",
        "SGLang does not know triton_pp: sglang-pp-mla is not in the Python that runs it, or is switched off.",
        f"{_INSTALL}, with that Python, on every host, and see that SGLANG_PP_MLA_DISABLE "
        "is not set; `python -m sglang.launch_server --help | grep triton_pp` must find it",
        (
            matches(
                r"backend: invalid choice: '?triton_pp\b|Invalid attention backend: triton_pp\b",
                "invalid choice",
                "Invalid attention backend: triton_pp",
            ),
        ),
    ),
    Signature(
        "missing-host",
        "The pipeline waits for a host that has not joined, or runs without sglang-pp-mla.",
        "On that host start SGLang with its --node-rank and the same --dist-init-addr and --nnodes, see that it "
        "reaches the address, and that `pip show sglang-pp-mla` finds the package",
        (
            matches(
                r"\((?P<ranks>PP[\dP, ]+)\) (?:has not joined at|runs without sglang-pp-mla, so no fix acts)"
                r"|has not brought all hosts together after \d+ s",
                "has not joined at",
                "has not brought all hosts together",
                "runs without sglang-pp-mla",
            ),
        ),
        kind=Kind.SYMPTOM,
    ),
    Signature(
        "missing-host",
        "Not all hosts of the pipeline joined in time: {joined} of {wanted} ranks came.",
        "See on each host that SGLang still runs, with its own --node-rank, the same --nnodes and --dist-init-addr, "
        "and that a firewall lets the address through; the log of the host that is missing has the cause",
        (
            matches(
                r"Timed out after \d+ seconds waiting for clients\. (?P<joined>\d+)/(?P<wanted>\d+) clients joined",
                "waiting for clients",
            ),
        ),
        kind=Kind.SYMPTOM,
        reports=("verl-project/verl#4373", "sgl-project/sglang#7478"),
    ),
    Signature(
        "stage-without-attention",
        "A stage holds no full-attention layer, so the Triton backend has nothing to build there.",
        "Move a stage boundary with SGLANG_PP_LAYER_PARTITION or lower --pp-size",
        (says("holds no full-attention layer, so triton_pp has nothing to build there"),),
    ),
    Signature(
        "mixed-value-heads",
        "The layers of a stage have value heads of different sizes, which one Triton backend cannot serve.",
        "Move the boundary with SGLANG_PP_LAYER_PARTITION so that a stage's layers agree",
        (matches(r"has a value head of \d+ on layer \d+ where the Triton kernels expect", "has a value head of"),),
    ),
    Signature(
        "bad-setting",
        "SGLANG_PP_MLA_DECODE is set to something this package does not know.",
        "Set SGLANG_PP_MLA_DECODE to stock or flat, or unset it",
        (says("is neither stock nor flat"),),
    ),
    # Installation
    Signature(
        "import-kernels",
        "The installed `kernels` package is too new for the installed transformers, which fails at import.",
        "`python -m pip install 'kernels>=0.12,<0.15'`",
        (says("ValueError: Either a revision or a version must be specified"),),
        reports=("sgl-project/sglang#26704", "sgl-project/sglang#27654"),
    ),
    Signature(
        "import-libcuda",
        "The CUDA build of the kernel library is on a machine, or in a container, without an NVIDIA driver.",
        "Give the container the GPUs (`docker run --gpus all`), or install the driver until `nvidia-smi` works; "
        "without a GPU this is expected, and `sglang-pp-mla preflight --rehearse` replaces that library",
        (says("libcuda.so.1: cannot open shared object file"),),
        reports=("sgl-project/sglang#4778",),
    ),
    Signature(
        "import-sgl-kernel",
        "SGLang's kernel library does not load: built for another PyTorch, CUDA or GPU than the one here.",
        "`python -m pip install --force-reinstall sgl-kernel` in the release that SGLang pins (`pip check` names it), "
        "with the PyTorch that SGLang pins",
        (says("Could not load any common_ops library"),),
        reports=("sgl-project/sglang#18203", "sgl-project/sglang#29646"),
    ),
    Signature(
        "driver-too-old",
        "The NVIDIA driver is older than the CUDA that PyTorch was built with.",
        "Update the driver of the host (`nvidia-smi` shows what it can do), or install SGLang with a PyTorch for an "
        "older CUDA",
        (
            says(
                "The NVIDIA driver on your system is too old",
                "CUDA driver version is insufficient for CUDA runtime version",
                "system has unsupported display driver / cuda driver combination",
            ),
        ),
    ),
    Signature(
        "no-gpu",
        "PyTorch sees no GPU, or the GPUs are not initialised.",
        "See that `nvidia-smi` works where SGLang runs; on NVSwitch machines start the fabric manager: "
        "`systemctl start nvidia-fabricmanager`",
        (
            says(
                "system not yet initialized",
                "No CUDA GPUs are available",
                "no CUDA-capable device is detected",
                "or platform plugin is available",
            ),
        ),
        reports=("sgl-project/sglang#27487",),
    ),
    Signature(
        "no-kernel-image",
        "A kernel was not compiled for this generation of GPU.",
        "Install a PyTorch and sgl-kernel built for it (for RTX 50 and RTX PRO 6000 Blackwell, CUDA 12.8 or newer)",
        (says("no kernel image is available for execution on the device"),),
        reports=("sgl-project/sglang#7249",),
    ),
    Signature(
        "too-few-gpus",
        "A rank asked for a GPU that is not there: --tp-size times --pp-size needs as many GPUs as there are ranks.",
        "Lower --tp-size or --pp-size, show the process more GPUs (CUDA_VISIBLE_DEVICES, `docker run --gpus all`), or "
        "spread the ranks with --nnodes",
        (says("invalid device ordinal"),),
    ),
    # Arguments and model
    Signature(
        "heads-not-divisible",
        "A number of heads, experts or hidden sizes cannot be divided by --tp-size.",
        "{whole} is not a multiple of {part}: take a --tp-size that divides the attention heads, and --pp-size for "
        "the other GPUs",
        (matches(r"AssertionError: (?P<whole>\d+) is not divisible by (?P<part>\d+)", "is not divisible by"),),
        reports=("sgl-project/sglang#3436", "gpustack/gpustack#4769"),
    ),
    Signature(
        "nodes-not-divisible",
        "The ranks cannot be shared out equally over the hosts.",
        "Take --tp-size and --pp-size so that --nnodes divides their product; for two hosts of four GPUs --pp-size 8 "
        "--tp-size 1 does",
        (says("tp_size must be divisible by number of nodes"),),
    ),
    Signature(
        "bad-argument",
        "SGLang refuses an argument.",
        "Compare it with `python -m sglang.launch_server --help` of the installed release",
        (
            matches(
                r"error: (?:unrecognized arguments|argument --?[\w/-]+|the following arguments are required)",
                "error: unrecognized arguments",
                "error: argument -",
                "error: the following arguments",
            ),
        ),
    ),
    Signature(
        "grpc-port",
        "The gRPC port, --port plus 10000 unless set, is out of range or the same as --port.",
        "Take a --port below 55536, or set SGLANG_GRPC_PORT to a free port",
        (
            matches(
                r"SGLANG_GRPC_PORT.*\(\d+\) must (?:be between|differ)|^\W*\(\d+\) must be between 1 and 65535",
                "must be between 1 and 65535",
                "SGLANG_GRPC_PORT",
            ),
        ),
        releases=Span("0.5.11"),
        reports=("sgl-project/sglang#29416", "sgl-project/sglang#30250"),
    ),
    Signature(
        "port-in-use",
        "A port that the server needs is taken, most often by a server that was not stopped.",
        "`ss -ltnp` says by which process; end it, or take another --port (and --nccl-port, --dist-init-addr)",
        (
            matches(
                r"(?i:address already in use)|error while attempting to bind on address|Port is already in use\."
                r"|at \d+ is not available in \d+ seconds|EADDRINUSE",
                "ddress already in use",
                "attempting to bind on address",
                "Port is already in use.",
                "is not available in",
                "EADDRINUSE",
            ),
        ),
        reports=("sgl-project/sglang#21320",),
    ),
    Signature(
        "remote-code",
        "The model's configuration or tokenizer brings code of its own, which is not run unless allowed.",
        "Add --trust-remote-code, once you have read that code",
        (
            says(
                "contains custom code which must be executed",
                "requires you to execute the configuration file",
                "requires you to execute the tokenizer file",
                "requires you to execute the model",
                "consider setting `trust_remote_code=True`",
            ),
        ),
    ),
    Signature(
        "unknown-architecture",
        "The installed SGLang or transformers does not know this model.",
        "Upgrade SGLang with the transformers that it pins, or use the model's own configuration file",
        (
            matches(
                r"Transformers does not recognize this architecture"
                r"|Model architectures .* are not supported for now",
                "does not recognize this architecture",
                "are not supported for now",
            ),
        ),
        reports=("sgl-project/sglang#6732", "ray-project/ray#60056"),
    ),
    Signature(
        "model-not-found",
        "--model-path is neither a folder with a config.json nor a model of the hub that can be reached.",
        "See that the path exists where SGLang runs (in the container too), or `huggingface-cli login` for a model "
        "that needs it",
        (
            matches(
                r"is not a local folder and is not a valid model identifier|GatedRepoError|RepositoryNotFoundError"
                r"|OSError: .* does not appear to have a file named config\.json",
                "is not a valid model identifier",
                "GatedRepoError",
                "RepositoryNotFoundError",
                "a file named config.json",
            ),
        ),
    ),
    Signature(
        "tokenizer-missing",
        "The model's folder has no tokenizer that can be loaded.",
        "Copy tokenizer.json, tokenizer_config.json and tiktoken.model from the model's repository, name them with "
        "--tokenizer-path, or install `tiktoken` or `sentencepiece` where the message asks for it",
        (
            says(
                "Can't load tokenizer for",
                "Couldn't instantiate the backend tokenizer",
                "does not appear to have a file named tokenizer",
            ),
        ),
    ),
    Signature(
        "checkpoint-damaged",
        "A file of the weights is cut short or no safetensors file (an unresolved Git LFS pointer is one).",
        "`ls -l` the *.safetensors: fetch again those that are smaller than in the model's repository",
        (matches(r"SafetensorError: |Error while deserializing header", "SafetensorError: ", "deserializing header"),),
        reports=("gpustack/gpustack#815", "datalab-to/marker#970"),
    ),
    # Memory
    Signature(
        "kv-cache-memory",
        "The weights leave no room for a KV cache within --mem-fraction-static.",
        "Raise --mem-fraction-static, or spread the weights: `sglang-pp-mla plan MODEL --pp-size N --gpu-memory GB` "
        "finds the partition that leaves the most room",
        (says("Not enough memory. Please try to increase --mem-fraction-static"),),
        reports=("sgl-project/sglang#322", "sgl-project/sglang#4330"),
    ),
    Signature(
        "cuda-graph-memory",
        "Memory ran out while CUDA graphs were captured, after weights and KV cache had their share.",
        "Lower --mem-fraction-static (by 0.05, say) or --cuda-graph-max-bs",
        (matches(r"Capture cuda graph failed: .*out of memory", "Capture cuda graph failed: "),),
        reports=("sgl-project/sglang#5285", "sgl-project/sglang#23769"),
    ),
    Signature(
        "out-of-memory",
        "The weights of a stage do not fit its GPU.",
        "Raise --pp-size or --tp-size, or give that stage fewer layers: `sglang-pp-mla plan MODEL --pp-size N "
        "--gpu-memory GB`; `nvidia-smi` says whether another process holds memory",
        (frame(r"in (?:load_model|load_weights\w*|create_weights|_initialize_model)\b"), _OOM),
    ),
    Signature(
        "out-of-memory",
        "A GPU ran out of memory.",
        "Lower --mem-fraction-static, --chunked-prefill-size or --max-running-requests; `nvidia-smi` says whether "
        "another process holds memory",
        (_OOM,),
    ),
    Signature(
        "memory-unbalanced",
        "The GPUs of one stage do not have the same memory free.",
        "`nvidia-smi`: end what holds memory there; for GPUs of different sizes set "
        "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK=0",
        (matches(r"(?:RuntimeError|ValueError): The memory capacity is unbalanced", "memory capacity is unbalanced"),),
        reports=("sgl-project/sglang#1533", "sgl-project/sglang#4233"),
    ),
    Signature(
        "dev-shm",
        "/dev/shm is full or too small for NCCL and the processes' messages; Docker gives 64 MB unless told.",
        "`docker run --shm-size 32g` or `--ipc=host`; on Kubernetes an emptyDir of medium Memory at /dev/shm; "
        "`df -h /dev/shm` shows it",
        (
            matches(
                r"posix_fallocate failed ?: No space left|Error while creating shared memory segment"
                r"|/dev/shm\S*.*No space left on device|No space left on device.*/dev/shm"
                r"|unable to (?:open|allocate|write).*shared memory|ncclShmOpen|Bus error",
                "posix_fallocate failed",
                "creating shared memory segment",
                "/dev/shm",
                "shared memory",
                "ncclShmOpen",
                "Bus error",
            ),
        ),
        reports=("NVIDIA/nccl#290", "NVIDIA/nccl#342", "vllm-project/vllm#1710"),
    ),
    Signature(
        "disk-full",
        "A disk is full.",
        "`df -h` says which; Triton's and Hugging Face's caches can be moved with TRITON_CACHE_DIR and HF_HOME",
        (says("OSError: [Errno 28] No space left on device"),),
    ),
    Signature(
        "oom-killed",
        "The host ran out of memory (not the GPU) and the kernel ended a process.",
        "Give the host or container more memory; loading needs it: fewer ranks a host, or no --hicache-size. "
        "`dmesg -T | grep -i oom` names the process",
        (
            matches(
                r"Out of memory: Killed process|oom-kill:|OOMKilled|Memory cgroup out of memory",
                "Out of memory: Killed process",
                "oom-kill:",
                "OOMKilled",
                "Memory cgroup out of memory",
            ),
        ),
        outlives_ready=True,
    ),
    Signature(
        "oom-killed",
        "A process was ended by SIGKILL, most often by the kernel since the host ran out of memory (not the GPU).",
        "Give the host or container more memory: fewer ranks a host, or no --hicache-size",
        (
            matches(
                r"(?i:exit ?code):? -9\b|with exit code -9\b|(?i:exited with code 137)",
                "xit code",
                "xitcode",
                "xited with code 137",
            ),
        ),
        certainty="likely",
        settle="`dmesg -T | grep -i oom` names the process if it was the kernel",
        kind=Kind.SYMPTOM,
        outlives_ready=True,
        reports=("sgl-project/sglang#20287", "sgl-project/sglang#15235"),
    ),
    Signature(
        "pool-leak",
        "SGLang's own check found slots of its KV pool that nobody holds and nobody freed: a bug of the release.",
        "Upgrade SGLang; until then SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE=0 keeps the server up",
        (matches(r"(?:memory|pool) leak detected", "leak detected"),),
        reports=("sgl-project/sglang#7130", "sgl-project/sglang#11970"),
    ),
    # GPUs
    Signature(
        "gpu-fault",
        "The GPU or its memory failed, says the driver.",
        "`nvidia-smi -q | grep -i -A3 ecc` and `dmesg | grep -i xid`; drain the host, reset or replace the GPU",
        (
            matches(
                r"NVRM: Xid|uncorrectable ECC error|fallen off the bus|CUDA error: unspecified launch failure",
                "NVRM: Xid",
                "uncorrectable ECC error",
                "fallen off the bus",
                "unspecified launch failure",
            ),
        ),
        outlives_ready=True,
        reports=("NVIDIA/NVSentinel#155", "NVIDIA/open-gpu-kernel-modules#507"),
    ),
    Signature(
        "illegal-memory-access",
        "A CUDA kernel read or wrote outside its memory. The traceback may name a later call than the guilty one.",
        "Run once with CUDA_LAUNCH_BLOCKING=1 and --disable-cuda-graph, which names the kernel; then try another "
        "--attention-backend or --moe-runner-backend, and report it",
        (says("an illegal memory access was encountered", "Memory access fault by GPU"),),
        reports=("sgl-project/sglang#4585", "sgl-project/sglang#5029", "sgl-project/sglang#11942"),
    ),
    Signature(
        "device-assert",
        "A check inside a CUDA kernel failed, often an index beyond a table: a wrong tokenizer or vocabulary.",
        "Run once with CUDA_LAUNCH_BLOCKING=1 and --disable-cuda-graph, which names the check",
        (says("device-side assert triggered"),),
    ),
    # Between ranks and hosts
    Signature(
        "nccl-network",
        "NCCL cannot reach another host: it took an interface or address that the others cannot reach.",
        "Set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the interface that carries --dist-init-addr (`ip -br addr`), "
        "on every host, and let its ports through the firewall",
        (
            matches(
                r"NCCL WARN.*(?:[Cc]onnect to \S+ (?:failed|returned)|No route to host|Connection refused)"
                r"|Gloo connectFullMesh failed|\bconnectFullMesh\b|no socket interface found",
                "NCCL WARN",
                "connectFullMesh",
                "no socket interface found",
            ),
        ),
        reports=("sgl-project/sglang#3820", "sgl-project/sglang#5594"),
    ),
    Signature(
        "nccl-init",
        "NCCL failed, most often while the ranks first connect: network, /dev/shm, or a neighbour that died.",
        "Start once with NCCL_DEBUG=INFO: the first `NCCL WARN` line says why",
        (
            matches(
                r"NCCL error(?: in)?: |nccl(?:System|Internal|UnhandledCuda|Remote)Error",
                "NCCL error",
                "ncclSystemError",
                "ncclInternalError",
                "ncclUnhandledCudaError",
                "ncclRemoteError",
            ),
        ),
        certainty="likely",
        settle="start once with NCCL_DEBUG=INFO: the first `NCCL WARN` line says why",
        kind=Kind.SYMPTOM,
        reports=("sgl-project/sglang#3820",),
    ),
    Signature(
        "nccl-timeout",
        "A rank waited in a collective until its time was up: another rank is slow, stuck or gone.",
        "Look for what the other ranks and hosts logged just before; if they only were slow (loading weights), raise "
        "--dist-timeout",
        (
            says(
                "Watchdog caught collective operation timeout",
                "Some NCCL operations have failed or timed out",
            ),
        ),
        certainty="likely",
        settle="`py-spy dump --pid PID` of each scheduler while it hangs shows who waits for whom",
        kind=Kind.SYMPTOM,
        outlives_ready=True,
        reports=("sgl-project/sglang#3783", "sgl-project/sglang#3836"),
    ),
    Signature(
        "weights-timeout",
        "One rank had its weights and another did not within SGLang's time: it died, or its disk is slower.",
        "Look for the other ranks' errors; if there are none, raise --dist-timeout or copy the model to a local disk",
        (says("could finish the model loading, but there are other ranks that didn't finish loading"),),
        certainty="likely",
        settle="the last `Load weight` line of each rank shows which one is behind",
        kind=Kind.SYMPTOM,
        reports=("sgl-project/sglang#4503",),
    ),
    Signature(
        "stuck-scheduler",
        "A scheduler did not finish a step within --watchdog-timeout: a stage waits for another, or a kernel hangs.",
        "Look for what another stage logged before; the py-spy dumps above that line show where each hangs. A first "
        "compilation that is only slow needs a higher --watchdog-timeout",
        (matches(r"\b[Ww]atchdog timeout \(", "atchdog timeout ("),),
        certainty="likely",
        settle="`py-spy dump --pid PID` of each scheduler while it hangs shows who waits for whom",
        kind=Kind.SYMPTOM,
        outlives_ready=True,
        reports=("sgl-project/sglang#17941", "sgl-project/sglang#3752", "sgl-project/sglang#23006"),
    ),
    Signature(
        "peer-died",
        "This rank lost its connection to another one, which died first.",
        "The cause is in the log of the rank or host at the other end: `sglang-pp-mla diagnose` that one",
        (
            matches(
                r"Connection (?:closed|reset) by peer|remote worker crashing|NCCL communicator was aborted"
                r"|Failed to check the \"should dump\" flag on TCPStore",
                "by peer",
                "remote worker crashing",
                "NCCL communicator was aborted",
                "flag on TCPStore",
            ),
        ),
        certainty="likely",
        settle="`sglang-pp-mla diagnose` the log of the host at the other end",
        kind=Kind.DEATH,
    ),
    Signature(
        "crashed",
        "A process crashed in native code, where Python cannot say why.",
        "Start once with PYTHONFAULTHANDLER=1 for the Python side of it, and see `dmesg` for the library at fault",
        (
            matches(
                r"Segmentation fault|(?i:exit ?code):? -(?:11|6|7|4)\b|Fatal Python error: |core dumped",
                "Segmentation fault",
                "xit code",
                "xitcode",
                "Fatal Python error: ",
                "core dumped",
            ),
        ),
        kind=Kind.SYMPTOM,
        outlives_ready=True,
    ),
)
"""In order: of two found in one traceback the earlier is the reading."""
