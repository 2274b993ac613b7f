"""Reads what the CUDA handlers take from their sources, and holds lowered calls to it.

XLA compares a call with its handler when the call first runs, on a GPU; these read the bindings of
XLA_FFI_DEFINE_HANDLER_SYMBOL instead.
"""

import dataclasses
import functools
import re

from support.drivers.lowering import CustomCall

from cuda_backend import ffi

DEFINE = re.compile(r"#define (LORA_JAX_\w+)((?:[^\n]|(?<=\\)\n)*)")
HANDLER = re.compile(r"XLA_FFI_DEFINE_HANDLER_SYMBOL\(\s*(\w+),(.*?)\);", re.DOTALL)
PART = re.compile(r'\b(Arg|RemainingArgs|Ret|RemainingRets|Attr)(?:<(.*?)>)?\((?:"(\w+)")?\)')
ELEMENTS = {
    "BF16": "bf16",
    "F32": "f32",
    "S32": "i32",
    "U8": "ui8",
    "S8": "i8",
    "ffi::AnyBuffer": "any",
}
ELEMENTS |= {"ffi::Buffer<ffi::U8>": "ui8", "ffi::Buffer<ffi::U32>": "ui32"}
VALUES = {"int64_t": "i64", "int32_t": "i32", "bool": "i1", "float": "f32"}
VALUES |= {"ffi::Span<const int64_t>": "[i64]", "ffi::Span<const float>": "[f32]"}


@dataclasses.dataclass(frozen=True)
class Handler:
    """Element types of a handler's arguments and results, and types of its attributes."""

    operands: tuple[str, ...]
    more_operands: bool
    results: tuple[str, ...]
    more_results: bool
    attributes: dict[str, str]


@functools.cache
def _bodies() -> dict[str, str]:
    texts = [path.read_text() for path in sorted(ffi.CSRC.rglob("*.cu*"))]
    macros = {name: body for text in texts for name, body in DEFINE.findall(text)}
    found = [match for text in texts for match in HANDLER.findall(text)]
    return {name: _expanded(body, macros) for name, body in found}


@functools.cache
def handlers() -> dict[str, Handler]:
    """Return the handlers of csrc by their names."""
    return {name: _handler(body) for name, body in _bodies().items()}


def stateful() -> set[str]:
    """Return the handlers that take a state, which XLA makes for each call."""
    return {name for name, body in _bodies().items() if "State<" in body}


def assert_served(call: CustomCall) -> None:
    """Hold the number and element types of arrays, and the attributes, to the handler's."""
    handler = handlers()[call.target]
    assert call.attribute_types == handler.attributes, call.target
    _assert_arrays(call.operands, handler.operands, handler.more_operands, call.target)
    _assert_arrays(call.results, handler.results, handler.more_results, call.target)


def _assert_arrays(given: tuple[str, ...], wanted: tuple[str, ...], more: bool, name: str) -> None:
    assert len(given) >= len(wanted) if more else len(given) == len(wanted), name
    for array, element in zip(given, wanted, strict=False):
        assert element in ("any", array.rpartition("x")[2]), (name, given, wanted)


def _expanded(body: str, macros: dict[str, str]) -> str:
    while names := re.findall(r"LORA_JAX_\w+", body):
        for name in names:
            body = body.replace(name, macros[name])
    return body


def _handler(body: str) -> Handler:
    parts = PART.findall(body)
    of = lambda kind: tuple(ELEMENTS[type] for part, type, _ in parts if part == kind)  # noqa: E731
    kinds = {part for part, *_ in parts}
    attributes = {name: VALUES[type] for part, type, name in parts if part == "Attr"}
    more = "RemainingArgs" in kinds, "RemainingRets" in kinds
    return Handler(of("Arg"), more[0], of("Ret"), more[1], attributes)
