"""Images through the whole engine: answers of transformers, and bits that nothing changes."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from support.cases.engine_cases import planned_together, settle
from support.cases.head_cases import write_head
from support.cases.image_parts import PICTURES, WRONG, part, sent
from support.cases.tiny_vision import (
    HOLDER,
    IMAGE_ID,
    picture,
    png,
    write_qwen3_vl,
    write_vision_adapter,
)
from support.processes.http_server import client_of

from lora_jax.vision.processor import preprocess, read_settings
from serving import Engine, Sampling
from serving.api.images import EncodeImage
from serving.engine.images.decode import ImageError
from serving.engine.images.sources import MediaPolicy
from serving.http.app import create_app
from serving.http.settings import HttpSettings
from serving.steps.device_stopwatch import DeviceStopwatch

FIELDS = {
    "structured_outputs": False,
    "max_num_seqs": 4,
    "block_size": 4,
    "max_loras": 6,
    "max_lora_rank": 8,
}
ASKED = Sampling(max_tokens=6, temperature=0, logprobs=3, ignore_eos=True)
PROMPT = f"look: {HOLDER} and {HOLDER} what?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("vision") / "tiny"


@pytest.fixture(scope="module")
def oracle(folder: Path):
    return write_qwen3_vl(folder)


@pytest.fixture(scope="module")
def adapters(folder: Path) -> dict[str, Path]:
    made = {"text": folder.parent / "text", "tower": folder.parent / "tower"}
    for seed, (name, path) in enumerate(made.items(), 1):
        write_vision_adapter(path, seed, tower=name == "tower")
    return made


@pytest.fixture(scope="module")
def engine(folder: Path, oracle, adapters) -> Iterator[Engine]:
    sizes = {"max_num_batched_tokens": 32, "max_lora_cls_labels": 3}
    with Engine(folder, adapters, **sizes, **FIELDS) as engine:
        yield engine
        settle(engine)
        assert engine.stats().compilations_after_warmup == 0


def bits(output) -> tuple:
    """What must never change: tokens and their log-probabilities."""
    (choice,) = output.outputs
    return tuple(choice.token_ids), tuple(
        (p.logprob, tuple(p.top.items())) for p in choice.logprobs
    )


def ask(engine: Engine, images, prompt: str = PROMPT, adapter=None) -> tuple:
    (output,) = engine.generate([prompt], adapter, ASKED, images=[images])
    return bits(output)


def test_answers_are_those_of_transformers(engine: Engine, oracle, folder: Path):
    images = PICTURES[:2]
    settings = read_settings(folder, engine._parts.loop._parts.runner.encoder._tower_config)
    made = [preprocess(image, settings) for image in images]
    ids, _ = engine.images.expand(
        engine.tokenizer.encode(PROMPT), [engine.images.prepare(image) for image in images]
    )
    tokens = torch.tensor([ids])
    with torch.no_grad():
        out = oracle.generate(
            input_ids=tokens,
            mm_token_type_ids=(tokens == IMAGE_ID).int(),
            attention_mask=torch.ones_like(tokens),
            pixel_values=torch.cat([torch.from_numpy(p.normalised(settings)) for p in made]),
            image_grid_thw=torch.tensor([[1, *p.grid] for p in made]),
            max_new_tokens=6,
            min_new_tokens=6,
            do_sample=False,
            suppress_tokens=None,
        )
    got = ask(engine, images)[0]
    assert list(got) == out[0, len(ids) :].tolist()


@pytest.mark.long  # test_feature_pairs.py has adapters of the language model
def test_two_devices_answer_with_the_bits_of_one(engine: Engine, folder: Path, adapters):
    """Each has the whole tower, whose adapters lie whole on each too."""
    sizes = {"max_num_batched_tokens": 32, "max_lora_cls_labels": 3, "tensor_parallel_size": 2}
    names = [None, "text", "tower"]
    with Engine(folder, adapters, **sizes, **FIELDS) as two:
        answers = [ask(two, PICTURES[:2], adapter=name) for name in names]
        assert answers == [ask(engine, PICTURES[:2], adapter=name) for name in names]
        assert len(set(answers)) == len(names)
        images = [PICTURES[:2], PICTURES[1:3], PICTURES[:2]]
        together = two.generate([PROMPT] * 3, names, ASKED, images=images)
        alone = two.generate([PROMPT], ["text"], ASKED, images=[PICTURES[1:3]])
        assert [bits(together[0]), bits(together[2])] == [answers[0], answers[2]]
        assert bits(together[1]) == bits(alone[0])
        assert two.stats().compilations_after_warmup == 0
        settle(two)


def test_a_task_head_reads_what_images_say(engine: Engine, oracle, tmp_path: Path):
    """Its weights are rows of the LM head: so its logits differ as the log-probabilities do."""
    (output,) = engine.generate([PROMPT], None, ASKED, images=[PICTURES[:2]])
    top = output.outputs[0].logprobs[0].top
    weight = oracle.lm_head.weight.detach().float().numpy()[list(top)]
    write_head(tmp_path / "head", [str(token) for token in top], weight)
    engine.load_adapter("head", tmp_path / "head")
    (got,) = engine.classify([PROMPT], "head", images=[PICTURES[:2]])
    logits, want = np.array(got.outputs.logits), np.array(list(top.values()))
    np.testing.assert_allclose(logits - logits[0], want - want[0], atol=1e-4)
    assert got.label == str(output.outputs[0].token_ids[0])
    (other,) = engine.classify([PROMPT], "head", images=[PICTURES[1:3]])
    assert other.outputs.logits != got.outputs.logits
    # Once more: all but the last token is known, and the page of that token may be written again.
    asked, longer = [PICTURES[:2], PICTURES[:2], PICTURES[1:3]], PROMPT + " of it"
    first = [engine.classify([longer], "head", images=[images])[0] for images in asked[1:]]
    again = engine.classify([longer] * 3, "head", images=asked)
    assert [a.outputs.logits for a in again] == [first[i].outputs.logits for i in (0, 0, 1)]
    assert len(again[0].prompt_ids) % FIELDS["block_size"] == 3
    left = [len(one.prompt_ids) - one.num_cached_tokens for one in again]
    assert (left[0], left[2]) == (1, 1)  # the second waits for the first's page, or computes more
    engine.unload_adapter("head")


def test_images_change_the_answer_and_their_order_does(engine: Engine):
    answers = {ask(engine, [PICTURES[a], PICTURES[b]]) for a, b in ((0, 1), (1, 0), (0, 0))}
    assert len(answers) == 3


def test_batch_caches_and_forms_keep_the_bits(engine: Engine):
    want = ask(engine, PICTURES[1:3])
    before = engine.stats()
    again = ask(engine, [png(PICTURES[1]), png(PICTURES[2], "WEBP", lossless=True)])
    after = engine.stats()
    assert again == want
    assert after.prefix_hits > before.prefix_hits
    prompts = [PROMPT, "only words", f"{HOLDER} one", PROMPT, PROMPT]
    images = [PICTURES[1:3], [], PICTURES[:1], PICTURES[1:3], PICTURES[1:3]]
    adapters = [None, None, "text", "tower", "text"]
    outputs = engine.generate(prompts, adapters, ASKED, images=images)
    assert bits(outputs[0]) == want
    assert len({want, bits(outputs[3]), bits(outputs[4])}) == 3, "each adapter sees its own way"
    assert bits(outputs[4]) == ask(engine, PICTURES[1:3], adapter="text")
    assert bits(outputs[2]) == ask(engine, PICTURES[:1], f"{HOLDER} one", "text")
    assert bits(outputs[3]) == ask(engine, PICTURES[1:3], adapter="tower")


def test_small_images_of_several_adapters_have_in_one_program_the_rows_that_each_has_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    ask(engine, PICTURES[:2], adapter="tower")  # then it is in a slot
    runner = engine._parts.loop._parts.runner
    monkeypatch.setattr(runner.encoder, "stopwatch", DeviceStopwatch())  # metrics count requests'
    encoder, kept = runner.encoder, jnp.copy(runner.encoder.operands.rows)
    images = [engine.images.prepare(picture(40, 24, n)) for n in range(7)]
    works = [
        EncodeImage(image, tuple(range(15 * n, 15 * n + 15)), slot)
        for n, (image, slot) in enumerate(zip(images, range(-1, 6), strict=True))
    ]

    def rows(groups) -> np.ndarray:
        for group in groups:
            encoder.encode(group, runner._plain_slots)
        return np.asarray(encoder.operands.rows)[: 15 * len(works)].copy()

    together, alone = rows([works]), rows([work] for work in works)
    base = rows([dataclasses.replace(work, slot=-1)] for work in works)
    encoder.operands = encoder.operands._replace(rows=kept)
    np.testing.assert_array_equal(together, alone)
    changed = (together != base).reshape(len(works), -1).any(1)
    assert changed.sum() == 1, "the one adapter of the tower changes the image of its slot"


def test_sums_of_adapters_change_the_tower_like_their_parts(engine: Engine):
    """A sum of one is that adapter; a sum with the tower's adapter has its own rows."""
    want = ask(engine, PICTURES[:2], adapter="tower")
    assert ask(engine, PICTURES[:2], adapter={"tower": 1.0})[0] == want[0]
    hits = engine.stats().image_stats.hits
    other = ask(engine, PICTURES[:2], adapter={"tower": 0.25, "text": 0.5})
    assert engine.stats().image_stats.hits == hits
    assert other not in (want, ask(engine, PICTURES[:2], adapter="text"))


