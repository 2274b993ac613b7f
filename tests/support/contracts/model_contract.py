"""The tests that every model must pass; a model's test file derives a class from `ModelContract`.

The file also gives a module-scoped fixture `case`, made by `make_case` from a tiny random
transformers model, which is the oracle, and the rewriting of its checkpoint to the hub's dialect.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.drivers.model_driver import (
    TOLERANCE,
    Driver,
    Sites,
    fill_slots,
    highest_rank,
    hub_copy,
    merged,
    oracle_greedy,
    oracle_logits,
    random_sites,
    save_oracle,
)

from lora_jax.config import ModelConfig
from lora_jax.models import load
from lora_jax.nn.decoder import AbstractCausalLM

PROMPT = [5, 3, 60, 17, 17, 41, 2, 33, 8, 50, 21]
OTHERS = [[9, 9, 12, 40], [63, 1, 0, 7, 55, 23, 23, 11, 4, 30, 44, 19, 2, 6]]


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """One tiny model: the oracle, its two checkpoints, and ours in float32."""

    oracle: Any
    folders: dict[str, Path]
    model: AbstractCausalLM
    config: ModelConfig
    driver: Driver


def make_case(
    tmp: Path,
    oracle: Any,
    rename: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]],
    hub_config: Callable[[dict[str, Any]], dict[str, Any]],
) -> Case:
    """Write the oracle in both dialects and load the one that transformers 5 writes."""
    oracle.eval()
    ours = save_oracle(oracle, tmp / "transformers")
    folders = {"transformers": ours, "hub": hub_copy(ours, tmp / "hub", rename, hub_config)}
    model, config = load(ours)
    return Case(oracle, folders, model, config, Driver(model, config))


def shaken(oracle: Any, seed: int = 0) -> Any:
    """Return the model with norms, biases and all else that starts as a constant made random."""
    import torch

    torch.set_num_threads(1)  # these sizes are not worth a second one
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in oracle.parameters():
            if parameter.numel() and bool((parameter == parameter.flatten()[0]).all()):
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return oracle


class ModelContract:
    """Needs the fixture `case`; a class with `stands_for_others` has all tests in `make test`."""

    stands_for_others = False
    of_each_family = (
        "test_both_dialects_give_one_model",
        "test_logits_match_transformers",
        "test_adapter_on_every_module_equals_merged_weights",
    )

    def test_both_dialects_give_one_model(self, case: Case):
        model, config = load(case.folders["hub"])
        assert config == case.config
        want = case.driver.run([PROMPT])
        got = case.driver.with_weights_of(model).run([PROMPT])  # equal configs: the same program
        np.testing.assert_array_equal(got[0], want[0])

    def test_logits_match_transformers(self, case: Case):
        for prompt in (PROMPT, *OTHERS):
            want = oracle_logits(case.oracle, prompt)
            assert want.std() > 0.5  # else a wrong model would be close, too
            got = case.driver.run([prompt])[0]
            np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=0)

    def test_greedy_text_matches_transformers(self, case: Case):
        """Decoding goes through the pages, the oracle's text through full forward passes."""
        assert case.driver.greedy(PROMPT) == oracle_greedy(case.oracle, PROMPT)

    @pytest.mark.parametrize("chunk", [1, 3, 8])
    def test_chunks_give_the_very_bits_of_one_pass(self, case: Case, chunk: int):
        whole = case.driver.run([PROMPT])[0]
        np.testing.assert_array_equal(case.driver.run([PROMPT], chunk=chunk)[0], whole)

    def test_neighbours_do_not_change_a_bit(self, case: Case):
        alone = [case.driver.run([prompt])[0] for prompt in (PROMPT, *OTHERS)]
        together = case.driver.run([PROMPT, *OTHERS])
        for want, got in zip(alone, together, strict=True):
            np.testing.assert_array_equal(got, want)

    def test_adapter_on_every_module_equals_merged_weights(self, case: Case):
        """One adapter per module, all in one batch."""
        catalogue = case.model.catalogue(case.config)
        names = catalogue.module_names
        adapters = [random_sites(catalogue, seed=1, modules=[name]) for name in names]
        self.check_against_merged(case, adapters, [PROMPT] * len(names), list(range(len(names))))

    def test_mixed_batch(self, case: Case):
        """Two adapters and the base in one batch: each as if merged, the base bit for bit."""
        catalogue = case.model.catalogue(case.config)
        adapters = [random_sites(catalogue, seed=2), {}, random_sites(catalogue, seed=3)]
        mixed = self.check_against_merged(case, adapters, [PROMPT, *OTHERS], [2, -1, 0])
        base = case.driver.run([OTHERS[0]])[0]
        np.testing.assert_array_equal(mixed[1], base)

    def check_against_merged(
        self, case: Case, adapters: list[Sites], prompts: list[list[int]], slots: list[int]
    ) -> list[np.ndarray]:
        """Compare every prompt with the model that has its adapter merged in; return the logits."""
        table = fill_slots(case.model.catalogue(case.config), adapters)
        rank = max(highest_rank(sites) for sites in adapters)
        got = case.driver.run(prompts, slots=slots, adapters=table, max_rank=rank)
        for prompt, slot, logits in zip(prompts, slots, got, strict=True):
            if slot >= 0:
                other = case.driver.with_weights_of(merged(case.model, adapters[slot]))
                want, base = other.run([prompt])[0], case.driver.run([prompt])[0]
                assert np.abs(want - base).max() > 100 * TOLERANCE, sorted(adapters[slot])
                np.testing.assert_allclose(logits, want, atol=TOLERANCE, rtol=0)
        return got
