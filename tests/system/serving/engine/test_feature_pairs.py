"""Every pair of features works together, or is refused by name at the start."""

import pytest
from support.cases.feature_pairs import FEATURES, PAIRS, REFUSED, WORKING, Models, table
from support.processes.server_process import ROOT


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Models:
    return Models(tmp_path_factory.mktemp("pairs"))


def is_near(pair: tuple[str, str]) -> bool:
    """Return whether another pair, or test_page_pool.py, meets the check that refuses this one."""
    same = (*pair, "merged modes") if "merged primary" in pair else pair
    twin = tuple(sorted(set(same) - {"merged primary"}, key=list(FEATURES).index))
    of_rows = pair[0] == "tokens and saved modules" and pair[1] in (
        "several devices",
        "LoRA Server",
    )
    of_pool = "page pool" in pair and "shared backbone" not in pair
    return of_pool or of_rows or (twin != pair and REFUSED.get(twin) == REFUSED[pair])


@pytest.mark.parametrize(
    "pair",
    [pytest.param(p, marks=pytest.mark.long if is_near(p) else ()) for p in REFUSED],
    ids=" and ".join,
)
def test_a_pair_that_does_not_work_is_refused_at_the_start(models: Models, pair):
    with pytest.raises(ValueError, match=REFUSED[pair]), models.engine(frozenset(pair)):
        pass


@pytest.mark.long
@pytest.mark.parametrize("pair", WORKING, ids=" and ".join)
def test_a_pair_answers_each_request_as_alone(models: Models, pair):
    """What keeps bits alone keeps them beside the other feature."""
    found = models.answers(*pair)
    for name in pair:
        if FEATURES[name].keeps_bits:
            (other,) = set(pair) - {name}
            without = models.answers(other, pair=pair)
            common = found.keys() & without.keys()
            assert common
            assert {kind: found[kind] for kind in common} == {k: without[k] for k in common}


def test_every_refused_pair_is_a_pair():
    assert set(REFUSED) <= set(PAIRS)


def test_the_page_has_the_table():
    page = (ROOT / "docs/reference/feature-pairs.md").read_text()
    assert table() in page, f"docs/reference/feature-pairs.md should have this table:\n{table()}"
