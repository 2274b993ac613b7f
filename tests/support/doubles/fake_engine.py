"""An engine without a model: deterministic letters from a thread per request, all at once."""

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from prometheus_client import CollectorRegistry

from lora_jax.adapters.composition import digest_of, shown
from lora_jax.adapters.host_memory.room_line import RoomLine
from lora_jax.adapters.registry import AdapterExists, AdapterNotFound, AdapterRejected, HostFull
from serving.adapters.rollouts import Rollouts
from serving.api.config import EngineConfig
from serving.api.request import FinishReason, OutputDelta, QueueFull, TokenLogprobs
from serving.api.sampling import Sampling
from serving.api.structured_outputs import StructuredOutputs
from serving.engine.metrics.stats import EngineStats

BOS = 256
VOCAB = 260


class FakeTokenizer:
    """One token per byte; 256 is a start token without text, 257 to 259 are special."""

    eos_token_ids = (257,)
    longest_token = 1

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * add_special_tokens + list(text.encode())

    def encode_again(self, text: str) -> list[int]:
        return self.encode(text)

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        shown = "" if skip_special_tokens else "<s>"
        return "".join(bytes([i]).decode("latin-1") if i < 256 else shown * (i == BOS) for i in ids)

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id], skip_special_tokens=False)

    def token_strs(self, ids: list[int]) -> list[str]:
        return [self.decode([i], skip_special_tokens=False) for i in ids]

    has_chat_template = True

    def apply_chat_template(
        self,
        messages,
        add_generation_prompt: bool = True,
        *,
        continue_final_message: bool = False,
        variables=None,
    ) -> str:
        shown = "".join(f"{{{name}={value}}}" for name, value in (variables or {}).items())
        text = shown + "".join(f"[{m['role']}]{m['content']}" for m in messages)
        end = "" if continue_final_message else "[end]" * bool(variables)
        return text + end + "[assistant]" * add_generation_prompt


@dataclasses.dataclass(frozen=True)
class FakeEntry:
    name: str
    digest: str
    generation: int
    pinned: bool
    path: str
    kind: str = "lora"

    @property
    def report(self) -> SimpleNamespace:
        details = {
            "kind": "lora",
            "folder": self.path,
            "digest": self.digest,
            "modules": {"q_proj": {"layers": [0], "ranks": [4], "scalings": [2.0]}},
            "weight_bytes": 1 << 20,
            "max_rank": 4,
            "base_model": "/home/somebody/llama",
            "warnings": ("made for '/home/somebody/llama'.",) if self.path == "other-base" else (),
        }
        modules = {"q_proj": SimpleNamespace(layers=(0,), ranks=(4,), scalings=(2.0,))}
        values = details | {"modules": modules}
        return SimpleNamespace(**values, head=None, as_json=lambda: dict(details))


class FakeRegistry:
    """Names to folders below a root that hold an adapter_config.json."""

    def __init__(self, root: Path | None):
        self._root, self._entries, self._generation = root, {}, 0
        self.refused: dict[str, str] = {}
        self.line = RoomLine()
        self.full = False  # of adapters in use: what is not loaded waits

    def load(
        self,
        name,
        path,
        *,
        replace=False,
        pinned=False,
        confined=True,
        digest=None,
        recorded=contextlib.nullcontext,
    ) -> FakeEntry:
        if name in self._entries and not replace:
            raise AdapterExists(f"{name} is loaded.")
        folder = Path(path) if self._root is None else (self._root / path)
        if confined and not folder.resolve().is_relative_to(self._root.resolve()):
            raise AdapterRejected(f"The path {folder} is outside of the adapter folder.")
        if not (folder / "adapter_config.json").exists():
            raise AdapterNotFound(name, tuple(self._entries))
        if json.loads((folder / "adapter_config.json").read_text()).get("bad"):
            raise AdapterRejected(f"{folder}/adapter_model.safetensors: lora_B is missing.")
        config = (folder / "adapter_config.json").read_bytes()
        found = 12 * "0" + hashlib.sha256(str(folder).encode() + config).hexdigest()[12:]
        if digest not in (None, found):
            raise AdapterRejected(f"Adapter {name!r}: its files have changed.")
        entry = FakeEntry(name, found, self._generation + 1, pinned, folder.name)
        with recorded(entry):
            self.publish(entry)
        return entry

    def publish(self, entry: FakeEntry) -> None:
        self._generation = entry.generation
        self._entries[entry.name] = entry
        self.refused.pop(entry.name, None)

    def refuse(self, name: str, why: str) -> None:
        self.refused[name] = why

    def unload(self, name: str) -> FakeEntry | None:
        if self.refused.pop(name, None) is not None and name not in self._entries:
            return None
        self.get(name)
        return self._entries.pop(name)

    def get(self, name: str) -> FakeEntry:
        if name not in self._entries:
            raise AdapterNotFound(name, tuple(self._entries))
        return self._entries[name]

    def find(self, name: str, ticket) -> FakeEntry | None:
        return self._entries.get(name)

    def resolve(self, name: str, share=None, deadline=None, ticket=None) -> FakeEntry:
        if name in self._entries:
            return self._entries[name]
        if self.full:
            self.line.enter(ticket, name)
            raise HostFull("in use.").about(name)
        if name in self.refused:
            raise AdapterRejected(self.refused[name])
        if self._root is None:
            raise AdapterNotFound(name, ())
        return self.load(name, name)

    def known(self) -> tuple[FakeEntry, ...]:
        return self.entries()

    def knows(self, name: str) -> bool:
        return name in self._entries

    def digest_of(self, name: str) -> str | None:
        return self._entries[name].digest if name in self._entries else None

    def entries(self) -> tuple[FakeEntry, ...]:
        return tuple(self._entries[name] for name in sorted(self._entries))


