"""One of several instances that is started anew serves the files of the others, or no others."""

from types import SimpleNamespace

import pytest
from support.cases import adapter_cases
from support.cases.registry_cases import registry, write_root

from lora_jax.adapters.registry_errors import AdapterRejected
from serving.adapters.given_files import check_same, digests_of, refuse_changed


class Registry:
    """Names with digests, and why some are refused."""

    def __init__(self, **digests):
        self.digests, self.refused = digests, {}

    def known(self):
        return [SimpleNamespace(name=n, digest=d) for n, d in self.digests.items()]

    def unload(self, name):
        del self.digests[name]

    def refuse(self, name, why):
        self.refused[name] = why


def test_changed_files_are_refused_by_name_and_others_are_served(caplog):
    registry = Registry(law="aa", sql="bb", chat="cc")
    paths = {"law": "adapters/law", "sql": "adapters/sql", "gone": "x"}
    refuse_changed(registry, {"law": "aa", "sql": "dd", "gone": "ee"}, paths)
    assert registry.digests == {"law": "aa", "chat": "cc"}
    assert list(registry.refused) == ["sql"]
    assert "'sql': its files have changed" in registry.refused["sql"]
    assert "adapters/sql" not in registry.refused["sql"]  # which clients read
    assert "adapters/sql" in caplog.text


def test_digests_are_those_of_the_names_asked_for():
    assert digests_of(Registry(law="aa", sql="bb"), ["law", "gone"]) == {"law": "aa"}


def test_instances_that_have_read_different_files_do_not_start():
    check_same([{"law": "aa", "sql": "bb"}, {"law": "aa"}, {}])
    with pytest.raises(ConnectionError, match="Adapter 'sql': its files have changed while"):
        check_same([{"law": "aa", "sql": "bb"}, {"law": "aa", "sql": "cc"}])


def test_an_overwritten_folder_answers_to_nobody_until_it_is_loaded_again(tmp_path):
    """The registry is that of an instance which was started anew."""
    root = write_root(tmp_path)
    paths = {"sql": str(root / "sql"), "law": str(root / "law")}
    first = registry(root)
    first.load_all(paths)
    wanted = digests_of(first, paths)
    adapter_cases.write_adapter(root / "sql", adapter_cases.dense_tensors(seed=5))
    again = registry(root)
    again.load_all(paths)
    refuse_changed(again, wanted, paths)
    with pytest.raises(AdapterRejected, match=r"'sql': its files have changed since it was loaded"):
        again.resolve("sql")  # also where --lora-dir has a folder of that name
    assert again.resolve("law").digest == wanted["law"]
    again.load("sql", "sql")
    assert again.resolve("sql").digest != wanted["sql"]
