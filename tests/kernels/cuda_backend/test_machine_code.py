"""No kernel lets a place of asynchronous copies go while it reads it: the machine code shows it."""

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.checks.machine_code import NO_SCOREBOARD, Instruction, kernels, unseen_reads

from cuda_backend import ffi
from cuda_backend.toolkit import find_compilers
from lora_jax.ops import dispatch

LISTING = """
		Function : first
	.headerflags	@"EF_CUDA_SM90"
        /*4cc0*/    LDSM.16.M88.4 R28, [R49+0x4c00] ;   /* 0x004c0000311c783b */
   /* 0x000e220000000200 */
        /*4cd0*/    @!P0 IMAD R4, R28, 0x5, R31 ;   /* 0x000000051c048824 */
   /* 0x023fe200078e021f */
        /*4ce0*/    BRA 0x4ce0;   /* 0xfffffffc00fc7947 */
   /* 0x000fc0000383ffff */
		..........


		Function : second
        /*0000*/    EXIT ;   /* 0x000000000000794d */
   /* 0x000fea0003800000 */
"""
READ = "0 - LDSM.16.M88.4 R4, [R2]"
OTHER_READ = "1 - LDS R9, [R3+0x10]"
USE = "- 0 HMMA.16816.F32.BF16 R12, R4, R20, R12"
USE_OTHER = "- 1 STG.E [R30.64], R9"
ARRIVE = "- - @!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R10+URZ+0x80], RZ"
COPY = "- - UTMALDG.4D [UR8], [UR4]"
EXIT = "- - EXIT"


def code_of(*lines: str) -> list[Instruction]:
    """Return instructions 16 bytes apart: the scoreboard set, those waited for, the text."""
    code = []
    for i, line in enumerate(lines):
        sets, waits, text = line.split(" ", 2)
        mask = sum(1 << int(board) for board in waits if board != "-")
        code.append(Instruction(i * 16, text, NO_SCOREBOARD if sets == "-" else int(sets), mask))
    return code


