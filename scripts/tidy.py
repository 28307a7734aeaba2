#!/usr/bin/env python3
"""clang-tidy over the C++ of src/, with the checks of .clang-tidy; prints each finding once; exits 1 on any.

    scripts/tidy.py                      every file of src/ but tests
    scripts/tidy.py src/http src/nn/     those of these folders and files alone

The files of a room are read as one, as they are compiled: most of the time goes into headers. Kernels are read for one
instruction set. What has not changed is not read again: build-tidy/found/ keeps what was found in it.
"""
import argparse
import concurrent.futures
import functools
import hashlib
import itertools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET

ROOT = pathlib.Path(__file__).resolve().parent.parent
OLDEST = 19  # what was written for C++20 before it is not all read
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.M)
FINDING = re.compile(r"^(\S+):(\d+):(\d+): (?:error|warning): (.*) \[([^\]]*)\]$")
# g++ has warnings that clang does not know; which of them are errors is not asked here.
PLAIN = ["--extra-arg=-Wno-unknown-warning-option", "--extra-arg=-Wno-error"]


def find_tool():
    """(path, version) of the first clang-tidy that is new enough, or None."""
    names = [os.environ.get("CLANG_TIDY", ""), *(f"clang-tidy-{n}" for n in range(24, OLDEST - 1, -1)), "clang-tidy"]
    for name in filter(None, names):
        if path := shutil.which(name):
            said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
            if (version := re.search(r"version (\d+)\.\S*", said)) and int(version[1]) >= OLDEST:
                return path, version[0]
    return None


def configure(folder):
    command = ["cmake", "-S", ROOT, "-B", folder, "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON", "-DKT_UNITY=ON",
               "-DKT_PRECOMPILE=OFF", "-DKT_PYTHON=OFF", "-DKT_ISAS=portable"]
    if not (folder / "CMakeCache.txt").exists() and shutil.which("ninja"):
        command += ["-G", "Ninja"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        sys.exit(f"tidy: cmake failed\n{ran.stdout}{ran.stderr}")


@functools.cache
def text_of(path):
    return path.read_text(encoding="utf-8", errors="replace")


@functools.cache
def included(path):
    """Our own files that a file names; where one is not found it is a system's."""
    found = []
    for name in INCLUDE.findall(text_of(path)):
        for folder in (path.parent, ROOT / "src", ROOT):
            if (folder / name).is_file():
                found.append((folder / name).resolve())
                break
    return found


class Unit:
    """One entry of compile_commands.json: a file, or a room's files as one."""

    def __init__(self, entry):
        self.file = pathlib.Path(entry["file"])
        self.command = entry["command"]
        self.files = [self.file]
        if self.file.suffix == ".cxx":  # CMake's list of a room's files
            self.files = included(self.file) or self.files
        self.name = os.path.relpath(self.files[0] if len(self.files) == 1 else self.files[0].parent, ROOT)
        self.stamp = os.path.relpath(self.file, ROOT).replace("/", "_")  # its file's name

    def asked(self, paths):
        return not paths or any(file == path or path in file.parents for file in self.files for path in paths)

    def digest(self, tool):
        """Of all that decides what is found here, but for the system's headers."""
        every, todo = set(), [self.file]
        while todo:
            path = todo.pop()
            if path not in every:
                every.add(path)
                todo += included(path)
        sums = hashlib.sha256(f"{tool[1]} {self.command}".encode())
        for path in [ROOT / ".clang-tidy", *sorted((ROOT / "src").rglob(".clang-tidy")), *sorted(every)]:
            sums.update(f"\n{path}\n{text_of(path)}".encode())
        return sums.hexdigest()


def read_units(folder, paths):
    units, seen = [], set()
    for entry in json.loads((folder / "compile_commands.json").read_text()):
        unit = Unit(entry)
        # Tests are run; what a build makes is nobody's to mend; kernels once, for one instruction set.
        ours = all(ROOT / "src" in file.parents and not file.name.endswith("_test.cc") and
                   file.parent.name != "testing" for file in unit.files)
        if ours and unit.file not in seen and unit.asked(paths):
            seen.add(unit.file)
            units.append(unit)
    return units


def findings_of(said):
    """(place, check) -> its lines, of what clang-tidy printed: a finding, the line of code, its notes."""
    found, lines = {}, None
    for line in said.splitlines():
        if match := FINDING.match(line):
            path = os.path.relpath(os.path.realpath(ROOT / match[1]), ROOT)
            which = match[5].removesuffix(",-warnings-as-errors")
            lines = found.setdefault((path, int(match[2]), int(match[3]), which), [])
            lines.append(f"{path}:{match[2]}:{match[3]}: error: {match[4]} [{which}]")
        elif lines is not None:
            lines.append(line)
    return found


def check(tool, folder, unit):
    """(findings, what was said when it failed without any)."""
    ran = subprocess.run([tool[0], "--quiet", "-p", str(folder), *PLAIN, str(unit.file)],
                         capture_output=True, text=True, check=False)
    found = findings_of(ran.stdout)
    return found, ran.stdout[-2000:] + ran.stderr[-2000:] if ran.returncode and not found else ""


def checked(tool, folder, unit):
    """The same from build-tidy/found/, where nothing has changed since."""
    kept, digest = folder / "found" / unit.stamp, unit.digest(tool)
    if kept.exists() and (said := kept.read_text()).startswith(digest):
        return findings_of(said), ""
    began = time.monotonic()
    found, broken = check(tool, folder, unit)
    if not broken:
        kept.write_text("\n".join([digest, *itertools.chain.from_iterable(found.values())]))
    print(f"{unit.name}: {len(found)} found in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return found, broken


def write_junit(path, results):
    suite = ET.Element("testsuite", name="tidy")
    for name, fault in results:
        case = ET.SubElement(suite, "testcase", classname="tidy", name=name)
        if fault:
            ET.SubElement(case, "failure", message=fault)
    path.parent.mkdir(parents=True, exist_ok=True)
    ET.ElementTree(suite).write(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=pathlib.Path, help="files and folders of src/ (default: all)")
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build-tidy", help="folder of the configuration")
    parser.add_argument("--junit", type=pathlib.Path, help="results for scripts/test_totals.py")
    parser.add_argument("-j", "--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args()
    tool = find_tool()
    if not tool:
        print(f"not run here: clang-tidy (no version from {OLDEST} on; pip install clang-tidy)")
        print("0 passed, 0 failed, 1 skipped")
        return 77
    folder = args.build.resolve()
    configure(folder)
    (folder / "found").mkdir(exist_ok=True)
    units = read_units(folder, [path.resolve() for path in args.paths])
    if not units:
        sys.exit("tidy: no file of src/ that is compiled was named")
    units.sort(key=lambda unit: -sum(len(text_of(file)) for file in unit.files))  # the longest first
    results, shown = [], set()
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        runs = {pool.submit(checked, tool, folder, unit): unit for unit in units}
        for run in concurrent.futures.as_completed(runs):
            unit, (found, broken) = runs[run], run.result()
            for key in [key for key in found if key not in shown]:
                shown.add(key)
                print("\n".join(found[key]), flush=True)
            if broken:
                print(f"{unit.name}: clang-tidy failed\n{broken}")
            fault = f"{len(found)} findings" if found else "clang-tidy failed" if broken else ""
            results.append((unit.name, fault))
    if args.junit:
        write_junit(args.junit, sorted(results))
    failed = sum(1 for _, fault in results if fault)
    print(f"{len(results) - failed} passed, {failed} failed, 0 skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
