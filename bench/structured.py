"""Cost of structured outputs: decode steps in which a grammar binds every row, beside plain ones.

`python -m bench.structured --model small --out DIR` serves one model and takes turns: all rows
plain, half of them bound by a JSON schema, all of them. A figure is the mean time between two
tokens of the row that came last, while every row decodes. "masks" is the time in which the host's
threads fill token masks, while the device computes the step's logits; "host" is what the engine's
thread does in a step, part by part. Processor time is that of the whole process, for a CPU that
others use too. "shipped" is assets/tiny-moe; the others have random weights and a vocabulary of
Qwen3's size: that of `--tokens FILE` (.tiktoken or .tiktoken.gz), or one made up of words, digits,
marks and pieces of JSON. Rows draw at temperature 1: with random weights a mask is then at its
worst, as all tokens that fit are about as likely.
"""

import argparse
import base64
import functools
import gzip
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel

from bench import record
from bench.random_model import LlamaShape
from serving import Engine, Sampling
from serving.api.structured_outputs import StructuredOutputs
from serving.engine.loop.pacing import SWITCH_S
from serving.text.token_text import byte_alphabet

SHIPPED = Path("assets/tiny-moe")
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "rope_theta": 1e6}
QWEN3 |= {"vocab_size": 151936, "rms_norm_eps": 1e-6, "hidden_act": "silu", "eos_token_id": 2}
QWEN3 |= {"max_position_embeddings": 4096, "torch_dtype": "bfloat16", "tie_word_embeddings": False}
SHAPES = {
    "small": LlamaShape(hidden_size=768),
    "qwen3-8b": LlamaShape(
        hidden_size=4096, intermediate_size=12288, num_layers=36, num_heads=32, num_kv_heads=8
    ),
}
END = "<|end|>"
SCHEMA = {
    "type": "array",
    "minItems": 100,
    "items": {
        "type": "object",
        "properties": {
            "id": {"type": "integer", "minimum": 0, "maximum": 999999},
            "name": {"type": "string", "maxLength": 40},
            "kind": {"enum": ["person", "place", "thing", "event"]},
            "where": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "zip": {"pattern": "^[0-9]{5}$"}},
                "required": ["city", "zip"],
                "additionalProperties": False,
            },
        },
        "required": ["id", "name", "kind", "where"],
        "additionalProperties": False,
    },
}
PROMPT = 2  # tokens
LONGER = 16  # tokens that other rows go on after the one that is timed


def words(rng: random.Random) -> Iterator[bytes]:
    """Yield tokens as a byte-level tokenizer has them, some more than once."""
    yield from (bytes([byte]) for byte in range(256))
    yield from (str(number).encode() for number in range(1000))
    marks = ['"', '":', '": "', '",', '", "', '"}', '"},', '{"', "[", "]", "}, {", "\n", "  ", ", "]
    yield from (mark.encode() for mark in marks)
    sounds = [a + b for a in "bcdfghklmnprstvwz" for b in ("a", "e", "i", "o", "u", "er", "ing")]
    ends = [""] * 90 + [".", ",", ")", ":", '"', '",']  # few tokens are a word and a mark
    while True:
        if rng.random() < 0.2:
            signs = (chr(rng.randrange(0x4E00, 0x9FA0)) for _ in range(rng.randint(1, 2)))
            yield "".join(signs).encode()
            continue
        word = "".join(rng.choices(sounds, k=rng.randint(1, 4)))
        word = word.capitalize() if rng.random() < 0.2 else word
        yield (" " * (rng.random() < 0.6) + word + rng.choice(ends)).encode()


def tokens_of(file: Path) -> Iterator[bytes]:
    """Yield the tokens of a file of BPE ranks, by rank."""
    data = file.read_bytes()
    lines = (gzip.decompress(data) if file.suffix == ".gz" else data).splitlines()
    yield from (base64.b64decode(line.split()[0]) for line in lines if line.strip())


def write_model(folder: Path, shape: LlamaShape, tokens: Iterable[bytes]) -> None:
    """Write the config and tokenizer of a model whose weights are made up."""
    sizes = {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**QWEN3, **sizes}))
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    vocabulary: dict[str, int] = {"<|start|>": 0, "<|pad|>": 1, END: 2}
    for word in tokens:
        vocabulary.setdefault("".join(letters[byte] for byte in word), len(vocabulary))
        if len(vocabulary) == QWEN3["vocab_size"]:
            break
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<|pad|>"))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|start|>", "<|pad|>", END])
    tokenizer.save(str(folder / "tokenizer.json"))


class Parts:
    """Seconds of the engine's thread by part of a step, one number a call."""

    def __init__(self, engine: Engine):
        loop = engine._loop
        parts = loop._parts
        self.seconds: dict[str, list[float]] = {}
        self._time(parts.scheduler, "plan", "complete")
        self._time(parts.runner, "dispatch", "forward", "sample", "read")
        self._time(parts.runner._step, "_step", "_forward", "_sample", launch="launch ")
        self._time(parts.runner._step.inputs, "set_table", "set_masks")
        self._time(engine.grammars.masks, "start", "finish", "post")
        self._time(engine.grammars.masks, "_fill")
        self._time(loop, "_hand_out")

    def start(self) -> None:
        """Forget what was timed."""
        for seconds in self.seconds.values():
            seconds.clear()

    def _time(self, owner: Any, *names: str, launch: str = "") -> None:
        for name in names:
            seconds = self.seconds[launch + name.lstrip("_")] = []
            setattr(owner, name, functools.partial(_timed, getattr(owner, name), seconds))


