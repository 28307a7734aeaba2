#!/usr/bin/env python3
"""Keeps the floors of DESIGN.md true: what a file may include, and where it may ask for the architecture.

A file includes its own folder and lower floors; folders on one floor do not include each other. What it says stands in
its folder's namespace, `kt::inline FOLDER` (text/ has `kt::inline texts`: text() is a function; helpers of tests that
several floors share have `kt::testing_*`). `#if` on macros of
the architecture stands in base/cpu.cc and kernels/isa/ only, and where the test driver switches stacks. Below cli/ no
string of the product names a --flag: others than the program's users read it, and kt turns `words` into flags itself. A
type's name is defined once in all of src/: two of one name would be merged by the linker into one of them. Prints
file:line for every breach; exit status 1 if any.
"""
import itertools
import pathlib
import re
import sys

FLOORS = {"base": 0, "formats": 1, "http": 1, "text": 1, "kernels": 2, "cuda": 2, "terminal": 2, "hub": 2, "weights": 3,
          "nn": 3,
          "models": 4, "engine": 5, "hybrid": 5, "server": 6, "bench": 6, "cli": 7}
SOURCES = {".h", ".cc", ".cu", ".cuh", ".cpp", ".hpp"}
INCLUDE = re.compile(r'\s*#\s*include\s*"([^"]+)"')
CONDITION = re.compile(r"\s*#\s*(?:if|ifdef|ifndef|elif|elifdef|elifndef)\b")
ARCHITECTURE = re.compile(r"\b(__x86_64__|__i386__|__aarch64__|__arm__|_M_X64|_M_ARM64|__AVX\w*|__SSE\w*|__AMX\w*|"
                          r"__FMA__|__F16C__|__ARM_\w+)\b")
SPACE = re.compile(r"namespace (kt)(?:::inline (\w+))?((?:::\w+)*) \{")
DECLARATION = re.compile(r"(?:class|struct|enum class) \w+(?: : \w+)?;")  # of what a lower floor defines
NAMESPACES = {"text": "texts"}  # where it is not the folder's name
TYPE = re.compile(r"(?:struct|enum class|enum|class|union)\s+(?:alignas\([^)]*\)\s+)?(\w+)\b(?!::)[^;()]*\{")
FLAG = re.compile(r'"(?:[^"\\]|\\.)*(?<![\w-])--[a-z](?:[^"\\]|\\.)*"')
MAY_ASK = ("src/base/cpu.cc", "src/kernels/isa/", "src/cuda/testing/test_blocks.cc")


def folder_of(path, root):
    """The floor's folder a file belongs to, or None for what stands above all floors (tests/, python/, fuzz/ ...)."""
    parts = path.relative_to(root).parts
    return parts[1] if parts[0] == "src" and len(parts) > 2 else None


def is_product_below_cli(path, folder):
    return folder not in (None, "cli") and not path.stem.endswith("_test") and path.parent.name != "testing"


def breaches(path, root):
    name = path.relative_to(root).as_posix()
    folder = folder_of(path, root)
    if name.startswith("src/") and folder not in FLOORS:
        yield 1, f"{folder or 'src'} is on no floor; add it to {pathlib.Path(__file__).name}"
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    in_condition = False  # also on the lines a backslash adds to it
    for number, line in enumerate(lines, 1):
        if (found := INCLUDE.match(line)) and folder:
            target = found[1].split("/")[0] if "/" in found[1] else folder
            if (path.parent / found[1]).exists() and "/" not in found[1]:
                continue
            if target == folder:
                continue
            if target not in FLOORS:
                yield number, f'includes "{found[1]}", which is on no floor'
            elif FLOORS[target] >= FLOORS[folder]:
                where = "a sibling" if FLOORS[target] == FLOORS[folder] else "a floor above"
                yield number, f'includes "{found[1]}": {target}/ is {where} of {folder}/'
        if is_product_below_cli(path, folder) and (found := FLAG.search(line.split("//")[0])):
            yield number, f"names a flag in {found[0]}; write the option's word in backticks, cli/ shows it as its flag"
        if folder and (found := SPACE.match(line)) and not found[3].startswith("::testing_"):
            floor = NAMESPACES.get(folder, folder)
            inside = itertools.takewhile(lambda inner: not inner.startswith("}"), lines[number:])
            declares = found[2] != floor and all(DECLARATION.fullmatch(inner) for inner in inside)
            if found[2] != floor and not (declares and FLOORS.get(found[2], 9) < FLOORS[folder]):
                yield number, f"opens '{found[0][:-2]}'; what stands in {folder}/ is in kt::inline {floor}"
        in_condition = bool(CONDITION.match(line)) or in_condition and lines[number - 2].endswith("\\")
        if in_condition and (macro := ARCHITECTURE.search(line)):
            if not name.startswith(MAY_ASK):
                yield number, f"asks for {macro[0]}; only {' and '.join(MAY_ASK)} may"


def types(path):
    """(line, name) of every type that the linker sees by that name: not nested (this style does not indent what stands
    in a namespace), not in an anonymous namespace."""
    anonymous, space = False, ""
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        if line.startswith("namespace {"):
            anonymous = True
        elif line.startswith("}  // namespace") and not line.startswith("}  // namespace kt"):
            anonymous = False
        elif found := SPACE.match(line):
            space = found[1] + found[3]
        elif found := re.match(r"namespace ([\w:]+) \{", line):
            space = found[1]
        elif not anonymous and (found := TYPE.match(line)):
            yield number, f"{space}::{found[1]}"


def repeated_types(files, root):
    """Test programs link their own folder's tests, and each ISA has a namespace of its own."""
    first = {}
    for path in files:
        name = path.relative_to(root).as_posix()
        if not name.startswith("src/") or name.startswith("src/kernels/isa/") or ".inl." in name or "/testing/" in name:
            continue
        for number, type_name in types(path):
            if path.stem.endswith("_test"):
                type_name = f"{path.parent.name}: {type_name}"
            if type_name in first:
                yield path, number, f"{type_name} is also defined in {first[type_name]}"
            first.setdefault(type_name, f"{name}:{number}")


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent.parent).resolve()
    files = [p for top in ("src", "tests", "bench", "fuzz", "python") for p in sorted((root / top).rglob("*"))
             if p.suffix in SOURCES and p.is_file()]
    count = 0
    for path in files:
        for number, message in breaches(path, root):
            print(f"{path.relative_to(root)}:{number}: {message}")
            count += 1
    for path, number, message in repeated_types(files, root):
        print(f"{path.relative_to(root)}:{number}: {message}")
        count += 1
    print(f"{len(files)} files, {count} breaches of the floors")
    return 1 if count or not files else 0


if __name__ == "__main__":
    sys.exit(main())