def test_rows_of_an_image_are_found_again_under_other_words(engine: Engine):
    image = [picture(48, 48, 9)]
    ask(engine, image, f"first {HOLDER}")
    hits = engine.stats().image_stats.hits
    ask(engine, image, f"second, other words {HOLDER}")
    assert engine.stats().image_stats.hits == hits + 1
    ask(engine, image, f"first {HOLDER}", "text")  # the tower has no part in this adapter
    assert engine.stats().image_stats.hits == hits + 2
    ask(engine, image, f"first {HOLDER}", "tower")
    assert engine.stats().image_stats.hits == hits + 2


@pytest.mark.long  # the models' tests cut prompts at every token
@pytest.mark.parametrize("step", [1, 3])
def test_steps_that_cut_an_image_anywhere_keep_the_bits(engine: Engine, folder: Path, step: int):
    want = [ask(engine, PICTURES[:2]), ask(engine, PICTURES[:2], adapter="tower")]
    fields = {**FIELDS, "max_num_seqs": 1, "enable_prefix_caching": False}
    adapters = {"tower": folder.parent / "tower"}
    with Engine(folder, adapters, max_num_batched_tokens=step, **fields) as small:
        got = [ask(small, PICTURES[:2]), ask(small, PICTURES[:2], adapter="tower")]
    assert got == want


