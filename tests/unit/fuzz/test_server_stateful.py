"""Any order of requests, loads and cancels: HTTP, registry and scheduler agree with a model.

The model is a table of names and folders. Every answer must be the one that the name's folder
gives alone; what is not in the table is 404; nothing is held once nothing runs.
"""

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.cases.engine_cases import Listener, settle
from support.cases.tiny_checkpoint import TinyShape, write_adapter, write_model
from support.processes.http_server import client_of
from support.waiting import wait_until

from serving import Engine, Sampling
from serving.http.app import create_app
from serving.http.settings import HttpSettings

SHAPE = TinyShape(experts=4, max_positions=96)
FOLDERS = {"a": 4, "b": 2, "c": 4}  # with their ranks
LOADED = ("one", "two", "a", "b")  # names that rules load; a and b are found in the folder too
UNKNOWN = ("nobody", "zzz", "one.two", "model:nobody")
BASE = "model"
PROMPTS = ("hello", "The quick brown fox jumps", "x", "hello there, hello again")
LONGEST = 24
MESSAGES = [{"role": "user", "content": "hello"}]

names = st.sampled_from((BASE, *LOADED, "c"))
loads = st.sampled_from(LOADED)
prompts = st.integers(0, len(PROMPTS) - 1)
counts = st.sampled_from((1, 5, LONGEST))
folders = st.sampled_from(sorted(FOLDERS))


@dataclasses.dataclass(frozen=True)
class World:
    """One engine behind one server, and what every folder answers alone."""

    engine: Engine
    client: httpx.Client
    alone: dict[tuple[str | None, int], tuple[int, ...]]  # folder and prompt; -1: the messages


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp("stateful")
    write_model(root / "model", SHAPE)
    for seed, (name, rank) in enumerate(FOLDERS.items(), 1):
        write_adapter(root / "adapters" / name, SHAPE, rank, seed)
    (root / "adapters" / "empty").mkdir()
    sizes = {
        "structured_outputs": False,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 32,
        "max_loras": 2,
        "block_size": 4,
    }
    limits = {"max_queue": 64, "max_adapter_loads_per_minute": 1_000_000}
    where = {"lora_dir": str(root / "adapters")}
    with Engine(str(root / "model"), **where, **sizes, **limits) as engine:
        alone = dict(answers_alone(engine, root / "adapters"))
        app = create_app(engine, HttpSettings(enable_runtime_lora=True))
        with client_of(app) as client:
            yield World(engine, client, alone)


def answers_alone(engine: Engine, root: Path):
    greedy = Sampling(max_tokens=LONGEST, temperature=0.0, ignore_eos=True)
    chat = engine.tokenizer.apply_chat_template(MESSAGES)
    for folder in (None, *FOLDERS):
        if folder is not None:
            engine.load_adapter("alone", root / folder, replace=True)
        for place, prompt in [*enumerate(PROMPTS), (-1, engine.tokenizer.encode(chat, False))]:
            ids = engine.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            heard, salt = Listener(), f"{folder} {place}"  # nothing of another's in the cache
            engine.submit(ids, folder and "alone", greedy, on_output=heard, cache_salt=salt)
            assert heard.wait().error is None
            yield (folder, place), heard.tokens()
    engine.unload_adapter("alone")


@dataclasses.dataclass
class OpenStream:
    """A stream whose first bytes have come; `folder` is what its name stood for then."""

    response: httpx.Response
    folder: str | None
    prompt: int
    count: int


