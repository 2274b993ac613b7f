"""transformers + PEFT on the same files: one mixed batch through `adapter_names`."""

import time
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
