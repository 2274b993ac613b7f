"""Fields of a body that would change the answer and are not served: each with what to send."""

from typing import Any

from serving.http.errors import ApiError
from serving.http.requests.protocol import Body, ChatBody

_ONLY_CHATS = "send the messages to /v1/chat/completions"
_TRANSFER = "every instance computes its own prompts; leave it out"
_LIKELY = "send logprobs (top_logprobs in a chat), or allowed_token_ids"
_BY_NAME = "send the adapter's name as model"
_SUM = 'send adapters [{"name": NAME, "weight": NUMBER}, ...]'
_FLAT = (
    "send its fields in the body itself, by OpenAI's names: an adapter's name as model, "
    "max_new_tokens as max_tokens"
)

# Name: the values that ask for nothing, and what to do in place of another.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "tools": (([],), _ONLY_CHATS),
    "tool_choice": (("none", "auto"), _ONLY_CHATS),
    "parallel_tool_calls": ((), _ONLY_CHATS),
    "functions": (([],), "send tools"),
    "function_call": (("none",), "send tools and tool_choice"),
    # vLLM's names before 0.12, and SGLang's.
    "guided_json": ((), 'send structured_outputs {"json": SCHEMA}, or response_format'),
    "guided_regex": ((), 'send structured_outputs {"regex": TEXT}'),
    "guided_choice": ((), 'send structured_outputs {"choice": [TEXT, ...]}'),
    "guided_grammar": ((), 'send structured_outputs {"grammar": TEXT}'),
    "guided_whitespace_pattern": ((), "send whitespace_pattern within structured_outputs"),
    "structural_tag": ((), 'send structured_outputs {"structural_tag": TAG}'),
    "json_schema": ((), 'send structured_outputs {"json": SCHEMA}, or response_format'),
    "regex": ((), 'send structured_outputs {"regex": TEXT}'),
    "ebnf": ((), 'send structured_outputs {"grammar": TEXT}'),
    "suffix": (("",), "write the prompt with the model's own tokens for filling in"),
    "use_beam_search": ((False,), "send n with a temperature for several answers"),
    "logits_processors": (([],), "send logit_bias, bad_words or allowed_token_ids"),
    "custom_logit_processor": ((), "send logit_bias, bad_words or allowed_token_ids"),
    "prompt_embeds": ((), "send text or token ids"),
    "input_embeds": ((), "send text or token ids"),
    "kv_transfer_params": ((), _TRANSFER),
    "ec_transfer_params": ((), _TRANSFER),
    "chat_template": ((), "the server's --chat-template holds for all requests"),
    "vllm_xargs": (({},), "there are no extensions; leave it out"),
    "thinking_token_budget": (
        (-1,),
        'bound the answer by max_tokens, or send chat_template_kwargs {"enable_thinking": false}',
    ),
    "mm_processor_kwargs": (({},), "the server's --mm-processor-kwargs holds for all requests"),
    "media_io_kwargs": (({},), "images are decoded in one way; leave it out"),
    "priority": ((0,), "requests have no priorities, send 0; the keys of --keys-file have weights"),
    "watermarking": ((False,), "texts carry no watermark; leave it out"),
    "logprob_token_ids": (([],), _LIKELY),
    "repetition_detection": ((), "send frequency_penalty or repetition_penalty"),
    "return_token_offsets": ((False,), "/tokenize returns token_strs"),
    "return_prompt_text": ((False,), "return_token_ids returns the prompt's, /detokenize its text"),
    "audio": ((), "answers are text; leave it out"),
    # Names of SGLang's, LoRAX's and TensorRT-LLM's own routes. Ignored ones would give the base
    # model's answer, or one of another length.
    "adapter_id": (("",), _BY_NAME),
    "lora_name": (("",), _BY_NAME),
    "lora_request": ((), _BY_NAME),
    "merged_adapters": ((), _SUM),
    "adapter_parameters": ((), _SUM),
    "parameters": (({},), _FLAT),
    "sampling_params": (({},), _FLAT),
    "max_new_tokens": ((), "send max_tokens (max_output_tokens in /v1/responses)"),
    "min_new_tokens": ((0,), "send min_tokens"),
    "ignore_eos_token": ((False,), "send ignore_eos"),
    "do_sample": ((True,), "send temperature 0 in place of false"),
    "typical_p": ((1.0,), "send top_p or min_p"),
    "stop_regex": (("", []), "send stop or stop_token_ids"),
    "no_stop_trim": ((False,), "send include_stop_str_in_output"),
    "return_full_text": ((False,), "send echo to /v1/completions"),
    "separate_reasoning": ((True,), "the server's --reasoning-parser holds for all requests"),
    "return_hidden_states": ((False,), "answers have text and log-probabilities; leave it out"),
}
_OF_CHATS = ("tools", "tool_choice", "parallel_tool_calls")
# Clients of several servers send both names; where both say the same, nothing is ignored.
_OURS = {
    "adapter_id": "model",
    "lora_name": "model",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "ignore_eos_token": "ignore_eos",
}


def check_fields(body: Body) -> None:
    """Raise ApiError 400 for the first field that asks for what this server does not do."""
    given = body.model_fields_set  # a request asks for what it names, which is little
    for name in filter(given.__contains__, _REFUSED):
        if name in _OF_CHATS and isinstance(body, ChatBody):
            continue
        harmless, instead = _REFUSED[name]
        value = getattr(body, name)
        if value is None or _is_said(body, name, value):
            continue
        if not any(_are_equal(one, value) for one in harmless):
            raise ApiError(400, f"{name} is not supported: {instead}.", param=name)


def _is_said(body: Body, name: str, value: Any) -> bool:
    """Return whether a field of our own says the same as this one of another server."""
    if name == "do_sample":
        return value is False and getattr(body, "temperature", None) == 0
    ours = getattr(body, _OURS.get(name, ""), None)
    return ours is not None and _are_equal(ours, value)


def _are_equal(one: Any, other: Any) -> bool:
    """Return whether two JSON values are the same: 1 and 1.0 are, 1 and true are not."""
    return isinstance(one, bool) is isinstance(other, bool) and one == other
