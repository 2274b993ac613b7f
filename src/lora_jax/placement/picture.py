"""A placement drawn as text. No jax."""

from collections.abc import Sequence

from lora_jax.placement.ep_pp import ServerLayout


def picture(layout: ServerLayout) -> str:
    """Return lines that show every device with the layers, experts or adapters it holds."""
    shape = layout.shape
    head = (
        f"{layout.name} on {layout.devices} devices: {shape.adapters} adapters x "
        f"{shape.layers} layers x {shape.experts} experts, "
        f"{spell_bytes(shape.adapter_bytes)} per adapter"
    )
    if layout.dp > 1:
        rows = [["", "all layers, all experts"]]
        rows += [
            [f"adapters {spell_range(layout.adapters_of(d))}", _cell(layout, d)]
            for d in range(layout.devices)
        ]
    else:
        rows = [["", *(f"experts {spell_range(layout.experts_of(d))}" for d in range(layout.ep))]]
        for stage in range(layout.pp):
            group = layout.group_of(stage)
            layers = f"layers {spell_range(layout.layers_of(group.start))}"
            rows.append([layers, *(_cell(layout, d) for d in group)])
    return "\n".join([head, *_table(rows)])


def spell_range(values: range) -> str:
    """Return "0-3" for consecutive numbers, "0,2,..,30" for numbers with gaps, "" for none."""
    if not values:
        return "none"
    if len(values) == 1:
        return str(values[0])
    if values.step == 1:
        return f"{values[0]}-{values[-1]}"
    if len(values) <= 3:
        return ",".join(map(str, values))
    return f"{values[0]},{values[1]},..,{values[-1]}"


def spell_bytes(number: float | int) -> str:
    """Return a number of bytes with the unit that suits it, e.g. 1.8 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.4g} TB"


def _cell(layout: ServerLayout, device: int) -> str:
    return f"device {device} ({spell_bytes(layout.bytes_on(device))})"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
