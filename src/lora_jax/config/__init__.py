"""Model configuration, read from config.json in either dialect.

Hub files say `rope_theta`, `rope_scaling`, `torch_dtype`, `num_experts`; transformers 5 re-writes
them as `rope_parameters`, `dtype`, `num_local_experts`. Both give equal configs here. What a
config asks for and this code does not do is refused by name.
"""

from lora_jax.config._hf import from_hf, known_model_types
from lora_jax.config._quantization import quantization_section
from lora_jax.config._types import (
    ClampedSwiglu,
    MlaConfig,
    ModelConfig,
    MoeConfig,
    QuantizationConfig,
    RopeConfig,
    VisionConfig,
)

__all__ = [
    "ClampedSwiglu",
    "MlaConfig",
    "ModelConfig",
    "MoeConfig",
    "QuantizationConfig",
    "RopeConfig",
    "VisionConfig",
    "from_hf",
    "known_model_types",
    "quantization_section",
]
