"""Memory of a function's process: what it shares, holds alone, and lacks by an error of XLA."""

_NO_MEMORY = "resource_exhausted", "out of memory", "out_of_memory"  # in an error of XLA


def backbone_memory(maps: str = "/proc/self/smaps") -> dict[str, int]:
    """Return bytes of this process's maps of shared pages: size, and its share of them (Pss)."""
    totals, ours = {"Size": 0, "Pss": 0}, False
    with open(maps) as lines:
        for line in lines:
            name, _, rest = line.partition(":")
            if "-" in name and " " in line.split(":")[0]:  # the head of a mapping
                ours = "lora_jax_pages" in line
            elif ours and name in totals:
                totals[name] += int(rest.split()[0]) << 10
    return totals


def private_bytes(path: str = "/proc/self/smaps_rollup") -> int:
    """Return bytes of memory that only this process holds; they are free when it has ended."""
    with open(path) as lines:
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))


def is_of_memory(text: str) -> bool:
    """Return whether an error of XLA says that the device has no memory left."""
    return any(words in text.lower() for words in _NO_MEMORY)
