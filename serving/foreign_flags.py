"""Flags of vLLM and SGLang that have one right value here, and what to say to all others. No jax.

A command line that serves elsewhere either means the same here, or is refused with the reason.
"""

import argparse

# True here whatever is said: adapters are on, prompts come in chunks and are never logged.
_ALWAYS_SO = (
    "--enable-lora",
    "--enable-chunked-prefill",
    "--no-enable-log-requests",
    "--disable-log-requests",
)
_ONE_VALUE = (
    (("--tensor-parallel-size", "--tp", "--tp-size", "-tp"), 1),
    (("--pipeline-parallel-size", "--pp-size", "-pp"), 1),
    (("--data-parallel-size", "--dp-size", "-dp"), 1),
    (("--lora-dtype",), "auto"),
    (("--kv-cache-dtype",), "auto"),
    (("--lora-eviction-policy",), "lru"),
)
_REFUSED_SWITCHES = {
    "--trust-remote-code": "code from a model's folder is never run here; the supported models "
    "are built in",
    "--enforce-eager": "a step is always one compiled program",
    "--fully-sharded-loras": "one process serves on one device, so there is nothing to shard",
}
_REFUSED_VALUES = {
    "--max-cpu-loras": "host memory for adapters is bounded in bytes: --max-total-adapter-bytes",
    "--quantization": "weights are served in bfloat16 or float32; MXFP4 files are unpacked",
    "--tokenizer": "the tokenizer is the one in the model's folder",
}


class _Refuse(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None) -> None:
        parser.error(f"{option_string}: {self.const}")


def add_foreign_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags; --help does not show them."""
    hidden = argparse.SUPPRESS
    for flag in _ALWAYS_SO:
        parser.add_argument(flag, action="store_true", help=hidden)
    for flags, value in _ONE_VALUE:
        parser.add_argument(*flags, type=type(value), choices=(value,), help=hidden)
    for table, nargs in ((_REFUSED_SWITCHES, 0), (_REFUSED_VALUES, "?")):
        for flag, why in table.items():
            parser.add_argument(flag, nargs=nargs, action=_Refuse, const=why, help=hidden)
    parser.add_argument("--context-length", dest="max_model_len", type=int, help=hidden)
    parser.add_argument("--max-running-requests", dest="max_num_seqs", type=int, help=hidden)
