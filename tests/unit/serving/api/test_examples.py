"""Example prompts: what a folder says, and nothing where it says nothing."""

import json

import pytest

from serving.api.examples import FILE, MAX_LENGTH, Examples, read_examples


def write(folder, content) -> str:
    folder.mkdir(exist_ok=True)
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / FILE).write_text(text, encoding="utf-8")
    return str(folder)


def test_a_model_s_file_has_them_for_base_and_adapters(tmp_path):
    write(tmp_path / "m", {"prompt": "once", "adapters": {"sql": "how many?"}})
    assert read_examples(tmp_path / "m") == Examples("once", {"sql": "how many?"})


def test_an_adapter_s_own_file_wins(tmp_path):
    write(tmp_path / "m", {"adapters": {"sql": "old", "law": "case"}})
    folder = write(tmp_path / "a", {"prompt": "new"})
    got = read_examples(tmp_path / "m", {"sql": folder, "law": str(tmp_path), "x": "nowhere"})
    assert got == Examples(None, {"sql": "new", "law": "case"})


@pytest.mark.parametrize(
    "content",
    [
        *["", "[]", "{", "3", '{"prompt": 3}', '{"prompt": ""}', '{"adapters": []}', "[" * 70_000],
        *[json.dumps({"prompt": "x" * (MAX_LENGTH + 1)}), '{"adapters": {"a": ["x"]}}'],
    ],
)
def test_what_is_not_as_described_gives_none(tmp_path, content):
    write(tmp_path / "m", content)
    assert read_examples(tmp_path / "m") == Examples()


def test_the_shipped_model_has_one_for_each_adapter():
    from support.processes.server_process import ROOT

    assets = ROOT / "assets" / "tiny-moe"
    names = {path.name for kind in ("adapters", "esft") for path in (assets / kind).iterdir()}
    assert set(read_examples(assets).adapters) == names
