"""Shared modules of these tests lie beside this file; the right answers are made once."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fault_clients import FOLDERS, LENGTHS, PROMPTS
from fault_cluster import MODEL, SIZES

from serving import Engine, Sampling


@pytest.fixture(scope="session")
def fault_answers():
    """The tokens of every content and prompt, alone in one process."""
    adapters = {name: str(MODEL / "adapters" / name) for name in FOLDERS}
    sizes = {name.replace("-", "_"): value for name, value in SIZES.items()}
    greedy = Sampling(max_tokens=max(LENGTHS), temperature=0.0, ignore_eos=True)
    found = {}
    with Engine(str(MODEL), adapters, **sizes) as engine:
        for content in ("base", *FOLDERS):
            for place, prompt in enumerate(PROMPTS):
                adapter = None if content == "base" else content
                [output] = engine.generate(prompt, adapter, greedy)
                found[content, place] = tuple(output.outputs[0].token_ids)
    assert len(set(found.values())) == len(found), "contents must be told apart by their answers"
    return found
