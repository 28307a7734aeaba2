#!/usr/bin/env python3
"""Sums the results that scripts/test.sh left, one folder per stage; names what failed; exits 1 on any failure.

A stage has ctest.xml (one entry per program), gtest/*.xml (the cases of each GoogleTest program), pytest.xml, a file
`broken` (it could not be built or run: one failure) or `skipped` (a number).
"""
import pathlib
import sys
import xml.etree.ElementTree as ET


def say_failed(folder, name, why):
    """One line for the end of the log, where it is looked for first."""
    lines = [line.strip() for line in (why or "").splitlines() if line.strip()]
    print(f"FAILED {folder.name}: {name}: {lines[0][:200] if lines else 'see above'}")


def cases(stage_folder, path):
    """(passed, failed, skipped) of a GoogleTest or pytest file."""
    passed = failed = skipped = 0
    for case in ET.parse(path).iter("testcase"):
        fault = case.find("failure")
        if fault is None:
            fault = case.find("error")
        if fault is not None:
            failed += 1
            say_failed(stage_folder, f"{case.get('classname')}.{case.get('name')}", fault.get("message") or fault.text)
        elif case.find("skipped") is not None or case.get("status") == "notrun":
            skipped += 1
        else:
            passed += 1
    return passed, failed, skipped


def stage(folder):
    total = [0, 0, 0]

    def add(counts):
        for i, count in enumerate(counts):
            total[i] += count

    programs = {path.stem: cases(folder, path) for path in (folder / "gtest").glob("*.xml")}
    for counts in programs.values():
        add(counts)
    if (folder / "ctest.xml").exists():
        for case in ET.parse(folder / "ctest.xml").iter("testcase"):
            failed, ran = case.get("status") == "fail", case.get("status") == "run"
            counts = programs.get(case.get("name"))
            if counts is None:
                add((int(ran), int(failed), int(not failed and not ran)))
            elif failed and not counts[1]:  # crashed, or a sanitizer spoke, after its cases passed
                add((0, 1, 0))
            if failed and not (counts and counts[1]):
                say_failed(folder, case.get("name"), "the program failed")
    if (folder / "pytest.xml").exists():
        add(cases(folder, folder / "pytest.xml"))
    if (folder / "broken").exists():
        add((0, 1, 0))
        say_failed(folder, "stage", (folder / "broken").read_text())
    if (folder / "skipped").exists():
        add((0, 0, int((folder / "skipped").read_text())))
    return total


def main():
    total = [0, 0, 0]
    for folder in sorted(path for path in pathlib.Path(sys.argv[1]).iterdir() if path.is_dir()):
        counts = stage(folder)
        total = [a + b for a, b in zip(total, counts)]
        print(f"{folder.name:12} {counts[0]} passed, {counts[1]} failed, {counts[2]} skipped".replace(", ", "  "))
    print(f"{total[0]} passed, {total[1]} failed, {total[2]} skipped")
    return 1 if total[1] or not total[0] else 0


if __name__ == "__main__":
    sys.exit(main())
