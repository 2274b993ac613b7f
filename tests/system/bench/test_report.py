import json
from pathlib import Path

import pytest

from bench import report

RESULTS = sorted((Path(report.__file__).parent / "results").glob("*.json"))
MEASURED = [p for p in report.PLOTS if any(file.name.startswith(p) for file in RESULTS)]


@pytest.mark.parametrize("prefix", [pytest.param(p, marks=pytest.mark.long) for p in MEASURED])
def test_what_was_measured_can_be_drawn_again(prefix, tmp_path):
    for file in (file for file in RESULTS if file.name.startswith(prefix)):
        drawn, result = tmp_path / f"{file.stem}.png", json.loads(file.read_text())
        report.PLOTS[prefix](result, drawn)
        if prefix == "end_to_end_lora-jax_" and not any(map(answered, result["rows"])):
            assert not drawn.exists()  # its figures are times of prompts alone
        else:
            assert drawn.stat().st_size > 10_000


def answered(row) -> bool:
    """Return whether a row of a whole server is a point of its plot."""
    return row["case"] != "prompts" and not row.get("error")
