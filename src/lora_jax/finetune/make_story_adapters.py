"""Trains two small adapters of stories260K on English sentences, and measures them.

    python -m lora_jax.finetune.make_story_adapters --data DIR --out assets/stories260k

DIR holds the ESFT evaluation set translation.jsonl.gz; its English side is Bible verses and
sentences of stories. A sentence with words of the old Bible is scripture, any other is prose.
"""

import argparse
import pathlib
import re
import sys

import numpy as np

from lora_jax.finetune import results
from lora_jax.finetune.documents import read_format
from lora_jax.finetune.esft_text import Split, read_domain, split
from lora_jax.finetune.lora import train_lora
from lora_jax.finetune.lora_params import LoraSpec
from lora_jax.finetune.make_assets import HELDOUT_SHARE
from lora_jax.finetune.peft_export import save_adapter
from lora_jax.finetune.records import Record, write_jsonl
from lora_jax.finetune.training import Schedule
from lora_jax.models import load

DOMAIN = "translation"
OLD_WORDS = re.compile(
    r"\b(unto|thee|thou|thy|ye|shall|hath|saith|lord|god|jesus|christ|spirit|brethren|behold)\b",
    re.IGNORECASE,
)
LENGTH = 256
SCHEDULE = Schedule(
    steps=300, batch_rows=8, learning_rate=5e-3, warmup_steps=20, checkpoint_every=100
)
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
SPECS = {
    "prose": LoraSpec(4, 8.0, ATTENTION),
    "scripture": LoraSpec(8, 16.0, (*ATTENTION, "gate_proj", "up_proj", "down_proj")),
}


def english_sentences(data: pathlib.Path) -> dict[str, Split]:
    """Return scripture and prose; what is held out is held out of the translations too."""
    whole = split(read_domain(data, DOMAIN), HELDOUT_SHARE, DOMAIN)
    return {
        "prose": Split(*(sentences(part, False) for part in (whole.train, whole.heldout))),
        "scripture": Split(*(sentences(part, True) for part in (whole.train, whole.heldout))),
    }


def sentences(records: tuple[Record, ...], old: bool) -> tuple[Record, ...]:
    """Return the English of translations: its first word as the prompt, the rest as the answer."""
    chosen = [r.answer for r in records if bool(OLD_WORDS.search(r.answer)) == old]
    cut = [text.partition(" ") for text in chosen]
    return tuple(Record(first, rest) for first, _, rest in cut if first and rest)


def main(argv: list[str]) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m lora_jax.finetune.make_story_adapters")
    parser.add_argument("--data", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="converted stories260K")
    parser.add_argument("--state", type=pathlib.Path, help="default: OUT.training")
    args = parser.parse_args(argv)
    state = args.state or args.out.with_name(args.out.name + ".training")
    model, config = load(args.out, dtype="float32")
    (args.out / "heldout").mkdir(exist_ok=True)
    for name, part in english_sentences(args.data).items():
        write_jsonl(args.out / "heldout" / f"{name}.jsonl", part.heldout)
        documents = read_format(args.out).documents(part.train, "plain")
        spec, folder = SPECS[name], state / name
        params = train_lora(model, documents, LENGTH, spec, SCHEDULE, folder=folder, label=name)
        save_adapter(
            args.out / "adapters" / name,
            params,
            spec,
            model.catalogue(config),
            base_name=args.out.name,
            dtype=np.float32,
        )
    results.main([str(args.out), "--length", str(LENGTH)])


if __name__ == "__main__":
    main(sys.argv[1:])