@pytest.mark.long
def test_preempted_and_starved_of_rows_keep_the_bits(engine: Engine, folder: Path):
    """Pages for one and a half sequences, encoder rows for one."""
    prompts = [f"{HOLDER} {word}" for word in ("one", "two", "six")]
    images = [[image] for image in PICTURES]
    asked = Sampling(max_tokens=32, temperature=0, logprobs=1, ignore_eos=True)
    want = [
        bits(engine.generate([p], None, asked, images=[i])[0])
        for p, i in zip(prompts, images, strict=True)
    ]
    per_token = 3 * 2 * 2 * 16 * 4
    fields = {
        **FIELDS,
        "kv_cache_memory_bytes": 4 * per_token * 26,
        "encoder_cache_tokens": 64,
        "max_model_len": 104,
        "enable_prefix_caching": False,
    }
    with Engine(folder, max_num_batched_tokens=16, **fields) as small:
        with planned_together(small, len(prompts)):
            outputs = small.generate(prompts, None, asked, images=images)
        assert [bits(output) for output in outputs] == want
        assert small.stats().preemptions > 0
        settle(small)


@pytest.mark.long
def test_text_is_answered_as_by_the_language_model_alone(engine: Engine, folder: Path):
    """Bit for bit by an engine that has no tower, whose step knows nothing of images."""
    texts = ["hello there", "what is this?"]
    want = [bits(output) for output in engine.generate(texts, None, ASKED)]
    with Engine(folder, language_model_only=True, max_num_batched_tokens=64, **FIELDS) as plain:
        assert [bits(output) for output in plain.generate(texts, None, ASKED)] == want
        with pytest.raises(ValueError, match="text only"):
            plain.generate([PROMPT], None, ASKED, images=[PICTURES[:2]])


