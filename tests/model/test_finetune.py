"""python -m lora_jax.finetune is the command of LoRA, and of task heads where one is asked for."""

import runpy
import sys

import pytest


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        ([], "--quantization {fp8,int4,nf4}"),
        (["--head", "class"], "adapter that gets the head"),
        (["--head=count"], "adapter that gets the head"),
    ],
)
def test_the_short_name_trains_lora_or_a_head(monkeypatch, capsys, flags, shown):
    # The import hook of array checks would be compiled into the cached module that users run.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "argv", ["finetune", *flags, "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("lora_jax.finetune", run_name="__main__")
    assert shown in capsys.readouterr().out
