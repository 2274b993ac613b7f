"""Reading the rows of the vocabulary that a PEFT folder brings. No jax.

`lora_jax.adapters.vocabulary` says what they are on the device.
"""

import dataclasses
import re
from collections.abc import Iterable

import numpy as np

from lora_jax.adapters.catalogue import LoraCatalogue
from lora_jax.adapters.formats.peft_config import PeftConfig
from lora_jax.adapters.formats.peft_names import find_target
from lora_jax.adapters.formats.safetensors_file import AdapterTensor
from lora_jax.adapters.vocabulary import EMBEDDING, HEAD, PARTS, saved_name, tokens_name
from lora_jax.adapters.weights import SiteWeights, TokenIds

_NAME = re.compile(
    r"base_model\.model\.(?P<path>(?:.+\.)?(?P<part>embed_tokens|lm_head))"
    r"(?P<kind>\.token_adapter\.trainable_tokens_delta|\.weight)"
)
_TOKENS, _SAVED = "tokens", "saved"
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
    head = catalogue.of_base[HEAD]
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
    head = catalogue.of_base[HEAD]
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


def needs(config: PeftConfig) -> tuple[int, int]:
    """Return (trained tokens, whole matrices) of an adapter."""
    tokens = max((len(ids) for ids in config.token_ids.values()), default=0)
    return tokens, len(config.saved)
