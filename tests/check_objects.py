#!/usr/bin/env python3
"""What may be in the objects of a build:  check_objects.py BUILD_DIR [--loops]

1. The object of an ISA defines nothing outside its namespace and has no weak symbol: the linker would keep one copy
   of several, compiled with one ISA's flags, for all of them.
2. The libraries neither print nor end the process.
3. No innermost loop that multiplies writes a vector register to the stack: a spilled accumulator costs half the speed.
--loops lists every multiply loop. Exit status 1 and a line for every breach.
"""
import pathlib
import re
import shutil
import struct
import subprocess
import sys

# 1
WEAK = set("WwVvu")
GLOBAL = set("TDRBSGCAi")

# 2: symbol -> what it does. Mangled names, matched whole.
FORBIDDEN = re.compile(
    r"(__)?(v|f|vf|d|vd)?printf(_chk)?|puts|putchar|putc|fputs|fputc|_IO_putc|fwrite|perror|abort|exit|_exit|_Exit|"
    r"quick_exit|__assert_fail|raise|_ZSt9terminatev|_ZSt4(cout|cerr|clog)|_ZSt10unexpectedv")
# (archive, member, symbol): reason
ALLOWED_CALLS = [
    (r"libkt_base\.a", r"log\.cc\.o", r"fwrite|fputs|v?fprintf|(__)?v?fprintf_chk", "the one sink writes to stderr"),
    (r"libkt_base\.a", r"pool\.cc\.o", r"_ZSt9terminatev",
     "the destructor of std::thread, inlined; every thread is joined"),
]

# 3
PRODUCT = re.compile(r"^(sdot|usdot|smmla|usmmla|bfmmla|bfdot|sadalp|vpdpbusds?|vdpbf16ps|tdpb\w+|vpmaddubsw)$")
# (object, demangled function, stores per product allowed): reason
ALLOWED_SPILLS = [
    (r".*", r"::few(_integer_pass|_float_pass)?<", 1.0,
     "sums, totals, activations and planes of 8 tokens exceed the registers; a ratchet: the tile loops of "
     "many have none"),
]

MACHINES = {62: ("x86_64-linux-gnu-objdump", "x86"), 183: ("aarch64-linux-gnu-objdump", "arm")}


def run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def machine_of(path):
    with open(path, "rb") as file:
        return struct.unpack("<H", file.read(20)[18:20])[0]


def isa_objects(build):
    """(name, path) of every per-ISA object."""
    for path in sorted(build.rglob("kt_isa_*.dir/instantiate*.cc.o")):
        yield path.parent.name.removeprefix("kt_isa_").removesuffix(".dir"), path


def check_symbols(name, path):
    namespace = f"kt_isa_{name}"
    own = re.compile(rf"_Z[A-Z]*N?K?{len(namespace)}{namespace}")
    for line in run("nm", "-P", str(path)).splitlines():
        symbol, kind = line.split()[:2]
        if kind in WEAK:
            yield f"{path.name} of {name}: weak symbol {symbol} ({kind}) could leak into another ISA"
        elif kind in GLOBAL and not own.match(symbol):
            yield f"{path.name} of {name}: defines {symbol} outside {namespace}"


def check_calls(archive):
    member = ""
    for line in run("nm", "-P", "-u", str(archive)).splitlines():
        if line.endswith(":"):
            member = line[line.rfind("[") + 1:].rstrip("]:")
            continue
        symbol = line.split()[0] if line.strip() else ""
        if not FORBIDDEN.fullmatch(symbol.split("@")[0]):
            continue
        if any(re.fullmatch(a, archive.name) and re.fullmatch(m, member) and re.fullmatch(s, symbol)
               for a, m, s, _ in ALLOWED_CALLS):
            continue
        yield f"{archive.name}: {member} calls {symbol}: libraries report through Error and the log sink"


INSTRUCTION = re.compile(r"^\s*([0-9a-f]+):\t(?:[0-9a-f]{2,8} )*\s*\t?([a-z][\w.]*)\s*(.*)$")
LEAVES = {"arm": re.compile(r"^(ret|br|brk|udf)$"), "x86": re.compile(r"^(ret\w*|ud2|hlt)$")}
ALWAYS = ("b", "jmp", "jmpq")  # branches that never fall through
BRANCH = {"arm": re.compile(r"^(b|b\.\w+|cbn?z|tbn?z)$"), "x86": re.compile(r"^j\w+$")}
STACK_STORE = {
    "arm": re.compile(r"^(?:str|stur|stp|stnp|st1)\s+[{]?[qv]\d+.*\[(?:sp|x29)\b"),
    "x86": re.compile(r"^vmov\w+\s+%[xyz]mm\d+(?:\{.*\})?,\s*-?(?:0x[0-9a-f]+)?\(%r[sb]p\b"),
}


def functions(path, objdump):
    """(name, [(address, mnemonic, operands)]) for every function of an object."""
    name, body = None, []
    for line in run(objdump, "-d", "--no-show-raw-insn", str(path)).splitlines():
        if head := re.match(r"^[0-9a-f]+ <(.+)>:$", line):
            if name:
                yield name, body
            name, body = head[1], []
        elif found := INSTRUCTION.match(line):
            body.append((int(found[1], 16), found[2], found[3]))
    if name:
        yield name, body


