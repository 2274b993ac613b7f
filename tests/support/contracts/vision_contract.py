"""The tests that every model with a tower must pass; a test file derives from `VisionContract`.

The file also gives a module-scoped fixture `case`, made by `make_vision_case`.
"""

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.drivers.model_driver import (
    TOLERANCE,
    fill_slots,
    highest_rank,
    hub_copy,
    merged,
    oracle_logits,
    random_sites,
    save_oracle,
)
from support.drivers.vision_driver import (
    END,
    START,
    PlacedImage,
    Tower,
    VisionDriver,
    picture,
    prompt_of,
)

from lora_jax.adapters.formats import peft_format
from lora_jax.config import ModelConfig
from lora_jax.models import load
from lora_jax.nn.decoder import AbstractCausalLM
from lora_jax.vision.processor import Patches, preprocess, read_settings

SIZES = ((40, 24), (24, 56))  # pixels of the pictures, height and width
QUESTION = [5, 3, 60, 17, 17, 41]
TEXT = [9, 9, 12, 40, 1, 7]


@dataclasses.dataclass(frozen=True, eq=False)
class VisionCase:
    """One tiny model: the oracle, its two checkpoints, ours in float32, and two images."""

    oracle: Any
    folders: dict[str, Path]
    model: AbstractCausalLM
    config: ModelConfig
    driver: VisionDriver
    tower: Tower
    images: list[Patches]

    def placed(self, rows: list[np.ndarray] | None = None) -> tuple[list[int], list[PlacedImage]]:
        """Return a prompt with both images, and where they stand."""
        grids = [image.grid for image in self.images]
        parts = [4, START, grids[0], END, 8, START, grids[1], END, *QUESTION]
        tokens, starts = prompt_of(self.config, parts)
        rows = rows or [self.tower(image) for image in self.images]
        at = zip(starts, grids, rows, strict=True)
        return tokens, [PlacedImage(start, grid, made) for start, grid, made in at]

    def pixel_values(self) -> np.ndarray:
        """Return the normalised patches of both images."""
        return np.concatenate([image.normalised(self.tower.settings) for image in self.images])

    def logits(self, chunk: int | None = None) -> np.ndarray:
        """Return our logits of the prompt with both images."""
        tokens, images = self.placed()
        self.driver.images = [images]
        return self.driver.run([tokens], chunk=chunk)[0]


def make_vision_case(
    tmp: Path,
    oracle: Any,
    rename: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]],
    hub_config: Callable[[dict[str, Any]], dict[str, Any]],
    **bounds: int,
) -> VisionCase:
    """Write the oracle in both dialects and load the one that transformers 5 writes."""
    ours = save_oracle(oracle, tmp / "transformers")
    folders = {"transformers": ours, "hub": hub_copy(ours, tmp / "hub", rename, hub_config)}
    model, config = load(ours)
    limits = bounds or {"min_pixels": 64, "max_pixels": 4096}
    kwargs = {} if config.tower.image_size else limits
    settings = read_settings(ours, config.tower, kwargs)
    images = [preprocess(picture(*size, seed), settings) for seed, size in enumerate(SIZES)]
    driver, tower = VisionDriver(model, config), Tower(model, config, settings)
    return VisionCase(oracle, folders, model, config, driver, tower, images)


