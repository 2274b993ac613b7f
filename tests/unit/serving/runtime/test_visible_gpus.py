"""Lists of GPUs in which those of a role come first."""

import pytest

from serving.runtime.visible_gpus import check_count, count_visible, first_of


@pytest.mark.parametrize(
    ("visible", "number", "wanted"),
    [
        ("4,5,6", 0, "4,5,6"),
        ("4, 5,6", 2, "6,4,5"),
        ("GPU-a,GPU-b", 1, "GPU-b,GPU-a"),
        ("", 3, ""),
    ],
)
def test_its_own_comes_first(visible, number, wanted):
    assert first_of(visible, number) == wanted


def test_those_of_a_split_model_come_first():
    assert first_of("4,5,6,7", 2, 2) == "6,7,4,5"
    with pytest.raises(ValueError, match=r"needs GPUs 2 to 4, .* or start fewer"):
        first_of("4,5,6,7", 2, 3)


def test_without_a_list_all_are_in_sight():
    names = first_of(None, 3).split(",")
    assert names[:5] == ["3", "0", "1", "2", "4"]
    assert sorted(names, key=int) == [str(n) for n in range(16)]


@pytest.mark.parametrize(("visible", "number"), [("4,5", 2), ("4,5", -1), (None, -1)])
def test_a_gpu_that_is_not_there_is_said(visible, number):
    with pytest.raises(ValueError, match=f"needs GPU {number}, .* or start fewer"):
        first_of(visible, number)


def test_a_host_without_gpus_has_as_many_devices_as_are_asked_for(tmp_path):
    check_count(None, 17, tmp_path / "no driver")
    check_count("", 17, tmp_path)
    assert first_of(None, 16).split(",")[:2] == ["16", "0"]


def test_a_host_with_too_few_gpus_says_how_many_it_has(tmp_path):
    for number in range(2):
        (tmp_path / f"0000:0{number}:00.0").mkdir()
    check_count(None, 2, tmp_path)
    with pytest.raises(ValueError, match=r"need 3 GPUs, .* this host has 2: start fewer"):
        check_count(None, 3, tmp_path)


def test_the_gpus_in_sight_are_those_of_the_list_that_are_there(tmp_path):
    assert count_visible(None, tmp_path / "none") is None
    assert count_visible("0,1", tmp_path / "none") == 2
    for name in "ab":
        (tmp_path / name).mkdir()
    assert [count_visible(v, tmp_path) for v in (None, "0", "", "0,1,2")] == [2, 1, 0, 2]