def blocks_of(body, kind):
    """Basic blocks as {first index: (end index, [successors])}, by indices into body."""
    at = {address: i for i, (address, _, _) in enumerate(body)}
    target, starts = {}, {0}
    for i, (_, mnemonic, operands) in enumerate(body):
        if BRANCH[kind].match(mnemonic):
            to = re.search(r"([0-9a-f]+) <[^>]*>\s*$", operands)
            target[i] = at.get(int(to[1], 16)) if to else None
            starts |= {i + 1} | ({target[i]} if target[i] is not None else set())
        elif LEAVES[kind].match(mnemonic):
            starts.add(i + 1)
    order = sorted(s for s in starts if s < len(body))
    blocks = {}
    for start, end in zip(order, order[1:] + [len(body)]):
        last = body[end - 1][1]
        next_blocks = [target[end - 1]] if target.get(end - 1) is not None else []
        if end < len(body) and not LEAVES[kind].match(last) and last not in ALWAYS:
            next_blocks.append(end)
        blocks[start] = (end, next_blocks)
    return blocks


def innermost_loops(body, kind):
    """Instructions of each natural loop that holds no other loop."""
    blocks = blocks_of(body, kind)
    before = {b: set() for b in blocks}
    for b, (_, after) in blocks.items():
        for a in after:
            before[a].add(b)
    latches, state, stack, roots = {}, {}, [], sorted(blocks)  # latches: head -> blocks that jump back to it
    while stack or roots:
        if not stack:  # the first block, and those that only a jump table reaches
            if (root := roots.pop(0)) not in state:
                stack.append((root, iter(blocks[root][1])))
            continue
        block, rest = stack[-1]
        state[block] = "open"
        for after in rest:
            if after not in state:
                stack.append((after, iter(blocks[after][1])))
                break
            if state[after] == "open":
                latches.setdefault(after, set()).add(block)
        else:
            state[block] = "done"
            stack.pop()
    loops = {}
    for head, ends in latches.items():
        inside, todo = {head}, list(ends)
        while todo:
            block = todo.pop()
            if block not in inside:
                inside.add(block)
                todo += before[block]
        loops[head] = inside
    for head, inside in sorted(loops.items()):
        if not any(other in inside for other in loops if other != head):
            yield body[head][0], [body[i] for b in sorted(inside) for i in range(b, blocks[b][0])]


def demangle(names):
    out = subprocess.run(["c++filt"], input="\n".join(names), check=True, capture_output=True, text=True).stdout
    return out.splitlines()


def short(name):
    """few_integer_pass<U4 F16 None k32, 8> for the demangled name of a kernel."""
    name = re.sub(r"\w+::\(anonymous namespace\)::", "", name.replace("(kt::", "(")).replace("kt::", "")
    return re.sub(r"\(.*?\)(?=\d)|\(const.*$", "", name)[:110]


def check_loops(name, path, listing):
    objdump, kind = MACHINES[machine_of(path)]
    if not shutil.which(objdump):
        objdump = "objdump"
    rows = []  # function, loop, products, stores
    for function, body in functions(path, objdump):
        for head, inside in innermost_loops(body, kind):
            products = sum(1 for _, m, _ in inside if PRODUCT.match(m))
            if products:
                stores = [f"{m} {o}" for _, m, o in inside if STACK_STORE[kind].match(f"{m}\t{o}")]
                rows.append((function, f"{head:x}", len(inside), products, stores))
    names = demangle([row[0] for row in rows]) if rows else []
    spilled = 0
    for long, (_, where, length, products, stores) in zip(names, rows):
        allowed = any(re.fullmatch(obj, name) and re.search(pattern, long) and len(stores) <= limit * products
                      for obj, pattern, limit, _ in ALLOWED_SPILLS)
        spilled += bool(stores)
        if listing or stores and not allowed:
            print(f"  {name:14} {where:>7} {length:5} instructions {products:4} products {len(stores):3} stack stores"
                  f"  {short(long)}")
        if stores and not allowed:
            yield f"{name}: {short(long)} loop {where}: {len(stores)} vector stores to the stack, as {stores[0]}"
    print(f"{name:16} {len(rows):5} multiply loops, {spilled} with stack stores")


def main():
    arguments = [a for a in sys.argv[1:] if not a.startswith("--")]
    build = pathlib.Path(arguments[0] if arguments else "build")
    problems, seen = [], 0
    for name, path in isa_objects(build):
        seen += 1
        problems += check_symbols(name, path)
        if name not in ("portable", "amx_emulated"):  # plain C++, never fast
            problems += check_loops(name, path, "--loops" in sys.argv)
    for library in ("base", "formats", "kernels", "nn"):
        for archive in build.rglob(f"libkt_{library}.a"):
            seen += 1
            problems += check_calls(archive)
    for problem in problems:
        print("FAIL:", problem)
    print(f"{seen} objects and archives, {len(problems)} problems")
    return 1 if problems or not seen else 0


if __name__ == "__main__":
    sys.exit(main())
