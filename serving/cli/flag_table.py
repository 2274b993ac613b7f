"""`python -m serving.cli.flag_table > docs/vllm_flags.md`: what each flag of vLLM means here."""

import argparse
from collections import Counter
from collections.abc import Iterator

from serving.cli.flags import build_parser
from serving.cli.foreign_flags import Fact, ForeignFlag, verdict, vllm_facts, vllm_source

# What differs in flags of one name beside their values: defaults, bounds and reach.
_NOTES = {
    "--host": "default 127.0.0.1; vLLM listens on all addresses. Another one needs a key",
    "--api-key": "all routes but /health, /ping, /ready, /live; /metrics: --metrics-key",
    "--lora-modules": "PATH is a folder of this machine",
    "--chat-template": "a file, or a template in one line",
    "--quantization": "the format that the model's files name, or an error",
    "--max-logprobs": "at most 20",
    "--limit-mm-per-prompt": "image",
    "--mm-processor-kwargs": "min_pixels and max_pixels",
    "--speculative-config": "the method ngram",
    "--shutdown-timeout": "default 25 s; vLLM ends at once",
    "--max-lora-rank": "any number, not only powers of two",
    "--max-num-seqs": "default 256 on an accelerator, 32 on a CPU",
    "--gpu-memory-utilization": "a part of JAX's memory, default 0.9",
    "--disable-log-stats": "rates are logged every ten seconds",
}


def table() -> str:
    """Return the page: a row per flag of vLLM's parser."""
    rows = list(_rows())
    counts = Counter(kind for _, kind, _ in rows)
    summary = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    lines = [
        "# vLLM's flags",
        "",
        f"This page says what each flag of {vllm_source()} means here: {summary}.",
        "`python -m serving.cli.flag_table > docs/vllm_flags.md` writes it.",
        "",
        "- *same*: a flag of ours with this name and meaning. The last column has its values,",
        "  where they are few, and other defaults or bounds.",
        "- *already so*: accepted; it asks for what this server always does.",
        "- *refused*: ends the start with the reason. A value that asks for nothing is accepted:",
        "  the other form of a switch, vLLM's own default.",
        "",
        "A flag may be spelled with underscores, an object key by key (`--flag.key VALUE`).",
        "",
        "| flag | here | why, or what else |",
        "| --- | --- | --- |",
        *(f"| {flag} | {kind} | {text} |" for flag, kind, text in rows),
    ]
    return "\n".join(lines) + "\n"


def _rows() -> Iterator[tuple[str, str, str]]:
    parser = build_parser()
    for fact in vllm_facts():
        action = parser._option_string_actions[fact.flag]
        if not isinstance(action, ForeignFlag):
            yield f"`{fact.flag}`", "same", _NOTES.get(fact.flag, _values(action))
        elif (answer := verdict(fact)) is not None:
            yield _shown(fact), "already so" if answer.so else "refused", answer.reason


def _values(action: argparse.Action) -> str:
    """Return the values of a flag that has few; of a switch there are none."""
    given = str(action.metavar or "").strip("{}").split(",")
    return ", ".join(map(str, action.choices or (given if len(given) > 1 else ())))


def _shown(fact: Fact) -> str:
    """Return the form or the values that are true here, or the flag that is refused."""
    answer = verdict(fact)
    if answer is None or not answer.so:
        refused = answer is not None and fact.flag in answer.accepted and fact.negative
        return f"`{fact.negative[0] if refused else fact.flag}`"
    if fact.kind in ("pair", "switch"):
        return f"`{answer.accepted[0]}`"
    values = " or ".join("any value" if value == "*" else value for value in answer.accepted)
    return f"`{fact.flag}` {values}"


if __name__ == "__main__":
    print(table(), end="")
