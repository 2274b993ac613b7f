"""Meaning here of the flags of vLLM that have no flag of ours. No jax.

`vllm_flags.json` has the flags as vLLM's own parser knows them. One that has a flag of the same
name here is not in these tables.
"""

# A form of a switch, or a flag with the values it may have (* is any), that is true here without
# being said. Every other form or value is refused with the same reason.
ALWAYS_SO = {
    "--enable-lora": "adapters are always on",
    "--enable-chunked-prefill": "prompts are computed in pieces of --max-num-batched-tokens",
    "--async-scheduling": "a step is scheduled while the one before it runs",
    "--enable-prompt-tokens-details": "usage always has prompt_tokens_details",
    "--enable-server-load-tracking": "/load always counts",
    "--enable-request-id-headers": "every answer has an X-Request-Id",
    "--enable-offline-docs": "/docs loads nothing from elsewhere",
    "--disable-cascade-attn": "attention has one kernel per device",
    "--disable-custom-all-reduce": "nothing is summed over devices",
    "--disable-nccl-for-dp-synchronization": "instances do not synchronize",
    "--disable-hybrid-kv-cache-manager": "all layers share one kind of KV page",
    "--enable-tower-connector-lora": "adapters may change towers and projectors",
    "--mm-processor-cache-gb 0": "--encoder-cache-tokens keeps images, as rows on the device",
    "--kv-offloading-backend native": "the engine itself moves KV pages to --kv-offloading-size",
    "--skip-mm-profiling": "memory for images is set by --encoder-cache-tokens",
    "--no-interleave-mm-strings": "content parts keep their order",
    "--no-mm-device-do-normalize": "pixels have the bits of transformers' processors",
    "--no-use-tqdm-on-load": "loading is logged in lines",
    "--scheduler-reserve-full-isl": "a request starts when there are pages for its whole prompt",
    "--disable-log-deltas": "answers are never logged",
    "--disable-flash-late-interaction": "models generate text here",
    "--no-cohere-is-reasoning-model": "there is no Cohere route",
    "--disable-flashinfer-autotune": "kernels have tilings that are kept as tables",
    "--no-swa-bounded-replay": "the KV pages of a sliding window are kept like all others",
    "--no-dcp-q-replicate": "a sequence is never split over devices",
    "--disable-batch-sharded-sampling": "every device of a split model samples every row",
    "--aggregate-engine-logging": "one log has the lines of every process",
    "--fail-on-environ-validation": "an unknown SERVING_ variable always ends the start",
    "--max-log-len *": "no part of a prompt is ever logged",
    "--api-server-count 1": "one process answers HTTP; --instances starts more engines behind it",
    "--tokenizer-mode auto hf": "the tokenizer is the one in the model's folder",
    "--runner auto generate": "models generate text here",
    "--convert auto none": "models generate text here",
    "--chat-template-content-format auto string": "parts of a message are joined to one text "
    "before the template reads them",
    "--config-format auto hf": "a model's folder is as Hugging Face has it",
    "--fingerprint-mode none": "system_fingerprint is null but for versions of adapters",
    "--prefix-caching-hash-algo sha256": "pages are found by SHA-256",
    "--logprobs-mode raw_logprobs": "log-probabilities are those of the model, before temperature "
    "and penalties",
    "--stream-interval 1": "a stream sends tokens as they are made",
    "--safetensors-load-strategy lazy": "a file's tensors are read when they are placed",
}

