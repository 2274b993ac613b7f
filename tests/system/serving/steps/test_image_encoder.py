"""The encoder's cache and table: the tower's rows where they were asked for, positions by row."""

import dataclasses

import jax
import numpy as np
import pytest
from support.cases.tiny_qwen3_vl import ROPE, VISION
from support.cases.tiny_vision import picture
from support.drivers.model_driver import random_model
from support.drivers.vision_driver import IMAGE, QWEN_TEXT, Tower

from lora_jax.vision.processor import ProcessorSettings, preprocess
from lora_jax.vision.rope_positions import rope_positions
from serving.api.images import EncodeImage, PreparedImage, PromptImage
from serving.api.request import Request, Sequence
from serving.api.sampling import Sampling
from serving.steps.image_encoder import ENCODER_ROW, POSITIONS, ImageEncoder, TowerWork

RAW = {
    "model_type": "qwen3_vl",
    "text_config": {**QWEN_TEXT, "rms_norm_eps": 1e-6, "rope_parameters": ROPE},
    "vision_config": VISION,
    "image_token_id": IMAGE,
}
HALF = (0.5, 0.5, 0.5)
# Images of 4 to 64 patches in the smallest program; narrow ones have more than `max_pixels` says.
SETTINGS = ProcessorSettings("qwen3_vl", 4, 2, 2, 64, 1024, 0, HALF, HALF)
NUM_ROWS = 40


@pytest.fixture(scope="module")
def made():
    model, config = random_model(RAW)
    oracle = Tower(model, config, SETTINGS)
    encoder = make_encoder(model, config, SETTINGS)
    encoder.start(3, 64, jax.devices()[0])
    encoder.warm_up(None)
    return encoder, oracle, config, model


def make_encoder(model, config, settings) -> ImageEncoder:
    sizes = {"num_rows": NUM_ROWS, "max_image_tokens": 30, "max_rank": 4}
    return ImageEncoder(model.tower, config, settings, model.module_names, **sizes)


def prepared(height: int, width: int, seed: int = 0) -> PreparedImage:
    patches = preprocess(picture(height, width, seed), SETTINGS)
    return PreparedImage(patches, patches.grid, patches.grid[0] * patches.grid[1] // 4, b"")


@pytest.mark.as_shipped
def test_an_image_s_rows_are_where_they_were_asked_for_and_no_others_change(made):
    encoder, oracle, *_ = made
    image = prepared(24, 40)
    where = tuple(range(38, 38 - image.num_tokens, -1))
    before = np.asarray(encoder.operands.rows)
    assert encoder.stopwatch.count == 0  # warming up is not counted
    encoder.encode([EncodeImage(image, where, -1)], None)
    after = np.asarray(encoder.operands.rows)
    encoder.stopwatch.settle()
    assert (encoder.stopwatch.count, encoder.stopwatch.seconds > 0) == (1, True)
    np.testing.assert_array_equal(after[list(where)], oracle(image.patches))
    others = [row for row in range(NUM_ROWS) if row not in where]
    np.testing.assert_array_equal(after[others], before[others])


@pytest.mark.as_shipped
@pytest.mark.parametrize("count", [4, 5, 8, 9])
def test_several_small_images_have_the_rows_that_each_has_alone(made, count, monkeypatch):
    """Their grid does not fill the bucket; one of another grid runs apart."""
    encoder, oracle, *_ = made
    images = [prepared(16 - 8 * (n == 1), 16, seed=n) for n in range(count)]
    works = [
        EncodeImage(image, tuple(range(4 * n, 4 * n + image.num_tokens)), -1)
        for n, image in enumerate(images)
    ]
    sizes, run = [], encoder._run
    monkeypatch.setattr(
        encoder, "_run", lambda group, *rest: (sizes.append(len(group)), run(group, *rest))[1]
    )
    encoder.encode(works, None)
    rows = np.asarray(encoder.operands.rows)
    for work in works:
        np.testing.assert_array_equal(rows[list(work.rows)], oracle(work.image.patches))
    assert sorted(sizes) == {4: [1, 1, 1, 1], 5: [1, 4], 8: [1, 7], 9: [1, 8]}[count]


def test_on_a_gpu_an_image_without_an_adapter_takes_a_program_without_any(made, monkeypatch):
    """There a map and what follows it are one launch, and adapters come between them."""
    encoder, *_ = made
    image, slots = prepared(16, 24), {"pool": np.zeros(1)}
    for plain, counts in ((False, [1, 1]), (True, [0, 1])):
        monkeypatch.setattr(encoder, "_has_plain", plain)
        works = ([TowerWork(image.patches, (), slot)] for slot in (-1, 0))
        given = (encoder._arguments(work, 64, 1, slots) for work in works)
        assert [len(adapters) for _, _, _, adapters, *_ in given] == counts


def test_buckets_end_with_the_largest_image(made):
    encoder, oracle, config, model = made
    assert encoder.buckets == (64, 256)
    smaller = dataclasses.replace(SETTINGS, max_pixels=64)
    assert make_encoder(model, config, smaller).buckets == (64,)
    narrow = prepared(8, 160)
    assert narrow.num_tokens * 64 > SETTINGS.max_pixels
    rows = tuple(range(narrow.num_tokens))
    encoder.encode([EncodeImage(narrow, rows, -1)], None)
    written = np.asarray(encoder.operands.rows)[list(rows)]
    np.testing.assert_array_equal(written, oracle(narrow.patches))


def test_an_admitted_sequence_has_rows_and_positions(made):
    encoder, _, config, _ = made
    image = prepared(16, 24)
    placed = PromptImage(image, 2, b"k")
    request = Request(
        request_id="r",
        prompt_ids=tuple(range(12)),
        sampling=Sampling(),
        adapter=None,
        adapter_digest="",
        on_output=lambda delta: None,
        arrival_s=0.0,
        deadline_s=0.0,
        images=(placed,),
    )
    sequence = Sequence(request=request, index=0, seed=0, token_ids=list(range(12)), row=1)
    sequence.image_rows = [(9, 8, 7, 6, 5, 4)]
    encoder.admit(sequence)
    places = np.asarray(encoder.operands.places)
    assert places[1, ENCODER_ROW, :10].tolist() == [-1, -1, 9, 8, 7, 6, 5, 4, -1, -1]
    want = rope_positions(config.tower, True, [(2, image.grid)], 64)
    np.testing.assert_array_equal(places[1, POSITIONS], want)
    assert (places[0] == -1).all()
    sequence.image_rows = [()]  # its tokens are in the prefix cache
    encoder.admit(sequence)
    assert (np.asarray(encoder.operands.places)[1, ENCODER_ROW] == -1).all()
    before = encoder.operands.places
    encoder.admit(sequence)  # as the one before in the same row
    assert encoder.operands.places is before
    sequence.row = 2
    encoder.admit(sequence)
    np.testing.assert_array_equal(np.asarray(encoder.operands.places)[2, POSITIONS], want)
