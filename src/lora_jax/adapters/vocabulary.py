"""Rows of the vocabulary that adapters bring: trained tokens, whole embeddings and heads. No jax.

Of PEFT's `trainable_token_indices` an adapter has some rows [tokens, hidden], each in the place of
the base's; of `modules_to_save` it has a whole embedding or head [vocab, hidden]. Either is a site
of its own: trained tokens are rank rows of the hidden width, a whole matrix is one row of
vocab * hidden values. A head that is tied to the embedding follows it as PEFT has it: trained
tokens change both, a saved embedding changes the head only with `ensure_weight_tying`.
"""

import dataclasses
import re
from collections.abc import Iterable

import numpy as np

from lora_jax.adapters.catalogue import WHOLE, LoraCatalogue, LoraModule
from lora_jax.adapters.peft_config import VOCABULARY, PeftConfig
from lora_jax.adapters.peft_names import find_target
from lora_jax.adapters.safetensors_file import AdapterTensor
from lora_jax.adapters.task_head import head_width
from lora_jax.adapters.weights import SiteWeights, TokenIds

PARTS = EMBEDDING, HEAD = VOCABULARY  # order of AdapterSlots.token_ids
MOST_TOKENS = 1024
_TOKENS, _SAVED = ".tokens", ".saved"
_NAME = re.compile(
    r"base_model\.model\.(?P<path>(?:.+\.)?(?P<part>embed_tokens|lm_head))"
    r"(?P<kind>\.token_adapter\.trainable_tokens_delta|\.weight)"
)
_WORDS = {_TOKENS: "trained tokens (trainable_token_indices)", _SAVED: "{} (modules_to_save)"}
_Site = tuple[str, int]


@dataclasses.dataclass(frozen=True)
class VocabularyRows:
    """Sites of an adapter's own rows of the vocabulary, and which tokens the trained rows are."""

    sites: dict[_Site, SiteWeights]
    token_ids: TokenIds
    words: tuple[str, ...]  # for people

    @property
    def num_bytes(self) -> int:
        """Bytes of the matrices, those that two sites share once."""
        matrices = {id(m): m for site in self.sites.values() for m in (site.a, site.b)}
        return sum(matrix.nbytes for matrix in matrices.values())


def tokens_name(part: str) -> str:
    """Return the module of an embedding's or head's trained tokens."""
    return part + _TOKENS


def saved_name(part: str) -> str:
    """Return the module of a whole embedding or head."""
    return part + _SAVED


def is_saved(module: str) -> bool:
    """Return whether a module is a whole embedding or head."""
    return module.endswith(_SAVED)


def is_trained_embedding(module: str) -> bool:
    """Return whether a module is an embedding's trained tokens, whose A and B are the same rows."""
    return module == tokens_name(EMBEDDING)


def with_vocabulary(
    catalogue: LoraCatalogue, *, tied: bool, most_tokens: int, most_saved: int
) -> LoraCatalogue:
    """Return the catalogue with room for up to `most_tokens` trained tokens of each adapter.

    All adapters together may have `most_saved` whole embeddings and heads; a head is `tied` if it
    is the base's embedding.
    """
    hidden, vocab = catalogue.modules[HEAD].d_in, catalogue.modules[HEAD].d_out
    added = []
    if most_tokens:
        rank = {"layers": (0,), "split": WHOLE, "most_rank": most_tokens}
        width = head_width(most_tokens)
        added.append(LoraModule(tokens_name(EMBEDDING), hidden, hidden, **rank))
        added.append(LoraModule(tokens_name(HEAD), hidden, width, **rank))
    if most_saved:
        values = vocab * hidden
        names = map(saved_name, PARTS)
        added += [LoraModule(n, values, values, (0,), split=WHOLE, most_rank=1) for n in names]
    modules = catalogue.modules | {module.name: module for module in added}
    return dataclasses.replace(catalogue, modules=modules, tied_head=tied, most_saved=most_saved)


