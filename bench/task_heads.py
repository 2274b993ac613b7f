"""Latency of a task head against the same adapter's LM head on one task: the intent of a request.

`python -m bench.task_heads --out DIR` asks the shipped adapter `heads/intent` for the intents of
requests. Its LM head writes JSON that begins with the intent; it is timed to the end of the intent
(`to label`) and of the JSON (`whole`). Its task head names the intent after one forward pass. One
caller asks for one prompt after the other, then for all at once. No prefix is cached. A figure is
the median of the turns, in ms for a prompt. With --heldout FILE (of `prompt` and `label`) the share
of right answers is told, too.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench import record
from lora_jax.adapters.task_head import HeadKind
from lora_jax.finetune.labelled import read_labelled
from serving import Engine, Sampling

NAME = "intent"
MODEL = Path(__file__).parents[1] / "assets" / "tiny-moe"
ASKED = "请分析下面这句话的意图，并转化为json格式： {}\n答案："
# Written for this command, none is from the training text.
REQUESTS = (
    "明天早上七点叫我起床",
    "播放周杰伦的歌",
    "北京今天会下雨吗",
    "把客厅的空调调到二十六度",
    "查一下周五去上海的高铁",
    "下周三是几号",
    "我想看一部科幻电影",
    "打开收音机听新闻",
)
WHOLE = Sampling(max_tokens=96, temperature=0.0)
TO_LABEL = Sampling(max_tokens=96, temperature=0.0, stop=('",',))
Prompt = list[int]
Answer = Callable[[Sequence[Prompt]], list[str]]


def answers_of(engine: Engine) -> dict[str, Answer]:
    """Return what each way of asking gives for prompts."""

    def text(prompts: Sequence[Prompt], sampling: Sampling) -> list[str]:
        done = engine.generate(list(prompts), NAME, sampling)
        return [output.outputs[0].text for output in done]

    return {
        "LM head, whole": lambda prompts: text(prompts, WHOLE),
        "LM head, to label": lambda prompts: text(prompts, TO_LABEL),
        "task head": lambda prompts: [c.label for c in engine.classify(list(prompts), NAME)],
    }


def prompt_of(engine: Engine, text: str) -> Prompt:
    """Return the tokens of a user's turn with this text, as the adapter was trained on."""
    turn = engine.tokenizer.apply_chat_template([{"role": "user", "content": text}])
    return engine.tokenizer.encode(turn, add_special_tokens=False)


def right_shares(engine: Engine, heldout: Path) -> dict[str, float]:
    """Return the share of right intents of held-out text, by the way of asking."""
    records = read_labelled(heldout, HeadKind.CLASS)
    prompts = [prompt_of(engine, record.prompt) for record in records]
    shares = {}
    for way, answer in answers_of(engine).items():
        # JSON begins with the intent; a head gives nothing else.
        results = [t.partition('"intent": "')[2].split('"')[0] or t for t in answer(prompts)]
        right = sum(f == r.labels[0] for f, r in zip(results, records, strict=True))
        shares[way] = round(right / len(records), 3)
    return shares


def seconds(answer: Answer, batches: Sequence[Sequence[Prompt]]) -> float:
    """Return the time of all batches, one after the other."""
    start = time.perf_counter()
    for prompts in batches:
        answer(prompts)
    return time.perf_counter() - start


def measure(model: Path, turns: int, heldout: Path | None) -> list[dict]:
    """Return a row for each way of asking and number of prompts at once."""
    adapters = {NAME: model / "heads" / NAME}
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "structured_outputs": False}
    with Engine(str(model), adapters, enable_prefix_caching=False, **sizes) as engine:
        prompts = [prompt_of(engine, ASKED.format(request)) for request in REQUESTS]
        loads = {1: [[prompt] for prompt in prompts], len(prompts): [prompts]}
        ways, results = answers_of(engine), {}
        for turn in range(turns + 1):
            for at_once, batches in loads.items():
                for way, answer in ways.items():
                    taken = seconds(answer, batches)
                    if turn:  # the first one warms up
                        results.setdefault((at_once, way), []).append(taken / len(prompts))
        texts = {way: answer(prompts) for way, answer in ways.items()}
        tokens = {way: _mean_tokens(engine, texts[way]) for way in ways}
        shares = {} if heldout is None else right_shares(engine, heldout)
    tokens["task head"] = 0.0
    medians = {key: 1e3 * statistics.median(values) for key, values in results.items()}
    return [
        {
            "at_once": at_once,
            "way": way,
            "ms": round(value, 2),
            "over_head": round(value / medians[at_once, "task head"], 2),
            "mean_output_tokens": tokens[way],
            **({"right": shares[way]} if shares else {}),
        }
        for (at_once, way), value in medians.items()
    ]


def _mean_tokens(engine: Engine, texts: Sequence[str]) -> float:
    counts = [len(engine.tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    return round(statistics.mean(counts), 1)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m bench.task_heads", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, required=True, help="folder of task_heads_cpu.json")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--heldout", type=Path, help=".jsonl file with prompt and label")
    parser.add_argument("--turns", type=int, default=7)
    args = parser.parse_args()
    about = record.about()
    rows = measure(args.model, args.turns, args.heldout)
    record.write(args.out / "task_heads_cpu.json", about | {"rows": rows})
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