# Why a flag is refused, and what to use instead. Of a switch the other form is accepted, of a value
# vLLM's own default: neither asks for anything.
REFUSED = {
    "one process serves on the devices of --tensor-parallel-size; --instances starts several": (
        "--headless --pipeline-parallel-size "
        "--data-parallel-rank --data-parallel-start-rank --data-parallel-size-local "
        "--data-parallel-address --data-parallel-rpc-port --data-parallel-backend "
        "--data-parallel-hybrid-lb --data-parallel-external-lb --dp-sync-interval "
        "--data-parallel-multi-port-external-lb --data-parallel-supervisor-port "
        "--dp-supervisor-probe-interval-s --dp-supervisor-probe-timeout-s "
        "--dp-supervisor-probe-failure-threshold --decode-context-parallel-size "
        "--dcp-comm-backend --dcp-kv-cache-interleave-size --cp-kv-cache-interleave-size "
        "--prefill-context-parallel-size "
        "--distributed-timeout-seconds --cpu-distributed-timeout-seconds --enable-dbo "
        "--dbo-decode-token-threshold --dbo-prefill-token-threshold --ubatch-size --enable-hc-sp "
        "--enable-elastic-ep --elastic-ep-max-dp-size --enable-nccl-comm-suspend "
        "--enable-shm-tensor-arena --ray-workers-use-nsight --worker-cls --worker-extension-cls "
        "--numa-bind --numa-bind-nodes --numa-bind-cpus"
    ),
    "the devices of --tensor-parallel-size share experts in order; adapters' experts can be on "
    "others: --lora-server": (
        "--enable-ep-weight-filter --all2all-backend --enable-eplb "
        "--eplb-config --expert-placement-strategy"
    ),
    "each device has an adapter's A whole, so that it needs no exchange of its own": (
        "--fully-sharded-loras"
    ),
    "an instance or a rank that ends is started anew by the server itself": (
        "--enable-fault-tolerance --fault-tolerance-config --watchdog-config"
    ),
    "code from a model's folder is never run here; the supported models are built in": (
        "--trust-remote-code --model-class-overrides"
    ),
    "code from outside this package is not run in the server; a proxy in front may do it": (
        "--middleware --logits-processors --io-processor-plugin --tool-parser-plugin "
        "--reasoning-parser-plugin --scheduler-cls"
    ),
    "JAX picks the device; set JAX_PLATFORMS or CUDA_VISIBLE_DEVICES": "--device-ids",
    "the models are this package's own": "--model-impl",
    "idle pages go in the order of their last use": "--prefix-cache-retention-interval",
    "templates are rendered in threads of the server": "--renderer-num-workers",
    "steps are planned in one way; --max-num-seqs and --max-num-batched-tokens bound them": (
        "--performance-mode"
    ),
    "templates come from the model's folder or --chat-template, never from a request": (
        "--trust-request-chat-template"
    ),
    "the model is a folder of this machine and nothing is downloaded": (
        "--revision --code-revision --tokenizer-revision --download-dir --hf-token "
        "--ignore-patterns"
    ),
    "config.json in the model's folder says it; change a copy of that file": (
        "--hf-config-path --hf-overrides"
    ),
    "the tokenizer is the one in the model's folder": "--tokenizer --skip-tokenizer-init",
    "the model's quantization_config says it; python -m lora_jax.quantize writes one": (
        "--quantization --quantization-config --allow-deprecated-quantization"
    ),
    "safetensors files are read straight to the device": (
        "--safetensors-prefetch-num-threads --safetensors-prefetch-block-size "
        "--model-loader-extra-config --pt-load-map-location --max-parallel-loading-workers "
        "--weight-transfer-config"
    ),
    "adapters may change any module that the model has": "--lora-target-modules",
    "adapters of any mixture share a batch anyway, and --specialize-lora compiles steps without "
    "adapters": "--specialize-active-lora --enable-mixed-moe-lora-format --enable-moe-shared-loras",
    "steps may cut an image anywhere, with equal bits": "--disable-chunked-mm-input",
    "images are decoded and prepared in one way, and no other media are taken": (
        "--trust-request-mm-kwargs --default-mm-loras --enable-mm-embeds "
        "--media-io-kwargs --mm-processor-cache-type "
        "--mm-hasher-algorithm --mm-shm-cache-max-object-size-mb --mm-encoder-only "
        "--mm-encoder-tp-mode --mm-encoder-attn-backend --mm-encoder-attn-dtype "
        "--mm-encoder-fp8-scale-path --mm-encoder-fp8-scale-save-path "
        "--mm-encoder-fp8-scale-save-margin --video-pruning-rate --video-pruning-method "
        "--mm-tensor-ipc --mm-processor-device --mm-ipc-gpu-memory-gb --ec-transfer-config "
        "--ec-manager-config --aux-output-config"
    ),
    "models generate text here": ("--pooler-config --enable-prompt-embeds --diffusion-config"),
    "demanded calls are always bound by their schemas, others never; tools are the client's": (
        "--tool-strict-level --tool-server"
    ),
    "templates get the tools under every tool_choice": "--exclude-tools-when-tool-choice-none",
    "chat_template_kwargs and reasoning_effort go to the template as they are": (
        "--reasoning-config --reasoning-effort-map"
    ),
    "llguidance makes the grammars, and a request's structured_outputs has the other options": (
        "--structured-outputs-config"
    ),
    "there is no such route; see serving/http/README.md for those there are": (
        "--grpc --grpc-port --cohere-format --anthropic-disabled-thinking-effort "
        "--enable-tokenizer-info-endpoint --tokens-only --enable-scale-out --engram-config"
    ),
    "prompts and answers are never logged; --enable-log-requests logs names and numbers": (
        "--enable-log-outputs"
    ),
    "an unexpected error is always logged with its stack, an expected one never": (
        "--log-error-stack"
    ),
    "log lines go to stdout in one format; --log-level and --uvicorn-log-level choose them": (
        "--logging-config --log-config-file --enable-logging-iteration-details"
    ),
    "/metrics has what there is; see ARCHITECTURE.md": (
        "--enable-per-request-metrics --show-hidden-metrics-for-version --kv-cache-metrics "
        "--kv-cache-metrics-sample --custom-histogram-buckets --cudagraph-metrics "
        "--enable-mfu-metrics --jit-monitor-mode --jit-monitor-verbose"
    ),
    "traces have one span for each request: --otlp-traces-endpoint; --enable-log-requests and "
    "/metrics say more": (
        "--collect-detailed-traces --enable-layerwise-nvtx-tracing --profiler-config "
        "--enable-trace-replay"
    ),
    "system_fingerprint is null but for versions of adapters": "--fingerprint-value",
    "the certificate is read at the start; start the server again for a new one": (
        "--enable-ssl-refresh"
    ),
    "headers are bounded in bytes: --h11-max-incomplete-event-size": "--h11-max-header-count",
    "the engine's memory is taken at the start and kept; stop the process to free it": (
        "--enable-sleep-mode --sleep-mode-backend --sleep-mode-offload-cudagraph "
        "--sleep-preserve-parameter-names --enable-cumem-allocator"
    ),
    "weights and KV pages are in the device's memory; bound them by --max-model-len and "
    "--kv-cache-memory-bytes": (
        "--offload-backend --cpu-offload-gb --cpu-offload-params --offload-group-size "
        "--offload-num-in-group --offload-prefetch-step --offload-params "
        "--kv-transfer-config --kv-events-config"
    ),
    "KV pages are counted in bytes: --kv-cache-memory-bytes": "--num-gpu-blocks-override",
    "every layer's KV pages have the dtype that --kv-cache-dtype says": (
        "--kv-cache-dtype-skip-layers --kv-sharing-fast-prefill"
    ),
    "a prompt's pages are matched whole: --block-size": "--prefix-match-unit",
    "no supported model has Mamba layers or other state instead of KV pages": (
        "--mamba-backend --mamba-ssu-algorithm --enable-mamba-cache-stochastic-rounding "
        "--mamba-cache-philox-rounds --mamba-cache-dtype --mamba-ssm-cache-dtype "
        "--mamba-block-size --mamba-cache-mode --enable-mamba-shared-prefix-checkpoint "
        "--replayssm-buffer-len --use-replayssm --gdn-prefill-backend --kda-prefill-backend "
        "--kda-decode-backend"
    ),
    "a step is always one compiled program": (
        "--enforce-eager --compilation-config --optimization-level --cudagraph-capture-sizes "
        "--max-cudagraph-capture-size"
    ),
    "kernels are chosen by device and batch": (
        "--attention-backend --attention-config --kernel-config --ir-op-priority --monokernel "
        "--moe-backend --linear-backend --sparse-indexer-topk-backend --use-fp64-gumbel"
    ),
    "a model's sliding window is part of it": "--disable-sliding-window",
    "drafts are copied from the text: --speculative-config with the method ngram": (
        "--spec-method --spec-model --spec-tokens"
    ),
    "drafts are counted for the whole server, see /metrics": "--per-request-spec-decode-metrics",
    "texts carry no watermark": "--watermark-config",
    "answers do not say it": "--enable-return-routed-experts --return-sampling-mask",
    "waiting sequences are bounded by --max-queue, running ones by --max-num-seqs": (
        "--max-num-active-seqs --max-num-queued-reqs --max-num-queued-tokens"
    ),
    "tokens of a step are bounded by --max-num-batched-tokens": (
        "--max-num-scheduled-tokens --long-prefill-token-threshold "
        "--long-prefill-token-threshold-adaptive --prefill-schedule-interval --watermark"
    ),
    "every option has a flag of its own": "--additional-config",
}

