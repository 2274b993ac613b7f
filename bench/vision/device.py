"""Times of Qwen3-VL's shapes on an accelerator: switches, heads, the tower, images in answers.

The weights are random. Each function returns what goes into the JSON file of its part.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bench.step_profile import device_span
from bench.vision import shapes
from lora_jax.adapters.slots import AdapterSlots
from lora_jax.models.loader import read_config
from lora_jax.models.qwen3_tower import Qwen3Tower
from lora_jax.vision import layout
from lora_jax.vision.processor import preprocess, read_settings
from serving import Engine, Sampling
from serving.api.images import EncodeImage, PreparedImage
from serving.steps.image_encoder import ImageEncoder, TowerWork
from serving.steps.shadow import Shadow

DENSE_FLOPS = {"H100": 989e12, "H200": 989e12}  # bfloat16, without sparsity
BANDWIDTH = {"H100": 3.35e12, "H200": 4.8e12}  # bytes a second
QUESTION = "Which of these things happens here, and who can see it from where?"
ANSWER = 5  # tokens of a label by the LM head


def of_device(table: dict[str, float]) -> float | None:
    """Return the entry for this device."""
    kind = jax.devices()[0].device_kind
    return next((value for name, value in table.items() if name in kind), None)


def median_ms(run: Callable[[], Any], turns: int) -> float:
    """Return the median time of a call that waits for its result."""
    run()
    times = []
    for _ in range(turns):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def switch(layers: int = 36, hidden: int = 4096, kv: int = 1024, rank: int = 64) -> dict[str, Any]:
    """Time a switch to another adapter over all attention maps of an 8B model.

    The program is the engine's: every map is written from the plain weights into the shadow.
    """
    outs = (hidden, kv, kv, hidden)  # q, k, v, o, each [d_out, hidden]
    key = jax.random.key(0, impl="rbg")
    plain = tuple(
        jax.random.normal(jax.random.fold_in(key, n), (outs[n % 4], hidden), jnp.bfloat16)
        for n in range(4 * layers)
    )
    slots, num_slots = _slots(layers, outs, hidden, rank), 2
    sites = tuple((n % 4, n // 4) for n in range(4 * layers))
    shadow = Shadow(plain, sites, rank)
    chosen = [jnp.int32(slot) for slot in range(num_slots)]

    def run(count: int) -> None:
        for turn in range(count):
            done = shadow.merge(slots, chosen[turn % 2])
        shadow.wait(done)

    one = median_ms(lambda: run(1), 20)
    ten = median_ms(lambda: run(10), 5) / 10  # the host does not wait between them
    moved = 2 * sum(w.nbytes for w in plain)
    bandwidth = of_device(BANDWIDTH)
    floor = None if bandwidth is None else round(1e3 * moved / bandwidth, 3)
    found = {"maps": len(plain), "gigabytes_moved": round(moved / 1e9, 2), "rank": rank}
    return found | {"ms_alone": round(one, 3), "ms_in_a_row": round(ten, 3), "floor_ms": floor}


def _slots(layers: int, outs: tuple[int, ...], hidden: int, rank: int) -> AdapterSlots:
    """Return two adapters on every map: rows of A and of B one after the other in their pools."""
    entries = np.zeros((len(outs), layers, 2, 5), np.int32)
    used = dict.fromkeys({hidden, *outs}, 0)
    for module, d_out in enumerate(outs):
        for layer in range(layers):
            for slot in range(2):
                a, used[hidden] = used[hidden], used[hidden] + rank
                b, used[d_out] = used[d_out], used[d_out] + rank
                entries[module, layer, slot, :3] = a, b, rank
    key = jax.random.key(1, impl="rbg")
    pools = {
        str(width): 0.01 * jax.random.normal(key, (rows, width), jnp.bfloat16)
        for width, rows in used.items()
    }
    scaling = jnp.ones(entries.shape[:3], jnp.float32)
    return AdapterSlots(pools, jnp.asarray(entries), scaling)


def tower(folder: Path, sides: tuple[int, int] = shapes.SIDES) -> dict[str, Any]:
    """Time the tower's program for one image, beside the time of its products at full speed.

    `ms` is from the host's arrays to the rows, `ms_resident` from arrays on the device. Those "in a
    row" are of images that follow each other, so that the device waits for no host.
    `ms_on_device` is from the first kernel's start to the last one's end for one image alone.
    """
    config, sizes = read_config(folder), read_settings(folder, read_config(folder).tower)
    model = Qwen3Tower(config.tower, dtype=jnp.dtype(jnp.bfloat16), rngs=nnx.Rngs(0))
    image = prepared(folder, sides)
    count = image.num_tokens
    limits: dict[str, Any] = {"num_rows": count, "max_image_tokens": count, "max_rank": 1}
    encoder = ImageEncoder(model, config, sizes, (), **limits)
    encoder.start(1, 64, jax.devices()[0])
    rows = tuple(range(count))

    def run(count: int) -> None:
        for _ in range(count):
            encoder.encode([EncodeImage(image, rows, -1)], None)
        encoder.wait()

    resident = _resident(encoder, image, rows)
    times = {
        "ms": median_ms(lambda: run(1), 7),
        "ms_in_a_row": median_ms(lambda: run(8), 3) / 8,
        "ms_resident": median_ms(lambda: resident(1), 7),
        "ms_resident_in_a_row": median_ms(lambda: resident(32), 3) / 32,
    }
    span = device_span(lambda: resident(1))
    times |= {} if span is None else {"ms_on_device": span[0], "ms_of_kernels": span[1]}
    patches = image.grid[0] * image.grid[1]
    flops, peak = shapes.tower_flops(patches, config.tower.out_size), of_device(DENSE_FLOPS)
    found: dict[str, Any] = {"tokens": image.num_tokens, "patches": patches}
    found |= {name: round(ms, 2) for name, ms in times.items()}
    found |= {"teraflop": round(flops / 1e12, 2)}
    if peak is None:
        return found
    floor = 1e3 * flops / peak
    shares = {name.replace("ms", "share_of_peak"): floor / ms for name, ms in times.items()}
    return found | {"floor_ms": round(floor, 2)} | {k: round(v, 3) for k, v in shares.items()}


def _resident(
    encoder: ImageEncoder, image: PreparedImage, rows: tuple[int, ...]
) -> Callable[[int], None]:
    """Return a call that computes an image, whose arrays are on the device, this many times."""
    bucket = encoder.buckets[-1]
    work = TowerWork(image.patches, rows, -1)
    leaves, _, *given = encoder._arguments([work], bucket, 1, None)
    tree = given.pop()
    given = jax.device_put(given)

    def run(count: int) -> None:
        for _ in range(count):
            done, _ = encoder._encode(leaves, encoder.operands.rows, *given, tree)
            encoder.operands = encoder.operands._replace(rows=done)
        encoder.wait()

    return run


def prepared(folder: Path, sides: tuple[int, int]) -> PreparedImage:
    """Return a random image as the engine prepares it."""
    config = read_config(folder)
    settings = read_settings(folder, config.tower)
    grid = settings.grid_of(*sides)
    count = layout.num_tokens(config.tower, grid)
    return PreparedImage(preprocess(shapes.frame(0, sides), settings), grid, count, b"")


def engine_of(folder: Path, adapters: dict[str, str], sides: tuple[int, int], **fields: Any):
    """Return an engine of random weights that takes one image of these sides in a prompt."""
    sizes: dict[str, Any] = {"max_model_len": 4096, "max_num_seqs": 4, "max_loras": 1}
    sizes |= {"max_num_batched_tokens": 2560, "max_esft_adapters": 0, "structured_outputs": False}
    sizes |= {"enable_prefix_caching": False, "limit_mm_per_prompt": {"image": 1}}
    pixels = -(-sides[0] // 32) * -(-sides[1] // 32) * 32**2
    sizes |= {"mm_processor_kwargs": {"max_pixels": pixels}, "max_lora_rank": 16}
    return Engine(str(folder), adapters, load_format="dummy", **(sizes | fields))


def heads(folder: Path, adapter: Path, turns: int = 10, **fields: Any) -> dict[str, Any]:
    """Time a task head against the LM head of the same adapter: one image, then a label."""
    prompt, sides = shapes.TURN.format(shapes.IMAGE, QUESTION), (448, 448)
    sampling = Sampling(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)
    with engine_of(folder, {"h": str(adapter)}, sides, **fields) as engine:
        ways: dict[str, Callable[[list], Any]] = {
            "task_head_ms": lambda images: engine.classify([prompt], "h", images=[images]),
            "lm_head_ms": lambda images: engine.generate([prompt], "h", sampling, images=[images]),
        }
        found: dict[str, Any] = {}
        for number, (way, ask) in enumerate(ways.items()):
            # Each image is new, so that its rows are not at hand.
            images = ([shapes.frame(1000 * number + n, sides)] for n in range(turns + 1))
            found[way] = round(median_ms(partial(_of_next, ask, images), turns), 2)
    ratio = found["lm_head_ms"] / found["task_head_ms"]
    return found | {"answer_tokens": ANSWER, "times_less": round(ratio, 2)}


def _of_next(ask: Callable[[list], Any], images: Iterator[list]) -> Any:
    return ask(next(images))


def frames(folder: Path, sides: tuple[int, int] = shapes.SIDES, **fields: Any) -> dict[str, Any]:
    """Time requests of one full frame each: the first token of one alone, tokens/s of several.

    The tower's time is the device's for its program, an image.
    """
    prompt = shapes.TURN.format(shapes.IMAGE, QUESTION)
    rows, length = 4, 64
    with engine_of(folder, {}, sides, max_num_seqs=rows, **fields) as engine:
        encoder = engine._parts.loop._parts.runner.encoder
        assert encoder is not None
        stopwatch = encoder.stopwatch

        def ask(count: int, tokens: int, first: int) -> tuple[float, float]:
            """Return milliseconds of the requests, and of the tower for an image of theirs."""
            sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
            images = [[shapes.frame(first + n, sides)] for n in range(count)]
            before, start = stopwatch.seconds, time.perf_counter()
            engine.generate([prompt] * count, None, sampling, images=images)
            took = time.perf_counter() - start
            stopwatch.settle()
            return 1e3 * took, 1e3 * (stopwatch.seconds - before) / count

        ask(1, 2, 0)
        alone = np.median([ask(1, 1, 10 + n) for n in range(5)], axis=0)
        longer = np.median([ask(1, 1 + length, 20 + n) for n in range(2)], axis=0)
        together = ask(rows, length, 30)
    ttft, tower_ms = (float(ms) for ms in alone)
    return {
        "ttft_ms": round(ttft, 1),
        "tpot_ms": round((float(longer[0]) - ttft) / length, 2),
        "requests": rows,
        "answer_tokens": length,
        "tokens_per_s": round(1e3 * rows * length / together[0], 1),
        "tower_ms": round(tower_ms, 2),
        "tower_ms_of_several": round(together[1], 2),
        "tower_share_of_ttft": round(tower_ms / ttft, 3),
        **_beside_peak(folder, sides, tower_ms),
    }


def _beside_peak(folder: Path, sides: tuple[int, int], ms: float) -> dict[str, Any]:
    """Return the tower's time by its products at the dense peak, and the share it reaches."""
    config = read_config(folder)
    grid = read_settings(folder, config.tower).grid_of(*sides)
    peak = of_device(DENSE_FLOPS)
    if peak is None:
        return {}
    floor = 1e3 * shapes.tower_flops(grid[0] * grid[1], config.tower.out_size) / peak
    return {"tower_floor_ms": round(floor, 2), "tower_share_of_peak": round(floor / ms, 3)}
