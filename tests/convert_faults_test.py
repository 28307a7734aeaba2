"""`kt quant` when the world goes wrong: killed, the disk full, the input changing under it, little memory. Every
failure is an exit code and one line, leaves only whole files under final names, and `--resume` ends with the bytes of a
run that nothing disturbed. Where a run is killed or held, that is at a point of its work, not of the clock
(tests/halts.cc). KT_PROGRAM names kt."""
import contextlib
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("numpy", reason="numpy is not installed")
import checkpoints
from checkpoints import Model, digests, halting, kt, kt_held, kt_ok, refused

pytestmark = pytest.mark.skipif(not checkpoints.KT, reason="KT_PROGRAM does not name the kt program")
KILLS = 30 if checkpoints.FULL else 8
MODES = {"merged": ["--method", "int4", "--numa-nodes", "2"],
         "folders": ["--method", "int8", "--numa-nodes", "1", "--no-merge"],
         "groups": ["--group-size", "64"]}
LAYERS, EXPERTS = 6, 8


def make_model(folder, hidden, inter):
    """A file for each layer."""
    layer = EXPERTS * 3 * hidden * inter * 2 / 1e6  # MB
    subprocess.run([sys.executable, checkpoints.ROOT / "tools" / "make_checkpoint.py", folder, "--layers", str(LAYERS),
                    "--experts", str(EXPERTS), "--hidden", str(hidden), "--inter", str(inter), "--shard-mb",
                    str(int(layer) + 1)], check=True, stdout=subprocess.DEVNULL)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    """About 40 MB."""
    return make_model(tmp_path_factory.mktemp("generated") / "model", 512, 256)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """About 180 MB."""
    return make_model(tmp_path_factory.mktemp("large") / "model", 1024, 512)


@pytest.fixture(scope="module")
def whole(generated, tmp_path_factory):
    """whole(mode) -> (digests of an uninterrupted run, its points)"""
    made = {}

    def get(mode):
        if mode not in made:
            folder = tmp_path_factory.mktemp("whole")
            calls = checkpoints.calls_of(folder, *command(generated, folder / mode, mode))
            made[mode] = digests(folder / mode), calls
            shutil.rmtree(folder / mode)
        return made[mode]
    return get


def command(model, out, mode, *more):
    return ["quant", str(model), "-o", str(out), "--cpu-threads", "2", *MODES[mode], *more]


def start(args, **options):
    return subprocess.Popen([checkpoints.KT, *args], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                            stderr=subprocess.PIPE, text=True, **options)


def check_whole_files_only(out, wanted):
    """What has a final name has its final bytes; returns how many files those are."""
    found = digests(out) if out.exists() else {}
    final = {name: digest for name, digest in found.items()
             if not name.startswith(".kt_progress/") and not re.search(r"\.\d+-\d+\.tmp(/|$)", name)}
    assert final.items() <= wanted.items(), sorted(set(final.items()) - set(wanted.items()))
    for folder in out.glob("_layer_*"):
        if not folder.name.endswith(".tmp"):
            assert {name for name in final if name.startswith(f"{folder.name}/")} == {
                name for name in wanted if name.startswith(f"{folder.name}/")}
    return len(final)


# --- interrupted -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("mode", list(MODES))
def test_kill_at_any_moment_then_resume(generated, whole, tmp_path, mode):
    """Points are spread over all calls by which an uninterrupted run reaches the disk; some runs are killed again while
    they resume, where they may have come to their end before."""
    wanted, calls = whole(mode)
    kills = KILLS if checkpoints.FULL or mode == "merged" else KILLS // 2
    assert calls > 10 * kills
    points, midway = random.Random(7), 0
    for i in range(kills):
        out = tmp_path / f"out{i}"
        for again in range(1 + i % 3):
            point = 1 + int((i + points.random()) / kills * 0.98 * calls / (1 + again))
            ended = kt(*command(generated, out, mode, *(["--resume"] if again else [])),
                       env=halting(f"kill call {point}"))
            assert ended.returncode in ((0, -signal.SIGKILL)
                                        if again else (-signal.SIGKILL,)), (point, calls, ended.stderr)
            midway += 0 < check_whole_files_only(out, wanted) < len(wanted)
        kt_ok(*command(generated, out, mode, "--resume"))
        assert digests(out) == wanted, f"round {i}"
        shutil.rmtree(out)
    assert midway >= kills // 2, "few kills hit between the first file and the last"


def held_midway(args):
    """A conversion held still once its first file or layer is whole; goes on when the block ends."""
    return kt_held("rename 1 " + ("_layer_0" if "--no-merge" in args else "model-00001-of-"), *args)


def result_of(process):
    return subprocess.CompletedProcess(process.args, process.returncode, process.stdout, process.stderr)