REFUSED = {
    "no placeholder": ("words", PICTURES[:1], "has 0 image placeholder"),
    "too few": (PROMPT, PICTURES[:1], "for 1 image"),
    "no image": (PROMPT, [], "where no image is"),
    "too many": (HOLDER * 9, [PICTURES[0]] * 9, "At most 8 image"),
    "narrow": (HOLDER, [picture(1, 300)], "too narrow"),
    "no picture": (HOLDER, [b"GIF89a"], "damaged|not one of"),
    "floats": (HOLDER, [PICTURES[0].astype("f4")], "uint8"),
    "rows": (HOLDER * 5, [picture(64, 64, n) for n in range(5)], "exceeds model's maximum"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(engine: Engine, case: str):
    prompt, images, message = REFUSED[case]
    with pytest.raises((ValueError, ImageError), match=message):
        ask(engine, images, prompt)
    assert ask(engine, PICTURES[:1], f"{HOLDER} one")


@pytest.fixture(scope="module")
def client(engine: Engine, folder: Path) -> Iterator[httpx.Client]:
    pictures = folder.parent / "pictures"
    pictures.mkdir()
    (pictures / "one.png").write_bytes(png(PICTURES[0]))
    settings = HttpSettings(media=MediaPolicy(local_path=str(pictures)))
    with client_of(create_app(engine, settings)) as client:
        yield client


def chat(client: httpx.Client, *parts: dict[str, Any], **more: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": list(parts)}], "temperature": 0}
    return client.post("/v1/chat/completions", json=body | {"max_tokens": 6} | more)


TEXT_PART = {"type": "text", "text": "what?"}


def test_a_chat_with_images_is_the_engine_s_answer(client: httpx.Client, engine: Engine):
    images = PICTURES[:2]
    answer = chat(client, part(images[0]), TEXT_PART, part(images[1]), add_special_tokens=False)
    assert answer.status_code == 200, answer.text
    prompt = f"user: {HOLDER}what?{HOLDER}"
    asked = Sampling(max_tokens=6, temperature=0)
    ids = engine.tokenizer.encode(prompt, add_special_tokens=False)
    (want,) = engine.generate([ids], None, asked, images=[images])
    assert answer.json()["choices"][0]["message"]["content"] == want.outputs[0].text
    usage = answer.json()["usage"]
    assert usage["prompt_tokens"] == len(want.prompt_token_ids)


def test_a_chat_in_python_is_the_chat_over_http(client: httpx.Client, engine: Engine):
    parts = [{"type": "image", "image": PICTURES[0]}, TEXT_PART]
    asked = Sampling(max_tokens=6, temperature=0)
    (output,) = engine.chat([{"role": "user", "content": parts}], sampling=asked)
    answer = chat(client, part(PICTURES[0]), TEXT_PART).json()["choices"][0]["message"]
    assert answer["content"] == output.outputs[0].text


def test_adapters_and_streams_take_images(client: httpx.Client):
    whole = chat(client, part(PICTURES[2]), TEXT_PART, model="tower").json()
    other = chat(client, part(PICTURES[2]), TEXT_PART).json()
    text = whole["choices"][0]["message"]["content"]
    assert text != other["choices"][0]["message"]["content"]
    stream = chat(client, part(PICTURES[2]), TEXT_PART, model="tower", stream=True)
    assert stream.status_code == 200
    assert stream.text.count("data: ") > 2


def test_files_of_the_folder_and_tokens_of_messages(client: httpx.Client, folder: Path):
    url = f"file://{folder.parent}/pictures/one.png"
    mine = {"type": "image_url", "image_url": {"url": url}}
    same = chat(client, part(PICTURES[0])).json()["choices"]
    assert chat(client, mine).json()["choices"] == same
    messages = [{"role": "user", "content": [part(PICTURES[0])]}]
    told = client.post("/tokenize", json={"messages": messages}).json()
    assert told["tokens"].count(IMAGE_ID) == 15  # 40 x 24 pixels in cells of 8 x 8


@pytest.mark.parametrize("case", WRONG)
def test_bad_parts_have_their_status_and_the_next_request_works(client: httpx.Client, case: str):
    wrong, status = WRONG[case]
    answer = chat(client, wrong, TEXT_PART)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == "messages"
    assert "passwd" not in answer.text
    assert chat(client, part(PICTURES[0])).status_code == 200


def test_the_bytes_say_the_format_and_not_the_label(client: httpx.Client):
    data = png(PICTURES[0], "JPEG")
    texts = [
        chat(client, sent(data, kind), TEXT_PART).json()["choices"][0]["message"]["content"]
        for kind in ("jpeg", "png")
    ]
    assert texts[0] == texts[1]


def test_placeholders_without_images_and_too_many_images_are_refused(client: httpx.Client):
    answer = client.post("/v1/completions", json={"prompt": HOLDER, "max_tokens": 1})
    assert (answer.status_code, "where no image is" in answer.text) == (400, True)
    answer = chat(client, *[part(PICTURES[0])] * 9)
    assert "At most 8 image(s) may be provided in one prompt." in answer.text
    assert answer.status_code == 400
    hundred = chat(client, *[part(picture(8, 8))] * 100)
    assert hundred.status_code == 400


def test_metrics_count_images(client: httpx.Client, engine: Engine):
    stats = engine.stats().image_stats
    text = client.get("/metrics").text
    found = {
        line.split("{")[0]: line.split()[-1] for line in text.splitlines() if "mm_cache" in line
    }
    assert float(found["vllm:mm_cache_queries_total"]) == stats.queries > stats.hits > 0
    assert float(found["vllm:mm_cache_hits_total"]) == stats.hits
    engine._parts.loop._parts.runner.encoder.stopwatch.settle()
    text = client.get("/metrics").text
    tower = {
        line.split()[0]: float(line.split()[1])
        for line in text.splitlines()
        if line.startswith("lora_jax:tower")
    }
    assert tower["lora_jax:tower_images_total"] == stats.queries - stats.hits
    assert tower["lora_jax:tower_seconds_total"] > 0
