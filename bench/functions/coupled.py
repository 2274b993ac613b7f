"""One engine with all adapters, in a process of its own: first tokens and answers.

`python -m bench.functions.coupled ORDER`; the last line is JSON.
"""

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from bench.functions.device_functions import _ANSWER, _WARM, FIELDS, PROMPTS, _greedy, new_prompt
from serving import Engine


def main(order: dict[str, Any]) -> dict[str, Any]:
    """Return first tokens with the adapter on the device and in host memory, and all answers.

    One slot serves all adapters: one that was not the last has to be brought from the host.
    """
    adapters = {Path(folder).name: folder for folder in order["adapters"]}
    names = list(adapters)
    more = {"max_loras": 1, "structured_outputs": False}
    start = time.perf_counter()
    with Engine(order["model"], adapters, **more, **FIELDS) as engine:
        made_s = time.perf_counter() - start

        def first_s(name: str) -> float:
            start = time.perf_counter()
            engine.generate([new_prompt()], name, _greedy(1))
            return time.perf_counter() - start

        answers = [
            [list(o.outputs[0].token_ids) for o in engine.generate(PROMPTS, n, _greedy(_ANSWER))]
            for n in names
        ]
        warm = statistics.median(first_s(names[-1]) for _ in range(_WARM))
        host = statistics.median(first_s(names[i % len(names)]) for i in range(_WARM))
    return {"made_s": made_s, "warm_s": warm, "from_host_s": host, "answers": answers}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