@pytest.mark.parametrize("mode", ["merged", "folders"])
def test_control_c(generated, whole, tmp_path, mode):
    wanted, _ = whole(mode)
    out = tmp_path / "out"
    with held_midway(command(generated, out, mode)) as process:
        process.send_signal(signal.SIGINT)
    assert process.returncode == 130 and "interrupted" in process.stderr
    check_whole_files_only(out, wanted)
    kt_ok(*command(generated, out, mode, "--resume"))
    assert digests(out) == wanted


def test_without_resume_an_unfinished_folder_is_refused(generated, whole, tmp_path):
    out = tmp_path / "out"
    with held_midway(command(generated, out, "merged")) as process:
        process.kill()
    before = digests(out)
    refused(kt(*command(generated, out, "merged")), 2, out, "--resume", "--overwrite")
    assert digests(out) == before
    other = command(generated, out, "merged", "--resume")
    other[other.index("int4")] = "int8"
    refused(kt(*other), 2, out, "resume")
    assert digests(out) == before
    kt_ok(*command(generated, out, "merged", "--overwrite"))
    assert digests(out) == whole("merged")[0]


def test_two_at_once_into_one_folder(generated, whole, tmp_path):
    out = tmp_path / "out"
    with held_midway(command(generated, out, "merged")) as process:
        refused(kt(*command(generated, out, "merged", "--resume")), 2, out, "another conversion")
    assert process.returncode == 0, process.stderr
    assert digests(out) == whole("merged")[0]


# --- input that does not hold still ----------------------------------------------------------------------------------

def linked_copy(source, target, own):
    """A copy that shares all files but `own`."""
    target.mkdir()
    for path in source.iterdir():
        if path.name == own:
            shutil.copyfile(path, target / own)
        else:
            os.link(path, target / path.name)
    return target


def replace(path):
    other = path.with_suffix(".new")
    other.write_bytes(path.read_bytes()[:-8] + b"\1" * 8)
    os.replace(other, path)


def rewrite(path):
    before = path.stat().st_mtime_ns
    while path.stat().st_mtime_ns == before:  # past the granularity of time stamps
        with open(path, "r+b") as file:
            file.seek(-8, os.SEEK_END)
            file.write(b"\1" * 8)


def truncate(path):
    os.truncate(path, 4096)


def grow(path):
    with open(path, "ab") as file:
        file.write(b"\0" * 4096)


@pytest.mark.parametrize("change", [replace, rewrite, truncate, grow, pathlib.Path.unlink],
                         ids=["replaced", "rewritten", "truncated", "grown", "removed"])
@pytest.mark.parametrize("mode", ["merged", "folders"])
def test_input_that_changes(generated, whole, tmp_path, mode, change):
    """The last layer's file, while the first layer is all that has been written."""
    own = sorted(generated.glob("*.safetensors"))[-2].name
    model, out = linked_copy(generated, tmp_path / "model", own), tmp_path / "out"
    with held_midway(command(model, out, mode)) as process:
        change(model / own)
    line = refused(result_of(process), 2)
    assert own in line or str(model) in line
    found = {name.split("/")[0] for name in digests(out)}
    assert not found & {"kt_manifest.json", "model.safetensors.index.json", f"_layer_{LAYERS - 1}"}
    assert not list(out.glob(f"model-{LAYERS:05d}-of-*.safetensors"))
    for path in out.glob("*.safetensors"):
        checkpoints.read_safetensors(path)


# --- output that cannot be written -----------------------------------------------------------------------------------

@contextlib.contextmanager
def mounted(at, size):
    """A tmpfs of `size` bytes, or a visible skip."""
    at.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(at)],
                          capture_output=True, text=True
                          ) if os.geteuid() == 0 else None
    if made is None or made.returncode:
        pytest.skip("needs root and mount: " + (made.stderr.strip() if made else "not root"))
    try:
        yield at
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)


def test_disk_too_small_is_found_before_the_first_byte(generated, tmp_path):
    with mounted(tmp_path / "disk", 4 << 20) as disk:
        line = refused(kt(*command(generated, disk / "out", "merged")), 3, disk / "out", "disk")
        assert len(re.findall(r"\d+", line.replace(str(disk), ""))) >= 2, "needed and free"
        assert not list(disk.iterdir())


@pytest.mark.parametrize("mode", ["merged", "folders"])
def test_disk_that_fills_up_then_resume(generated, whole, tmp_path, mode):
    with mounted(tmp_path / "disk", 100 << 20) as disk:
        out, filler = disk / "out", disk / "filler"
        with held_midway(command(generated, out, mode)) as process:
            with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
                while file.write(b"\0" * 65536):
                    pass
        refused(result_of(process), 3, out)
        check_whole_files_only(out, whole(mode)[0])
        assert not [name for name in digests(out) if ".tmp" in name], "temporaries of a failed run take room"
        filler.unlink()
        kt_ok(*command(generated, out, mode, "--resume"))
        assert digests(out) == whole(mode)[0]


