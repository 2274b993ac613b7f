"""Latency of each shipped head against the LM head of its own adapter, on held-out images.

The two are asked in turns, one request at a time. A frame is new, or its tower rows lie in the
encoder cache because the adapter was asked about it before; either with reuse of prompt prefixes
and without. Times are medians for a request, by the clock and by the processor time of all threads.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.vision.accuracy import asked
from lora_jax.finetune.pictures import tasks
from lora_jax.finetune.pictures.make_adapters import RECIPES, Recipe
from serving import Engine, Sampling

_SIZES: dict[str, Any] = {
    **{"max_num_seqs": 8, "max_num_batched_tokens": 256, "max_esft_adapters": 0},
    **{"structured_outputs": False},
}
_WARM_UP = 2  # turns that do not count
_MOST_TOKENS = 64

Ask = Callable[[tasks.Example], int]  # returns the tokens of the answer


def run(model: Path, data: Path, turns: int = 40) -> dict[str, Any]:
    """Return rows for each head: both times, their ratio, and the tokens of the LM's answer.

    An adapter that was trained with words writes its answer to the end. Another writes as many
    tokens as the right answer and its end are.
    """
    recipes = [recipe for recipe in RECIPES if recipe.head and (model / recipe.folder).is_dir()]
    sources = tasks.parts(tasks.read_sources(data))[True]
    adapters = {recipe.name: str(model / recipe.folder) for recipe in recipes}
    rows = []
    for reuse in (False, True):
        sizes = {"max_loras": len(adapters), "enable_prefix_caching": reuse} | _SIZES
        with Engine(str(model), adapters, **sizes) as engine:
            for recipe, known in itertools.product(recipes, (False, True)):
                examples = tasks.draw(recipe.task, sources, 2 * (turns + _WARM_UP), 5 + known)
                row = _row(recipe, ways_of(engine, recipe, examples), examples, known=known)
                rows.append({"prefix_reuse": reuse} | row)
                print(rows[-1], flush=True)
    return {"turns": turns, "rows": rows}


def ways_of(engine: Engine, recipe: Recipe, examples: Sequence[tasks.Example]) -> dict[str, Ask]:
    """Return how each of the examples is asked, by the head and in words."""

    name = recipe.name

    def by_head(example: tasks.Example) -> int:
        prompts, images = asked([example])
        engine.classify(prompts, name, images=images)
        return 0

    def sampling_of(text: str) -> Sampling:
        length = len(engine.tokenizer.encode(text, add_special_tokens=False)) + 1
        most = _MOST_TOKENS if recipe.words else length
        return Sampling(max_tokens=most, temperature=0.0, ignore_eos=not recipe.words)

    samplings = {text: sampling_of(text) for text in {one.answer for one in examples}}

    def in_words(example: tasks.Example) -> int:
        sampling = samplings[example.answer]
        prompts, images = asked([example])
        (answer,) = engine.generate(prompts, name, sampling, images=images)
        return len(answer.outputs[0].token_ids)

    return {"task_head": by_head, "lm_head": in_words}


def _row(
    recipe: Recipe, ways: dict[str, Ask], examples: Sequence[tasks.Example], *, known: bool = False
) -> dict[str, Any]:
    """Return the times of both ways, which take turns over the examples, and change places.

    With `known` the head has been asked about each example just before, which is not timed.
    """
    clock: dict[str, list[float]] = {way: [] for way in ways}
    worked: dict[str, list[float]] = {way: [] for way in ways}
    tokens, num_images = [], len(examples[0].images)
    for turn in range(len(examples) // 2):
        order = list(ways) if turn % 2 else list(ways)[::-1]
        for way, example in zip(order, examples[2 * turn : 2 * turn + 2], strict=True):
            if known:
                ways["task_head"](example)
            start, busy = time.perf_counter(), time.process_time()
            count = ways[way](example)
            took = time.perf_counter() - start, time.process_time() - busy
            if turn >= _WARM_UP:
                clock[way].append(took[0])
                worked[way].append(took[1])
                tokens += [count] if way == "lm_head" else []
    frame = "in the encoder cache" if known else "new"
    found: dict[str, Any] = {"head": recipe.name, "images": num_images, "frame": frame}
    found["answer_tokens"] = round(statistics.mean(tokens), 1)
    for kind, times in (("ms", clock), ("processor_ms", worked)):
        medians = {way: 1e3 * statistics.median(values) for way, values in times.items()}
        found |= {f"{way}_{kind}": round(value, 2) for way, value in medians.items()}
        ratio = "times_less" if kind == "ms" else "times_less_work"
        found[ratio] = round(medians["lm_head"] / medians["task_head"], 2)
    return found
