"""Answers to flags of vLLM that this server does not have. No jax.

`vllm_flags.json` lists the flags of vLLM's parser. Flags that this server has under the same name
are not in these tables.
"""

# Switches, and flags with values (* is any), that ask for what this server always does. They are
# accepted and change nothing. Every other form or value is rejected with the same reason.
ALWAYS_SO = {
    "--enable-lora": "adapters are always enabled",
    "--enable-chunked-prefill": "prompts are computed in pieces of --max-num-batched-tokens",
    "--async-scheduling": "a step is scheduled while the one before it runs",
    "--enable-prompt-tokens-details": "usage always has prompt_tokens_details",
    "--enable-server-load-tracking": "/load always counts requests",
    "--enable-request-id-headers": "every answer has the header X-Request-Id",
    "--enable-offline-docs": "/docs loads nothing from other hosts",
    "--disable-cascade-attn": "no kernel for shared prefixes",
    "--disable-custom-all-reduce": "devices exchange parts of results and sum nothing",
    "--disable-nccl-for-dp-synchronization": "instances run independently",
    "--disable-hybrid-kv-cache-manager": "all layers have one kind of KV page",
    "--enable-tower-connector-lora": "adapters may change towers and projectors",
    "--kv-offloading-backend native": "the engine itself moves KV pages to --kv-offloading-size",
    "--skip-mm-profiling": "--encoder-cache-tokens sets the memory for images",
    "--no-interleave-mm-strings": "text and images keep their order",
    "--no-mm-device-do-normalize": "images are prepared on the host, as transformers does",
    "--no-use-tqdm-on-load": "progress is logged as lines",
    "--scheduler-reserve-full-isl": "a request starts when its whole prompt has KV pages",
    "--disable-log-deltas": "answers are never logged",
    "--disable-flash-late-interaction": "models only generate text",
    "--no-cohere-is-reasoning-model": "no Cohere route",
    "--disable-flashinfer-autotune": "tables hold the tile sizes of kernels",
    "--no-swa-bounded-replay": "KV pages outside a sliding window are kept",
    "--no-dcp-q-replicate": "sequences are not split over devices",
    "--disable-batch-sharded-sampling": "every device of a split model samples every row",
    "--aggregate-engine-logging": "all processes write to one log",
    "--fail-on-environ-validation": "an unknown SERVING_ variable is always an error",
    "--max-log-len *": "no part of a prompt is ever logged",
    "--api-server-count 1": "one process answers HTTP; --instances adds engines",
    "--tokenizer-mode auto hf": "the tokenizer comes from the model's folder",
    "--runner auto generate": "models only generate text",
    "--convert auto none": "models only generate text",
    "--chat-template-content-format auto string": "the template gets a message's texts joined, "
    "or its parts where it has an image",
    "--config-format auto hf": "the model's folder has the Hugging Face format",
    "--fingerprint-mode none": "only versions of adapters have a system_fingerprint",
    "--prefix-caching-hash-algo sha256": "the prefix cache uses SHA-256",
    "--logprobs-mode raw_logprobs": "log-probabilities are taken before temperature and penalties",
    "--stream-interval 1": "a stream sends each token at once",
    "--safetensors-load-strategy lazy": "each tensor is read when it is placed",
}

