"""Trains an adapter: as lora_jax.finetune.lora does, with --head as lora_jax.finetune.head does."""

from lora_jax.finetune import head, lora
from lora_jax.finetune.command import run


def main(argv: list[str]) -> None:
    """Run the command that the flags are of."""
    has_head = any(flag.partition("=")[0] == "--head" for flag in argv)
    (head if has_head else lora).main(argv)


if __name__ == "__main__":
    run(main)
