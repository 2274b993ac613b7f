"""Every bound answer is valid, whatever rides with it; rows without a grammar keep their bits."""

import dataclasses
import itertools
import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import jsonschema
import pytest
from support.cases.bound_cases import (
    FREE,
    NAMES,
    TEXTS,
    TOOLS,
    answer,
    bound,
    check,
    check_call,
    lose_masks,
    meet_a_driver_that_waits,
)
from support.cases.engine_cases import planned_together, settle
from support.cases.grammar_cases import MODEL, drawn_schema
from support.doubles.host_board import patience
from support.doubles.paying_drafts import num_drafts, send_all_drafts
from support.processes.http_server import client_of
from support.waiting import wait_until

from bench.bad_requests import chained_references, crossed_patterns
from serving import Engine, QueueFull, RequestFailed, Sampling
from serving.engine.parts import step_parts
from serving.http.app import create_app
from serving.http.settings import HttpSettings
from serving.steps.device_users import DeviceUsers
from serving.text.structured.row_masks import RowMasks

ADAPTERS = {
    "intent": MODEL / "adapters" / "intent",
    "law": MODEL / "adapters" / "law",
    "token-law": MODEL / "esft" / "token-law",
}
SIZES = {"max_num_seqs": 8, "max_num_batched_tokens": 8, "max_model_len": 384, "block_size": 8}


@pytest.fixture(scope="module")
def engine():
    # Pages for about three long answers: some are preempted.
    with Engine(str(MODEL), ADAPTERS, kv_cache_memory_bytes=400 << 10, **SIZES) as made:
        yield made


@pytest.fixture(scope="module")
def client(engine):
    with client_of(create_app(engine, HttpSettings())) as made:
        yield made


def test_steps_that_wait_for_their_masks_answer_as_steps_in_two_programs(engine, monkeypatch):
    def slow(masks, *given):
        if next(count) % 16 == 0:
            time.sleep(0.01)  # the next step goes out meanwhile
        work(masks, *given)

    board, users = engine._loop._parts.runner.board, DeviceUsers()
    monkeypatch.setattr(board, "_users", users)  # as on a GPU; the other engine is none of them
    monkeypatch.setattr(board, "_most_waits", 0)
    monkeypatch.setattr(engine.grammars.masks, "_few", 1)  # as on a machine of many cores
    monkeypatch.setattr(step_parts, "make_board", lambda *_: None)
    answers, count, work = [], itertools.count(), RowMasks._fill
    with Engine(str(MODEL), ADAPTERS, kv_cache_memory_bytes=400 << 10, **SIZES) as in_two:
        assert in_two._loop._parts.runner.board is None
        for each in (in_two, engine):
            monkeypatch.setattr(RowMasks, "_fill", slow if each is engine else work)
            samplings = [
                bound(seed, structured_outputs={"json": drawn_schema(seed)}) for seed in range(5)
            ]
            outputs = each.generate(["x"] * 8, [*NAMES, *NAMES], [*samplings, *FREE])
            answers.append([answer(output) for output in outputs])
            endless = Sampling(max_tokens=8, structured_outputs={"regex": "a*"}, ignore_eos=True)
            answers[-1].append(answer(each.generate("x", sampling=endless)[0]))
    assert answers[0] == answers[1]
    meet_a_driver_that_waits(engine, users, monkeypatch)
    assert lose_masks(engine, monkeypatch) == answers[0][5:8]
    monkeypatch.setattr(RowMasks, "_fill", work)
    assert answer(engine.generate("x", sampling=endless)[0]) == answers[0][-1]
    assert engine.stats().compilations_after_warmup == 0
    settle(engine)


def run_schemas(engine, seeds):
    """Answer drawn schemas and free prompts in one batch; return the free answers."""
    prompts, names, samplings = [], [], []
    for seed in seeds:
        outputs = {"json": drawn_schema(seed)}
        prompts.append(TEXTS[seed % len(TEXTS)])
        names.append(NAMES[seed % len(NAMES)])
        samplings.append(bound(seed, structured_outputs=outputs, n=1 + (seed % 5 == 0)))
        prompts.append(TEXTS[seed % 3])
        names.append(NAMES[(seed + 1) % len(NAMES)])
        samplings.append(FREE[seed % len(FREE)])
    answers = engine.generate(prompts, names, samplings)
    ended = sum(
        check(drawn_schema(seed), output) for seed, output in zip(seeds, answers[::2], strict=True)
    )
    assert ended >= 0.9 * len(seeds)
    return prompts[1::2], names[1::2], samplings[1::2], answers[1::2]