def _timed(call: Callable, seconds: list[float], *args: Any, **names: Any) -> Any:
    began = time.perf_counter()
    result = call(*args, **names)
    seconds.append(time.perf_counter() - began)
    return result


def step_ms(engine: Engine, rows: int, bound: int, steps: int, turn: int) -> tuple[float, float]:
    """Return the mean milliseconds from a token of the last row to its next.

    The second number is the processor time of the process meanwhile, also a token.
    """
    ended: list[tuple[float, float]] = []
    left = threading.Semaphore(0)
    failed: list[str] = []

    def receive(delta: Any, times: list[tuple[float, float]] | None) -> None:
        if times is not None and delta.token_ids:
            times.append((time.perf_counter(), time.process_time()))
        if delta.error:
            failed.append(delta.error)
        if delta.finish_reason is not None:
            left.release()

    for row in range(rows):
        last = row == rows - 1
        outputs = StructuredOutputs.of({"json": SCHEMA}) if row < bound else None
        sampling = Sampling(
            max_tokens=steps + (0 if last else LONGER),
            ignore_eos=True,
            seed=row + rows * turn,
            structured_outputs=outputs,
        )
        prompt = [3 + (row * PROMPT + place) % 250 for place in range(PROMPT)]
        times = ended if last else None
        engine.submit(prompt, None, sampling, on_output=lambda d, t=times: receive(d, t))
    for _ in range(rows):
        left.acquire()
    if failed:
        raise RuntimeError(f"{len(failed)} rows failed: {failed[0]}")
    # The first gaps hold what is left of other rows' prompts.
    wall, processor = (
        (last - first) / (len(ended) - 3) for first, last in zip(ended[2], ended[-1], strict=True)
    )
    return 1e3 * wall, 1e3 * processor


def measure(engine: Engine, rows: int, steps: int, turns: int) -> list[dict[str, Any]]:
    """Return a row of figures for each share of bound rows."""
    parts, cases = Parts(engine), {"plain": 0, "half bound": rows // 2, "all bound": rows}
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    spent: dict[str, dict[str, list[float]]] = {name: {} for name in cases}
    for turn in range(turns + 1):
        for name, bound in cases.items():
            parts.start()
            taken = step_ms(engine, rows, bound, steps, turn)
            if turn:  # the first one compiles the grammar and warms up
                results[name].append(taken)
                for part, seconds in parts.seconds.items():
                    spent[name].setdefault(part, []).extend(seconds)
    return [_row(rows, name, results[name], results["plain"], spent[name]) for name in cases]


def _row(
    rows: int,
    name: str,
    taken: list[tuple[float, float]],
    plain: list[tuple[float, float]],
    spent: dict[str, list[float]],
) -> dict[str, Any]:
    walls, processors = (
        [(one[place], other[place]) for one, other in zip(taken, plain, strict=True)]
        for place in (0, 1)
    )
    masks = spent["fill"] or [0.0]
    return {
        "rows": rows,
        "case": name,
        "step_ms": round(statistics.median(one for one, _ in walls), 3),
        "over_plain": round(statistics.median(one / other for one, other in walls), 3),
        "processor_ms": round(statistics.median(one for one, _ in processors), 3),
        "processor_over_plain": round(
            statistics.median(one / other for one, other in processors), 3
        ),
        "masks_ms": round(1e3 * statistics.mean(masks), 3),
        "masks_worst_ms": round(1e3 * max(masks), 3),
        "host_ms": {p: round(1e3 * statistics.mean(s), 3) for p, s in spent.items() if s},
    }


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m bench.structured", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", choices=("shipped", *SHAPES), required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON file")
    parser.add_argument(
        "--tokens", type=Path, help="file of BPE ranks, for a vocabulary of real tokens"
    )
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--turns", type=int, default=5)
    args, about = parser.parse_args(), record.about()
    sys.setswitchinterval(SWITCH_S)  # as in a server
    fields: dict[str, Any] = {"max_num_seqs": args.rows, "max_num_batched_tokens": args.rows}
    fields |= {"max_model_len": 512, "load_format": "dummy"}
    with tempfile.TemporaryDirectory() as place:
        model = SHIPPED
        if args.model == "shipped":
            fields["load_format"] = "auto"
        else:
            model = Path(place)
            tokens = tokens_of(args.tokens) if args.tokens else words(random.Random(0))
            write_model(model, SHAPES[args.model], tokens)
        with Engine(str(model), **fields) as engine:
            rows = measure(engine, args.rows, args.steps, args.turns)
            compilations = engine.stats().compilations_after_warmup
    device = record.jax_device()
    result = {
        **about,
        "device": device,
        "vocabulary": args.tokens.name if args.tokens else "made up",
        "compilations_after_warmup": compilations,
        "rows": rows,
    }
    name = f"structured_{args.model}_{record.in_file_name(device)}"
    record.write(args.out / f"{name.lower()}.json", result)
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()))
    print(f"compilations after warm-up: {compilations}")


if __name__ == "__main__":
    main()
