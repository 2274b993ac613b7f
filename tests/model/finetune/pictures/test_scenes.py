"""Scenes: things that do not touch, the places of them, and motions that are seen."""

import numpy as np
import pytest
from support.cases.tiny_pictures import sources

from lora_jax.finetune.pictures import scenes


def test_things_do_not_touch_and_stand_in_order():
    rng, emoji = np.random.default_rng(0), sources()["emoji"]
    for _ in range(20):
        drawn = scenes.scene(emoji, 5, rng)
        covered = np.zeros((scenes.SIDE, scenes.SIDE), int)
        for thing in drawn.things:
            left, top, right, bottom = thing.box
            covered[top:bottom, left:right] += 1
        assert covered.max() == 1
        places = [scenes.PLACES.index(thing.place) for thing in drawn.things]
        assert places == sorted(places)


def test_places_are_thirds_of_the_image():
    assert scenes.Thing(0, (0, 0, 10, 10)).place == "top left"
    assert scenes.Thing(0, (27, 27, 37, 37)).place == "middle centre"
    assert scenes.Thing(0, (54, 40, 64, 64)).place == "bottom right"


@pytest.mark.parametrize("motion", scenes.MOTIONS)
def test_a_picture_moves_as_it_is_said(motion):
    picture = np.full((48, 48, 4), 255, np.uint8)
    rng = np.random.default_rng(3)
    shown = scenes.frames(picture, motion, 6, rng).astype(int)
    white = (shown == 255).all(-1)
    middles = np.array([np.argwhere(one).mean(0)[::-1] for one in white])
    way = np.sign(np.round(middles[-1] - middles[0])).astype(int)
    assert tuple(way) == scenes.MOTIONS[motion]
