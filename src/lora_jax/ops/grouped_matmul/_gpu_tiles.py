"""Tile sizes of the Mosaic GPU kernel, computed from the shape while tracing."""

import dataclasses
import math

from lora_jax.ops import hopper

ALIGN = 8  # rows: a copied tile of x starts at a multiple
STEP = hopper.COLUMNS  # of d_in in one stage of plain weights
QUANTISED_COLUMNS = 64  # of d_out that a warpgroup makes plain: one operand's
STORED = 16  # rows that leave the registers at once
FEW_STAGES = 4  # hide the copies' latency
# By CTAs per SM. One alone is a launch of fewer tiles than SMs: what is on its way must fill the
# memory's pipeline for the idle ones too.
MOST_STAGES = {1: 24, 2: 8}
STRIDE = 8  # groups that a warpgroup looks at together when it seeks its next work
SKIPS = (32, 8)  # groups without rows that it passes together
LONG_GROUP = 48  # rows per group from which weights are read more than once
LONG_TILES = (128, 144, 160, 176, 192)  # rows
MOST_GATED = 144  # of them: two products of more leave registers for neither


@dataclasses.dataclass(frozen=True)
class GroupedMatmulConfig:
    """Tiles of one launch, chosen while tracing: by the table of this device, or by find_config."""

    columns: int  # of d_out in one warpgroup's tile
    warpgroups: int  # that multiply, side by side in d_out
    rows: int  # in one tile
    stages: int
    ctas: int  # per SM
    part: int = STORED  # rows that leave the registers at once, if the tile has so many
    step: int = STEP  # of d_in in one stage
    bits: int = 16  # of a weight

    def stage_bytes(self, matrices: int) -> int:
        """Bytes of shared memory that one stage of the ring takes."""
        weights = matrices * self.columns * self.warpgroups * self.bits // 8
        return (weights + self.rows * 2) * self.step

    @property
    def stored(self) -> int:
        """Rows of a part of the results."""
        return min(self.rows, self.part)

    @property
    def parts(self) -> int:
        """Parts in which the results of a tile leave the registers; `part` divides the rows."""
        return self.rows // self.stored

    def part_bytes(self) -> int:
        """Bytes of one part of all warpgroups."""
        return self.warpgroups * self.columns * self.stored * 2


@dataclasses.dataclass(frozen=True)
class Depths:
    """Number of a tile's parts in flight: results out, addends in."""

    results: int
    addends: int