class FakeGrammars(dict):
    """Grammars by digest; one kind of structure is refused."""

    def find(self, outputs: StructuredOutputs) -> object | None:
        return self.get(outputs.digest)

    def compile(self, outputs: StructuredOutputs) -> object:
        if '"not"' in outputs.text:
            raise ValueError(f'structured_outputs.{outputs.kind}: Unimplemented keys: ["not"]')
        return self.setdefault(outputs.digest, object())


class FakeEngine:
    """Answers every request with letters that depend on prompt, adapter, choice and place.

    Clear `open` to hold all output back; `fail` makes the next request end in that error,
    which may be retryable or the request's own.
    """

    def __init__(self, lora_dir: Path | None = None, max_model_len: int = 64):
        root = None if lora_dir is None else str(lora_dir)
        self.config = EngineConfig(model="some/where/fake-base", lora_dir=root)
        self.model_info = SimpleNamespace(
            vocab_size=VOCAB,
            max_model_len=max_model_len,
            sampling_defaults={},
            most_tokens=None,
            quantization=None,
        )
        self.metrics = SimpleNamespace(registry=CollectorRegistry())
        self.tokenizer = FakeTokenizer()
        self.images = None
        self.registry = FakeRegistry(lora_dir)
        self.rollouts = Rollouts(self.registry)
        self.open = threading.Event()
        self.open.set()
        self.queue_limit = 10_000
        self.alive = True
        self.fail: tuple[str, bool] | tuple[str, bool, bool] | None = None
        self.submitted: list[SimpleNamespace] = []
        self.aborted: list[str] = []
        self.running: set[str] = set()
        self.grammars = FakeGrammars()

    def tokenizer_of(self, adapter, session=None):
        return self.tokenizer

    def submit(
        self,
        prompt_ids: list[int],
        adapter: str | None,
        sampling: Sampling,
        *,
        on_output: Callable[[OutputDelta], None],
        request_id: str | None = None,
        cache_salt: str = "",
        share=None,
        entry=None,
        grammar=None,
        trace=None,
    ) -> str:
        if len(self.running) >= self.queue_limit:
            raise QueueFull("The waiting queue is full.", 2.0)
        sampling.check_vocab(VOCAB)
        if adapter is not None and entry is None:
            self.registry.get(adapter)
        request_id = f"fake-{len(self.submitted)}"
        given = SimpleNamespace(
            ids=prompt_ids,
            adapter=adapter,
            sampling=sampling,
            salt=cache_salt,
            id=request_id,
            share=share,
            grammar=grammar,
            trace=trace,
        )
        self.submitted.append(given)
        self.running.add(request_id)
        threading.Thread(target=self._run, args=(given, on_output), daemon=True).start()
        return request_id

    def _run(self, given: SimpleNamespace, on_output: Callable[[OutputDelta], None]) -> None:
        fail, self.fail = self.fail, None
        for index in range(given.sampling.n):
            for delta in self._deltas(given, index):
                self.open.wait()
                if given.id not in self.running:
                    return
                if fail and delta.finish_reason:
                    kind = {"retryable": fail[1], "bad_request": any(fail[2:])}
                    delta = delta._replace(finish_reason=FinishReason.ERROR, error=fail[0], **kind)
                if delta.finish_reason and index == given.sampling.n - 1:
                    self.running.discard(given.id)  # before anybody learns of the end
                on_output(delta)

    def _deltas(self, given: SimpleNamespace, index: int):
        sampling = given.sampling
        ids = letters(given.ids, given.adapter, index, sampling.max_tokens)
        scored = prompt_scores(given.ids) if sampling.prompt_logprobs is not None else None
        if not ids:
            yield OutputDelta(
                given.id, index, "", (), prompt_logprobs=scored, finish_reason=FinishReason.LENGTH
            )
        for i, token in enumerate(ids):
            yield OutputDelta(
                request_id=given.id,
                index=index,
                text=chr(token),
                token_ids=(token,),
                logprobs=(score(token, sampling.logprobs),)
                if sampling.logprobs is not None
                else (),
                prompt_logprobs=scored if i == 0 else None,
                finish_reason=FinishReason.LENGTH if i == len(ids) - 1 else None,
            )

    def compose(self, parts):
        """An entry that is named for its parts; a name with `big` fits nowhere."""
        if len(parts) == 1 and parts[0][1] == 1:
            return parts[0][0]
        if any("big" in entry.name for entry, _ in parts):
            raise ValueError("the ranks sum to 40; the server takes max_lora_rank=16.")
        name = shown((entry.name, weight) for entry, weight in parts)
        digest = digest_of((entry.digest, weight) for entry, weight in parts)
        return FakeEntry(name, digest, 0, False, name)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.running.discard(request_id)

    def is_alive(self) -> bool:
        return self.alive

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self.running), adapter_slots_total=4)

    def close(self) -> None:
        self.alive = False


