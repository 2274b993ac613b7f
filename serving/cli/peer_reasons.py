"""Answers to flags that only SGLang and LoRAX have. No jax.

`foreign_reasons` has the flags of vLLM, among them those that SGLang shares.
"""

# Flags of ours, and other names of the same setting.
PEER_SPELLINGS = {
    "--model": ("--model-path", "--model-id"),
    "--host": ("--hostname",),
    "--seed": ("--random-seed",),
    "--data-parallel-size": ("--dp",),
    "--tensor-parallel-size": ("--num-shard",),
    "--max-model-len": ("--context-length",),
    "--max-num-seqs": ("--max-running-requests",),
    "--max-queue": ("--max-queued-requests",),
    "--max-cpu-loras": ("--max-loaded-loras",),
    "--lora-modules": ("--lora-paths",),
    "--block-size": ("--page-size",),
    "--disable-prefix-caching": ("--disable-radix-cache",),
    "--scheduling-policy": ("--schedule-policy",),
    "--root-path": ("--fastapi-root-path",),
    "--uvicorn-log-level": ("--log-level-http",),
}
# Names that SGLang gives to formats of tool calls and of thoughts.
TOOL_PARSERS = {"llama3": "llama3_json", "qwen": "hermes", "qwen25": "hermes", "gpt-oss": "openai"}
REASONING_NAMES = {"deepseek-r1": "deepseek_r1", "gpt-oss": "openai_gptoss"}

# Switches, and flags with values, that ask for what this server always does.
PEER_ALWAYS_SO = {
    "--enable-metrics": "/metrics is always served",
    "--enable-cache-report": "usage always has prompt_tokens_details",
    "--enable-mixed-chunk": "a step computes prompts and answers together",
    "--stream-output": "an event of a stream has the new text only",
    "--incremental-streaming-output": "an event of a stream has the new text only",
    "--enable-lora-overlap-loading": "adapters are loaded while steps run",
    "--lora-strict-loading": "an adapter is loaded completely or refused",
    "--experts-shared-outer-loras": "an adapter's files say which matrices its experts share",
    "--enable-multimodal": "a model with an image tower takes images",
    "--enable-trace": "--otlp-traces-endpoint sends traces",
    "--grammar-backend llguidance": "llguidance makes the grammars",
    "--radix-eviction-policy lru": "idle pages go in the order of their last use",
    "--sampling-defaults model": "--generation-config vllm uses the API's defaults instead",
    "--tokenizer-worker-num 1": "prompts are encoded in threads of the server",
    "--num-continuous-decode-steps 1": "a step computes one token of each sequence",
    "--ep 1": "--enable-expert-parallel gives each device whole experts",
    "--ep-size 1": "--enable-expert-parallel gives each device whole experts",
    "--expert-parallel-size 1": "--enable-expert-parallel gives each device whole experts",
    "--adapter-source local": "adapters are local folders: --lora-modules NAME=DIR, --lora-dir DIR",
    "--source local": "the model is a local folder",
    "--sharded false": "--tensor-parallel-size N splits the model over N devices",
}

