"""A model written as a checkpoint is read back with the same weights."""

import jax
import numpy as np
from flax import nnx

from lora_jax.finetune.pictures import checkpoint
from lora_jax.models import load
from lora_jax.strict_json import loads


def test_a_model_is_read_back(picture_base, picture_folder, tmp_path):
    raw = loads((picture_folder / "config.json").read_text())
    checkpoint.save_model(picture_base.model, raw, tmp_path)
    again, _ = load(tmp_path, dtype="float32")
    want, got = (jax.tree.leaves(nnx.state(m)) for m in (picture_base.model, again))
    assert len(want) == len(got)
    for a, b in zip(want, got, strict=True):
        np.testing.assert_array_equal(a, b)


def test_tokens_of_images_come_last(tmp_path):
    texts = [f"word{n} other{n * 7}" for n in range(200)]
    first = checkpoint.save_tokenizer(texts, 266, tmp_path, 64)
    from lora_jax.finetune.documents import read_format

    form = read_format(tmp_path)
    found = [form.tokenizer.token_to_id(t) for t in (checkpoint.START, checkpoint.PAD)]
    assert (first, found) == (263, [263, 265])
    document = form.exchange([{"type": "image"}, {"type": "text", "text": "word1?"}], "yes")
    assert document.tokens.count(265) == 1
