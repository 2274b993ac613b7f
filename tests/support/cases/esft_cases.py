"""Shared ESFT cases: an engine with adapters, and the answers of merged models.

The oracle is an engine whose base weights are exchanged for those of a merged checkpoint.
"""

import contextlib
import mmap
import random
import shutil

import jax
import ml_dtypes  # noqa: F401  makes bfloat16 a name that safetensors finds
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file
from support.cases import tiny_esft
from support.cases.engine_cases import Listener
from support.waiting import wait_until

from lora_jax.adapters.kinds import AdapterKind
from lora_jax.memory.host import HostMemory
from lora_jax.memory.virtual import OutOfPages
from lora_jax.models import load
from serving import Engine, FinishReason, Sampling
from serving.engine.loop.loop import EngineLoop
from serving.loading import esft_parts
from serving.steps.model_runner import ModelRunner

SIZES = {
    "max_model_len": 64,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 8,  # one program
    "block_size": 4,
    "max_lora_rank": 4,
    "max_loras": 2,
    "max_adapter_loads_per_minute": 1_000_000,
    "structured_outputs": False,
}
ADAPTERS, SLOTS = 10, 3
SCORED = Sampling(max_tokens=5, temperature=0.0, logprobs=2, prompt_logprobs=1, ignore_eos=True)
LONG = Sampling(max_tokens=50, temperature=0.0, ignore_eos=True)


class FaultyMemory(HostMemory):
    """Gives only so many pages more than come back, if `left` says so."""

    def __init__(self):
        super().__init__("none")  # a step that reads where no expert lies ends the process
        self.left: int | None = None
        self.why: Exception = OutOfPages("the device is full")
        self.page_bytes = 0  # of the engine's pool

    def create_page(self, num_bytes):
        if self.left is not None:
            if self.left < num_bytes // self.page_bytes:
                raise self.why
            self.left -= num_bytes // self.page_bytes
        return super().create_page(num_bytes)

    def destroy_page(self, handle):
        if self.left is not None:
            self.left += self._ledger.find_page(handle).num_bytes // self.page_bytes
        super().destroy_page(handle)


def runner_of(engine) -> ModelRunner:
    loop: EngineLoop = engine._parts.loop
    return loop._parts.runner


def leaves_of(folder, dtype=None):
    """Return a checkpoint's weights in the order of a runner's."""
    return tuple(jax.tree.leaves(nnx.split(load(folder, dtype=dtype)[0], graph=False)[1]))


def draw_prompts(rng):
    return [rng.integers(4, 260, rng.integers(3, 9)).tolist() for _ in range(3)]


def answer(output):
    first = output.outputs[0]
    return first.token_ids, first.logprobs, output.prompt_logprobs, first.finish_reason


class Case:
    """An engine that finds ESFT adapters and LoRAs in its folder, and everybody's answers alone.

    `merged` are the model folders whose answers the ESFT adapters must give, by adapter. Answers
    are equal to the last bit, or with `exact` false in their tokens.
    """

    def __init__(self, base, folder, merged, loras, *, memory=None, exact=True, **options):
        self.base, self.dir, self.exact = base, folder, exact
        self.names, self.loras = list(merged), list(loras)
        self.prompts = draw_prompts(np.random.default_rng(7))
        options = SIZES | {"max_esft_adapters": SLOTS} | options
        dtype = options.get("dtype")
        self.alone = {}
        lora_paths = {name: folder / name for name in loras}
        with Engine(base, lora_paths, **_without_esft(options)) as oracle:
            for name in loras:
                self.alone[name] = self.answers(oracle, name)
            for name, model in {None: base, **merged}.items():
                runner_of(oracle)._step._leaves = leaves_of(model, dtype)
                self.alone[name] = self.answers(oracle, None)
        assert len({str(found) for found in self.alone.values()}) == len(self.alone)
        with pytest.MonkeyPatch.context() as patch:
            if memory is not None:
                patch.setattr(esft_parts, "for_platform", lambda platform, device: memory)
            self.engine = Engine(base, **options, lora_dir=str(folder), max_queue=4000)
        tensors = self.engine._parts.residencies.of(AdapterKind.ESFT).room.tensors
        self.memory = memory or tensors._memory
        if memory is not None:
            memory.page_bytes = tensors.pages().page_bytes
        self.pages_at_start = self.pages()

    def answers(self, engine, name):
        return [answer(output) for output in engine.generate(self.prompts, name, SCORED)]

    def pages(self):
        stats = self.engine.stats()
        return stats.expert_page_bytes

    def check(self, names):
        """Ask for all these at once; everybody gets what they get alone."""
        asked = [(name, place) for name in names for place in range(len(self.prompts))]
        prompts = [self.prompts[place] for _, place in asked]
        outputs = self.engine.generate(prompts, [name for name, _ in asked], SCORED)
        for (name, place), output in zip(asked, outputs, strict=True):
            want = self.alone[name][place]
            if self.exact:
                assert answer(output) == want, (name, place)
            assert answer(output)[0] == want[0], (name, place)

    def unload_all(self):
        for entry in self.engine.registry.entries():
            self.engine.unload_adapter(entry.name)

    def check_nothing_is_left(self):
        self.unload_all()
        wait_until(lambda: self.pages() == self.pages_at_start)
        wait_until(lambda: self.memory.usage().created == self.pages_at_start)
        wait_until(lambda: holds(self.engine.check_integrity))


