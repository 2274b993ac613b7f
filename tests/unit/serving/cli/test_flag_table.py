"""The page about vLLM's flags is what the code says."""

from support.processes.server_process import ROOT

from serving.cli.flag_table import _NOTES, table
from serving.cli.foreign_flags import vllm_facts


def test_the_page_is_up_to_date():
    page = (ROOT / "docs" / "vllm_flags.md").read_text()
    assert page == table(), "run python -m serving.cli.flag_table > docs/vllm_flags.md"
    assert all(f"| `{flag}` | same | {note} |" in page for flag, note in _NOTES.items())
    assert page.count("\n| `") == len(vllm_facts())
