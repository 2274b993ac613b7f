"""The page about vLLM's flags is what the code says."""

from server_process import ROOT

from serving.flag_table import table
from serving.foreign_flags import vllm_facts


def test_the_page_is_up_to_date():
    page = (ROOT / "docs" / "vllm_flags.md").read_text()
    assert page == table(), "run python -m serving.flag_table > docs/vllm_flags.md"
    assert page.count("\n| `") == len(vllm_facts())
