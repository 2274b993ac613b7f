"""An adapter in the form in which a tenant's loop computes it."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np

from lora_jax.adapters.weights import AdapterReport, AdapterWeights, SiteWeights
from lora_jax.models import model_class
from lora_jax.models.loader import read_config
from serving.lora_server.plain_adapter import read_plain
from serving.lora_server.tenant_layout import TenantLayout
from serving.lora_server.transport.shapes import Shapes
from serving.lora_server.transport.tenants import MAP, TenantServer


def layout_of(model: str) -> TenantLayout:
    """Return the sites of the model in a folder. Raises ValueError; reads no weights."""
    config = read_config(Path(model))
    return TenantLayout(model_class(config.model_type).catalogue(config))


def open_tenant(
    model: str, folder: str, max_rank: int, max_rows: int, dtype: str
) -> tuple[TenantServer, AdapterReport]:
    """Return the server of the adapter in a folder, and its report.

    `max_rows` are those of a message, `dtype` is the base model's, in which an engine would keep
    the adapter. Raises ValueError for an adapter that cannot be served so, NotImplementedError
    without a C++ compiler.
    """
    config = read_config(Path(model))
    catalogue = model_class(config.model_type).catalogue(config)
    layout = TenantLayout(catalogue)
    weights = read_plain(Path(folder).name, folder, model, config, catalogue, max_rank)
    shapes = layout.shapes(max_rows, dtype)
    maps, keep = _maps(layout, shapes, weights)
    return TenantServer(shapes, maps, keep), weights.report


def _maps(
    layout: TenantLayout, shapes: Shapes, weights: AdapterWeights
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the table of what the adapter adds, and the matrices whose addresses are in it."""
    outputs = [name for site in layout.sites for name in site]
    maps = np.zeros((layout.num_layers, len(outputs)), MAP)
    matrices: dict[int, np.ndarray] = {}

    def kept(matrix: np.ndarray) -> np.ndarray:
        if id(matrix) not in matrices:
            matrices[id(matrix)] = np.ascontiguousarray(matrix.astype(shapes.row_dtype))
        return matrices[id(matrix)]

    for (name, layer), site in weights.sites.items():
        maps[layer, outputs.index(name)] = _map(site, kept(site.a), kept(site.b))
    return maps, list(matrices.values())


def _map(site: SiteWeights, a: np.ndarray, b: np.ndarray) -> tuple:
    strides = tuple(0 if matrix.shape[0] == 1 else site.rank for matrix in (a, b))
    rows = a.shape[0] * a.shape[1], b.shape[0] * b.shape[1]
    return (a.ctypes.data, b.ctypes.data, *rows, site.rank, *strides, jnp.float32(site.scaling))
