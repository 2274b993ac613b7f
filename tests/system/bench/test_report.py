import json
from pathlib import Path

import pytest

from bench import report

RESULTS = sorted((Path(report.__file__).parent / "results").glob("*.json"))


FIRST, *FURTHER = report.PLOTS


@pytest.mark.parametrize(
    "prefix", [pytest.param(prefix, marks=pytest.mark.long) for prefix in (FIRST, *FURTHER)]
)
def test_what_was_measured_can_be_drawn_again(prefix, tmp_path):
    results = [file for file in RESULTS if file.name.startswith(prefix)]
    assert results
    for file in results:
        drawn = tmp_path / f"{file.stem}.png"
        report.PLOTS[prefix](json.loads(file.read_text()), drawn)
        assert drawn.stat().st_size > 10_000
