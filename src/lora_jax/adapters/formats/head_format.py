"""Reading the task head of a PEFT folder: task_head.json, and score.weight and score.bias. No jax.

`modules_to_save` of adapter_config.json names `score`, as PEFT writes it for a classifier; the
tensors are `base_model.model.score.weight` [labels, hidden] and, if there is one, `.bias` [labels].
"""

import math
from pathlib import Path
from typing import Any

import numpy as np

from lora_jax import strict_json
from lora_jax.adapters.catalogue import LoraCatalogue
from lora_jax.adapters.formats.folder import AdapterFolder
from lora_jax.adapters.formats.safetensors_file import AdapterTensor
from lora_jax.adapters.task_head import (
    MAX_LABEL_TEXT,
    MAX_LABELS,
    SCORE,
    HeadKind,
    TaskHead,
)
from lora_jax.adapters.weights import SiteWeights

HEAD_FILE = "task_head.json"
WEIGHT, BIAS = (f"base_model.model.{SCORE}.{name}" for name in ("weight", "bias"))
POOLING = "last"  # the state of the last prompt token
_MAX_BYTES = 1 << 20
_MAX_VALUES = 4 * MAX_LABELS
_MAX_QUERIES = 100
_KEYS = ("kind", "labels", "pooling", "queries")


def read_head(folder: AdapterFolder) -> TaskHead:
    """Return what the folder's head means. Raises ValueError naming the file and the key."""
    try:
        return parse(strict_json.read_object(folder.read(HEAD_FILE, _MAX_BYTES), _MAX_VALUES))
    except ValueError as error:
        raise ValueError(f"{HEAD_FILE}: {error}") from None


def parse(given: dict[str, Any]) -> TaskHead:
    """Return the head that task_head.json describes; ValueError naming the key that is wrong."""
    unknown = next((key for key in given if key not in _KEYS), None)
    if unknown is not None:
        raise ValueError(f"the key {unknown[:80]!r} is not known; known are {', '.join(_KEYS)}.")
    kinds = [str(kind) for kind in HeadKind]
    if given.get("kind") not in kinds:
        raise ValueError(f"kind is {_short(given.get('kind'))}; allowed are {', '.join(kinds)}.")
    if given.get("pooling", POOLING) != POOLING:
        raise ValueError(
            f"pooling is {_short(given['pooling'])}; {POOLING!r} is served: the state of the last "
            "prompt token."
        )
    kind, labels = HeadKind(given["kind"]), _labels(given.get("labels"))
    if kind is HeadKind.COUNT and labels != [str(n) for n in range(len(labels))]:
        raise ValueError('the labels of a count are "0", "1", "2" and so on, in order.')
    head = TaskHead(kind, tuple(labels), _queries(given, kind))
    if head.size > MAX_LABELS:
        raise ValueError(
            f"{head.queries} queries of {len(labels)} labels, nothing and a box are {head.size} "
            f"numbers; at most {MAX_LABELS} are served."
        )
    return head


def _queries(given: dict[str, Any], kind: HeadKind) -> int:
    """Return how many boxes a head can find, 0 for one that finds none; ValueError."""
    queries = given.get("queries")
    if kind is not HeadKind.BOXES:
        if queries is not None:
            raise ValueError(f"queries belong to a head of kind boxes, not {kind}.")
        return 0
    if type(queries) is not int or not 1 <= queries <= _MAX_QUERIES:
        raise ValueError(
            f"queries is {_short(queries)}; a head of kind boxes needs 1 to {_MAX_QUERIES}."
        )
    return queries


def _labels(labels: Any) -> list[str]:
    """Return the labels; ValueError naming what is wrong with them."""
    if not isinstance(labels, list) or not 1 <= len(labels) <= MAX_LABELS:
        raise ValueError(f"labels must be a list of 1 to {MAX_LABELS} names.")
    for label in labels:
        if not isinstance(label, str) or not 0 < len(label) <= MAX_LABEL_TEXT:
            raise ValueError(
                f"the label {_short(label)} is no text of 1 to {MAX_LABEL_TEXT} characters."
            )
    twice = next((label for i, label in enumerate(labels) if label in labels[:i]), None)
    if twice is not None:
        raise ValueError(f"the label {_short(twice)} stands twice.")
    return labels


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def take_site(
    tensors: dict[str, AdapterTensor], head: TaskHead, catalogue: LoraCatalogue
) -> SiteWeights:
    """Return the head's site, and take its tensors out of `tensors`.

    a is W [1, size, hidden]. b is [1, size + 1, width]: the identity, which gives row j of W to
    logit j, and the bias. Raises ValueError for shapes that do not fit the labels, the base model
    or the server.
    """
    module = catalogue.modules.get(SCORE)
    labels = head.size
    if module is None:
        raise ValueError(
            f"the adapter has a task head of {labels} labels, and there is no room for heads here; "
            f"a server takes them with max_lora_cls_labels of {labels} or more."
        )
    if labels > module.d_out:
        raise ValueError(
            f"the task head has {labels} labels; the server takes {module.d_out}: start it with a "
            "larger max_lora_cls_labels."
        )
    weight, bias = tensors.pop(WEIGHT, None), tensors.pop(BIAS, None)
    if weight is None:
        raise ValueError(f"no {WEIGHT}, which the task head needs.")
    if weight.shape != (labels, module.d_in):
        raise ValueError(
            f"{WEIGHT} has shape {weight.shape}; {labels} labels over states of this base model "
            f"are {(labels, module.d_in)}."
        )
    a = weight.read()
    b = np.zeros((labels + 1, module.d_out), a.dtype)
    np.fill_diagonal(b[:labels], 1)
    if bias is not None:
        if bias.shape != (labels,):
            raise ValueError(f"{BIAS} has shape {bias.shape}, not {(labels,)}.")
        b = b.astype(np.result_type(a.dtype, bias.dtype), copy=False)
        b[labels, :labels] = bias.read()
    return SiteWeights(a[None], b[None], 1.0)


def most_values(catalogue: LoraCatalogue) -> int:
    """Return how many values the tensors of a head may hold; 0 where none is taken."""
    module = catalogue.modules.get(SCORE)
    return 0 if module is None else math.prod((module.d_out, module.d_in + 1))


def labels_of(path: Path) -> int:
    """Return the rows of the head in an adapter's folder; 0 without one. Raises as read_head."""
    folder = AdapterFolder(path)
    return read_head(folder).size if HEAD_FILE in folder.files() else 0
