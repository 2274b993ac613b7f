"""Help texts of the flags that are fields of a configuration. No jax.

The parser adds the default of a field that has one; a text says what None stands for.
"""

ENGINE_HELP = {
    "dtype": ("Data type of weights and activations. auto: the checkpoint's; float32 for float16."),
    "load_format": "Format of the weights. dummy: random weights, to measure speed.",
    "max_model_len": "Maximum tokens of prompt and answer together, such as 4096 or 4k. auto: the "
    "model's. Default: the model's, or fewer where the KV cache has no room.",
    "max_num_seqs": "Maximum sequences in one step. Default: 256 on an accelerator, 32 on a CPU "
    "and beside a LoRA Server.",
    "max_num_batched_tokens": "Maximum tokens in one step. Default: 8192 on an accelerator of 64 "
    "GiB or more, 2048 on a smaller one, 512 on a CPU, over several devices and beside a LoRA "
    "Server.",
    "mixed_step_tokens": "Maximum tokens in one step in which requests decode; always 8 for each "
    "of them. Default: where --max-num-batched-tokens is left out on an accelerator 512, and 2048 "
    "for a model with experts.",
    "tensor_parallel_size": "Number of devices that the model is split over. The results have "
    "the bits of one device.",
    "enable_expert_parallel": "Give each device whole experts instead of a part of every expert. "
    "Default: on where the number of experts divides by the number of devices.",
    "block_size": "Tokens in one KV page.",
    "kv_cache_memory_bytes": "Device memory for the KV cache, in bytes. Default: 256 MiB on a "
    "CPU, what --gpu-memory-utilization leaves on a GPU.",
    "kv_cache_dtype": "Data type of the KV cache. fp8: 8 bits, with a scale per token and head. "
    "auto: the model's.",
    "page_pool_bytes": "Device memory that KV pages and adapters share, in bytes. It replaces "
    "--kv-cache-memory-bytes and --lora-memory-bytes. Default: no shared pool.",
    "kv_offloading_size": "Host memory of each instance for KV pages that leave the device, in "
    "GiB. 0: none.",
    "gpu_memory_utilization": "Fraction of JAX's device memory that weights, adapters and KV "
    "pages may use. XLA_CLIENT_MEM_FRACTION sets JAX's share of the device.",
    "enable_prefix_caching": "Reuse the KV pages of prompts that begin alike.",
    "scheduling_policy": "Order of waiting requests. fcfs: first come, first served. sjf: "
    "smallest prompt + max_tokens first; long requests may starve.",
    "max_queue": "Maximum waiting sequences. A request beyond it gets status 429.",
    "seed": "Seed of the server. Requests without a seed draw theirs from it.",
    "max_logprobs": "Maximum log-probabilities per token that a request may ask for.",
    "chat_template": "Jinja file, or a template in one line, that replaces the model's chat "
    "template.",
    "generation_config": "Source of sampling defaults. auto: the model's generation_config.json. "
    "vllm: the API's defaults. DIR: a folder with such a file.",
    "override_generation_config": "Sampling defaults that replace those of --generation-config. "
    "max_new_tokens here or in the file of a DIR bounds the max_tokens of all requests. "
    "Default: {}.",
    "limit_mm_per_prompt": 'Maximum images of one prompt. Default: {"image": 8}.',
    "mm_processor_kwargs": "Bounds of an image's size, in pixels: min_pixels, max_pixels. "
    "Default: the model's.",
    "mm_processor_cache_gb": "Host memory for images that were decoded and resized before, found "
    "by the digest of their file, in GiB. 0: none.",
    "encoder_cache_tokens": "Size of the cache of encoded images on the device, in tokens. "
    "Default: --max-model-len, but at most 16384.",
    "language_model_only": "Do not load the image tower. Requests with images are rejected.",
    "max_loras": "Maximum LoRA adapters on the device at a time. More may be loaded in host "
    "memory.",
    "max_lora_rank": "Maximum rank of an adapter.",
    "lora_target_modules": "Modules that adapters may change, as target_modules of PEFT names "
    "them: q_proj v_proj. Steps and adapters' memory have no part for others, and adapters that "
    "change others are rejected. all: every module. auto: those that the adapters of "
    "--lora-modules change. Default: auto where adapters are given and none can come later, else "
    "all.",
    "max_lora_cls_labels": "Maximum labels of an adapter's task head. 0: no task heads. Default: "
    "as the adapters of --lora-modules need.",
    "enable_dora_and_bias": "Accept adapters with DoRA, with a bias of lora_B or with trained "
    "biases of the base model. Default: on if an adapter of --lora-modules has one.",
    "max_lora_trainable_tokens": "Maximum trained tokens (trainable_token_indices) of an adapter. "
    "Default: as the adapters of --lora-modules need.",
    "max_lora_modules_to_save": "Maximum whole embeddings and output heads (modules_to_save) of "
    "all adapters on the device. Default: as the adapters of --lora-modules need.",
    "lora_dtype": "Data type of adapters in memory. int8: 8 bits with a scale per rank row, half "
    "the memory. auto: the model's.",
    "lora_dir": "Folder of adapters. A request for model=SUBFOLDER loads that adapter. Adapters "
    "are loaded at run time from this folder only. Default: none.",
    "max_esft_adapters": "Maximum ESFT adapters on the device at a time. 0: ESFT is off. Default: "
    "16 for a model with experts; on a GPU only if the experts fit beside JAX's memory.",
    "max_esft_experts": "Maximum experts that an ESFT adapter replaces in one layer.",
    "esft_memory_bytes": "Device memory for the experts of ESFT adapters, in bytes. Default: as "
    "needed on a CPU, what is left on a GPU.",
    "lora_memory_bytes": "Device memory for LoRA adapters, in bytes. Default: room for "
    "--max-loras adapters of --max-lora-rank, or on an accelerator of the largest rank of "
    "--lora-modules where there is no --lora-dir.",
    "max_adapter_bytes": "Maximum size of one adapter's files, in bytes.",
    "max_total_adapter_bytes": "Host memory for all loaded adapters, in bytes. Requests for more "
    "adapters at a time than it holds wait.",
    "max_cpu_loras": "Maximum adapters in host memory, within --max-total-adapter-bytes. Others "
    "are read from disk again when they are used. Default: as many as fit.",
    "max_adapter_loads_per_minute": "Maximum adapter loads per minute that requests cause. A load "
    "beyond it is rejected.",
    "adapter_wait_s": "Maximum time that a request waits for an adapter slot, and for host memory "
    "for its adapter, in seconds.",
    "adapter_load_chunks_per_step": "Maximum pieces of adapters that are written to the device "
    "between two steps.",
    "compile_base_only_steps": "Compile steps for batches without adapters too. They "
    "are faster than those with LoRA; the first start takes longer.",
    "speculative_config": "Draft tokens by n-gram lookup in the text, such as "
    '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 5, '
    '"prompt_lookup_min": 2}. Default: {}, no speculation.',
    "otlp_traces_endpoint": "OpenTelemetry collector that gets a span per request: "
    "grpc://HOST:4317 or http://HOST:4318/v1/traces. Needs pip install 'lora-jax[otel]'. "
    "Default: none.",
    "lora_merge": "Merge the adapter that most rows use into a second copy of the weights. exact: "
    "only rows of that adapter run on the copy. auto: rows of other adapters too.",
    "lora_merge_theta": "Maximum time that merged steps leave a running sequence out, in seconds.",
    "merge_adapter": "Adapter of --lora-modules that is merged into the weights of the last of "
    "several --instances, which serves it alone. Default: none.",
    "structured_outputs": "Compile steps for answers that follow a JSON schema, a regular "
    "expression or a grammar. Without them the start is faster and such requests are rejected.",
}
FUNCTIONS_HELP = {
    "functions": "Folder of adapters. Each adapter runs in a process of its own over one shared "
    "copy of the base model, from its first request on. Default: no functions.",
    "functions_keep_alive_s": "Time without requests after which a function's process ends, in "
    "seconds.",
    "functions_memory_bytes": "Memory of all function processes without the base model, in bytes. "
    "Idle processes end to make room. Default: no limit.",
    "functions_ttft_slo_s": "Promised time to first token, in seconds. Functions then take turns "
    "on the device, the one with the least time left first. Default: turns on accelerators only, "
    "with 5 times the measured prefill of one request.",
    "functions_isolation": "Isolation of adapters. none: one engine for all. server: each "
    "adapter's weights in a process of its own, on GPUs all in one process on a second GPU; one "
    "engine for all rows. process: an engine for "
    "each adapter.",
    "functions_max_tenants": "Maximum adapters of one engine at a time, for isolation none and "
    "server. Default: 16.",
    "functions_verify_s": "Time between two checks of the shared weights' hashes, in seconds. "
    "Changed weights are loaded again. Default: no checks.",
}
CLUSTER_HELP = {
    "instances": "Number of LLM instances. Each is a process with the whole base model.",
    "lora_server": "Number of ranks of the LoRA Server. 0: each instance has its own adapters.",
    "placement": "Layout of the LoRA Server, such as ep2-pp1. Default: experts over all ranks.",
    "lora_server_adapters": "Maximum adapters on the LoRA Server at a time. Default: --max-loras "
    "times --instances.",
    "lora_server_memory_bytes": "Device memory of each rank for adapters, in bytes. Default: room "
    "for --lora-server-adapters adapters of --max-lora-rank.",
    "lora_server_wait_s": "Maximum time that a layer waits for the LoRA Server, in seconds.",
    "lora_server_transport": "Transport between instances and the LoRA Server. auto: shared "
    "memory or GPU memory on one host, tcp between hosts. nixl: UCX, needs pip install "
    "'lora-jax[nixl]'. nvshmem: GPUs of one host or several, needs pip install "
    "'lora-jax[nvshmem]'; all processes restart together.",
    "distributed_executor_backend": "Starter of the processes. mp and uni: this command, on this "
    "host. ray: on the hosts of a Ray cluster, needs pip install 'lora-jax[cluster]'.",
    "lora_attention": "Place that computes adapters of attention layers. local: the instances. "
    "remote: the LoRA Server.",
    "local_expert_slots": "Maximum adapters that an instance computes itself while the LoRA "
    "Server is lost. 0: requests for adapters then end with status 503.",
    "nnodes": "Number of hosts that one instance is split over, or that several instances and a "
    "LoRA Server are spread over. Each starts the same command.",
    "node_rank": "Number of this host. Host 0 answers requests.",
    "master_addr": "Address of host 0 that the other hosts connect to.",
    "master_port": "Port of host 0 that the other hosts connect to.",
    "headless": "Serve no front on this host: vLLM's flag for hosts whose --node-rank is above 0, "
    "which have none in any case.",
    "nodes_secret_file": "File with a secret of at least 16 bytes, the same on all hosts.",
    "lora_overlap": "Overlap exchanges with the base model's computation. Turn off only to "
    "measure.",
    "lora_separate_stream": "Send rows from a separate GPU stream. Turn on only to measure.",
    "layerwise_loading": "Serve an adapter while its later layers still load. Turn off only to "
    "measure.",
    "lora_prefetch": "Load an adapter when its request is queued. Turn off only to measure.",
    "lora_kernel": "Kernels of the LoRA Server. reference: plain JAX, to measure.",
}

# Name of a field's value in --help; others are called BYTES, N, NUMBER or NAME.
METAVARS = {
    "lora_dir": "DIR",
    "functions": "DIR",
    "functions_keep_alive_s": "SECONDS",
    "functions_ttft_slo_s": "SECONDS",
    "functions_verify_s": "SECONDS",
    "functions_isolation": "{none,server,process}",
    "kv_offloading_size": "GIB",
    "mm_processor_cache_gb": "GIB",
    "lora_merge_theta": "SECONDS",
    "otlp_traces_endpoint": "URL",
    "chat_template": "FILE|TEXT",
    "generation_config": "auto|vllm|DIR",
    "override_generation_config": "JSON",
    "max_model_len": "TOKENS",
    "encoder_cache_tokens": "TOKENS",
    "max_num_batched_tokens": "TOKENS",
    "mixed_step_tokens": "TOKENS",
    "block_size": "TOKENS",
    "gpu_memory_utilization": "FRACTION",
    "adapter_wait_s": "SECONDS",
    "lora_server_wait_s": "SECONDS",
    "placement": "epX-ppY",
    "master_addr": "ADDRESS",
    "master_port": "PORT",
    "nodes_secret_file": "FILE",
}