# Why a flag is refused, and what to use instead. Of a switch the other form is accepted, of a value
# vLLM's own default: neither asks for anything.
REFUSED = {
    "one process serves on the devices of --tensor-parallel-size; --instances starts several": (
        "--pipeline-parallel-size "
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
    "each device has the whole A of an adapter, which saves an exchange": ("--fully-sharded-loras"),
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
    "there is one scheduling mode; --max-num-seqs and --max-num-batched-tokens bound a step": (
        "--performance-mode"
    ),
    "templates come from the model's folder or --chat-template, never from a request": (
        "--trust-request-chat-template"
    ),
    "nothing is downloaded: the model is a local folder": (
        "--revision --code-revision --tokenizer-revision --download-dir --hf-token "
        "--ignore-patterns"
    ),
    "config.json in the model's folder sets it; change a copy of that file": (
        "--hf-config-path --hf-overrides"
    ),
    "the tokenizer is the one in the model's folder": "--tokenizer --skip-tokenizer-init",
    "the model's quantization_config sets it; python -m lora_jax.quantize writes one": (
        "--quantization-config --allow-deprecated-quantization"
    ),
    "safetensors files are read straight to the device": (
        "--safetensors-prefetch-num-threads --safetensors-prefetch-block-size "
        "--model-loader-extra-config --pt-load-map-location --max-parallel-loading-workers "
        "--weight-transfer-config"
    ),
    "a batch may mix any adapters; --compile-base-only-steps compiles steps without adapters": (
        "--specialize-active-lora --enable-mixed-moe-lora-format --enable-moe-shared-loras"
    ),
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
    "models only generate text": ("--pooler-config --enable-prompt-embeds --diffusion-config"),
    "required calls always follow their schemas, others never; the client runs the tools": (
        "--tool-strict-level --tool-server"
    ),
    "chat templates get the tools under every tool_choice": "--exclude-tools-when-tool-choice-none",
    "the chat template gets chat_template_kwargs and reasoning_effort unchanged": (
        "--reasoning-config --reasoning-effort-map"
    ),
    "llguidance makes the grammars, and a request's structured_outputs has the other options": (
        "--structured-outputs-config"
    ),
    "this server has no such route; serving/http/README.md lists the routes": (
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
    "/metrics has all metrics that this server keeps; see docs/reference/metrics.md": (
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
    "answers have no such field": "--enable-return-routed-experts --return-sampling-mask",
    "waiting sequences are bounded by --max-queue, running ones by --max-num-seqs": (
        "--max-num-active-seqs --max-num-queued-reqs --max-num-queued-tokens"
    ),
    "tokens of a step are bounded by --max-num-batched-tokens": (
        "--max-num-scheduled-tokens --long-prefill-token-threshold "
        "--long-prefill-token-threshold-adaptive --prefill-schedule-interval --watermark"
    ),
    "every option has a flag of its own": "--additional-config",
}

# Values of refused flags that ask for what is so.
HARMLESS_OBJECTS = {
    "--structured-outputs-config": ('{"backend": "auto"}', '{"backend": "guidance"}'),
}

# Flags of older releases of vLLM and of SGLang: spellings, and what was said above.
OLDER_SPELLINGS = {
    "--tensor-parallel-size": ("--tp", "--tp-size"),
    "--pipeline-parallel-size": ("--pp-size",),
    "--data-parallel-size": ("--dp-size",),
}
OLDER_ALWAYS_SO = {
    "--lora-eviction-policy lru": "the idle adapter that was used least recently is evicted first",
    "--task auto generate": "models only generate text",
    "--device auto": "JAX picks the device: JAX_PLATFORMS, CUDA_VISIBLE_DEVICES",
    "--guided-decoding-backend auto guidance": "llguidance makes the grammars",
    "--num-scheduler-steps 1": "a step computes one token of each sequence",
    # Switches.
    "--enable-reasoning": "--reasoning-parser separates thoughts",
    "--use-v2-block-manager": "KV pages are managed in one way",
    "--disable-frontend-multiprocessing": "HTTP and engine are one process; --instances adds some",
    "--guided-decoding-disable-fallback": "llguidance makes the grammars",
    "--full-cuda-graph": "a step is always one compiled program",
    "--multi-step-stream-outputs": "a stream sends each token at once",
    "--disable-uvicorn-metrics-access-log": "reads of /metrics are not logged",
}
OLDER_REFUSED = {
    "use --max-lora-trainable-tokens": "--lora-extra-vocab-size",
    "use --enable-dora-and-bias": "--enable-lora-bias",
    "use --lora-modules NAME=DIR; a quantised folder is the base": "--qlora-adapter-name-or-path",
    "adapters are LoRA, ESFT and task heads": (
        "--enable-prompt-adapter --max-prompt-adapters --max-prompt-adapter-token "
        "--prompt-adapters --long-lora-scaling-factors"
    ),
    "kernels are chosen by device and batch": "--lora-backend",
    "a preempted request is computed again, its prefix from the cache": (
        "--swap-space --preemption-mode"
    ),
    "use --gpu-memory-utilization": "--mem-fraction-static",
    "config.json in the model's folder sets it; change a copy of that file": (
        "--rope-scaling --rope-theta --override-neuron-config --override-pooler-config"
    ),
    "a step is always one compiled program": (
        "--max-seq-len-to-capture --max-context-len-to-capture --cuda-graph-sizes"
    ),
    """use --speculative-config '{"method": "ngram", "num_speculative_tokens": N}'""": (
        "--speculative-model --num-speculative-tokens --speculative-max-model-len "
        "--speculative-draft-tensor-parallel-size --speculative-disable-by-batch-size "
        "--speculative-disable-mqa-scorer --speculative-model-quantization "
        "--ngram-prompt-lookup-max --ngram-prompt-lookup-min --spec-decoding-acceptance-method "
        "--typical-acceptance-sampler-posterior-threshold "
        "--typical-acceptance-sampler-posterior-alpha --num-lookahead-slots "
        "--disable-logprobs-during-spec-decoding"
    ),
    "use --distributed-executor-backend ray": "--worker-use-ray --engine-use-ray",
    "use --mm-processor-cache-gb 0": "--disable-mm-preprocessor-cache",
    "templates are rendered in threads of the server": (
        "--tokenizer-pool-size --tokenizer-pool-type"
    ),
    "a step is scheduled while the one before it runs": "--disable-async-output-proc",
    "tokens of a step are bounded by --max-num-batched-tokens": (
        "--scheduler-delay-factor --max-num-partial-prefills --max-long-partial-prefills"
    ),
    "a request sends disable_any_whitespace in structured_outputs": (
        "--guided-decoding-disable-any-whitespace"
    ),
    'a schema says "additionalProperties": false itself': (
        "--guided-decoding-disable-additional-properties"
    ),
    "code from outside this package is not run in the server": "--logits-processor-pattern",
    "KV pages in 8 bits have a scale for each token, nothing is calibrated": (
        "--calculate-kv-scales --quantization-param-path"
    ),
    "the devices of --tensor-parallel-size share experts in order": (
        "--num-redundant-experts --eplb-window-size --eplb-step-interval --eplb-log-balancedness"
    ),
    "images are decoded and prepared in one way": (
        "--enable-multimodal-encoder-data-parallel --disable-image-processor --image-input-type "
        "--image-token-id --image-input-shape --image-feature-size"
    ),
}
# Switches among them; the others have values.
OLDER_SWITCHES = (
    "--enable-lora-bias --enable-prompt-adapter --speculative-disable-mqa-scorer "
    "--disable-logprobs-during-spec-decoding --worker-use-ray --engine-use-ray "
    "--disable-mm-preprocessor-cache --disable-async-output-proc "
    "--guided-decoding-disable-any-whitespace --guided-decoding-disable-additional-properties "
    "--calculate-kv-scales --eplb-log-balancedness --enable-multimodal-encoder-data-parallel "
    "--disable-image-processor"
)