def test_every_answer_under_a_schema_is_valid_and_free_rows_keep_their_bits(engine):
    prompts, names, samplings, mixed = run_schemas(engine, range(20))
    alone = [
        answer(engine.generate([p], n, s)[0])
        for p, n, s in list(zip(prompts, names, samplings, strict=True))[:6]
    ]
    assert [answer(output) for output in mixed[:6]] == alone
    assert engine.stats().compilations_after_warmup == 0
    settle(engine)


@pytest.mark.long
def test_two_hundred_more(engine):
    for start in range(20, 220, 20):
        run_schemas(engine, range(start, start + 20))
    assert engine.stats().compilations_after_warmup == 0


def test_barred_words_and_a_grammar_bind_together(engine, client):
    binary = {"max_tokens": 9, "structured_outputs": {"regex": "[7Q]{5}"}}
    body = {"model": "law", "prompt": "x", "temperature": 1.0, "seed": 1, **binary}
    answer = client.post("/v1/completions", json={**body, "bad_words": ["Q"]}).json()
    assert answer["choices"][0]["text"] == "77777"
    with pytest.raises(RequestFailed, match="bad_words and structured_outputs: no token is left"):
        engine.generate("x", sampling=Sampling(**binary, bad_words=["7", "Q"]))
    assert engine.generate("x", sampling=FREE[0])[0].outputs[0].token_ids


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_that_are_all_barred_at_a_later_step_are_a_bad_request(engine, client, temperature):
    """By a word of two tokens, of which one is the only token that may come."""
    seven = client.post("/tokenize", json={"prompt": "77"}).json()["tokens"][-1]
    body = {"model": "law", "prompt": "x", "temperature": temperature, "max_tokens": 9}
    barred = {"allowed_token_ids": [seven], "bad_words": ["77"]}
    answer = client.post("/v1/completions", json={**body, **barred})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, 400, "allowed_token_ids")
    assert "after 1 tokens of the answer" in error["message"]
    assert client.post("/v1/completions", json={**body, **barred, "max_tokens": 1}).json()
    assert client.post("/v1/completions", json=body).status_code == 200
    settle(engine)


def test_a_bound_answer_has_the_same_bits_alone_and_preempted_in_a_crowd(engine):
    schema = {"json": drawn_schema(3)}
    one = bound(1, structured_outputs=schema, logprobs=2)
    (alone,) = engine.generate(["Answer: "], "law", one)
    long, before = {"regex": "[0-9]{90}"}, engine.stats().preemptions
    names = [*[None] * 5, "law", *["intent"] * 5]
    samplings = [*[bound(8, structured_outputs=long)] * 5, one]
    samplings += [bound(9, structured_outputs=long)] * 5
    with planned_together(engine, len(names)):
        crowd = engine.generate([*TEXTS, "Answer: ", *TEXTS], names, samplings)
    assert engine.stats().preemptions > before
    assert answer(crowd[5]) == answer(alone)
    assert all(
        re.fullmatch("[0-9]{90}", output.outputs[0].text) for output in [*crowd[:5], *crowd[6:]]
    )
    logprobs = alone.outputs[0].logprobs
    assert len(logprobs) == len(alone.outputs[0].token_ids)
    assert all(entry.logprob <= 0 for entry in logprobs)


def test_rows_keep_their_masks_when_a_stop_string_ends_a_neighbour(engine):
    """The next step is planned ahead, and must not hold a sequence that has no row any more."""
    letters = bound(1, structured_outputs={"regex": "[a-h]{60}"}, stop=["a"], max_tokens=40)
    digits = bound(1, structured_outputs={"regex": "[0-9]{60}"}, max_tokens=40)
    samplings = [dataclasses.replace(letters, seed=seed) for seed in range(4)]
    samplings += [dataclasses.replace(digits, seed=seed) for seed in range(2)]
    samplings += [FREE[0]]
    alone = [answer(engine.generate(["x"], None, one)[0]) for one in samplings]
    assert len({len(ids) for ((ids, *_),) in alone[:4]}) > 2  # they end in different steps
    assert [answer(one) for one in engine.generate(["x"] * 7, None, samplings)] == alone