def take_rows(
    tensors: dict[str, AdapterTensor], config: PeftConfig, catalogue: LoraCatalogue
) -> VocabularyRows:
    """Return an adapter's own rows of the vocabulary, taken out of `tensors`.

    Raises ValueError naming what is missing, has a wrong shape, or has no room here.
    """
    if not config.token_ids and not config.saved:
        return VocabularyRows({}, {}, ())
    tensors_of: dict[tuple[str, str], AdapterTensor] = {}
    for name in tuple(tensors):
        if (match := _NAME.fullmatch(name)) is None:
            continue
        _check_path(name, match["path"], match["part"], catalogue)
        kind = _SAVED if match["kind"] == ".weight" else _TOKENS
        if (match["part"], kind) in tensors_of:
            raise ValueError(f"{name}: the file has it under two names.")
        tensors_of[match["part"], kind] = tensors.pop(name)
    tokens = _trained(tensors_of, config, catalogue)
    saved = _saved(tensors_of, config, catalogue)
    for (part, kind), tensor in tensors_of.items():
        raise ValueError(f"{tensor.name}: the config announces no{_what(kind, part)}.")
    both = sorted(
        {n.partition(".")[0] for n, _ in tokens} & {n.partition(".")[0] for n, _ in saved}
    )
    if both:
        raise ValueError(
            f"{both[0]} has trained tokens, and is saved whole: one of them is served."
        )
    ids = {
        part: config.token_ids[_source(part, config)]
        for part in PARTS
        if (tokens_name(part), 0) in tokens
    }
    kinds = [_TOKENS] if tokens else []
    words = tuple(_WORDS[kind] for kind in kinds)
    words += tuple(_WORDS[_SAVED].format(part) for part in PARTS if (saved_name(part), 0) in saved)
    return VocabularyRows(tokens | saved, ids, words)


def check_alone(rows: VocabularyRows, sites: Iterable[_Site]) -> None:
    """Raise ValueError for LoRA on a head whose rows the adapter has replaced."""
    replaced = {name.partition(".")[0] for name, _ in rows.sites}
    if HEAD in replaced and (HEAD, 0) in sites:
        raise ValueError(f"{HEAD} has LoRA beside {', '.join(rows.words)}: one of them is served.")


def _source(part: str, config: PeftConfig) -> str:
    """Return the part whose trained tokens this one takes: a tied head has the embedding's."""
    return part if part in config.token_ids else EMBEDDING


def _trained(
    found: dict[tuple[str, str], AdapterTensor], config: PeftConfig, catalogue: LoraCatalogue
) -> dict[_Site, SiteWeights]:
    """Return the sites of trained tokens, whose tensors are taken out of `found`."""
    sites: dict[_Site, SiteWeights] = {}
    for part, ids in config.token_ids.items():
        if part == HEAD and catalogue.tied_head:
            raise ValueError(
                f"trainable_token_indices names {HEAD}, which is the base's embedding: name "
                f"{EMBEDDING}, which changes both."
            )
        tensor = found.pop((part, _TOKENS), None)
        if tensor is None:
            raise ValueError(f"no trained rows of {part}, which trainable_token_indices announces.")
        rows = _rows(tensor, ids, catalogue)
        parts = PARTS if part == EMBEDDING and catalogue.tied_head else (part,)
        for each in parts:
            sites[tokens_name(each), 0] = _token_site(rows, each, catalogue)
    return sites


def _token_site(rows: np.ndarray, part: str, catalogue: LoraCatalogue) -> SiteWeights:
    """Return trained rows [1, tokens, hidden] as a site: of a head B gives row j to logit j."""
    if part == EMBEDDING:
        return SiteWeights(rows, rows, 1.0)
    count = rows.shape[1]
    b = np.eye(count, catalogue.modules[tokens_name(HEAD)].d_out, dtype=rows.dtype)
    return SiteWeights(rows, b[None], 1.0)


def _rows(tensor: AdapterTensor, ids: tuple[int, ...], catalogue: LoraCatalogue) -> np.ndarray:
    """Return the trained rows [1, tokens, hidden]; ValueError where they do not fit."""
    module = catalogue.modules.get(tokens_name(EMBEDDING))
    room = 0 if module is None else module.most_rank or 0
    if len(ids) > room:
        raise ValueError(
            f"the adapter has {len(ids)} trained tokens (trainable_token_indices); the server "
            f"takes {room}: "
            + catalogue.what_to_change(f"max_lora_trainable_tokens of {len(ids)} or more.")
        )
    head = catalogue.modules[HEAD]
    outside = [token for token in ids if token >= head.d_out]
    if outside:
        raise ValueError(
            f"trainable_token_indices has {outside[0]}; the base has {head.d_out} tokens."
        )
    if tensor.shape != (len(ids), head.d_in):
        raise ValueError(
            f"{tensor.name} has shape {tensor.shape}; the config and the base want "
            f"{(len(ids), head.d_in)}."
        )
    return tensor.read()[None]


