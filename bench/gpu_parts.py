"""Table of the benchmarks and tests that need GPUs: command, number of devices, time limit."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Part:
    """One command of a batch.

    Attributes:
        name: of its folder and log.
        command: arguments of Python; `{out}` stands for the part's folder.
        seconds: time after which it is ended, kernels and programs compiled on the way included.
        devices: number of GPUs that it needs.
    """

    name: str
    command: str
    seconds: int
    devices: int = 1


_TESTS = "-m pytest -n 0 -q -p no:cacheprovider -m"

# The order is that of a batch: what takes little time for what it tells comes first.
PARTS = (
    Part("tower", "-m bench.vision --tower --switch --heads --out {out}", 300),
    Part("bound", "-m bench.structured --model qwen3-8b --out {out}", 240),
    Part("eight_bits", "-m bench.kernels --only eight_bits --out {out}", 240),
    Part("step_bf16", "-m bench.decode_step --out {out}", 300),
    Part("step_fp8", "-m bench.decode_step --quantization fp8 --out {out}", 300),
    Part("step_int4", "-m bench.decode_step --quantization int4 --out {out}", 300),
    Part("step_256_rows", "-m bench.decode_step --rows 256 --out {out}", 300),
    Part("step_one_row", "-m bench.decode_step --rows 1 --out {out}", 300),
    Part("limits_llama", "-m bench.step_limits --model llama-3.1-8b --out {out}", 200),
    Part("limits_qwen3", "-m bench.step_limits --model qwen3-30b-a3b --out {out}", 240),
    Part("functions", "-m bench.functions --device llama-2-7b --out {out}", 400),
    Part("slots", "-m bench.tier_throughput --part slots --out {out}", 400),
    Part("tiers", "-m bench.tier_throughput --part throughput --out {out}", 500),
    Part("page_pool", "-m bench.page_pool --large --out {out}", 560),
    Part("frames", "-m bench.vision --frames --out {out}", 400),
    Part("kernels", "-m bench.kernels --out {out}", 1200),
    Part("tests", _TESTS + " gpu tests", 1800),
    Part("exchange_2", "-m bench.parallel exchange --devices 2 --out {out}", 120, 2),
    Part("bits_2", "-m bench.parallel bits --devices 2 --out {out}", 400, 2),
    Part("steps_2", "-m bench.parallel steps --devices 1 2 --layers 16 --out {out}", 400, 2),
    Part("tests_2", _TESTS + " multigpu tests", 900, 2),
    Part("exchange_4", "-m bench.parallel exchange --devices 4 --out {out}", 120, 4),
    Part("bits_4", "-m bench.parallel bits --devices 4 --out {out}", 400, 4),
    Part("steps_4", "-m bench.parallel steps --devices 1 4 --layers 16 --out {out}", 400, 4),
    Part("cluster_4", "-m bench.parallel cluster --out {out}", 500, 4),
    Part("remote_4", "-m bench.parallel remote --out {out}", 500, 4),
)
