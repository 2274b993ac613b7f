"""Sources of pictures: what is held out, and files that are read back."""

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
    (tmp_path / "emoji.json").write_text(collect.json.dumps(given))
    got = collect.read_emoji(tmp_path)
    assert (list(got.names), list(got.kinds)) == (["red car"], ["vehicle"])
    picture = got.images[0]
    assert picture.shape == (collect.SIDE, collect.SIDE, 4)
    assert picture[collect.SIDE // 2, 1].tolist() == [9, 8, 7, 255]
    assert picture[0, 0, 3] == 0, "it stands in the middle of a transparent square"


def test_one_in_so_many_names_is_held_out():
    share = np.mean([collect.held(f"name {n}", 8) for n in range(2000)])
    assert 0.09 < share < 0.16