# Why a flag is refused, and what to use instead.
PEER_REFUSED = {
    "use --lora-modules NAME=DIR for adapters at the start, --lora-dir DIR for those that requests "
    "name": (
        "--adapter-id --preloaded-adapter-ids --preloaded-adapter-source --default-adapter-source"
    ),
    "use --max-loras N, the adapters on the device at a time": (
        "--max-active-adapters --adapter-memory-fraction"
    ),
    "use --max-lora-rank": "--compile-max-rank",
    "a request that waits 30 s for an adapter slot gets the next one; --adapter-wait-s bounds the "
    "wait": "--lora-drain-wait-threshold --adapter-cycle-time-s",
    "use --merge-adapter NAME, or --lora-merge auto": "--merge-adapter-weights",
    "kernels are chosen by device and batch": (
        "--max-lora-chunk-size --lora-use-virtual-experts --prefill-attention-backend "
        "--decode-attention-backend --sampling-backend --mm-attention-backend "
        "--moe-runner-backend --moe-a2a-backend --fp8-gemm-backend --fp4-gemm-backend "
        "--triton-attention-num-kv-splits --triton-attention-reduce-in-fp32 --disable-sgmv "
        "--disable-custom-kernels --backend"
    ),
    "use --gpu-memory-utilization": "--cuda-memory-fraction --memory-wiggle-room",
    "use --max-num-batched-tokens, the tokens of a step": (
        "--chunked-prefill-size --max-prefill-tokens --max-batch-prefill-tokens "
        "--prefill-max-requests --schedule-conservativeness --waiting-served-ratio "
        "--max-waiting-tokens --eager-prefill --chunked-prefill"
    ),
    "use --kv-cache-memory-bytes for the tokens that the server holds, --max-model-len for those "
    "of one request": "--max-total-tokens --max-batch-total-tokens --max-input-length",
    "use --max-num-seqs for running sequences, --max-queue for waiting ones": (
        "--max-concurrent-requests"
    ),
    "use --no-enable-prefix-caching to turn it off": "--prefix-caching",
    "use --kv-offloading-size GIB": (
        "--enable-hierarchical-cache --hicache-ratio --hicache-size --hicache-write-policy "
        "--hicache-io-backend --hicache-mem-layout --hicache-storage-backend --enable-lmcache"
    ),
    """use --speculative-config '{"method": "ngram", "num_speculative_tokens": N}'""": (
        "--speculative-algorithm --speculative-draft-model-path --speculative-draft-model "
        "--speculative-num-steps --speculative-eagle-topk --speculative-num-draft-tokens "
        "--speculative-tokens --speculation-max-batch-size"
    ),
    "use --master-addr HOST and --master-port PORT": (
        "--dist-init-addr --nccl-init-addr --nccl-port"
    ),
    "use --tensor-parallel-size for one model over several devices, --instances for several "
    "engines": "--enable-dp-attention --enable-dp-lm-head --moe-dense-tp-size --moe-dp-size",
    "every instance computes its own prompts": (
        "--disaggregation-mode --disaggregation-transfer-backend --disaggregation-bootstrap-port "
        "--disaggregation-ib-device"
    ),
    "a step is always one compiled program": (
        "--disable-cuda-graph --cuda-graph-max-bs --cuda-graph-bs --disable-cuda-graph-padding "
        "--disable-piecewise-cuda-graph --enable-torch-compile --torch-compile-max-bs --compile "
        "--eager --compile-max-batch-size --compile-batch-size"
    ),
    "a step is scheduled while the one before it runs": "--disable-overlap-schedule",
    "programs are compiled before the server is ready": "--skip-server-warmup --warmups",
    "answers do not depend on the batch on a CPU and on Hopper GPUs, see "
    "docs/concepts/batch-invariance.md": "--enable-deterministic-inference",
    "JAX picks the device; set JAX_PLATFORMS or CUDA_VISIBLE_DEVICES": (
        "--base-gpu-id --gpu-id-step"
    ),
    "the tokenizer is the one in the model's folder": "--tokenizer-path --tokenizer-config-path",
    "config.json in the model's folder sets it; change a copy of that file": (
        "--json-model-override-args"
    ),
    "config.json of a quantised folder names the format; python -m lora_jax.quantize writes such "
    "a folder": "--quantize --torchao-config",
    "use --override-generation-config": "--preferred-sampling-params",
    "models only generate text": "--is-embedding --embedding-dim",
    "/v1/completions takes prompts as they are": "--completion-template",
    "a request sends truncate_prompt_tokens": "--allow-auto-truncate",
    "a request sends whitespace_pattern in structured_outputs": (
        "--constrained-json-whitespace-pattern"
    ),
    "a request sends disable_any_whitespace in structured_outputs": (
        "--constrained-json-disable-any-whitespace"
    ),
    "code from outside this package is not run in the server": "--enable-custom-logit-processor",
    "answers have text and log-probabilities": "--enable-return-hidden-states",
    "prompts and answers are never logged; --enable-log-requests logs names and numbers": (
        "--log-requests --log-requests-level --log-requests-format --log-requests-target "
        "--crash-dump-folder"
    ),
    "rates are logged every ten seconds, and /metrics has the times": (
        "--decode-log-interval --show-time-cost --enable-request-time-stats-logging "
        "--bucket-time-to-first-token --bucket-inter-token-latency --bucket-e2e-request-latency"
    ),
    "log lines go to stdout in one format": "--json-output",
    "use --otlp-traces-endpoint URL": "--otlp-endpoint",
    "use --allowed-origins, --allowed-methods, --allowed-headers and --allow-credentials": (
        "--cors-allow-origin --cors-allow-header --cors-allow-method --cors-allow-credentials "
        "--cors-expose-header"
    ),
    "GET /health answers 503 when a step does not end, so that the process can be restarted": (
        "--watchdog-timeout --soft-watchdog-timeout"
    ),
    "the engine's memory is taken at the start and kept; stop the process to free it": (
        "--enable-memory-saver"
    ),
    "nothing is downloaded: the model and adapters are local folders": (
        "--huggingface-hub-cache --weights-cache-override --download-only --predibase-api-token"
    ),
    "no check is needed": "--enable-p2p-check",
    "a request has bounds, see docs/bounds.md": "--max-best-of --max-stop-sequences",
    "prompts are encoded in threads of the server": "--validation-workers",
    "texts carry no watermark": "--watermark-gamma --watermark-delta",
    "processes of one server find each other": "--shard-uds-path",
    "a proxy in front may do it": "--ngrok --ngrok-authtoken --ngrok-edge",
}
# Switches among them; the others have values.
PEER_SWITCHES = (
    "--merge-adapter-weights --lora-use-virtual-experts --triton-attention-reduce-in-fp32 "
    "--disable-sgmv --disable-custom-kernels --enable-hierarchical-cache --enable-lmcache "
    "--enable-dp-attention --enable-dp-lm-head --disable-cuda-graph --disable-cuda-graph-padding "
    "--disable-piecewise-cuda-graph --enable-torch-compile --compile --eager "
    "--disable-overlap-schedule --skip-server-warmup --enable-deterministic-inference "
    "--is-embedding --allow-auto-truncate --constrained-json-disable-any-whitespace "
    "--enable-custom-logit-processor --enable-return-hidden-states --log-requests "
    "--show-time-cost --enable-request-time-stats-logging --json-output --enable-memory-saver "
    "--download-only --enable-p2p-check --ngrok"
)
