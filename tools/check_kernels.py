#!/usr/bin/env python3
"""Whether the GPU kernels that builds take (src/cuda/kernels.tar.xz) are those of the sources: the archive carries a
digest of what it was made of. Needs no nvcc. Also its size and the header that old drivers ask for. Exit status 1 if
not."""
import pathlib
import subprocess
import sys
import tarfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
ARCHIVE = ROOT / "src" / "cuda" / "kernels.tar.xz"
MOST_BYTES = 1 << 20


def main():
    digest = subprocess.run([ROOT / "scripts" / "kernels.sh", "--digest"], capture_output=True, text=True,
                            check=True).stdout
    with tarfile.open(ARCHIVE) as archive:
        files = {member.name: archive.extractfile(member).read().decode() for member in archive}
    modules = {name: text for name, text in files.items() if name.endswith(".ptx")}
    if files["sources.sha256"] != digest:
        sys.exit("src/cuda/kernels.tar.xz was made of other sources: make kernels (needs nvcc)")
    if ARCHIVE.stat().st_size > MOST_BYTES:
        sys.exit(f"src/cuda/kernels.tar.xz has {ARCHIVE.stat().st_size} bytes, at most {MOST_BYTES} are wanted")
    for name, text in modules.items():
        if not text.startswith(".version 7.8\n.target sm_80\n"):
            sys.exit(f"{name}: a header that drivers from 525 on would not take")
    print(f"{len(modules)} modules in {ARCHIVE.stat().st_size} bytes, made of these sources")


if __name__ == "__main__":
    main()
