"""Trains a LoRA adapter: python -m lora_jax.finetune is python -m lora_jax.finetune.lora."""

import sys

from lora_jax.finetune.lora import main

if __name__ == "__main__":
    main(sys.argv[1:])
