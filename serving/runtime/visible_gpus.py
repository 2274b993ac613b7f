"""Lists of GPUs that CUDA shows a process. No jax."""

from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
_DRIVER = Path("/proc/driver/nvidia/gpus")  # a folder for each GPU of the host
_MOST_GPUS = 16  # of a host; CUDA heeds a list up to its first number without a GPU


def count_visible(visible: str | None, driver: Path = _DRIVER) -> int | None:
    """Return how many GPUs a process sees; None: the driver does not say.

    `visible` is as for `first_of`.
    """
    listed = None if visible is None else [name for name in visible.split(",") if name.strip()]
    found = len(list(driver.iterdir())) if driver.is_dir() else None
    counts = [n for n in (None if listed is None else len(listed), found) if n is not None]
    return min(counts, default=None)


def check_count(visible: str | None, count: int, driver: Path = _DRIVER) -> None:
    """Raise ValueError where roles need more GPUs than this host, or the list `visible`, has.

    A host without GPUs has no limit: there, and with an empty list, devices are the CPU's.
    """
    if visible is not None:
        first_of(visible, 0, count)
        return
    found = len(list(driver.iterdir())) if driver.is_dir() else 0
    if found and count > found:
        raise ValueError(
            f"The roles need {count} GPUs, one for each device of an instance and each rank of the "
            f"LoRA Server, but this host has {found}: start fewer, or set JAX_PLATFORMS=cpu."
        )


def first_of(visible: str | None, number: int, count: int = 1) -> str:
    """Return a list of visible GPUs with `count` of them, from this number on, in front.

    `visible` is the list that a process was started with; None: all, however many there are.
    Raises ValueError for a number that is not in it.
    """
    end = number + count
    most = max(_MOST_GPUS, end)
    names = [str(n) for n in range(most)] if visible is None else visible.split(",")
    names = [name.strip() for name in names if name.strip()]
    if not names:  # no GPU is to be used at all
        return ""
    if not 0 <= number < end <= len(names):
        needed = f"GPU {number}" if count == 1 else f"GPUs {number} to {end - 1}"
        raise ValueError(
            f"This role needs {needed}, but {VISIBLE}={visible} lists {len(names)}: list one "
            "for each instance and each rank of the LoRA Server, or start fewer of them."
        )
    return ",".join([*names[number:end], *names[:number], *names[end:]])
