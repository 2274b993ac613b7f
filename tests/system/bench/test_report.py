import json
from pathlib import Path

import pytest

from bench import report

RESULTS = sorted((Path(report.__file__).parent / "results").glob("*.json"))
MEASURED = [p for p in report.PLOTS if any(file.name.startswith(p) for file in RESULTS)]


@pytest.mark.parametrize("prefix", [pytest.param(p, marks=pytest.mark.long) for p in MEASURED])
def test_what_was_measured_can_be_drawn_again(prefix, tmp_path):
    for file in (file for file in RESULTS if file.name.startswith(prefix)):
        drawn = tmp_path / f"{file.stem}.png"
        report.PLOTS[prefix](json.loads(file.read_text()), drawn)
        assert drawn.stat().st_size > 10_000
