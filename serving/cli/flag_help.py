"""Help texts of the flags that are fields of a configuration. No jax."""

ENGINE_HELP = {
    "dtype": "auto is what the checkpoint says",
    "load_format": "dummy: random weights, for measuring speed",
    "max_model_len": "tokens of prompt and answer, e.g. 4096 or 4k; auto is the model's",
    "max_num_seqs": "most sequences in one step",
    "max_num_batched_tokens": "most tokens in one step",
    "tensor_parallel_size": "devices over which the model is split; they give the bits of one",
    "enable_expert_parallel": "each device has some experts whole; off: a part of each expert; "
    "default: whole ones where their number divides",
    "block_size": "tokens in one KV page",
    "kv_cache_memory_bytes": "bytes for KV pages",
    "kv_cache_dtype": "fp8: KV pages in 8 bits with a scale per token and head; auto: in the dtype "
    "of the model",
    "page_pool_bytes": "device memory that KV pages and adapters share, page by page, in place of "
    "kv_cache_memory_bytes and lora_memory_bytes",
    "kv_offloading_size": "host memory for KV pages of prompts that leave the device, in GiB, for "
    "each instance; 0 keeps none",
    "gpu_memory_utilization": "share of JAX's device memory (XLA_PYTHON_CLIENT_MEM_FRACTION) for "
    "weights, adapters and KV pages",
    "enable_prefix_caching": "reuse the KV pages of equal prompt beginnings",
    "scheduling_policy": "sjf: the smallest prompt + max_tokens first, which may starve "
    "long requests",
    "max_queue": "most waiting sequences; further requests get status 429",
    "seed": "seed of the seeds of requests that set none",
    "max_logprobs": "most log-probabilities per token that a request may ask for",
    "chat_template": "Jinja file that replaces the model's chat template",
    "generation_config": "source of sampling defaults: auto = the model's generation_config.json,"
    " vllm = the API's defaults, or a folder with such a file",
    "override_generation_config": "sampling defaults as JSON; they win over the file; "
    "max_new_tokens is a default, not a limit",
    "limit_mm_per_prompt": 'most images of one prompt, e.g. {"image": 4}; default: 8',
    "mm_processor_kwargs": "bounds of an image's size in pixels: min_pixels, max_pixels",
    "encoder_cache_tokens": "tokens of images kept on the device; default: the context, at most "
    "16384",
    "language_model_only": "load no tower and refuse images",
    "max_loras": "most LoRA adapters on the device at a time; any number may be loaded",
    "max_lora_rank": "largest rank that an adapter may have",
    "max_lora_cls_labels": "labels of the largest task head that an adapter may have; 0 takes no "
    "heads; default: those of --lora-modules",
    "enable_dora_and_bias": "take adapters with DoRA, a bias of lora_B or trained biases of the "
    "base; default: if some of --lora-modules have them",
    "max_lora_trainable_tokens": "most tokens whose rows an adapter may have trained "
    "(trainable_token_indices); default: those of --lora-modules",
    "max_lora_modules_to_save": "most whole embeddings and heads of adapters (modules_to_save) on "
    "the device; default: those of --lora-modules",
    "lora_dtype": "int8: adapters in 8 bits with a scale per rank row, half the memory; auto: in "
    "the dtype of the model",
    "lora_dir": "folder of adapters: model=SUBFOLDER is loaded on first use",
    "max_esft_adapters": "most ESFT adapters on the device at a time; 0 turns ESFT off; default: "
    "16 for a model with experts, on a GPU only if the experts fit beside JAX's memory",
    "max_esft_experts": "most experts that an ESFT adapter replaces in one layer",
    "esft_memory_bytes": "device memory for ESFT adapters' experts, in bytes; default: as needed,"
    " on a GPU what is left",
    "lora_memory_bytes": "device memory for LoRA adapters, in bytes; default: max_loras of "
    "max_lora_rank",
    "max_adapter_bytes": "largest adapter, in bytes of all its files",
    "max_total_adapter_bytes": "host memory for all loaded adapters, in bytes",
    "max_cpu_loras": "most adapters in host memory, beside --max-total-adapter-bytes; others are "
    "read again on use",
    "max_adapter_loads_per_minute": "most adapter loads per minute; further loads are refused",
    "adapter_wait_s": "longest wait of a request for an adapter slot, in seconds",
    "adapter_load_chunks_per_step": "pieces of an adapter written to the device between two steps",
    "specialize_lora": "also compile decode steps for batches without adapters; off halves the "
    "start time",
    "speculative_config": "guess tokens from repetitions, e.g. "
    '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 5, '
    '"prompt_lookup_min": 2}; default: off',
    "otlp_traces_endpoint": "send a span for each request to this OpenTelemetry collector: "
    "grpc://HOST:4317 or http://HOST:4318/v1/traces; needs pip install 'lora-jax[otel]'",
    "lora_merge": "merge the adapter that most rows ask for into a second copy of the weights; "
    "exact: only its rows run on them, auto: rows of others too, in the same step",
    "lora_merge_theta": "longest time that such steps leave a running sequence out, in seconds",
    "merge_adapter": "adapter of --lora-modules that the last of several --instances has in its "
    "weights and serves alone",
    "structured_outputs": "also compile steps for answers bound by a JSON schema, a regex or a "
    "grammar; off shortens the start and refuses such requests",
}
FUNCTIONS_HELP = {
    "functions": "folder of adapters; each becomes a process of its own over one copy of the base "
    "model, when it is first asked for",
    "functions_keep_alive_s": "seconds without requests after which such a process ends",
    "functions_memory_bytes": "memory of these processes together, in bytes, without the base "
    "model; idle ones end for one that is asked for; default: no limit",
    "functions_ttft_slo_s": "seconds in which functions promise the first token; they then have "
    "the device in turns, those first that have least time left. Without it there are turns on "
    "accelerators only, for 5 times the measured prefill of one request",
    "functions_isolation": "none = all adapters in one engine, server = each adapter's weights in "
    "a process of its own and all rows in one batch, process = an engine for each",
    "functions_max_tenants": "most adapters of one engine at a time, by isolation server or none; "
    "default: 16",
    "functions_verify_s": "seconds between two hashes of the shared weights, by a process of its "
    "own; where bytes have changed they are loaded anew. Default: never",
}
CLUSTER_HELP = {
    "instances": "number of LLM instances, each a process with the whole base model",
    "lora_server": "number of ranks of the LoRA Server, which holds the adapters' experts",
    "placement": "layout of the LoRA Server, e.g. ep2-pp1; default: experts over all ranks",
    "lora_server_adapters": "most adapters on the LoRA Server; default: max_loras of each instance",
    "lora_server_memory_bytes": "device memory of each rank for adapters, in bytes; default: "
    "lora_server_adapters of max_lora_rank",
    "lora_server_wait_s": "longest wait of a layer for the LoRA Server, in seconds",
    "lora_server_transport": "transport of rows: auto (by the device's memory; between hosts tcp), "
    "tcp, or nixl (over UCX, needs lora-jax[nixl])",
    "distributed_executor_backend": "what starts the processes: mp, on this host, or ray, on the "
    "hosts of a Ray cluster (needs lora-jax[cluster])",
    "lora_attention": "adapters' attention: local = on the instances, remote = on the LoRA Server"
    " too",
    "local_expert_slots": "most adapters that an instance computes itself while the LoRA Server "
    "is lost; 0: their requests end with status 503",
    "nnodes": "hosts over which one instance is split, started with the same command each",
    "node_rank": "number of this host; 0 answers requests, the others follow it",
    "master_addr": "address of rank 0 that the other nodes connect to",
    "master_port": "port of rank 0 for them",
    "nodes_secret_file": "file with a secret of at least 16 bytes, the same on all nodes",
    "lora_overlap": "overlap exchanges with the base's computation; switch off only to measure",
    "lora_separate_stream": "send rows from a separate GPU stream; switch on only to measure",
    "layerwise_loading": "serve a cold adapter from its first layer on; switch off only to measure",
    "lora_prefetch": "load an adapter when its request is queued; switch off only to measure",
    "lora_kernel": "kernels of the LoRA Server: fast, or reference (plain JAX) to measure",
}

# What a value of a field is called; a number or a name where nothing is said.
METAVARS = {
    "lora_dir": "DIR",
    "chat_template": "FILE",
    "generation_config": "auto|vllm|DIR",
    "override_generation_config": "JSON",
    "max_model_len": "TOKENS",
    "encoder_cache_tokens": "TOKENS",
    "max_num_batched_tokens": "TOKENS",
    "block_size": "TOKENS",
    "gpu_memory_utilization": "SHARE",
    "adapter_wait_s": "SECONDS",
    "lora_server_wait_s": "SECONDS",
    "placement": "epX-ppY",
    "master_addr": "ADDRESS",
    "master_port": "PORT",
    "nodes_secret_file": "FILE",
}