@pytest.mark.parametrize("mode", ["merged", "folders"])
def test_limit_on_file_sizes(generated, whole, tmp_path, mode):
    limit = 20_000  # below a projection of an expert
    result = kt(*command(generated, tmp_path / "out", mode),
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    refused(result, 3, tmp_path / "out")
    check_whole_files_only(tmp_path / "out", whole(mode)[0])


@pytest.mark.parametrize("mode", ["merged", "folders"])
def test_output_that_may_not_be_written(tmp_path, mode):
    model = Model(tmp_path / "in", hidden=256, inter=256).save()
    if os.geteuid() == 0:
        with mounted(tmp_path / "disk", 64 << 20) as disk:
            subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
            refused(kt(*command(model.folder, disk / "out", mode)), 2, disk / "out", "ead-only")
        return
    (tmp_path / "locked").mkdir(mode=0o555)
    refused(kt(*command(model.folder, tmp_path / "locked" / "out", mode)), 2, tmp_path / "locked" / "out", "ermission")


def test_input_and_output_apart(tmp_path):
    model = Model(tmp_path / "a" / "in").save()
    before = digests(tmp_path)
    for out in (model.folder, model.folder / "out", tmp_path / "a", model.folder / ".." / "in"):
        refused(kt("quant", model.folder, "-o", out, "--method", "int8"), 2, out)
    (tmp_path / "link").symlink_to(model.folder)
    refused(kt("quant", model.folder, "-o", tmp_path / "link" / "out", "--method", "int8"), 2)
    assert {name: digest for name, digest in digests(tmp_path).items() if not name.startswith("link/")} == before


def test_output_that_exists(tmp_path):
    model, out = Model(tmp_path / "in").save(), tmp_path / "out"
    out.mkdir()
    kt_ok("quant", model.folder, "-o", out, "--method", "int8")  # an empty folder is nobody's
    before = digests(out)
    refused(kt("quant", model.folder, "-o", out, "--method", "int4"), 2, out, "--overwrite")
    assert digests(out) == before
    kt_ok("quant", model.folder, "-o", out, "--method", "int4", "--overwrite")
    kt_ok("quant", model.folder, "-o", tmp_path / "fresh", "--method", "int4")
    assert digests(out) == digests(tmp_path / "fresh")
    folders = tmp_path / "folders"  # whose kt_weights.json said "int8" beside other files once
    kt_ok("quant", model.folder, "-o", folders, "--method", "int8", "--no-merge")
    kt_ok("quant", model.folder, "-o", folders, "--method", "int4", "--overwrite")
    assert digests(folders) == digests(tmp_path / "fresh")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")
    refused(kt("quant", model.folder, "-o", foreign), 2, foreign, "notes.txt")
    (tmp_path / "file").write_text("mine")
    refused(kt("quant", model.folder, "-o", tmp_path / "file", "--overwrite"), 2, tmp_path / "file")
    assert (foreign / "notes.txt").read_text() == (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("more", [[], ["--resume"], ["--overwrite"]], ids=["new", "resume", "overwrite"])
@pytest.mark.parametrize("mode", ["merged", "folders"])
def test_a_link_in_the_output_leads_nowhere(tmp_path, mode, more):
    """What lies behind .kt_progress was emptied once, with exit code 0."""
    model, out, precious = Model(tmp_path / "in").save(), tmp_path / "out", tmp_path / "precious"
    out.mkdir()
    precious.mkdir()
    (precious / "letter").write_text("mine")
    (out / ".kt_progress").symlink_to(precious)
    refused(kt(*command(model.folder, out, mode, *more)), 2, out / ".kt_progress", "symbolic link")
    assert digests(precious).keys() == {"letter"} and (precious / "letter").read_text() == "mine"
    assert os.listdir(out) == [".kt_progress"]


# --- memory ----------------------------------------------------------------------------------------------------------

def peak_anonymous(args):
    """(result, largest anonymous bytes seen)"""
    process, peak = start(args), 0
    while process.poll() is None:
        with contextlib.suppress(OSError):
            text = pathlib.Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            found = re.search(r"^Anonymous:\s+(\d+) kB", text, re.M)
            peak = max(peak, int(found[1]) << 10) if found else peak
        time.sleep(0.001)
    process.stdout, process.stderr = process.communicate()
    return result_of(process), peak


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="no /proc/PID/smaps_rollup here")
@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("threads", [1, 4])
def test_anonymous_memory_is_bounded(large, tmp_path, mode, threads):
    """256 MiB and two experts' working set a thread: f32 values, codes and what is packed."""
    expert = 3 * 1024 * 512 * (4 + 1 + 1)
    args = command(large, tmp_path / "out", mode)
    args[args.index("--cpu-threads") + 1] = str(threads)
    result, peak = peak_anonymous(args)
    assert result.returncode == 0, result.stderr
    assert 0 < peak <= (256 << 20) + 2 * expert * threads


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="no /proc/PID/smaps_rollup here")
def test_max_memory_is_kept(large, tmp_path):
    limit = 96
    result, peak = peak_anonymous(command(large, tmp_path / "out", "merged", "--max-memory", f"{limit}MiB"))
    assert result.returncode == 0, result.stderr
    assert 0 < peak <= limit << 20
