"""Several adapters in one model give, bit by bit, what each merged checkpoint gives."""

import numpy as np
import pytest
from support.cases.finetune_cases import RECORDS, make_esft, make_folder

from lora_jax.adapters.formats import esft_format
from lora_jax.finetune.assets.served import ServedEvaluator
from lora_jax.finetune.documents import read_format
from lora_jax.finetune.esft_export import merge_checkpoint
from lora_jax.finetune.multi_esft import MultiEsftModel
from lora_jax.models import load

# Not every layer, not every expert, and different numbers of both.
SELECTIONS = {"a": {0: (3, 1), 1: (2,)}, "b": {1: (0, 2, 3)}, "c": {0: (1,)}}
LENGTH = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    base = make_folder(tmp_path_factory.mktemp("base") / "tiny", scale=5.0)
    for seed, (name, selection) in enumerate(SELECTIONS.items()):
        make_esft(base, name, selection, seed)
    return base


@pytest.mark.long
def test_each_adapter_in_the_woven_model_equals_its_merged_checkpoint(folder, tmp_path):
    model, config = load(folder, dtype="float32")
    documents = read_format(folder).documents(RECORDS, "chat")
    alone = ServedEvaluator(model, LENGTH)
    plain = alone.measure(documents)
    catalogue = model.catalogue(config)
    adapters = [esft_format.read(folder / "esft" / n, catalogue) for n in SELECTIONS]
    multi_esft = MultiEsftModel(model, adapters)
    evaluator = ServedEvaluator(model, LENGTH)
    try:
        base = evaluator.measure(documents, -1, multi_esft.reroute_tables)
        own = [evaluator.measure(documents, slot, multi_esft.reroute_tables) for slot in range(3)]
    finally:
        del model, evaluator
        multi_esft.close()
    assert base.text.nats == plain.text.nats
    for name, found in zip(SELECTIONS, own, strict=True):
        merge_checkpoint(folder, folder / "esft" / name, tmp_path / name)
        merged, _ = load(tmp_path / name, dtype="float32")
        want = alone.with_weights_of(merged).measure(documents)
        assert found.text.nats == want.text.nats
        assert found.answer.nats == want.answer.nats
        assert found.text.nats != pytest.approx(plain.text.nats, rel=1e-3)


def test_tables_send_replaced_experts_behind_the_bases_and_no_others(folder):
    model, config = load(folder, dtype="float32")
    catalogue = model.catalogue(config)
    adapters = [esft_format.read(folder / "esft" / n, catalogue) for n in SELECTIONS]
    multi_esft = MultiEsftModel(model, adapters)
    tables = multi_esft.reroute_tables
    del model
    multi_esft.close()
    assert tables.shape == (2, 3, 4)
    for layer in range(2):
        moved = []
        for slot, selection in enumerate(SELECTIONS.values()):
            chosen = sorted(selection.get(layer, ()))
            kept = [e for e in range(4) if e not in chosen]
            np.testing.assert_array_equal(tables[layer, slot, kept], kept)
            moved += tables[layer, slot, chosen].tolist()
        assert sorted(moved) == list(range(4, 4 + len(moved)))


def test_nothing_to_weave_is_refused(folder):
    with pytest.raises(ValueError, match="there is no adapter"):
        MultiEsftModel(load(folder, dtype="float32")[0], [])
