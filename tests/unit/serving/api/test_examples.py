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


def test_images_are_small_files_below_the_folder(tmp_path):
    (tmp_path / "out.png").write_bytes(b"x")
    names = {"": ["a.png"], "two": ["a.png", "b.png"], "sql": ["a.png"]}
    wrong = {"gone": ["c.png"], "out": ["../out.png"], "big": ["big.png"], "jpg": ["a.jpg"]}
    wrong |= {"text": "a.png", "many": ["a.png"] * 9, "number": [3], "empty": []}
    folder = write(tmp_path / "m", {"prompt": "look", "images": names | wrong})
    for name, size in {"a.png": 3, "b.png": 1 << 16, "big.png": (1 << 16) + 1, "a.jpg": 3}.items():
        (tmp_path / "m" / name).write_bytes(b"x" * size)
    own = write(tmp_path / "own", {"prompt": "how many?"})
    got = read_examples(folder, {"sql": own})
    a, b = tmp_path / "m" / "a.png", tmp_path / "m" / "b.png"
    assert got.images == {"": (a,), "two": (a, b)}, "another prompt has no image of this one"
    assert got.of(None) == ("look", (a,))
    assert got.of("sql") == ("how many?", ())


@pytest.mark.parametrize("model", ["tiny-moe", "tiny-vl"])
def test_the_shipped_models_have_one_for_each_adapter(model):
    from support.processes.server_process import ROOT

    assets, got = ROOT / "assets" / model, read_examples(ROOT / "assets" / model)
    names = {path.name for kind in ("adapters", "esft") for path in assets.glob(f"{kind}/*")}
    names |= {f"{path.name}-head" for path in assets.glob("heads/*")}
    assert names <= set(got.adapters)
    assert set(got.images) == ({"", *got.adapters} if model == "tiny-vl" else set())
