"""transformers + PEFT on the same files: one mixed batch through `adapter_names`.

It runs in a process of its own, so that neither side's idle threads take time from the other.
"""

import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM


def load(model: Path, adapters: dict[str, Path], dtype: str) -> PeftModel:
    """Load the base and every adapter into one PEFT model."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
    names = list(adapters)
    peft = PeftModel.from_pretrained(base, adapters[names[0]], adapter_name=names[0])
    for name in names[1:]:
        peft.load_adapter(adapters[name], adapter_name=name)
    return peft.eval()


def generate(
    peft: PeftModel, prompts: list[list[int]], names: list[str | None], num_out: int
) -> tuple[list[list[int]], float]:
    """Greedy tokens of one mixed batch (None is the base model) and the seconds it took."""
    ids = torch.tensor(prompts)
    adapter_names = [name or "__base__" for name in names]
    start = time.perf_counter()
    with torch.inference_mode():
        out = peft.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            adapter_names=adapter_names,
            max_new_tokens=num_out,
            min_new_tokens=num_out,
            do_sample=False,
            pad_token_id=0,
        )
    seconds = time.perf_counter() - start
    return out[:, ids.shape[1] :].tolist(), seconds


class PeftProcess:
    """A PEFT model in a child process; a context manager."""

    def __init__(self, model: Path, adapters: dict[str, Path], dtype: str):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, model, adapters, dtype))
        self._process.start()

    def __enter__(self) -> "PeftProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.send(None)
        self._process.join()

    def generate(
        self, prompts: list[list[int]], names: list[str | None], num_out: int
    ) -> tuple[list[list[int]], float]:
        """`generate` over there; the seconds are its own."""
        self._pipe.send((prompts, names, num_out))
        return self._pipe.recv()


def _serve(pipe: Connection, model: Path, adapters: dict[str, Path], dtype: str) -> None:
    peft = load(model, adapters, dtype)
    while (request := pipe.recv()) is not None:
        pipe.send(generate(peft, *request))