def _saved(
    found: dict[tuple[str, str], AdapterTensor], config: PeftConfig, catalogue: LoraCatalogue
) -> dict[_Site, SiteWeights]:
    """Return the sites of whole matrices, whose tensors are taken out of `found`."""
    if len(config.saved) > catalogue.most_saved:
        raise ValueError(
            f"the adapter has {len(config.saved)} whole matrices of the vocabulary "
            f"(modules_to_save: {', '.join(config.saved)}); the server takes "
            f"{catalogue.most_saved}: "
            + catalogue.what_to_change("a larger max_lora_modules_to_save.")
        )
    follows = config.ties_weights and catalogue.tied_head and EMBEDDING in config.saved
    sites: dict[_Site, SiteWeights] = {}
    for part in PARTS:
        if part not in config.saved and not (follows and part == HEAD):
            continue
        tensor = found.pop((part, _SAVED), None)
        if tensor is None and follows and part == HEAD:
            sites[saved_name(part), 0] = sites[saved_name(EMBEDDING), 0]
            continue
        if tensor is None:
            raise ValueError(f"no weight of {part}, which modules_to_save announces.")
        whole = _whole(tensor, catalogue)
        if follows and part == HEAD:
            site = sites[saved_name(EMBEDDING), 0]
            if not np.array_equal(site.a, whole):
                raise ValueError(f"{tensor.name}: it is tied to the embedding, and differs.")
        else:
            site = SiteWeights(whole, whole, 1.0)
        sites[saved_name(part), 0] = site
    return sites


def _whole(tensor: AdapterTensor, catalogue: LoraCatalogue) -> np.ndarray:
    """Return a whole matrix as one row [1, 1, vocab * hidden]; ValueError where it does not fit."""
    head = catalogue.modules[HEAD]
    if tensor.shape != (head.d_out, head.d_in):
        raise ValueError(
            f"{tensor.name} has shape {tensor.shape}; the base has {(head.d_out, head.d_in)}. A "
            "vocabulary of another size is not served: train added tokens in rows that the base "
            "has to spare, or resize the base."
        )
    return tensor.read().reshape(1, 1, -1)


def _check_path(name: str, path: str, part: str, catalogue: LoraCatalogue) -> None:
    """Raise ValueError unless the path is that of the base's embedding or head."""
    if part == HEAD:
        target = find_target(path, catalogue)
        is_head = target is not None and target.modules[0].name == HEAD
    else:
        is_head = any(rule.pattern.fullmatch(path) for rule in catalogue.rules)
    if not is_head:
        raise ValueError(f"{name}: the base model ({catalogue.model_type}) has no module {path}.")


def _what(kind: str, part: str) -> str:
    return f" {_WORDS[kind].format(part)}"


def ids_table(ids: TokenIds, most: int) -> np.ndarray:
    """Return int32 [2, most]: each part's tokens in the order of their rows, -1 behind them."""
    table = np.full((len(PARTS), most), -1, np.int32)
    for part, tokens in ids.items():
        table[PARTS.index(part), : len(tokens)] = tokens
    return table


def most_tokens(catalogue: LoraCatalogue) -> int:
    """Return how many trained tokens an adapter may have; 0 where there is no room for any."""
    module = catalogue.modules.get(tokens_name(EMBEDDING))
    return 0 if module is None else module.most_rank or 0


def brings_tokens(catalogue: LoraCatalogue) -> bool:
    """Return whether there is room for rows of the vocabulary that adapters bring."""
    return bool(most_tokens(catalogue) or catalogue.most_saved)


def needs(config: PeftConfig) -> tuple[int, int]:
    """Return (trained tokens, whole matrices) of an adapter."""
    tokens = max((len(ids) for ids in config.token_ids.values()), default=0)
    return tokens, len(config.saved)
