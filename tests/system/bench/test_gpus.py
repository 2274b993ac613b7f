import pytest

from bench import gpus


@pytest.mark.parametrize(
    ("visible", "count"), [("2", 1), ("0, 3", 2), ("", 0), ("GPU-a,GPU-b,", 2)]
)
def test_a_list_of_visible_gpus_is_heeded(visible, count, monkeypatch):
    monkeypatch.setattr(gpus.glob, "glob", lambda pattern: pytest.fail("the list says it all"))
    assert gpus.count_gpus({"CUDA_VISIBLE_DEVICES": visible}) == count


def test_without_a_list_all_of_the_machine_count(monkeypatch):
    monkeypatch.setattr(gpus.glob, "glob", lambda pattern: ["/dev/nvidia0", "/dev/nvidia1"])
    assert gpus.count_gpus({}) == 2
