"""vLLM's variables that are set and change nothing are told, and only those."""

from serving.cli.vllm_variables import without_effect


def test_only_what_vllm_reads_and_this_server_does_not():
    environ = {
        "VLLM_LORA_RESOLVER_CACHE_DIR": "/adapters",
        "VLLM_LOGGING_LEVEL": "",
        "VLLM_PORT": "tcp://10.0.0.1:8000",  # Kubernetes, for a service called vllm
        "VLLM_API_KEY": "k",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    }
    assert without_effect(environ) == ["VLLM_LORA_RESOLVER_CACHE_DIR: use --lora-dir"]
