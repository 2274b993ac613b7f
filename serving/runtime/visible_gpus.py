"""Lists of GPUs that CUDA shows a process. No jax."""

VISIBLE = "CUDA_VISIBLE_DEVICES"
_MOST_GPUS = 16  # of a host; CUDA heeds a list up to its first number without a GPU


def first_of(visible: str | None, number: int, count: int = 1) -> str:
    """Return a list of visible GPUs with `count` of them, from this number on, in front.

    `visible` is the list that a process was started with; None: all. Raises ValueError for a number
    that is not in it.
    """
    names = [str(n) for n in range(_MOST_GPUS)] if visible is None else visible.split(",")
    names = [name.strip() for name in names if name.strip()]
    if not names:  # no GPU is to be used at all
        return ""
    end = number + count
    if not 0 <= number < end <= len(names):
        needed = f"GPU {number}" if count == 1 else f"GPUs {number} to {end - 1}"
        raise ValueError(
            f"This role needs {needed}, but {VISIBLE}={visible} lists {len(names)}: list one "
            "for each instance and each rank of the LoRA Server, or start fewer of them."
        )
    return ",".join([*names[number:end], *names[:number], *names[end:]])
