"""Adapters from files to the device while an engine runs, LoRA and ESFT."""
