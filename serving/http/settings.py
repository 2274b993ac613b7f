"""Settings of the HTTP server: permissions, and limits of a request."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from serving.engine.images.sources import MediaPolicy

ROLES = ("user", "admin", "metrics")
NEVER_S = 1e9
HARMONY, HARMONY_CALLS = "openai_gptoss", "openai"  # one format has thoughts and calls
TAGGED_CALLS = ("qwen3_coder", "qwen3_xml")  # one format, by both names that vLLM has
TOOL_CALL_PARSERS = ("hermes", "llama3_json", "mistral", *TAGGED_CALLS, HARMONY_CALLS)
ALWAYS_THOUGHTS = "deepseek_r1"
THINK_TAGS = ("qwen3", ALWAYS_THOUGHTS)
REASONING_PARSERS = (*THINK_TAGS, HARMONY)


@dataclasses.dataclass(frozen=True)
class KeyLimits:
    """Limits of one key; None: no limit, or that for all keys."""

    max_running: int | None = None  # sequences; further ones wait
    max_waiting: int | None = None  # sequences; further ones are refused
    tokens_per_minute: int | None = None  # of prompts and answers
    max_adapters: int | None = None  # in host memory, of those that it named
    max_adapter_bytes: int | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 50:
                raise ValueError(f"{field.name} must be an integer of at least 1, got {value!r}.")

    def over(self, general: "KeyLimits") -> "KeyLimits":
        """Return these limits, and where there is none the general one."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        return dataclasses.replace(general, **given)


@dataclasses.dataclass(frozen=True)
class Tenant:
    """Permissions of one API key of the keys file; see `key_file` for the file."""

    key: str = ""  # or its hash
    adapters: frozenset[str] | None = None  # None: every adapter
    rate: float | None = None  # requests per second; None: no limit
    salt: str | None = None  # prefix-cache salt; None: the key's own
    id: str = ""  # what logs call it; keys of one id share limits and cache
    hash: str = ""
    roles: frozenset[str] = frozenset({"user"})
    weight: float = 1.0  # its share beside others
    limits: KeyLimits = dataclasses.field(default_factory=KeyLimits)
    not_before: float | None = None  # unix time
    expires: float | None = None


@dataclasses.dataclass(frozen=True)
class Cors:
    """Permissions of web pages of other origins; "*" is any."""

    origins: tuple[str, ...]
    methods: tuple[str, ...] = ("*",)
    headers: tuple[str, ...] = ("*",)
    credentials: bool = False

    def __post_init__(self) -> None:
        if self.credentials and "*" in self.origins:
            raise ValueError(
                "--allow-credentials needs the origins by name in --allowed-origins, not '*': any "
                "web page could act for its visitor."
            )


@dataclasses.dataclass(frozen=True)
class HttpSettings:
    """Settings of one HTTP server; a contradiction is a ValueError naming the flags."""

    served_names: tuple[str, ...] = ()  # further names of the base model; the first is listed too
    api_keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()
    metrics_keys: tuple[str, ...] = ()
    tenants: tuple[Tenant, ...] = ()
    keys_file: str | None = None  # where the tenants are from; it is read again when it changes
    key_limits: KeyLimits = dataclasses.field(default_factory=KeyLimits)  # of each key
    audit_log: str | None = None  # a file
    access_log: bool = False  # a line per request, with key id and adapter
    num_instances: int = 1  # that share the host memory of each key
    budgets_folder: str | None = None  # where they share its tokens a minute
    front_secret: str | None = dataclasses.field(default=None, repr=False)  # of a front elsewhere
    is_behind_front: bool = False  # a front checks the keys and writes refusals and rotations
    enable_runtime_lora: bool = False  # load and unload adapters over HTTP
    demo: bool = False  # the page at /
    docs: bool = True  # /docs and /openapi.json
    cors: Cors | None = None
    root_path: str = ""  # under which a proxy offers this server
    response_role: str = "assistant"
    default_template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    enable_auto_tool_choice: bool = False  # models may call tools by themselves
    tool_call_parser: str | None = None  # of TOOL_CALL_PARSERS, for such calls
    reasoning_parser: str | None = None  # of REASONING_PARSERS; None: thoughts are content
    tokens_as_ids: bool = False  # log-probabilities name tokens as token_id:NUMBER
    force_include_usage: bool = False  # every stream ends with its usage
    log_requests: bool = False  # a line per request for text, without its words
    max_body_bytes: int | None = None  # None: what follows from the model
    body_timeout_s: float = 30.0  # for the whole body to arrive
    keep_alive_s: float = NEVER_S  # silence of a stream before a comment is sent
    media: MediaPolicy = dataclasses.field(default_factory=MediaPolicy)  # URLs of images

    def __post_init__(self) -> None:
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ValueError(f"--root-path must be like /llm, got {self.root_path!r}.")
        if not self.keep_alive_s > 0:
            raise ValueError(
                f"--sse-keep-alive-interval must be positive, or 0 for never, got "
                f"{self.keep_alive_s:g}."
            )
        _check_name("--tool-call-parser", self.tool_call_parser, TOOL_CALL_PARSERS)
        _check_name("--reasoning-parser", self.reasoning_parser, REASONING_PARSERS)
        if self.tool_call_parser and (
            (self.tool_call_parser == HARMONY_CALLS) != (self.reasoning_parser == HARMONY)
        ):
            raise ValueError(
                f"--reasoning-parser {HARMONY} and --tool-call-parser {HARMONY_CALLS} read one "
                "format: calls of such a model need both, and other parsers go with neither."
            )
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise ValueError(
                "--enable-auto-tool-choice needs --tool-call-parser with the format of the model: "
                f"{', '.join(TOOL_CALL_PARSERS)}."
            )
        if self.max_body_bytes is not None and self.max_body_bytes < 1:
            raise ValueError(f"--max-body-bytes must be at least 1, got {self.max_body_bytes}.")
        keys = [*self.api_keys, *self.admin_keys, *self.metrics_keys]
        keys += [tenant.key or tenant.hash for tenant in self.tenants]
        if any(not key or key != key.strip() for key in keys):
            raise ValueError("An API key is empty or has spaces around it.")
        if len(set(keys)) != len(keys):
            raise ValueError("The same key is given twice; each key has one role.")
        if self.tenants and self.enable_runtime_lora and not self.has_admin_keys:
            raise ValueError(
                "--keys-file with --enable-runtime-lora needs --admin-api-key or a key of the role "
                "admin: otherwise one tenant could unload the adapters of another."
            )
        if self.key_limits != KeyLimits() and not self.has_api_keys:
            raise ValueError("Limits of a key (--key-...) need --api-key or --keys-file.")

    @property
    def auto_call_parser(self) -> str | None:
        """The parser of calls that models make by themselves; None where they may not."""
        return self.tool_call_parser if self.enable_auto_tool_choice else None

    @property
    def has_api_keys(self) -> bool:
        """True if a caller needs a key to use the model."""
        return bool(self.api_keys or self.tenants)

    @property
    def has_admin_keys(self) -> bool:
        """True if changing adapters needs a key of its own."""
        return bool(self.admin_keys) or any("admin" in tenant.roles for tenant in self.tenants)

    @property
    def has_metrics_keys(self) -> bool:
        """True if there is a key for /metrics only."""
        return bool(self.metrics_keys) or any("metrics" in tenant.roles for tenant in self.tenants)


def _check_name(flag: str, name: str | None, known: tuple[str, ...]) -> None:
    if name is not None and name not in known:
        raise ValueError(f"{flag} must be one of {', '.join(known)}, got {name!r}.")
