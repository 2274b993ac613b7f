"""Checks ctypes declarations against a header that the user installed, by C++ static assertions."""

import ctypes
import subprocess
from collections.abc import Mapping
from pathlib import Path

_PROLOGUE = """
#include <cstddef>
#include <tuple>
#include <type_traits>
template <class F> struct Call;
template <class R, class... A> struct Call<R (*)(A...)> {
  static constexpr size_t count = sizeof...(A);
  using Arguments = std::tuple<A...>;
  using Result = R;
};
template <class F, size_t I>
using Argument = std::tuple_element_t<I, typename Call<F>::Arguments>;
"""


def assertions(
    headers: tuple[str, ...],
    structures: Mapping[str, tuple[type[ctypes.Structure], Mapping[str, str]]],
    functions: Mapping[str, tuple],
    constants: Mapping[str, int],
) -> str:
    """Return a program that compiles only where sizes, offsets, arguments and numbers agree.

    A structure is its ctypes class and {field in C: field in Python}.
    """
    lines = [f"#include <{header}>" for header in headers]
    lines.append(_PROLOGUE)
    for name, (made, fields) in structures.items():
        lines.append(f"static_assert(sizeof({name}) == {ctypes.sizeof(made)});")
        for ours, theirs in ((getattr(made, py), c) for c, py in fields.items()):
            lines.append(f"static_assert(offsetof({name}, {theirs}) == {ours.offset});")
            lines.append(f"static_assert(sizeof({name}::{theirs}) == {ours.size});")
    for name, arguments in functions.items():
        call = f"decltype(&{name})"
        lines.append(f"static_assert(Call<{call}>::count == {len(arguments)});")
        lines.append(f"static_assert(sizeof(Call<{call}>::Result) == sizeof(int));")
        for i, argument in enumerate(arguments):
            of = f"Argument<{call}, {i}>"
            pointer = str(_is_pointer(argument)).lower()
            lines.append(f"static_assert(sizeof({of}) == {ctypes.sizeof(argument)});")
            lines.append(f"static_assert(std::is_pointer_v<{of}> == {pointer});")
    lines += [f"static_assert((long){name} == {value});" for name, value in constants.items()]
    return "\n".join(lines) + "\n"


def compile_errors(program: str, include: Path, folder: Path) -> str:
    """Return what g++ says against the program; nothing where all assertions hold."""
    source = folder / "check.cc"
    source.write_text(program)
    command = ["g++", "-std=c++17", "-fsyntax-only", "-isystem", include, source]
    return subprocess.run(command, capture_output=True, text=True, timeout=120).stderr


def _is_pointer(argument: type) -> bool:
    return argument in (ctypes.c_void_p, ctypes.c_char_p) or issubclass(argument, ctypes._Pointer)
