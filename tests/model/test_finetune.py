"""python -m lora_jax.finetune is the command of LoRA."""

import runpy
import sys

import pytest


def test_the_short_name_trains_lora(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["finetune", "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("lora_jax.finetune", run_name="__main__")
    assert "--quantization {fp8,int4,nf4}" in capsys.readouterr().out
