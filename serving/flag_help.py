"""What --help says of the flags that are fields of a configuration. No jax."""

ENGINE_HELP = {
    "dtype": "auto is what the checkpoint says",
    "load_format": "dummy: random weights, for measuring speed",
    "max_model_len": "tokens of prompt and answer, e.g. 4096 or 4k; auto is the model's",
    "max_num_seqs": "sequences in one step",
    "max_num_batched_tokens": "tokens in one step",
    "block_size": "tokens in one KV page",
    "kv_cache_memory_bytes": "bytes for KV pages",
    "gpu_memory_utilization": "share of an accelerator's memory (of what JAX may take of it, see "
    "XLA_PYTHON_CLIENT_MEM_FRACTION) for weights, adapters and KV pages",
    "enable_prefix_caching": "reuse the KV pages of equal prompt beginnings",
    "scheduling_policy": "sjf: the smallest prompt + max_tokens first, which may starve "
    "long requests",
    "max_queue": "waiting sequences before 429",
    "seed": "from which requests without a seed get theirs",
    "max_logprobs": "most log-probabilities a request may ask for per token",
    "chat_template": "a Jinja file that replaces the model's chat template",
    "generation_config": "where requests that set no temperature, top_p, top_k, min_p, "
    "repetition_penalty or (in a chat) max_tokens get them: auto is the model's "
    "generation_config.json, vllm nowhere, anything else a folder with such a file",
    "override_generation_config": "the same values as JSON, over those of the file; max_new_tokens "
    "is a default, not a limit",
    "max_loras": "LoRA adapters on the device at a time; any number may be loaded",
    "max_lora_rank": "largest rank of an adapter",
    "lora_dir": "folder of adapters: model=SUBFOLDER is loaded on first use",
    "max_esft_adapters": "ESFT adapters on the device at a time, 0 turns them off; by default 16 "
    "if the model has experts that can be replaced, on a GPU if they fit beside what jax took",
    "max_esft_experts": "most experts that an ESFT adapter replaces in one layer",
    "esft_memory_bytes": "bytes on the device for ESFT adapters' experts; by default as needed, "
    "on a GPU what is left",
    "lora_memory_bytes": "bytes on the device for adapters; by default max_loras of max_lora_rank",
    "max_adapter_bytes": "largest adapter, all its files together",
    "max_total_adapter_bytes": "host memory of all loaded adapters",
    "max_adapter_loads_per_minute": "adapter loads before requests for more are refused",
    "adapter_wait_s": "longest wait of a request for an adapter slot",
    "adapter_load_chunks_per_step": "pieces of an adapter written to the device between two steps",
    "specialize_lora": "compile decode steps once more for batches without adapters; off halves a "
    "start's time",
}
CLUSTER_HELP = {
    "instances": "LLM instances, each a process with the whole base model",
    "lora_server": "ranks of the LoRA Server that holds the adapters' experts for all instances",
    "placement": "how the LoRA Server is laid out, e.g. ep2-pp1; by default experts over all ranks",
    "lora_server_adapters": "adapters on the LoRA Server; by default max_loras of each instance",
    "lora_server_memory_bytes": "bytes for adapters on the device of each of its ranks; by default "
    "lora_server_adapters of max_lora_rank",
    "lora_server_wait_s": "longest wait of a layer for the LoRA Server",
    "lora_server_carrier": "what carries rows: auto (by the device's memory), or nixl, over UCX, "
    "which comes with lora-jax[nixl]",
    "lora_attention": "where adapters' attention is: local, on the instances, or remote, on the "
    "LoRA Server too",
    "local_expert_slots": "adapters whose experts an instance computes itself while the LoRA "
    "Server is lost; 0: their requests end with status 503",
    "lora_overlap": "exchange with the LoRA Server behind the base's computation; only to measure",
    "lora_aside": "send rows from a GPU stream of their own, not the step's; only to measure",
    "layerwise_loading": "let a cold adapter serve from its first layer on; only to measure",
    "lora_prefetch": "ask the LoRA Server for an adapter when a request is queued; only to measure",
    "lora_kernel": "kernels of the LoRA Server: fast, or reference (plain JAX); only to measure",
}

# What a value of a field is called; a number or a name where nothing is said.
METAVARS = {
    "lora_dir": "DIR",
    "chat_template": "FILE",
    "generation_config": "auto|vllm|DIR",
    "override_generation_config": "JSON",
    "max_model_len": "TOKENS",
    "max_num_batched_tokens": "TOKENS",
    "block_size": "TOKENS",
    "gpu_memory_utilization": "SHARE",
    "adapter_wait_s": "SECONDS",
    "lora_server_wait_s": "SECONDS",
    "placement": "epX-ppY",
}