def find_config(rows: int, groups: int, d_out: int, matrices: int = 1) -> GroupedMatmulConfig:
    """Return tiles for so many rows in so many groups, from the mean rows of a group.

    Few rows: two CTAs per SM stream weights through tiles of 8 to 64 rows; of a dense map one if it
    has no more tiles. Many: one CTA per SM multiplies tiles of 256 x 128 or more, unless there are
    too few of them for all SMs.
    """
    mean, wide = rows / groups, d_out // (256 // matrices)
    tile_rows = _long_tile(mean, groups, wide, LONG_TILES[-1] if matrices == 1 else MOST_GATED)
    long_tiles = groups * math.ceil(mean / tile_rows) * wide
    # The rows of a single group are known, those of one among many only in the mean.
    if mean > (LONG_GROUP if groups > 1 else 64) and long_tiles >= hopper.NUM_SMS:
        config = GroupedMatmulConfig(128 // matrices, 2, tile_rows, 1, 1)
    else:
        sizes = ((1, 8), (6, 16), (16, 32)) if groups > 1 else ((8, 8), (16, 16), (32, 32))
        tile_rows = next((n for most, n in sizes if mean <= most), 64)
        few = min(groups, rows) * d_out < 2 * hopper.NUM_SMS * 128
        columns = 64 if few or matrices > 1 else 128
        config = GroupedMatmulConfig(columns, 1, tile_rows, 1, 2)
        if groups == 1 and mean <= 64 and d_out <= columns * hopper.NUM_SMS:
            # A tile for each SM at most: deeper stages, fewer turns from one to the next.
            config = dataclasses.replace(config, ctas=1, step=256 if tile_rows <= 16 else 128)
    return with_stages(config, matrices)


def find_quantised(
    rows: int, groups: int, d_out: int, matrices: int, bits: int, step: int
) -> GroupedMatmulConfig:
    """Return tiles for weights that are made plain in registers, which `d_out` fills.

    As many warpgroups on an SM as registers allow: what they wait for differs. They are one CTA's
    where its tiles are enough for all SMs: on an H100 one row of Llama's gate took 29 us as two
    CTAs of one warpgroup, 39 us as one of four.
    """
    mean = rows / groups
    sizes = ((1, 8), (6, 16), (16, 32)) if groups > 1 else ((8, 8), (16, 16), (32, 32))
    tile_rows = next((n for most, n in sizes if mean <= most), 64)
    if mean > LONG_GROUP and groups * math.ceil(mean / 128) * d_out // 128 >= hopper.NUM_SMS:
        tile_rows = 128 // matrices
    sums = matrices * tile_rows
    most = 4 if sums <= 32 // matrices else 3 if sums <= 64 else 2
    columns = min(groups, rows) * d_out // QUANTISED_COLUMNS
    fits = (n for n in range(most, 1, -1) if columns // n >= hopper.NUM_SMS)
    wide = next((n for n in fits if d_out % (n * QUANTISED_COLUMNS) == 0), 1)
    ctas = 2 if wide == 1 and sums <= 64 else 1
    config = GroupedMatmulConfig(QUANTISED_COLUMNS, wide, tile_rows, 1, ctas, step=step, bits=bits)
    return with_stages(config, matrices)


def _long_tile(mean: float, groups: int, wide: int, most: int) -> int:
    """Return the rows, up to `most`, of tiles that all SMs are done with first; `wide` make d_out.

    For groups one standard deviation above the mean: the last tile of a group costs as much as a
    full one, and the last round of the SMs as one in which none is idle.
    """
    longer = mean + (math.sqrt(mean) if groups > 1 else 0)

    def rows_in_turn(tile: int) -> int:
        return math.ceil(groups * math.ceil(longer / tile) * wide / hopper.NUM_SMS) * tile

    return min((tile for tile in LONG_TILES if tile <= most), key=rows_in_turn)


def with_stages(
    config: GroupedMatmulConfig, matrices: int, addend_size: int = 0
) -> GroupedMatmulConfig:
    """Return the tiles with as many stages, up to MOST_STAGES, as fit; 0 where none does.

    Stages beyond FEW_STAGES give way to results on their way out: a tile whose parts have places of
    their own is stored while the next one is multiplied. `addend_size` are the bytes of one number
    that is added to a product, 0 if nothing is.
    """
    stage, part = config.stage_bytes(matrices), config.part_bytes()
    addends = part // 2 * addend_size * matrices * min(2, config.parts)
    room = _room(config) - addends
    most, least = (room - n * part for n in (min(2, config.parts), config.parts))
    stages = max(least // stage, min(FEW_STAGES, most // stage))
    return dataclasses.replace(config, stages=max(0, min(MOST_STAGES[config.ctas], stages)))


def fitted(config: GroupedMatmulConfig, rows: int, d_in: int, matrices: int) -> GroupedMatmulConfig:
    """Return a map's tiles no longer than its rows and with a step that divides its d_in.

    A table's nearest shape may have twice the rows, and another d_in.
    """
    longest = STORED * math.ceil(rows / STORED)
    step = config.step if d_in % config.step == 0 else STEP
    if config.rows <= longest and step == config.step:
        return config
    short = dataclasses.replace(config, rows=min(config.rows, longest), step=step)
    return with_stages(short, matrices)


def depths(config: GroupedMatmulConfig, matrices: int, addend_size: int = 0) -> Depths:
    """Return how deep results and addends are buffered in what the stages leave."""
    part, parts = config.part_bytes(), config.parts
    room, few = _room(config) - config.stages * config.stage_bytes(matrices), min(2, parts)
    addends, addend = 0, part // 2 * addend_size * matrices
    if addend:
        addends = max(few, min(parts, room // 2 // addend))
    return Depths(max(few, min(parts, (room - addends * addend) // part)), addends)


def _room(config: GroupedMatmulConfig) -> int:
    """Return the bytes that a CTA has for stages and parts, single rows having a part of theirs."""
    return hopper.SHARED_BYTES // config.ctas - 2048 - config.part_bytes()