@pytest.mark.parametrize(
    ("outputs", "pattern"),
    [
        ({"choice": ["yes", "no", "größe 🎉"]}, "yes|no|größe 🎉"),
        ({"regex": "[a-f]{3,6}[0-9]"}, "[a-f]{3,6}[0-9]"),
        ({"grammar": 'root ::= "(" root ")" | "x"'}, r"\(*x\)*"),
    ],
)
def test_the_other_kinds_bind_too(engine, outputs, pattern):
    samplings = [bound(seed, structured_outputs=outputs, max_tokens=60) for seed in range(6)]
    texts = [o.outputs[0] for o in engine.generate(["x "] * 6, "intent", samplings)]
    assert any(choice.finish_reason == "stop" for choice in texts)
    for choice in texts:
        if choice.finish_reason == "stop":
            assert re.fullmatch(pattern, choice.text)


def test_ends_are_where_the_grammar_or_the_request_has_them(engine):
    def run(**fields):
        (output,) = engine.generate(["x"], None, Sampling(temperature=0.0, **fields))
        return output.outputs[0]

    digits = {"regex": "[0-9]+"}
    cut = run(structured_outputs={"regex": "[a-z]{50}"}, max_tokens=3)
    assert (cut.finish_reason, len(cut.token_ids)) == ("length", 3)
    for fields in ({"min_tokens": 12}, {"ignore_eos": True}):
        longer = run(structured_outputs=digits, max_tokens=12, **fields)
        assert (longer.finish_reason, len(longer.token_ids)) == ("length", 12)
        assert longer.text.isdecimal()
        done = run(structured_outputs={"choice": ["ab"]}, max_tokens=12, **fields)
        assert (done.text, done.finish_reason) == ("ab", "stop")
    stopped = run(structured_outputs={"regex": "[a-c]{9}"}, max_tokens=30, stop=["b", "c", "a"])
    assert stopped.finish_reason == "stop"
    assert stopped.text == ""


def test_an_aborted_answer_leaves_nothing_behind(engine):
    seen = threading.Event()
    long = bound(1, structured_outputs={"regex": "[a-z]{300}"}, max_tokens=300)
    ids = engine.tokenizer.encode("x")
    request = engine.submit(ids, "law", long, on_output=lambda delta: seen.set())
    assert seen.wait(30)
    engine.abort(request)
    settle(engine)


def test_what_cannot_bind_is_refused_by_name_and_the_next_is_answered(engine):
    for outputs, named in (
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": chained_references(1500)}, "too large or too deeply nested"),
        ({"regex": "(?=a)b"}, "look-around"),
    ):
        with pytest.raises(ValueError, match=named):
            engine.generate(["x"], None, Sampling(structured_outputs=outputs))
        good = Sampling(structured_outputs={"choice": ["yes"]})
        assert engine.generate(["x"], None, good)[0].outputs[0].text == "yes"


def ask(client: httpx.Client, **fields):
    body = {"prompt": "x", "max_tokens": 200, "seed": 1, **fields}
    return client.post("/v1/completions", json=body, timeout=120)


def test_a_bomb_over_http_is_400_while_others_are_answered(engine, client, monkeypatch):
    answers, checked, may_end = [], [], threading.Event()
    check = engine.grammars._checker.check

    def late(outputs):
        checked.append(outputs)
        try:
            return check(outputs)
        finally:
            assert may_end.wait(120)

    monkeypatch.setattr(engine.grammars._checker, "check", late)
    monkeypatch.setattr(engine.grammars._checker, "_limit_s", 1.0)
    bomb = {"structured_outputs": {"json": crossed_patterns(30)}}
    thread = threading.Thread(target=lambda: answers.append(ask(client, **bomb)))
    thread.start()
    wait_until(lambda: checked)
    assert ask(client, max_tokens=4).status_code == 200  # plain ones do not wait
    assert not answers
    may_end.set()
    thread.join()
    assert answers[0].status_code == 400
    # Time or memory, whichever ends first on this machine.
    assert re.search("takes longer|too large", answers[0].json()["error"]["message"])
    assert ask(client, **bomb).status_code == 400
    assert len(checked) == 1  # remembered
    fine = ask(client, structured_outputs={"choice": ["fine"]}).json()["choices"][0]
    assert fine["text"] == "fine"


def test_a_stream_adds_up_to_the_answer(client):
    schema = drawn_schema(5)
    fields = {"structured_outputs": {"json": schema}, "logprobs": 2, "model": "intent"}
    whole = ask(client, **fields).json()["choices"][0]
    pieces = []
    body = {"prompt": "x", "max_tokens": 200, "seed": 1, "stream": True, **fields}
    with client.stream("POST", "/v1/completions", json=body, timeout=120) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                pieces.append(json.loads(line[6:])["choices"][0])
    assert "".join(piece["text"] for piece in pieces) == whole["text"]
    assert pieces[-1]["finish_reason"] == whole["finish_reason"] == "stop"
    jsonschema.validate(json.loads(whole["text"]), schema)
    assert all(value > -9999 for value in whole["logprobs"]["token_logprobs"])


