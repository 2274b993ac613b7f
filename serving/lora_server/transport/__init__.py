"""Rows to a LoRA Server and their results back; start reading at base.py."""