class ServerMachine(RuleBasedStateMachine):
    """The rules; `world` is set by `machine_of`."""

    world: World

    @initialize()
    def forget_everything(self):
        self.table: dict[str, str] = {}
        self.streams: list[OpenStream] = []
        for entry in self.world.engine.registry.entries():
            self.world.engine.unload_adapter(entry.name)

    # What the model says.

    def folder_of(self, name: str) -> str | None:
        """Return the folder of a name that is asked for; the server then loads it if need be."""
        if name == BASE:
            return None
        return self.table.setdefault(name, name) if name in FOLDERS else self.table.get(name)

    def is_known(self, name: str) -> bool:
        return name == BASE or name in FOLDERS or name in self.table

    def check(self, tokens, folder: str | None, prompt: int, count: int) -> None:
        assert tuple(tokens) == self.world.alone[folder, prompt][:count]

    # Requests.

    def body(self, name: str, prompt: int, count: int, **more):
        said = {"messages": MESSAGES} if prompt < 0 else {"prompt": PROMPTS[prompt]}
        greedy = {"max_tokens": count, "temperature": 0, "ignore_eos": True}
        return {"model": name, "return_token_ids": True, **said, **greedy, **more}

    def post(self, path: str, body) -> httpx.Response:
        return self.world.client.post(path, json=body)

    @rule(name=names, prompt=prompts, count=counts)
    def complete(self, name, prompt, count):
        answer = self.post("/v1/completions", self.body(name, prompt, count))
        if not self.is_known(name):
            assert answer.status_code == 404
            return
        assert answer.status_code == 200, answer.text
        tokens = answer.json()["choices"][0]["token_ids"]
        self.check(tokens, self.folder_of(name), prompt, count)

    @rule(name=names, count=counts)
    def chat(self, name, count):
        answer = self.post("/v1/chat/completions", self.body(name, -1, count))
        if not self.is_known(name):
            assert answer.status_code == 404
            return
        assert answer.status_code == 200, answer.text
        self.check(answer.json()["choices"][0]["token_ids"], self.folder_of(name), -1, count)

    @rule(asked=st.lists(st.tuples(names, prompts, counts), min_size=2, max_size=6))
    def many_at_once(self, asked):
        known = [one for one in asked if self.is_known(one[0])]
        bodies = [self.body(*one, n=2) for one in known]
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda body: self.post("/v1/completions", body), bodies))
        for (name, prompt, count), answer in zip(known, answers, strict=True):
            assert answer.status_code == 200, answer.text
            for choice in answer.json()["choices"]:
                self.check(choice["token_ids"], self.folder_of(name), prompt, count)

    @precondition(lambda self: len(self.streams) < 4)
    @rule(name=names, prompt=prompts, count=counts)
    def open_stream(self, name, prompt, count):
        client = self.world.client
        body = self.body(name, prompt, count, stream=True)
        request = client.build_request("POST", "/v1/completions", json=body)
        response = client.send(request, stream=True)
        if not self.is_known(name):
            assert response.status_code == 404
            response.close()
            return
        assert response.status_code == 200
        self.streams.append(OpenStream(response, self.folder_of(name), prompt, count))

    @precondition(lambda self: self.streams)
    @rule(place=st.integers(0, 3))
    def read_stream(self, place):
        stream = self.streams.pop(place % len(self.streams))
        lines = [line[6:] for line in stream.response.iter_lines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        events = [json.loads(line) for line in lines[:-1]]
        tokens = [t for e in events for c in e["choices"] for t in c.get("token_ids") or ()]
        self.check(tokens, stream.folder, stream.prompt, stream.count)

    @precondition(lambda self: self.streams)
    @rule(place=st.integers(0, 3))
    def cancel_stream(self, place):
        self.streams.pop(place % len(self.streams)).response.close()

    # Adapters.

    def load(self, name: str, folder: str, **more) -> httpx.Response:
        body = {"lora_name": name, "lora_path": folder, **more}
        return self.post("/v1/load_lora_adapter", body)

    @rule(name=loads, folder=folders)
    def load_adapter(self, name, folder):
        answer = self.load(name, folder)
        assert answer.status_code == (400 if name in self.table else 200)
        self.table.setdefault(name, folder)

    @rule(name=loads, folder=folders, pinned=st.booleans())
    def load_in_place(self, name, folder, pinned):
        others = [e for e in self.world.engine.registry.entries() if e.pinned and e.name != name]
        pinned = pinned and not others  # with two slots one at least stays free
        assert self.load(name, folder, load_inplace=True, pinned=pinned).status_code == 200
        self.table[name] = folder

    @rule(name=st.sampled_from((*LOADED, *UNKNOWN)))
    def unload(self, name):
        answer = self.post("/v1/unload_lora_adapter", {"lora_name": name})
        assert answer.status_code == (200 if name in self.table else 404)
        self.table.pop(name, None)

    @rule(name=loads, folder=st.sampled_from(("empty", "missing", "../model", "", "/etc")))
    def load_what_cannot_be(self, name, folder):
        assert self.load(name, folder, load_inplace=True).status_code in (400, 404)

    # The rest.

    @rule()
    def list_models(self):
        listed = {card["id"] for card in self.world.client.get("/v1/models").json()["data"]}
        assert listed == {BASE, *FOLDERS, *self.table}
        loaded = {entry.name for entry in self.world.engine.registry.entries()}
        assert loaded == set(self.table)

    @rule(name=names, prompt=prompts)
    def tokenize(self, name, prompt):
        answer = self.post("/tokenize", {"model": name, "prompt": PROMPTS[prompt]})
        assert answer.status_code == (200 if self.is_known(name) else 404)
        if self.is_known(name):
            self.folder_of(name)
            assert answer.json()["tokens"] == self.world.engine.tokenizer.encode(PROMPTS[prompt])

    @rule(name=st.sampled_from(UNKNOWN))
    def unknown(self, name):
        assert self.post("/v1/completions", self.body(name, 0, 1)).status_code == 404

    @rule(
        wrong=st.sampled_from(
            (
                {"max_tokens": 10_000},
                {"temperature": -1},
                {"n": 0},
                {"prompt": [10**6]},
                {"prompt": "x" * 5000},
                {"stop": 5},
                {"logprobs": 10_000},
                {"stream": "yes"},
            )
        )
    )
    def bad_request(self, wrong):
        body = self.body(BASE, 0, 5) | wrong
        assert self.post("/v1/completions", body).status_code == 400

    @invariant()
    def is_healthy(self):
        assert self.world.engine.is_alive()

    def teardown(self):
        for stream in self.streams:
            stream.response.close()
        settle(self.world.engine)
        stats = self.world.engine.stats()
        held = (stats.running, stats.waiting, stats.kv_usage, stats.waiting_for_adapter)
        assert held == (0, 0, 0, 0)
        self.forget_everything()
        self.world.engine.generate("x", None, Sampling(max_tokens=1))  # the loop turns
        wait_until(lambda: not self.world.engine.stats().adapter_slots_used)


def run(world: World, examples: int, steps: int) -> None:
    machine = type("Machine", (ServerMachine,), {"world": world})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.long
def test_any_order_of_requests(world):
    run(world, 25, 25)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_any_long_order_of_requests(world):
    run(world, 400, 80)
