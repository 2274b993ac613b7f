"""A conversation handed to the engine: what chats and responses have in common."""

import dataclasses

from fastapi import Request

from serving.engine.classification import HEAD_SAMPLING
from serving.http.access.auth import caller_of
from serving.http.answers.answers import cache_salt
from serving.http.answers.generation import Generation
from serving.http.interface import AbstractTokenizer
from serving.http.requests.adapter_view import engine_for
from serving.http.requests.heads import by_head, with_length
from serving.http.requests.images import read_images
from serving.http.requests.model_names import Target
from serving.http.requests.parameters import chat_sampling, fit_context
from serving.http.requests.prompts import chat_prompt, plain_messages, text_of
from serving.http.requests.protocol import ChatBody
from serving.http.requests.session import target_of
from serving.http.requests.structure import after_thoughts, compiled_grammar, thinks_first
from serving.http.requests.template_options import template_options
from serving.http.requests.tools import auto_parser
from serving.http.requests.trace import trace_of
from serving.http.requests.truncation import truncation_of
from serving.http.server import Server
from serving.http.settings import HARMONY


@dataclasses.dataclass(frozen=True)
class ChatGeneration:
    """A conversation in the engine; `echo` is the text that comes before the answer's own.

    `tokenizer` is that of the adapter.
    """

    generation: Generation
    target: Target
    role: str
    echo: str
    tokenizer: AbstractTokenizer


async def chat_generation(request: Request, server: Server, body: ChatBody) -> ChatGeneration:
    """Return the generation of a chat's next message; ApiError says what cannot be served."""
    caller = caller_of(request)
    target = await target_of(server.names, request, body, caller)
    request.state.adapter = target.adapter
    info = server.engine.model_info
    # Refuse bad parameters before any work on the messages.
    asks_head = by_head(body, target)
    parser = auto_parser(body, server.settings.auto_call_parser)
    limit = server.max_model_len
    truncation = truncation_of(body, limit)
    sampling = chat_sampling(with_length(body, asks_head), limit, info.sampling_defaults)
    outputs, thinker = sampling.structured_outputs, server.settings.reasoning_parser
    waits = outputs is not None and thinks_first(body, thinker)  # for the prompt
    grammar = None if waits else await compiled_grammar(server.engine, body, outputs)
    options = template_options(body, server.settings.default_template_kwargs)
    special = bool(body.add_special_tokens)  # templates write their own special tokens
    salt = cache_salt(caller.salt, body.cache_salt)
    images = await read_images(server.engine, body.messages, server.settings.media, salt)
    engine = engine_for(server.engine, target)
    prompt = await chat_prompt(
        engine, body.messages, options, special, images=images, truncation=truncation
    )
    if outputs is not None and waits:
        outputs = after_thoughts(outputs, thinker, prompt.text or "")
        sampling = dataclasses.replace(sampling, structured_outputs=outputs)
        grammar = await compiled_grammar(server.engine, body, outputs)
    is_harmony = grammar is None and thinker == HARMONY
    if asks_head:
        sampling = HEAD_SAMPLING
    else:
        sampling = fit_context(sampling, body, len(prompt.ids), limit, info.most_tokens)
        if parser is not None or is_harmony:  # marks of parts are special tokens of some models
            sampling = dataclasses.replace(sampling, skip_special_tokens=False)
    how = {"by_head": asks_head, "trace": trace_of(request, server.engine)}
    generation = Generation(server.engine, server.mailbox, [prompt], **how)
    generation.submit(target.adapter, [sampling], salt, caller, target.entry, grammar)
    last = plain_messages(server.engine, body.messages[-1:])[0]
    role = server.settings.response_role if options.add_generation_prompt else last["role"]
    echo = text_of(last) if body.echo and last["role"] == role else ""
    return ChatGeneration(generation, target, role, echo, engine.tokenizer)
