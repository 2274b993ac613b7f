"""Machine code of Hopper GPUs, searched for reads that a place is let go before.

A consumer of a ring reads a stage of shared memory and arrives at a barrier, and an asynchronous
copy overwrites the stage. The hardware does not hold the arrival, nor the copy, until the reads are
done. A read is done once an instruction has waited for its result.

The assembler writes the waits into the upper bits of an instruction's 128. Bits 110 to 112 are one
of six scoreboards, which the result sets free; bits 116 to 121 are the scoreboards waited for.

Not searched: products of warpgroups, which read shared memory without a scoreboard.
"""

import dataclasses
import re
from collections.abc import Collection, Iterable, Iterator

NO_SCOREBOARD = 7
COPIES = re.compile(r"UTMALDG|UBLKCP|LDGSTS|STAS")
# Arrivals at barriers in shared memory, but for those that announce bytes, by the thread that asks
# for the copies; barriers of a CTA or a cluster; copies that the reading thread asks for itself.
LETS_GO = re.compile(rf"SYNCS\.ARRIVE.*, RZ$|BAR\.|UCGABAR_ARV|{COPIES.pattern}")
JUMPS = re.compile(r"(?:BRA|CALL)\b.*?0x([0-9a-f]+)$")
ENDS = re.compile(r"BRA 0x|CALL|EXIT|RET")
# Their first operand is read, not written.
READS_FIRST = re.compile(r"WARPSYNC|RET|BAR|NANOSLEEP|HGMMA")
WORDS = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;\s*/\* 0x[0-9a-f]{16} \*/")
UPPER_WORD = re.compile(r"\s*/\* 0x([0-9a-f]{16}) \*/")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of a kernel.

    `scoreboard` is the one that its result sets free, or NO_SCOREBOARD. `waits` has a bit for each
    scoreboard that it waits for, whatever its predicate is.
    """

    address: int
    text: str
    scoreboard: int
    waits: int

    @property
    def operation(self) -> str:
        """The text without the predicate."""
        return self.text.split(" ", 1)[1].lstrip() if self.predicated else self.text

    @property
    def predicated(self) -> bool:
        return self.text.startswith("@")

    def reads_shared(self) -> bool:
        """Whether it loads from shared memory into registers."""
        return bool(re.match(r"LDSM?[. ]", self.operation)) and self.scoreboard != NO_SCOREBOARD

    def written(self) -> set[int]:
        """Return registers that it overwrites, maybe too few."""
        name, _, operands = self.operation.partition(" ")
        first = re.match(r"R(\d+)(,|$)", operands)
        if not first or READS_FIRST.match(name):
            return set()
        return set(range(int(first[1]), int(first[1]) + _width_written(name)))

    def read(self) -> set[int]:
        """Return registers that it reads, maybe too many."""
        name, _, operands = self.operation.partition(" ")
        if not READS_FIRST.match(name):
            operands = re.sub(r"^R\d+(,|$)", "", operands)
        found = re.findall(r"\bR(\d+)(\.64)?", operands)
        width = _width_read(name)
        return {int(r) + i for r, pair in found for i in range(2 if pair else width)}


def _width_written(name: str) -> int:
    if name.startswith("LDSM"):
        return int(name[-1]) if name.endswith((".2", ".4")) else 1
    if re.match(r"LD[SG]?\b.*\.128$|HMMA\.16816\.F32", name):
        return 4
    return 2 if re.match(r"LD[SG]?\b.*\.64$|CS2R$|IMAD\.WIDE", name) else 1


def _width_read(name: str) -> int:
    if name.startswith("LD"):  # addresses, of which those of two registers say so
        return 1
    for part, width in (("GMMA", 128), ("MMA", 4), ("128", 4), ("64", 2), ("WIDE", 2)):
        if part in name:
            return width
    return 2 if re.match(r"D[A-Z]", name) else 1


def kernels(listing: Iterable[str]) -> Iterator[tuple[str, list[Instruction]]]:
    """Yield name and instructions of each function in the lines of `cuobjdump -sass`."""
    name, code, begun = "", [], None
    for line in listing:
        if "Function :" in line:
            if code:
                yield name, code
            name, code = line.split("Function :")[1].strip(), []
        elif begun and (upper := UPPER_WORD.match(line)):
            word = int(upper[1], 16)
            code.append(Instruction(*begun, scoreboard=word >> 46 & 7, waits=word >> 52 & 63))
            begun = None
        elif words := WORDS.match(line):
            begun = (int(words[1], 16), words[2])
    if code:
        yield name, code


def followers(code: list[Instruction]) -> list[list[int]]:
    """Return for each instruction the places in `code` of those that may follow it.

    A return may go behind any call of the function.

    Raises:
        NotImplementedError: an instruction jumps to an address in a register.
    """
    places = {one.address: i for i, one in enumerate(code)}
    behind_calls = [i + 1 for i, one in enumerate(code) if one.operation.startswith("CALL")]
    lists = []
    for i, one in enumerate(code):
        if one.operation.startswith(("BRX", "JMX", "JMP")):
            raise NotImplementedError(f"{one.address:#x}: where does {one.text} go?")
        ends = not one.predicated and ENDS.match(one.operation)
        after = [] if ends or i + 1 == len(code) else [i + 1]
        if jump := JUMPS.match(one.operation):
            after.append(places[int(jump[1], 16)])
        lists.append(after + behind_calls if one.operation.startswith("RET") else after)
    return lists


def reads_in_flight(code: list[Instruction], stops: Collection[int]) -> dict[int, set[int]]:
    """Return for those of `stops` that have any the reads that may be in flight there.

    Both are places in `code`. Some path leads from the read to the stop, and no instruction on it,
    nor the stop, waits for the read's scoreboard.
    """
    after = followers(code)
    arriving: dict[int, frozenset[int]] = {0: frozenset()}
    work, found = [0], {}
    while work:
        i = work.pop()
        one, flying = code[i], arriving[i]
        if one.waits:
            flying = frozenset(r for r in flying if not one.waits >> code[r].scoreboard & 1)
        if i in stops and flying:
            found[i] = found.get(i, set()) | flying
        if one.reads_shared():
            flying |= {i}
        for j in after[i]:
            if j not in arriving or not flying <= arriving[j]:
                arriving[j] = flying | arriving.get(j, frozenset())
                work.append(j)
    return found


def wanted_registers(code: list[Instruction]) -> list[set[int]]:
    """Return for each instruction the registers whose values may be read behind it."""
    before: list[list[int]] = [[] for _ in code]
    for i, following in enumerate(followers(code)):
        for j in following:
            before[j].append(i)
    behind: list[set[int]] = [set() for _ in code]
    in_front = [one.read() for one in code]
    work = list(range(len(code)))
    while work:
        j = work.pop()
        for i in before[j]:
            if in_front[j] <= behind[i]:
                continue
            behind[i] |= in_front[j]
            passed = behind[i] if code[i].predicated else behind[i] - code[i].written()
            if not passed <= in_front[i]:
                in_front[i] |= passed
                work.append(i)
    return behind


def unseen_reads(code: list[Instruction]) -> dict[Instruction, list[Instruction]]:
    """Return what lets a place go while reads may be in flight, with those reads.

    Of a kernel without asynchronous copies nothing: barriers order reads before plain stores. Reads
    whose values nothing uses any more are left out, whatever they find.
    """
    if not any(COPIES.match(one.operation) for one in code):
        return {}
    stops = {i for i, one in enumerate(code) if LETS_GO.match(one.operation)}
    if not (found := reads_in_flight(code, stops)):
        return {}
    wanted = wanted_registers(code)
    used = {i: sorted(r for r in found[i] if code[r].written() & wanted[i]) for i in sorted(found)}
    return {code[i]: [code[r] for r in reads] for i, reads in used.items() if reads}
