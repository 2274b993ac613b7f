"""Small files that a start reads, checked before jax is imported or a process started. No jax.

An engine checks the same and more before it reads weights; the command says it within a second.
"""

from serving.cli.options import Options
from serving.engine.parts.early_checks import (
    check_adapters,
    check_hosts_adapters,
    check_plain,
    check_primary,
)
from serving.text.tokenizer import check_files


def check_start_files(options: Options) -> None:
    """Raise ValueError or LookupError naming the file that a start would fail at.

    They are the tokenizer's by their names, the chat template, and the adapters' configs.
    """
    engine, follows = options.engine, options.cluster.follows
    template = None if follows else engine.chat_template
    check_files(engine.model, template, needed=engine.load_format != "dummy")
    if follows:  # rank 0 alone reads adapters
        return
    adapters = {module.name: module.path for module in options.adapters}
    if options.cluster.splits_model:
        check_hosts_adapters(adapters)
    check_adapters(engine, adapters)
    check_plain(engine, adapters, has_server=bool(options.cluster.lora_server))
    check_primary(engine, adapters)
