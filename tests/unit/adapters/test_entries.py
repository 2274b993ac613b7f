"""Registry entries whose weights have left the host."""

from support.cases import adapter_cases as cases

from lora_jax.adapters.registry import AdapterRegistry


def test_an_evicted_entry_keeps_all_but_its_weights(tmp_path):
    cases.write_adapter(tmp_path / "sql", cases.dense_tensors())
    entry = AdapterRegistry(cases.llama(), lora_dir=tmp_path).load("sql", "sql")
    left = entry.evicted(9)
    assert (left.name, left.digest, left.folder) == ("sql", entry.digest, entry.folder)
    assert (left.report, left.generation, left.confined) == (entry.report, 9, True)
    assert not hasattr(left, "weights")
    assert not left.pinned
