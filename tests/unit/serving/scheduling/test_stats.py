"""Names of adapters, each once."""

from serving.api.request import Request, Sequence
from serving.api.sampling import Sampling
from serving.scheduling.stats import adapter_names


def test_names_are_sorted_and_distinct():
    def of(adapter: str | None) -> Sequence:
        request = Request("r", (1,), Sampling(), adapter, "", lambda delta: None, 0.0, 0.0)
        return Sequence(request, 0, 0, [1])

    assert adapter_names(map(of, ["b", None, "a", "b"])) == ("a", "b")