def found_in(*lines: str) -> dict[int, list[int]]:
    """Return the lines that let a place go, and of each the lines of reads in flight."""
    found = unseen_reads(code_of(*lines, EXIT, COPY, EXIT))
    return {one.address // 16: [r.address // 16 for r in reads] for one, reads in found.items()}


def test_a_listing_is_read():
    (first, code), (second, exits) = kernels(LISTING.splitlines())
    assert (first, second) == ("first", "second")
    assert code == [
        Instruction(0x4CC0, "LDSM.16.M88.4 R28, [R49+0x4c00]", 0, 0),
        Instruction(0x4CD0, "@!P0 IMAD R4, R28, 0x5, R31", NO_SCOREBOARD, 0b100011),
        Instruction(0x4CE0, "BRA 0x4ce0", NO_SCOREBOARD, 0),
    ]
    assert exits == [Instruction(0, "EXIT", NO_SCOREBOARD, 0)]


def test_registers_are_found():
    read, use, store = code_of(READ, USE, "- - @P1 STG.E.64 desc[UR6][R30.64], R8")
    assert read.written() == {4, 5, 6, 7}
    assert read.read() == {2}
    assert use.written() == {12, 13, 14, 15}
    assert {4, 7, 20, 21, 12, 15} <= use.read()
    assert (store.written(), store.read()) == (set(), {30, 31, 8, 9})
    (sync,) = code_of("- - WARPSYNC.COLLECTIVE R40, 0x80")
    assert (sync.written(), sync.read()) == (set(), {40})


def test_an_arrival_behind_a_wait_is_right():
    assert not found_in(READ, USE, ARRIVE)
    waits_itself = ARRIVE.replace("- -", "- 0")
    assert not found_in(READ, waits_itself, USE)


def test_an_arrival_before_the_wait_is_found():
    assert found_in(READ, ARRIVE, USE) == {1: [0]}
    assert found_in(READ, OTHER_READ, USE_OTHER, ARRIVE, USE) == {3: [0]}
    assert found_in(READ, OTHER_READ, ARRIVE, USE, USE_OTHER) == {2: [0, 1]}


def test_whatever_else_lets_go_is_found():
    for text in ("BAR.SYNC.DEFER_BLOCKING 0x1, 0x80", "BAR.ARV 0x2, 0x80", "UCGABAR_ARV", COPY[4:]):
        assert found_in(READ, f"- - {text}", USE) == {1: [0]}
    remote = "- - SYNCS.ARRIVE.TRANS64.RED.A1T0 RZ, [R10+URZ], RZ"
    assert found_in(READ, remote, USE) == {1: [0]}
    announces = "- - SYNCS.ARRIVE.TRANS64 RZ, [R10+URZ], R24"
    assert not found_in(READ, announces, USE)


def test_a_read_at_the_end_of_a_loop_is_in_flight_at_its_begin():
    loop = (ARRIVE, "- - @P1 BRA 0x40", READ, "- - BRA 0x0")
    assert found_in(*loop, USE) == {0: [2]}
    assert not found_in(*loop[:3], "- 0 BRA 0x0", USE)


def test_a_predicated_read_is_in_flight():
    assert found_in(READ.replace("LDSM", "@P2 LDSM"), ARRIVE, USE) == {1: [0]}
    # what a false predicate skips, a wait is not
    assert not found_in(READ, "- 0 @P3 MOV R40, R41", ARRIVE, USE)


def test_branches_are_followed():
    around = (READ, "- - @P0 BRA 0x30", USE, ARRIVE, USE)
    assert found_in(*around) == {3: [0]}
    assert not found_in(READ, "- - BRA 0x30", ARRIVE, USE)
    assert found_in(READ, "- - BRA.DIV UR8, 0x30", ARRIVE, USE) == {2: [0]}
    call = ("- - CALL.REL.NOINC 0x40", ARRIVE, USE, EXIT)
    assert found_in(*call, READ, "- - RET.REL.NODEC R50 0x0") == {1: [4]}
    assert not found_in(*call, READ, "- 0 RET.REL.NODEC R50 0x0")


def test_a_jump_to_anywhere_is_refused():
    with pytest.raises(NotImplementedError, match="0x10: where does BRX R6"):
        found_in(READ, "- - BRX R6 0x40", ARRIVE, USE)


def test_reads_that_nothing_uses_do_no_harm():
    assert not found_in(READ, ARRIVE)
    assert not found_in(
        READ, ARRIVE, "2 - LDS.128 R4, [R3]", "- 2 HMMA.16816.F32 R12, R4, R20, R12"
    )
    assert found_in(READ, ARRIVE, "2 - @P0 LDS.128 R4, [R3]", USE) == {1: [0]}
    assert found_in(READ, ARRIVE, "- - MOV R4, R20", USE) == {1: [0]}


def test_a_kernel_without_copies_has_no_such_place():
    assert not unseen_reads(code_of(READ, ARRIVE, USE, EXIT))


# ---------------------------------------------------------------- of the library
needs_nvcc = pytest.mark.skipif(not find_compilers(), reason="no nvcc on this machine")


def disassembled(file: Path) -> Iterator[str]:
    """Yield what `cuobjdump` of the toolkit, or triton's, prints of a library or a cubin."""
    places = [str(Path(compiler.path).parent) for compiler in find_compilers()]
    if triton := importlib.util.find_spec("triton"):
        places += [f"{at}/backends/nvidia/bin" for at in triton.submodule_search_locations or ()]
    found = (shutil.which("cuobjdump", path=place) for place in (None, *places))
    if (command := next(filter(None, found), None)) is None:
        pytest.skip("no cuobjdump: it is part of the CUDA toolkit, and of triton")
    with subprocess.Popen([command, "-sass", file], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield from process.stdout
    assert process.returncode == 0


def is_of_a_table(kernel: str, read: str) -> bool:
    """A word of the table that 4-bit codes are decoded by.

    Of groups of 64, scales are read by 16 bytes, and weights and x by ldmatrix.
    """
    codings = re.search(r"enum class Coding \{(.*?)\}", (ffi.CSRC / CODINGS).read_text())
    assert codings
    table = codings[1].split(", ").index("kTable")
    return f"few_rows_kernelILNS_6CodingE{table}ELi64E" in kernel and bool(
        re.fullmatch(r"LDS R\d+, \[R\d+\]", read)
    )


def is_behind_the_stages(kernel: str, read: str) -> bool:
    """A word of a ticket or of h: both are in shared memory behind all stages."""
    sizes = re.search(r"\d(?:pair|both)_kernelILi(\d+)ELi(\d+)E", kernel)
    at = re.search(r"LDS R\d+, \[R\d+\+0x([0-9a-f]+)\]$", read)
    if not sizes or not at:
        return False
    return int(at[1], 16) >= int(sizes[1]) * int(sizes[2])


CODINGS = "grouped_matmul/codings.cuh"
# Reads of what no asynchronous copy writes, which barriers of other places do not wait for.
HARMLESS: dict[str, Callable[[str, str], bool]] = {
    "the table is written once, before the first stage": is_of_a_table,
    "plain stores write tickets and h, behind barriers of their own": is_behind_the_stages,
}


def places_let_go(file: Path) -> tuple[list[str], set[str]]:
    """Return a line for each read of a place that is let go too soon, and the others' reasons."""
    faults, reasons = [], set()
    for kernel, code in kernels(disassembled(file)):
        for leaving, reads in unseen_reads(code).items():
            for read in reads:
                why = [why for why, holds in HARMLESS.items() if holds(kernel, read.text)]
                reasons.update(why)
                if not why:
                    faults.append(
                        f"{kernel}: {read.address:#x} {read.text} is in flight at "
                        f"{leaving.address:#x} {leaving.text}"
                    )
    return faults, reasons


@needs_nvcc
@pytest.mark.aot
@pytest.mark.timeout(900)
def test_no_kernel_lets_a_place_go_that_it_still_reads():
    """Of the whole library, which is compiled unless it is in the cache."""
    faults, reasons = places_let_go(ffi.library().build(dispatch.cache_folder()))
    assert not faults, "let these arrive by mbar_arrive_seen:\n" + "\n".join(faults)
    assert reasons  # else the search finds nothing at all


SEEN = "mbar_arrive_if(bar + (seen & nothing), wanted);"
KERNEL = """
#include "grouped_matmul/few_rows.cuh"
using namespace lora_jax;
template __global__ void lora_jax::few_rows_kernel<Coding::kInteger, 64, 8, 4, 2, false, 3>(
    const __grid_constant__ FewRowsArgs);
"""


@needs_nvcc
@pytest.mark.aot
def test_an_arrival_that_waits_for_nothing_is_found(tmp_path):
    """int4 in groups of 64, which had wrong values on an H200 without what `seen` does."""
    shutil.copytree(ffi.CSRC, tmp_path / "csrc")
    header = tmp_path / "csrc/device/ptx.cuh"
    text = header.read_text()
    (tmp_path / "one.cu").write_text(KERNEL)
    flags = [f for f in ffi.FLAGS if f.startswith(("-O", "-std", "-gencode"))]
    command = [
        find_compilers()[0].path,
        *flags,
        "-w",
        "-cubin",
        "-I",
        "csrc",
        "one.cu",
        "-o",
        "one",
    ]
    found = []
    for arrival in (SEEN, "mbar_arrive_if(bar, wanted);"):
        assert SEEN in text
        header.write_text(text.replace(SEEN, arrival))
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=500)
        found.append(places_let_go(tmp_path / "one")[0])
    right, wrong = found
    assert not right
    assert any("LDSM" in fault and "SYNCS.ARRIVE" in fault for fault in wrong)