class SayingEngine(FakeEngine):
    """Answers with a text, a character a piece."""

    def __init__(self, said: str, reason: FinishReason = FinishReason.STOP):
        super().__init__(max_model_len=4096)
        self.said, self.reason = said, reason

    def _deltas(self, given: SimpleNamespace, index: int):
        top = given.sampling.logprobs
        for char in self.said:
            scored = () if top is None else (score(ord(char), top),)
            yield OutputDelta(given.id, index, char, (ord(char),), logprobs=scored)
        yield OutputDelta(given.id, index, "", (257,), finish_reason=self.reason)


def letters(prompt: list[int], adapter: str | None, index: int, count: int) -> list[int]:
    """The tokens of an answer: a pure function of what was asked."""
    start = sum(prompt) + sum((adapter or "").encode()) + index
    return [ord("a") + (start + 7 * i) % 26 for i in range(count)]


def score(token: int, top: int) -> TokenLogprobs:
    """A made-up log-probability, and `top` likelier tokens with the impossible one last."""
    likelier = {token + 1 + i: -0.1 * (i + 1) for i in range(top)}
    return TokenLogprobs(token, -0.5 - token / 1000, top + 1, likelier)


def prompt_scores(ids: list[int]) -> tuple[TokenLogprobs | None, ...]:
    return (None, *(score(token, 0) for token in ids[1:]))


def write_fake_adapters(root: Path, *names: str) -> Path:
    """Make folders that the fake registry takes for adapters."""
    for name in names:
        (root / name).mkdir(parents=True)
        config = {"r": 4} | ({"bad": True} if name.startswith("bad") else {})
        (root / name / "adapter_config.json").write_text(json.dumps(config))
    return root


def engine_without_room(folder: Path) -> FakeEngine:
    """Return an engine with the adapter "law" in memory and no room for another, "sql"."""
    engine = FakeEngine(write_fake_adapters(folder, "sql", "law"))
    engine.registry.load("law", "law")
    engine.registry.full = True
    return engine


async def wait_for_line(engine: FakeEngine, count: int) -> None:
    """Return when so many requests wait for room in host memory."""
    async with asyncio.timeout(60):
        while len(engine.registry.line) != count:
            await asyncio.sleep(0.001)
