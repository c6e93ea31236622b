"""The child interpreter that holds the engine. Runs by path; needs SGLang and the standard library only.

``python worker.py REQUESTS EVENTS`` reads JSON lines from file descriptor REQUESTS and writes JSON lines
to EVENTS; standard output and error are SGLang's log. The first request holds the engine's arguments,
each later one ``{"input_ids", "sampling_params"}`` for ``Engine.generate``. The end of REQUESTS ends it.
"""

import functools
import json
import math
import os
import sys
import time
import traceback
from typing import Any


def ray_engine(**arguments: Any) -> Any:
    """``RayEngine`` on a Ray of its own, on this machine, that pretends to have a GPU a scheduler."""
    # Every actor's lines, even those that look alike; no report to Ray's makers; loopback needs no token.
    os.environ.update(RAY_DEDUP_LOGS="0", RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled")
    import ray
    from sglang.srt.ray.engine import RayEngine

    start = functools.partial(
        ray.init,
        "local",
        num_cpus=1,
        num_gpus=math.prod(arguments.get(name, 1) for name in ("dp_size", "pp_size", "tp_size")),
        include_dashboard=False,
        object_store_memory=100 * 2**20,
        runtime_env={"worker_process_setup_hook": _without_gpu},
        _node_ip_address="127.0.0.1",
        # A folder of its own, gone with the processes; Ray's sockets are in it.
        _temp_dir=os.environ["TMPDIR"],
    )
    for _ in range(2):
        try:
            start()
            break
        except Exception:  # Ray waits half a minute for its own processes, too little on a busy machine
            traceback.print_exc()
            ray.shutdown()
    else:
        start()
    return RayEngine(**arguments)


def _without_gpu() -> None:
    """Run in each of Ray's workers: the actor sets its GPU before it serves, and here is none."""
    import torch

    torch.cuda.set_device = lambda _device: None


def main() -> int:
    requests_fd, events_fd = int(sys.argv[1]), int(sys.argv[2])
    # SGLang's children must not hold these open.
    os.set_inheritable(requests_fd, False)
    os.set_inheritable(events_fd, False)
    requests = os.fdopen(requests_fd, "r", encoding="utf-8")
    events = os.fdopen(events_fd, "w", encoding="utf-8")

    def tell(**event: object) -> None:
        events.write(json.dumps(event) + "\n")
        events.flush()

    began = time.monotonic()
    try:
        arguments = json.loads(requests.readline())
        import sglang

        tell(event="imported", seconds=time.monotonic() - began)
        engine = (ray_engine if arguments.get("use_ray") else sglang.Engine)(**arguments)
        tell(event="ready", seconds=time.monotonic() - began)
        for line in requests:
            request = json.loads(line)
            asked = time.monotonic()
            answers = engine.generate(return_logprob=True, **request)
            tell(
                event="answers",
                seconds=time.monotonic() - asked,
                answers=[
                    {
                        "tokens": answer["output_ids"],
                        "logprobs": [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]],
                        "cached_tokens": answer["meta_info"].get("cached_tokens", 0),
                    }
                    for answer in answers
                ],
            )
    except BaseException:
        tell(event="error", traceback=traceback.format_exc())
        raise
    # What is left is the keeper's; SGLang's own shutdown may wait for stages that are gone.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
