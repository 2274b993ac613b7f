"""Sources of pictures: what is held out, and files that are read back."""

import gzip
import json
import sys
from types import SimpleNamespace

import numpy as np
from PIL import Image
from support.cases.tiny_pictures import sources

from lora_jax.finetune.pictures import collect


def test_pictures_are_read_back_and_parted(tmp_path):
    want = sources()["emoji"]
    want.save(tmp_path / "emoji.npz")
    got = collect.load(tmp_path / "emoji.npz")
    np.testing.assert_array_equal(got.images, want.images)
    assert list(got.names) == list(want.names)
    parts = [set(got.part(heldout=heldout).names) for heldout in (False, True)]
    assert len(parts[0] | parts[1]) == len(want.names)
    assert not parts[0] & parts[1]


def test_emoji_of_skin_flags_and_keycaps_are_left_out(tmp_path):
    folder = tmp_path / "img/twitter/64"
    folder.mkdir(parents=True)
    rows = [("red_car", "Travel", "transport-ground"), ("jp", "Flags", "country-flag")]
    rows += [("one", "Symbols", "keycap"), ("missing", "Food", "food-fruit")]
    keys = ("short_name", "category", "subcategory")
    given = [dict(zip(keys, row, strict=True)) | {"image": f"{row[0]}.png"} for row in rows]
    for row in rows[:3]:
        Image.new("RGBA", (64, 32), (9, 8, 7, 255)).save(folder / f"{row[0]}.png")
    (tmp_path / "emoji.json").write_text(json.dumps(given))
    got = collect.read_emoji(tmp_path)
    assert (list(got.names), list(got.kinds)) == (["red car"], ["vehicle"])
    picture = got.images[0]
    assert picture.shape == (collect.SIDE, collect.SIDE, 4)
    assert picture[collect.SIDE // 2, 1].tolist() == [9, 8, 7, 255]
    assert picture[0, 0, 3] == 0, "it stands in the middle of a transparent square"


def test_one_in_so_many_names_is_held_out():
    share = np.mean([collect.held(f"name {n}", 8) for n in range(2000)])
    assert 0.09 < share < 0.16


def write_clothes(folder):
    """Write Fashion-MNIST's four files: three images to learn, two held out."""
    pixels = {}
    for part, labels in (("train", (0, 9, 4)), ("t10k", (1, 1))):
        pixels[part] = np.random.default_rng(len(labels)).integers(0, 256, (len(labels), 28, 28))
        images = bytes(16) + pixels[part].astype(np.uint8).tobytes()
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
        labelled = gzip.compress(bytes(8) + bytes(labels))
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(labelled)
    return np.concatenate([pixels["train"], pixels["t10k"]])


def test_the_command_reads_four_packages(tmp_path, capsys, monkeypatch):
    pixels = write_clothes(tmp_path)
    images = np.arange(11 * 64).reshape(11, 8, 8) % 17.0  # as scikit-learn has them: 0 to 16
    digits = SimpleNamespace(images=images, target=np.arange(11) % 10)
    package = SimpleNamespace(load_digits=lambda: digits)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", package)
    (tmp_path / "png100px").mkdir()
    (tmp_path / "img/twitter/64").mkdir(parents=True)
    for name in ("png100px/fr.png", "png100px/gb-sct.png", "img/twitter/64/cat.png"):
        Image.new("RGB", (100, 60), (200, 0, 0)).save(tmp_path / name)
    countries = {"FR": "France", "GB-SCT": "Scotland", "ZZ": "Nowhere"}
    (tmp_path / "countries.json").write_text(json.dumps(countries))
    emoji = {"image": "cat.png", "short_name": "cat", "category": "A", "subcategory": "animal-x"}
    (tmp_path / "emoji.json").write_text(json.dumps([emoji]))
    out = tmp_path / "made" / "out"
    given = [f"--{name}={tmp_path}" for name in ("clothes", "emoji", "flags")]
    collect.main([*given, f"--out={out}"])
    made = {path.stem: collect.load(path) for path in out.iterdir()}
    assert set(made) == {"clothes", "digits", "emoji", "flags"}
    clothes = made["clothes"]
    assert list(clothes.names) == ["t-shirt", "boot", "coat", "trousers", "trousers"]
    assert list(clothes.heldout) == [False, False, False, True, True]
    np.testing.assert_array_equal(clothes.images[..., 0], pixels)
    digits = made["digits"]
    np.testing.assert_array_equal(digits.images[..., 0], np.minimum(images * 16, 255))
    assert list(digits.names) == list("01234567890")
    assert list(np.flatnonzero(digits.heldout)) == [0, 5, 10]
    assert (list(made["flags"].names), made["flags"].heldout.any()) == (["France"], False)
    assert list(made["emoji"].kinds) == ["animal"]
    assert "clothes: 5 images, 2 held out" in capsys.readouterr().out
