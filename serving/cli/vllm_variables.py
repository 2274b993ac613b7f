"""vLLM's environment variables without effect here, and what to use in place of each. No jax."""

from collections.abc import Mapping

_LOCAL = "nothing is downloaded: models and adapters are local folders"
_KERNELS = "kernels are chosen by device and batch"

# Only names that vLLM reads: Kubernetes sets others for a service that is called vllm.
_INSTEAD = {
    "VLLM_LORA_RESOLVER_CACHE_DIR": "use --lora-dir",
    "VLLM_LORA_RESOLVER_HF_REPO_LIST": _LOCAL,
    "VLLM_USE_MODELSCOPE": _LOCAL,
    "VLLM_PLUGINS": "code from outside this package is not run in the server",
    "VLLM_LOGGING_LEVEL": "use --log-level",
    "VLLM_LOGGING_CONFIG_PATH": "use --log-level and --uvicorn-log-level",
    "VLLM_DEBUG_LOG_API_SERVER_RESPONSE": "use --enable-log-requests; answers are never logged",
    "VLLM_CPU_KVCACHE_SPACE": "use --kv-cache-memory-bytes",
    "VLLM_CPU_OMP_THREADS_BIND": "use taskset or numactl",
    "VLLM_ATTENTION_BACKEND": _KERNELS,
    "VLLM_USE_FLASHINFER_SAMPLER": _KERNELS,
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "change max_position_embeddings in a copy of config.json",
    "VLLM_SERVER_DEV_MODE": "there are no such routes",
    "VLLM_TORCH_PROFILER_DIR": "use --otlp-traces-endpoint",
    "VLLM_CACHE_ROOT": "use XDG_CACHE_HOME",
}


def without_effect(environ: Mapping[str, str]) -> list[str]:
    """Return `NAME: what to use` for each of vLLM's variables that is set and changes nothing."""
    return [f"{name}: {instead}" for name, instead in _INSTEAD.items() if environ.get(name)]