def test_many_at_once_are_bounded(engine, monkeypatch):
    monkeypatch.setattr(engine.grammars, "_max_waiting", 0)
    with pytest.raises(QueueFull):
        engine.grammars.compile(
            dataclasses.replace(bound(1), structured_outputs={"regex": "new"}).structured_outputs
        )


def chat(client, **fields):
    history = [
        {"role": "user", "content": "Play"},
        {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "play"}}]},
        {"role": "tool", "tool_call_id": "c", "content": "done"},
    ]
    body = {"messages": history, "tools": TOOLS, "seed": 3, "max_tokens": 150, **fields}
    return client.post("/v1/chat/completions", json=body, timeout=120)


def test_a_demanded_call_comes_whole_and_in_pieces(client):
    for choice, reason in (("required", "tool_calls"), ({"function": {"name": "stop"}}, "stop")):
        fields = {"tool_choice": choice, "parallel_tool_calls": False}
        whole = chat(client, **fields).json()["choices"][0]
        (call,) = whole["message"]["tool_calls"]
        assert check_call(call) in (("play", "stop") if choice == "required" else ("stop",))
        assert (whole["finish_reason"], whole["message"]["content"]) == (reason, None)
        lines = chat(client, stream=True, **fields).text.splitlines()
        chunks = [json.loads(line[6:])["choices"][0] for line in lines if line[:7] == "data: {"]
        deltas = [d for chunk in chunks for d in chunk["delta"].get("tool_calls", ())]
        text = "".join(delta["function"].get("arguments", "") for delta in deltas)
        assert deltas[0]["function"]["name"] == call["function"]["name"]
        assert text == call["function"]["arguments"]
        assert chunks[-1]["finish_reason"] == reason
        assert all(not chunk["delta"].get("content") for chunk in chunks)


def test_drafts_of_bound_rows_change_no_bit(engine, monkeypatch):
    """A mask follows each draft, so answers under a schema have those of speculation too."""
    ngram = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
    item = {"type": "object", "properties": {"city": {"enum": ["Berlin", "Paris"]}}}
    item |= {"required": ["city"], "additionalProperties": False}
    schema = {"type": "array", "items": item, "minItems": 4, "maxItems": 6}
    counted = {"grammar": 'start: (some "!")+ "."\nsome[max_tokens=5]: /([ab]c)+/'}
    outputs = {"json": schema}, {"regex": "([ab]c)+[.]"}, None, {"json": schema}, counted, None
    samplings = [
        bound(i, structured_outputs=outputs[i], min_tokens=12 * (i % 2), logprobs=i % 3)
        for i in range(6)
    ]
    samplings = [dataclasses.replace(one, max_tokens=120) for one in samplings]
    names = [None, None, "law"] * 2
    adapters = {"law": ADAPTERS["law"]}
    sizes = SIZES | {"max_esft_adapters": 0, "speculative_config": ngram}
    with Engine(str(MODEL), adapters, **sizes) as drafting:
        send_all_drafts(drafting)
        with ThreadPoolExecutor(1) as pool:  # both engines of the process have bound rows
            other = pool.submit(engine.generate, TEXTS[:3] * 2, names, samplings)
            got = [drafting.generate(TEXTS[:3], names[:3], samplings[i : i + 3]) for i in (0, 3)]
            want = other.result()
        assert num_drafts(drafting)[2] > 20
        assert drafting.stats().compilations_after_warmup == 0
        assert [answer(one) for few in got for one in few] == [answer(one) for one in want]
        fail_while_a_step_waits(drafting, monkeypatch)


def fail_while_a_step_waits(engine, monkeypatch):
    """Have the loop fail before it posts the masks of a step that is out."""
    monkeypatch.setattr(engine._loop._parts.runner.board, "_users", DeviceUsers())
    monkeypatch.setattr(engine.grammars.masks, "post", None)
    began = time.monotonic()
    with patience(240):
        with pytest.raises(RequestFailed, match="engine has stopped"):
            engine.generate("x", sampling=bound(1, structured_outputs={"regex": "[0-9]{9}"}))
        engine.close()
    assert time.monotonic() - began < 120  # no step has waited to the end
