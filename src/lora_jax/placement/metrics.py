"""Cost of a placement per layer, counted on the layout: Table 1 of InfiniLoRA. No jax."""

import dataclasses

import numpy as np

from lora_jax.placement.ep_pp import ServerLayout


@dataclasses.dataclass(frozen=True)
class LayerCost:
    """The four metrics of Table 1 for one layer and one LLM instance; volumes in activations.

    The paper defines Comm Peer Count as clients per server device, and so do its paragraphs (DP
    p, PP p, EP max(p/m, 1)); the column of Table 1 holds the opposite count, server devices per
    client (DP m, PP 1, EP max(m/p, 1)). Both are here.
    """

    peer_volume: float  # mean over the (client, server) pairs that talk
    servers_per_client: int  # Table 1's Comm Peer Count; most over the clients
    clients_per_server: int  # the text's comm peer count; most over the servers
    compute_volume: float  # mean over the devices of the layer's group
    sync_scope: int  # devices that must agree on a step


def traffic(
    layout: ServerLayout, batch: int, top_k: int, instance_ranks: int, layer: int = 0
) -> np.ndarray:
    """Return float64 [instance_ranks, devices]: activations sent for one layer.

    `batch` * `top_k` activations fall evenly on all (adapter, expert) pairs. The instance has its
    experts in equal, consecutive ranges, one per rank. Raises ValueError if they are not equal.
    """
    experts, adapters = layout.shape.experts, layout.shape.adapters
    if instance_ranks < 1 or experts % instance_ranks:
        raise ValueError(f"{experts} experts cannot be split over {instance_ranks} ranks evenly.")
    ranks = np.arange(experts) * instance_ranks // experts
    pairs = ranks * layout.devices + layout.devices_of_layer(layer)
    counts = np.bincount(pairs.ravel(), minlength=instance_ranks * layout.devices)
    share = batch * top_k / (adapters * experts)
    return counts.reshape(instance_ranks, layout.devices) * share


def layer_cost(layout: ServerLayout, batch: int, top_k: int, instance_ranks: int) -> LayerCost:
    """Return the metrics of Table 1, counted on the layout.

    They equal the table's formulas wherever the cuts line up (one of p and x divides the other).
    """
    sent = traffic(layout, batch, top_k, instance_ranks)
    talks = sent > 0
    return LayerCost(
        peer_volume=float(sent[talks].mean()),
        servers_per_client=int(talks.sum(axis=1).max()),
        clients_per_server=int(talks.sum(axis=0).max()),
        compute_volume=float(sent.sum(axis=0)[talks.any(axis=0)].mean()),
        sync_scope=len(layout.group_of(0)),
    )
