#!/usr/bin/env python3
"""How fast `kt quant` converts and how fast its files load, as docs/benchmarks/conversion.md has it: a bf16 checkpoint
of the given size, converted from the page cache into a memory file system and onto the disk, with the peak of anonymous
memory; then `kt microbench load` of what was written.

    conversion_speed.py --gb 4 --folder /tmp/speed    # wants three times that much disk, and half of it in /dev/shm
"""
import argparse
import json
import pathlib
import shutil
import subprocess
import sys
import time

METHODS = ("int8", "int4")


def parsed_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default="build/bin/kt")
    parser.add_argument("--gb", type=float, default=4)
    parser.add_argument("--folder", type=pathlib.Path, required=True,
                        help="on the disk to measure; made, and emptied at the end")
    parser.add_argument("--memory", type=pathlib.Path, default="/dev/shm/kt-conversion-speed",
                        help="in a memory file system")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    for folder in (args.folder, args.memory):
        if folder.exists():
            parser.error(f"{folder} is there already")
    return args


def anonymous_bytes(pid):
    """What the process holds beside mapped files now; 0 once it has gone."""
    try:
        words = pathlib.Path(f"/proc/{pid}/status").read_text().split()
        return 1024 * int(words[words.index("RssAnon:") + 1])
    except (OSError, ValueError):
        return 0


def converted(args, source, method, out):
    """Seconds until the bytes are on the disk, and the most anonymous memory in samples ten times a second."""
    command = [args.program, "quant", str(source), "-o", str(out), "--method", method]
    if args.threads:
        command += ["--threads", str(args.threads)]
    start, most = time.monotonic(), 0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while process.poll() is None:
        most = max(most, anonymous_bytes(process.pid))
        time.sleep(0.1)
    if process.returncode:
        sys.exit(f"{' '.join(command)}: {process.stderr.read().strip()}")
    subprocess.run(["sync", "-f", str(out)], check=True)
    return time.monotonic() - start, most


def main():
    args = parsed_arguments()
    source = args.folder / "source"
    try:
        args.folder.mkdir(parents=True)
        args.memory.mkdir(parents=True)
        subprocess.run([sys.executable, str(pathlib.Path(__file__).with_name("make_checkpoint.py")), str(source),
                        "--gb",
                        str(args.gb)], check=True, stdout=subprocess.DEVNULL)
        files = sorted(source.glob("*.safetensors"))
        size = sum(file.stat().st_size for file in files)
        print("| method | to | seconds | GB/s of source | anonymous memory, MiB |\n|---|---|---|---|---|")
        for method in METHODS:
            for name, folder in (("memory", args.memory), ("disk", args.folder)):
                subprocess.run(["cat", *map(str, files)], stdout=subprocess.DEVNULL, check=True)  # into the page cache
                seconds, most = converted(args, source, method, folder / method)
                print(f"| {method} | {name} | {seconds:.1f} | {size / seconds / 1e9:.2f} | {most >> 20} |", flush=True)
            shutil.rmtree(args.memory / method)
            load = subprocess.run([args.program, "microbench", "load", str(args.folder / method), "--json"],
                                  capture_output=True, text=True, check=True)
            print(f"`kt microbench load` of {method}: {json.dumps(json.loads(load.stdout))}", flush=True)
    finally:
        for folder in (args.folder, args.memory):
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
