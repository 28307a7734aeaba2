#!/usr/bin/env python3
"""Names that only one file may see, held apart within a room, because the files of a room are compiled as one (KT_UNITY
in cmake/floor.cmake): two would clash, or one file would call the function of the other.

A name in an anonymous namespace stands in one file of its room; aliases of the same type may be repeated, and functions
may share a name when their first parameters are of different types of ours. A hidden type is not called like one of a
header that any file of the room sees. Prints file:line for every breach; exit status 1 if any.
"""
import pathlib
import re
import sys

SINGLE_FILES = {"nn", "hybrid", "kernels"}  # KT_SINGLE_FILES; kernels/ compiles its few files apart. Not their tests.
SKIPPED = {"testing", "arch"}
INCLUDE = re.compile(r'#include "([^"]+)"')
TYPE = re.compile(r"(?:template.*>\s*)?(?:struct|class|enum class|enum|union)\s+(?:alignas\([^)]*\)\s+)?(\w+)")
ALIAS = re.compile(r"(?:using\s+(\w+)\s*=|namespace\s+(\w+)\s*=)\s*(.*)")
FUNCTION = re.compile(r"[\w:<>,&*\s\[\]]*?[&*\s](\w+)\((.*)")
VARIABLE = re.compile(r"[\w:<>,&*\s]*?[&*\s](\w+)\s*(?:\[[^=]*\])?\s*(?:=|\{|;|,)")
MORE = re.compile(r",\s*(k[A-Z]\w*)\s*=")  # constants after the first of a line
OURS = re.compile(r"(?:const\s+)?([A-Z]\w*(?:<[^,]*>)?(?:::\w+)?)\b")
SRC = pathlib.Path(__file__).resolve().parent.parent / "src"


def lines_of(path):
    return path.read_text(encoding="utf-8").splitlines()


def named(line):
    """(name, kind, what tells it from others of that name) of each declaration that begins on this line."""
    function, variable = FUNCTION.match(line), VARIABLE.match(line)
    if found := ALIAS.match(line):
        yield found[1] or found[2], "alias", found[3].strip()
    elif found := TYPE.match(line):
        yield found[1], "type", ""
    elif function and not (variable and variable.end() <= function.start(2)):
        first = OURS.match(function[2])
        yield function[1], "function", first[1] if first else ""
    elif variable:
        for name in [variable[1], *MORE.findall(line[variable.end() - 1:])]:
            yield name, "variable", ""


def hidden_names(path):
    """(line, name, kind, mark) of what stands in the file's anonymous namespaces. This style indents nothing in them,
    so that what begins in the first column is a declaration."""
    hidden = False
    for number, line in enumerate(lines_of(path), 1):
        if line == "namespace {":
            hidden = True
        elif line == "}  // namespace":
            hidden = False
        elif (hidden and re.match(r"[\[\w]", line)
              and not re.match(r"(public|private|protected):|template <|using [\w ]+(::|;)|[A-Z_]+\(", line)):
            for found in named(re.sub(r"^\[\[\w+\]\]\s*", "", line)):
                yield number, *found


def headers_of(files):
    """The headers of ours that these files see."""
    seen, todo = set(), list(files)
    while todo:
        for found in map(INCLUDE.match, lines_of(todo.pop())):
            path = SRC / found[1] if found else None
            if path and path not in seen and path.exists():
                seen.add(path)
                todo.append(path)
    return seen


def types_of(headers):
    """{name: header} of the types that they define in namespace kt, of whatever floor."""
    types = {}
    for path in headers:
        ours = True
        for line in lines_of(path):
            if line.startswith("namespace "):
                ours = bool(re.fullmatch(r"namespace kt(::inline \w+)? \{", line))
            elif ours and (found := TYPE.match(line)) and "{" in line:
                types[found[1]] = path
    return types


def breaches(files):
    seen, of_headers = {}, types_of(headers_of(files))
    for path in files:
        for number, name, kind, mark in hidden_names(path):
            if kind == "type" and name in of_headers:
                yield path, number, f"{name} is a type of {of_headers[name].relative_to(SRC)} too"
            for other_path, other_number, other_kind, other_mark in seen.get(name, []):
                if other_path == path:
                    continue
                same = kind == other_kind
                if same and kind == "alias" and mark == other_mark:
                    continue
                if same and kind == "function" and mark and other_mark and mark != other_mark:
                    continue
                yield path, number, f"{name} is a name of {other_path.name}:{other_number} too"
                break
            seen.setdefault(name, []).append((path, number, kind, mark))


def main():
    rooms = sorted({path.parent for path in SRC.rglob("*.cc")})
    rooms = [room for room in rooms if room.name not in SKIPPED]
    count = 0
    for room in rooms:
        files = [path for path in sorted(room.glob("*.cc")) if path.name != "main.cc"]
        tests = [path for path in files if path.name.endswith("_test.cc")]
        sources = [] if room.relative_to(SRC).parts[0] in SINGLE_FILES else [path for path in files
                                                                             if path not in tests]
        for path, number, message in [*breaches(sources), *breaches(tests)]:
            print(f"src/{path.relative_to(SRC)}:{number}: {message}")
            count += 1
    print(f"{len(rooms)} rooms, {count} names that clash")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