class VisionContract:
    """Needs the fixture `case`; `peft_targets` is a pattern of the maps PEFT puts LoRA on."""

    peft_targets: str
    stands_for_others = False  # then all tests are in `make test`
    of_each_family = (
        "test_rows_of_the_tower_match_transformers",
        "test_logits_match_transformers",
        "test_text_alone_matches_transformers",
        "test_images_matter",
    )

    def oracle_rows(self, case: VisionCase, image: Patches) -> list[np.ndarray]:
        """Return transformers' rows of an image: those for embeddings, then deepstack's."""
        import torch

        with torch.no_grad():
            grid = torch.tensor([[1, *image.grid]])
            values = torch.from_numpy(image.normalised(case.tower.settings))
            out = case.oracle.model.visual(values, grid_thw=grid)
        parts = [out.pooler_output, *(getattr(out, "deepstack_features", None) or [])]
        return [part.numpy() for part in parts]

    def oracle_of_images(self, case: VisionCase, tokens: list[int]) -> np.ndarray:
        """Return transformers' logits of a prompt with the case's images."""
        import torch

        is_image = torch.tensor([[t == case.config.tower.image_token_id for t in tokens]])
        with torch.no_grad():
            out = case.oracle(
                input_ids=torch.tensor([tokens]),
                mm_token_type_ids=is_image.int(),
                pixel_values=torch.from_numpy(case.pixel_values()),
                image_grid_thw=torch.tensor([[1, *image.grid] for image in case.images]),
            )
        return out.logits[0].float().numpy()

    def test_both_dialects_give_one_model(self, case: VisionCase):
        model, config = load(case.folders["hub"])
        assert config == case.config
        want = case.logits()
        other_tower = case.tower.with_weights_of(model)
        tokens, images = case.placed([other_tower(image) for image in case.images])
        other = case.driver.with_weights_of(model)
        other.images = [images]
        np.testing.assert_array_equal(other.run([tokens])[0], want)

    def test_rows_of_the_tower_match_transformers(self, case: VisionCase):
        for image in case.images:
            got = case.tower(image)
            want = self.oracle_rows(case, image)
            assert got.shape[1] == len(want)
            for part, rows in enumerate(want):
                assert rows.std() > 0.1  # else a wrong tower would be close, too
                np.testing.assert_allclose(got[:, part], rows, atol=TOLERANCE, rtol=0)

    def test_bucket_and_padding_do_not_change_a_bit(self, case: VisionCase):
        if case.config.tower.image_size:
            pytest.skip("all images have one size")
        for image in case.images:
            np.testing.assert_array_equal(case.tower(image, bucket=512), case.tower(image))

    def test_logits_match_transformers(self, case: VisionCase):
        tokens, _ = case.placed()
        want = self.oracle_of_images(case, tokens)
        assert want.std() > 0.5
        np.testing.assert_allclose(case.logits(), want, atol=TOLERANCE, rtol=0)

    def test_text_alone_matches_transformers(self, case: VisionCase):
        case.driver.images = [[]]
        got = case.driver.run([TEXT])[0]
        np.testing.assert_allclose(got, oracle_logits(case.oracle, TEXT), atol=TOLERANCE, rtol=0)

    def test_images_matter(self, case: VisionCase):
        tokens, images = case.placed()
        swapped = [dataclasses.replace(i, rows=i.rows[::-1].copy()) for i in images]
        case.driver.images = [swapped]
        other = case.driver.run([tokens])[0]
        assert np.abs(other[-1] - case.logits()[-1]).max() > 100 * TOLERANCE

    @pytest.mark.long
    def test_chunks_cut_anywhere_and_neighbours_keep_the_bits(self, case: VisionCase):
        whole = case.logits()
        for chunk in (1, 7):
            np.testing.assert_array_equal(case.logits(chunk), whole)
        tokens, images = case.placed()
        case.driver.images = [[], images, images[:1]]
        first = tokens[: images[1].start - 1]
        together = case.driver.run([TEXT, tokens, first])
        np.testing.assert_array_equal(together[1], whole)
        case.driver.images = [[]]
        np.testing.assert_array_equal(together[0], case.driver.run([TEXT])[0])

    @pytest.mark.filterwarnings("ignore")  # PEFT's own
    def test_a_file_of_peft_means_what_peft_computes(self, case: VisionCase, tmp_path: Path):
        import peft
        import torch

        torch.manual_seed(1)
        lora = peft.LoraConfig(
            r=3, lora_alpha=6, target_modules=self.peft_targets, init_lora_weights=False
        )
        trained = peft.get_peft_model(copy.deepcopy(case.oracle), lora)
        trained.save_pretrained(tmp_path)
        catalogue = case.model.catalogue(case.config)
        read = peft_format.read(tmp_path, catalogue).sites
        assert any(name.startswith("visual.") for name, _ in read)
        sites = {at: (site.a, site.b, site.scaling) for at, site in read.items()}
        table = fill_slots(catalogue, [sites])
        rows = [case.tower(image, None, table, 0, 3) for image in case.images]
        tokens, images = case.placed(rows)
        case.driver.images = [images]
        got = case.driver.run([tokens], slots=[0], adapters=table, max_rank=3)[0]
        want = self.oracle_of_images(dataclasses.replace(case, oracle=trained), tokens)
        assert np.abs(want - case.logits()).max() > 100 * TOLERANCE
        np.testing.assert_allclose(got, want, atol=2 * TOLERANCE, rtol=0)

    @pytest.mark.long
    def test_adapters_of_tower_and_text_equal_merged_weights(self, case: VisionCase):
        """Two adapters and the base, the same image, one batch: as if merged."""
        catalogue = case.model.catalogue(case.config)
        adapters = [random_sites(catalogue, seed=2), random_sites(catalogue, seed=3)]
        table = fill_slots(catalogue, adapters)
        rank = max(highest_rank(sites) for sites in adapters)
        image, slots = case.images[0], [1, -1, 0]
        rows = [case.tower(image, None, table, slot, rank) for slot in slots]
        parts = [4, START, image.grid, END, *QUESTION]
        tokens, (start,) = prompt_of(case.config, parts)
        case.driver.images = [[PlacedImage(start, image.grid, made)] for made in rows]
        got = case.driver.run([tokens] * 3, slots=slots, adapters=table, max_rank=rank)
        plain = case.tower(image)
        np.testing.assert_array_equal(rows[1], plain)
        for slot, made, logits in zip(slots, rows, got, strict=True):
            if slot < 0:
                continue
            whole = merged(case.model, adapters[slot])
            want = case.tower.with_weights_of(whole)(image)
            assert np.abs(want - plain).max() > 100 * TOLERANCE
            np.testing.assert_allclose(made, want, atol=TOLERANCE, rtol=0)
            other = case.driver.with_weights_of(whole)
            other.images = [[PlacedImage(start, image.grid, want)]]
            np.testing.assert_allclose(logits, other.run([tokens])[0], atol=TOLERANCE, rtol=0)
