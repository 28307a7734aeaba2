"""The demo's weights: an archive in git, unpacked beside it when a build is configured. Python's own tarfile says what
is in it."""
import os
import pathlib
import shutil
import subprocess
import tarfile
import tempfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEMO = ROOT / "demo" / "tiny-deepseekv3"
SCRIPT = ROOT / "cmake" / "unpack.cmake"
pytestmark = pytest.mark.skipif(not shutil.which("cmake"), reason="cmake is not installed")


def contents(archive):
    with tarfile.open(archive) as opened:
        return {member.name: opened.extractfile(member).read() for member in opened.getmembers()}


def pack(folder, files):
    """As demo/README.md says, of other files."""
    (folder / "made").mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / "made" / name).write_bytes(data)
    with tarfile.open(folder / "model" / "weights.tar.xz", "w:xz") as archive:
        for name in sorted(files):
            archive.add(folder / "made" / name, name)


def unpack(folder, **options):
    return subprocess.run(["cmake", f"-DARCHIVE={folder}/model/weights.tar.xz", "-P", SCRIPT], capture_output=True,
                          text=True, **options)


def unpacked(folder):
    """Whether it was unpacked this time, and the files."""
    done = unpack(folder)
    assert done.returncode == 0, done.stderr
    rest = sorted(path.name for path in folder.iterdir())
    assert rest == [".model.unpacked", "made", "model"]  # nothing of the work is left
    return "unpacked" in done.stdout, {path.name: path.read_bytes() for path in (folder / "model").iterdir()
                                       if path.suffix != ".xz"}


def state(folder):
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in (folder / "model").iterdir()}


FILES = {"model-00001-of-00002.safetensors": bytes(range(256)) * 4000,
         "model-00002-of-00002.safetensors": b"second" * 5000}


@pytest.fixture
def folder(tmp_path):
    at = tmp_path / "a folder"
    (at / "model").mkdir(parents=True)
    pack(at, FILES)
    return at


def test_the_demo_is_what_the_archive_holds():
    kept = contents(DEMO / "weights.tar.xz")
    assert sorted(kept) == sorted(path.name for path in DEMO.glob("*.safetensors")) and len(kept) == 2
    for name, data in kept.items():
        assert (DEMO / name).read_bytes() == data, name
    if shutil.which("git") and (ROOT / ".git").exists():
        seen = subprocess.run(["git", "ls-files", "--others", "--exclude-standard", "demo"], cwd=ROOT,
                              capture_output=True, text=True).stdout
        assert "safetensors" not in seen and "unpacked" not in seen


def test_once_is_enough(folder):
    assert unpacked(folder) == (True, FILES)
    before = state(folder)
    assert unpacked(folder) == (False, FILES)
    assert state(folder) == before


@pytest.mark.parametrize("hurt", ["missing", "short", "long", "no stamp", "a stamp of nothing"])
def test_what_is_not_whole_is_unpacked_again(folder, hurt):
    unpacked(folder)
    second, stamp = folder / "model" / "model-00002-of-00002.safetensors", folder / ".model.unpacked"
    match hurt:
        case "missing":
            second.unlink()
        case "short":
            os.truncate(second, 1000)
        case "long":
            second.write_bytes(second.read_bytes() + b"x")
        case "no stamp":
            stamp.unlink()
        case _:
            stamp.write_text("")
    assert unpacked(folder) == (True, FILES)
    assert unpacked(folder) == (False, FILES)


def test_another_archive_is_unpacked(folder):
    unpacked(folder)
    other = {name: data[::-1] for name, data in FILES.items()}  # of the same sizes
    pack(folder, other)
    assert unpacked(folder) == (True, other)


def test_nobody_sees_half_a_file(folder):
    """Four at once, and a reader that finds a file whole or not at all."""
    command = ["cmake", f"-DARCHIVE={folder}/model/weights.tar.xz", "-P", str(SCRIPT)]
    running = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for _ in range(4)]
    while any(process.poll() is None for process in running):
        for name, data in FILES.items():
            if (folder / "model" / name).exists():
                assert (folder / "model" / name).stat().st_size == len(data)
    assert [(process.returncode, process.communicate()[1]) for process in running] == [(0, b"")] * 4
    assert unpacked(folder) == (False, FILES)


def test_a_broken_archive_leaves_what_was_there(folder):
    unpacked(folder)
    archive = folder / "model" / "weights.tar.xz"
    whole = archive.read_bytes()
    archive.write_bytes(whole[:len(whole) // 2])
    done = unpack(folder)
    assert done.returncode and "cannot be unpacked" in done.stderr
    assert sorted(path.name for path in folder.iterdir()) == [".model.unpacked", "made", "model"]
    assert {name: (folder / "model" / name).read_bytes() for name in FILES} == FILES
    archive.write_bytes(whole)
    assert unpacked(folder) == (False, FILES)


def test_a_tree_that_cannot_be_written_to():
    """Is an error that says so, and none once the files are there."""
    other = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = pathlib.Path(name)
        (folder / "model").mkdir()
        pack(folder, FILES)
        folder.chmod(0o555)
        done = unpack(folder, cwd="/", **other)
        assert done.returncode and "cannot be written to" in done.stderr and str(folder) in "".join(done.stderr.split())
        folder.chmod(0o755)
        unpacked(folder)
        folder.chmod(0o555)
        assert unpack(folder, cwd="/", **other).returncode == 0
        folder.chmod(0o755)