# Flags of older releases of vLLM and of SGLang: spellings, and what was said above.
OLDER_SPELLINGS = {
    "--tensor-parallel-size": ("--tp", "--tp-size"),
    "--pipeline-parallel-size": ("--pp-size",),
    "--data-parallel-size": ("--dp-size",),
}
OLDER_ALWAYS_SO = {
    "--lora-eviction-policy lru": "idle adapters go in the order of their last use",
    "--task auto generate": "models generate text here",
    "--device auto": "JAX picks the device: JAX_PLATFORMS, CUDA_VISIBLE_DEVICES",
    "--guided-decoding-backend auto guidance": "llguidance makes the grammars",
    "--num-scheduler-steps 1": "a step is one token of each sequence",
}
OLDER_REFUSED = {
    "--lora-extra-vocab-size": "adapters that change embeddings are refused",
    "--lora-backend": "kernels are chosen by device and batch",
    "--swap-space": "a preempted request is computed anew, its prefix from the cache",
    "--mem-fraction-static": "the share of the device's memory is --gpu-memory-utilization",
    "--rope-scaling": "config.json in the model's folder says it; change a copy of that file",
    "--rope-theta": "config.json in the model's folder says it; change a copy of that file",
    "--max-seq-len-to-capture": "a step is always one compiled program",
}
