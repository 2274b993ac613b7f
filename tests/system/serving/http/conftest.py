"""The fixtures that all HTTP tests share."""

from support.fixtures.http import _nothing_left_running, client, engine, lora_dir

__all__ = ["_nothing_left_running", "client", "engine", "lora_dir"]
