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
    "--async-scheduling",
)
_ONE_DEVICE = "one process serves on one device; --instances starts several"
_ONE_VALUE = (  # and why no other
    (("--tensor-parallel-size", "--tp", "--tp-size", "-tp"), "1", _ONE_DEVICE),
    (("--pipeline-parallel-size", "--pp-size", "-pp"), "1", _ONE_DEVICE),
    (("--data-parallel-size", "--dp-size", "-dp"), "1", _ONE_DEVICE),
    (("--lora-dtype",), "auto", "adapters are computed in the dtype of the model"),
    (("--kv-cache-dtype",), "auto", "KV pages have the dtype of the model"),
    (("--lora-eviction-policy",), "lru", "idle adapters go in the order of their last use"),
    (("--tokenizer-mode",), "auto", "the tokenizer is the one in the model's folder"),
    (("--runner",), "generate", "models generate text here"),
)
_REFUSED_SWITCHES = {
    "--trust-remote-code": "code from a model's folder is never run here; the supported models "
    "are built in",
    "--enforce-eager": "a step is always one compiled program",
    "--fully-sharded-loras": "one process serves on one device, so there is nothing to shard",
    "--enable-expert-parallel": "one process serves on one device; adapters' experts can be on "
    "others: --lora-server",
    "--enable-tower-connector-lora": "the supported models read text only",
    "--enable-auto-tool-choice": "tools are not supported",
}
_REFUSED_VALUES = {
    "--max-cpu-loras": "host memory for adapters is bounded in bytes: --max-total-adapter-bytes",
    "--quantization": "weights are served in bfloat16 or float32; MXFP4 files are unpacked",
    "--tokenizer": "the tokenizer is the one in the model's folder",
    "--revision": "the model is a folder of this machine",
    "--download-dir": "the model is a folder of this machine",
    "--lora-extra-vocab-size": "adapters that change embeddings are refused",
    "--lora-target-modules": "adapters may change any module that the model has",
    "--lora-backend": "kernels are chosen by device and batch",
    "--default-mm-loras": "the supported models read text only",
    "--tool-call-parser": "tools are not supported",
    "--reasoning-parser": "an answer is one text",
    "--speculative-config": "every token is computed by the model that is served",
    "--swap-space": "a preempted request is computed anew, its prefix from the cache",
    "--mem-fraction-static": "the share of the device's memory is --gpu-memory-utilization",
}


class _Refuse(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None) -> None:
        parser.error(f"{option_string}: {self.const}")


class _OnlyOne(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None) -> None:
        only, why = self.const
        if values != only:
            parser.error(f"{option_string} {values}: only {only} is offered; {why}")


def add_foreign_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags; --help does not show them."""
    hidden = argparse.SUPPRESS
    for flag in _ALWAYS_SO:
        parser.add_argument(flag, action="store_true", help=hidden)
    for flags, value, why in _ONE_VALUE:
        parser.add_argument(*flags, action=_OnlyOne, const=(value, why), help=hidden)
    for table, nargs in ((_REFUSED_SWITCHES, 0), (_REFUSED_VALUES, "*")):
        for flag, why in table.items():
            parser.add_argument(flag, nargs=nargs, action=_Refuse, const=why, help=hidden)
    parser.add_argument("--context-length", dest="max_model_len", type=int, help=hidden)
    parser.add_argument("--max-running-requests", dest="max_num_seqs", type=int, help=hidden)
