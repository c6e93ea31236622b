"""The child interpreter that holds the engine. Runs by path; needs SGLang and the standard library only.

``python worker.py REQUESTS EVENTS`` reads JSON lines from file descriptor REQUESTS and writes JSON lines
to EVENTS; standard output and error are SGLang's log. The first request holds the engine's arguments,
each later one ``{"input_ids", "sampling_params"}`` for ``Engine.generate``. The end of REQUESTS ends it.
"""

import json
import os
import sys
import time
import traceback


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
        engine = sglang.Engine(**arguments)
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
