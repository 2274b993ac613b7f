"""GPU assignment of role processes that share a host."""

import os

import jax

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_MOST_GPUS = 16  # of a host; CUDA heeds a list up to its first number without a GPU


def use_gpu(number: int) -> None:
    """Let jax use one GPU of the host; call it before anything asks for devices.

    It becomes the first of this process and jax sees no other: jax numbers its devices from 0 and
    refuses programs for a GPU of a higher number when it is the only one. The driver goes on seeing
    all GPUs, so that their memory can be reached over NVLink. Nothing changes on a machine without
    GPUs. Raises ValueError where the process was started for fewer GPUs; a host that has fewer
    leaves the process without any.
    """
    os.environ[_VISIBLE] = first_of(os.environ.get(_VISIBLE), number)
    jax.config.update("jax_cuda_visible_devices", "0")


def first_of(visible: str | None, number: int) -> str:
    """Return a list of visible GPUs with the one of this number in front of the others.

    `visible` is the list that a process was started with; None: all. Raises ValueError for a number
    that is not in it.
    """
    names = [str(n) for n in range(_MOST_GPUS)] if visible is None else visible.split(",")
    names = [name.strip() for name in names if name.strip()]
    if not names:  # no GPU is to be used at all
        return ""
    if not 0 <= number < len(names):
        raise ValueError(
            f"This role needs GPU {number}, but {_VISIBLE}={visible} lists {len(names)}: list one "
            "for each instance and each rank of the LoRA Server, or start fewer of them."
        )
    return ",".join([names[number], *names[:number], *names[number + 1 :]])
