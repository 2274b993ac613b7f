"""Files of adapters, read completely or refused by name: PEFT, ESFT, safetensors. No jax."""