def _without_esft(options):
    return {**options, "max_esft_adapters": 0, "enable_prefix_caching": False}


def random_case(root, kind, num_adapters=ADAPTERS, **options):
    """A case of a random model with adapters e0, e1, ... and a LoRA, all written to `root`."""
    rng = np.random.default_rng(7)
    draw_prompts(rng)  # so that the adapters are others for other prompts
    sizes = {name: options.pop(name) for name in ("hidden", "width") if name in options}
    base, folder = tiny_esft.write_moe(root / "base", kind, **sizes), root / "adapters"
    tiny_esft.write_lora_adapter(folder / "lora", kind, 2, seed=50, **sizes)
    merged = {}
    for place in range(num_adapters):
        name, chosen = f"e{place}", tiny_esft.random_choice(kind, rng)
        made = tiny_esft.write_esft_adapter(folder / name, base, chosen, place)
        merged[name] = tiny_esft.write_merged(root / f"merged-{name}", base, made)
    return Case(base, folder, merged, ["lora"], **options)


def shipped_case(root, assets, **options):
    """A case of a shipped model with its LoRA and ESFT adapters; the merged ones are in `root`."""
    folder, merged = root / "adapters", {}
    loras = sorted(path.name for path in (assets / "adapters").iterdir())
    for name in loras:
        shutil.copytree(assets / "adapters" / name, folder / name)
    for adapter in sorted((assets / "esft").iterdir()):
        shutil.copytree(adapter, folder / adapter.name)
        made = load_file(adapter / "model.safetensors")
        merged[adapter.name] = tiny_esft.write_merged(root / f"m-{adapter.name}", assets, made)
    options = {"max_lora_rank": 32, "max_loras": len(loras)} | options
    return Case(assets, folder, merged, loras, **options)


def resident_bytes() -> int:
    """Return the memory of this process."""
    with open("/proc/self/statm") as line:
        return int(line.read().split()[1]) * mmap.PAGESIZE


def holds(check) -> bool:
    try:
        check()
    except AssertionError:
        return False
    return True


@contextlib.contextmanager
def running(case):
    try:
        yield case
        assert case.engine.stats().compilations_after_warmup == 0
        assert case.engine.is_alive()
    finally:
        case.engine.close()
    assert case.memory.usage().created == 0


def churn(case, rounds, seed):
    """Load, unload and exchange adapters in random order while requests for them run.

    Returns the names of all that were asked for: every one, where there are rounds enough.
    """
    rng, asked, names, others = random.Random(seed), [], [], []

    def ask(name, of):
        place = rng.randrange(len(case.prompts))
        listener = Listener()
        case.engine.submit(case.prompts[place], name, SCORED, on_output=listener)
        asked.append((of, place, listener))

    live = None
    for _ in range(rounds):
        names = names or rng.sample(case.names, len(case.names))
        others = others or rng.sample([*case.loras, None], len(case.loras) + 1)
        loaded = {entry.name for entry in case.engine.registry.entries()}
        for name in rng.sample([names.pop(), others.pop()], 2):
            ask(name, name)  # all are read from the folder on first use
        if rng.random() < 0.5 and loaded:
            case.engine.unload_adapter(rng.choice(sorted(loaded)))
            live = live if "live" in {e.name for e in case.engine.registry.entries()} else None
        if rng.random() < 0.3:
            live = rng.choice(case.names)
            case.engine.load_adapter("live", case.dir / live, replace=True)
        if live is not None:
            ask("live", live)
        if rng.random() < 0.3:
            asked[rng.randrange(len(asked))][2].finished.wait(60)
    for of, place, listener in asked:
        assert listener.wait().finish_reason is FinishReason.LENGTH, listener.deltas[-1]
        tokens = tuple(token for delta in listener.deltas for token in delta.token_ids)
        logprobs = tuple(entry for delta in listener.deltas for entry in delta.logprobs)
        want = case.alone[of][place]
        assert tokens == want[0], of
        assert not case.exact or logprobs == want[1], of
    return {of for of, _, _ in asked} - {None}
