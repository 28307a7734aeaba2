"""The papers against the tree: links lead somewhere, every paper is in the index, files and functions that are named
are there, every variable that the product reads is in the table and the table holds no other."""
import email
import json
import os
import pathlib
import re
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAPERS = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *ROOT.glob("demo/*.md"), *ROOT.glob("examples/*.md"),
                 *ROOT.glob("src/*/*.md")])
# A name between quotes where the environment is asked, in C++ and in Python.
ASKED = re.compile(r'(?:getenv|is_set|setting|variable|environ\.get|environ)[(\[]\s*"([A-Z][A-Z_0-9]+)"')
# Lists that are walked with one of those functions.
LISTED = re.compile(r"for \(const char\* ?(?:const )?\w+ ?:\s*\{([^}]*)\}")
SET_FOR_OTHERS = {"HF_HUB_DISABLE_PROGRESS_BARS", "HF_HUB_DISABLE_TELEMETRY", "TRANSFORMERS_VERBOSITY"}


def prose(paper):
    """A paper without its blocks of code."""
    return re.sub(r"^```.*?^```", "", paper.read_text(), flags=re.S | re.M)


def anchor(heading):
    """What hubs of repositories make of a heading."""
    plain = re.sub(r"[`*]", "", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def anchors(paper):
    text = prose(paper)
    headings = {anchor(line.lstrip("#")) for line in text.splitlines() if line.startswith("#")}
    return headings | set(re.findall(r'id="([^"]+)"', text))


@pytest.mark.parametrize("paper", PAPERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(paper):
    links = re.findall(r"\]\(([^)\s]+)\)", prose(paper)) + re.findall(r'(?:src|srcset)="([^"]+)"', prose(paper))
    for link in links:
        if "://" in link:
            continue
        path, _, place = link.partition("#")
        target = (paper.parent / path).resolve() if path else paper
        assert target.exists(), f"{paper.name}: no {path}"
        if place:
            assert place in anchors(target), f"{paper.name}: {target.name} has no heading for #{place}"


def test_every_paper_is_in_the_index():
    index = (DOCS / "README.md").read_text()
    missing = [path.name for path in DOCS.glob("*.md") if path.name != "README.md" and f"]({path.name})" not in index]
    assert not missing
    # So is every page of figures, on the first one of them.
    first = (DOCS / "benchmarks.md").read_text()
    assert not [path.name for path in (DOCS / "benchmarks").glob("*.md") if f"](benchmarks/{path.name}" not in first]


# A step of the tour: a file, its functions, what happens.
STEP = re.compile(r"^\| `([^`]+)` \| (`[^|]+`) \| .+ \|$", re.M)


def defines(text, name):
    """Whether a file has that function or class: C++, Python or JavaScript; `Owner::name` and `Owner.name` too."""
    owner, _, last = name.replace(".", "::").rpartition("::")
    if owner and f"{owner}::{last}(" not in text and not re.search(rf"\b(?:class|struct) {owner}\b", text):
        return False
    return bool(re.search(rf"\b{last}\(|\b(?:class|struct) {last}\b", text))


def test_the_tour_names_what_is_there():
    tour = (DOCS / "internals.md").read_text()
    steps = STEP.findall(tour)
    rows = [line for line in tour.splitlines() if line.startswith("| `")]
    assert len(steps) == len(rows) > 60
    faults = [(file, name) for file, names in steps for name in re.findall(r"`([^`]+)`", names)
              if not (ROOT / file).is_file() or not defines((ROOT / file).read_text(), name)]
    assert not faults
    assert not defines("int f(); struct S {};", "g") and not defines("void A::f() {}", "B::f")
    # Files and functions between the tables.
    mentioned = set(re.findall(r"`((?:src|python)/[\w./]+)`", tour))
    assert not [name for name in mentioned if not (ROOT / name).exists()]
    texts = [(ROOT / name).read_text() for name in mentioned if (ROOT / name).is_file()]
    assert not [name for name in re.findall(r"`(\w+::\w+)`", tour) if not any(defines(text, name) for text in texts)]


def text_of_tree():
    """All that is code, scripts or builds, without the papers."""
    ends = {".cc", ".h", ".cu", ".py", ".pyi", ".js", ".sh", ".cmake", ".txt", ".toml", ".yaml"}
    folders = ("src", "python", "scripts", "tests", "cmake", "tools", "examples")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*")
             if path.suffix in ends and path.is_file()]
    return "\n".join(path.read_text(errors="ignore") for path in [*files, ROOT / "CMakeLists.txt", ROOT / "Makefile"]
                     if path != pathlib.Path(__file__).resolve())


ROOMS = sorted(ROOT.glob("src/*/README.md"))


@pytest.mark.parametrize("paper", [ROOT / "DESIGN.md", ROOT / "CONTRIBUTING.md", DOCS / "internals.md", *ROOMS],
                         ids=lambda path: str(path.relative_to(ROOT)))
def test_papers_name_files_that_are_there(paper):
    """Files and folders between quotes, but patterns, what a build or an exercise makes, and words with a stroke."""
    assert len(ROOMS) >= 3
    names = set(re.findall(r"`([\w.]+/[\w./]*)`", prose(paper)))
    if paper in ROOMS:  # there, files of the folder stand without it
        names |= set(re.findall(r"`(\w[\w.]*\.(?:cc|h|cu|cmake|py))`", prose(paper)))
    words = {"hybrid/ExpertLayer", "new/delete", "snake_case.h/.cc/.cu", "build/venv"}
    exercises = "".join(patch.read_text() for patch in (ROOT / "tests/exercises").glob("*.patch"))
    places = [paper.parent, ROOT, ROOT / "src", ROOT / "python", ROOT / "python/kt_kernel/sft"]
    assert len(names) > (60 if paper.name == "DESIGN.md" else 3)
    assert not [name for name in sorted(names - words) if f"+++ b/{name}" not in exercises
                and not any((place / (name + end)).exists() for place in places for end in ("", ".cc", ".h", ".py"))]


@pytest.mark.parametrize("paper", [ROOT / "DESIGN.md", *ROOMS], ids=lambda path: str(path.relative_to(ROOT)))
def test_papers_name_what_the_code_has(paper):
    """Types, functions, constants, variables and macros between quotes, but examples of a style."""
    known = set(re.findall(r"[A-Za-z_]\w*", text_of_tree()))
    known |= {part for path in tracked() for part in re.split(r"[/.]", path.relative_to(ROOT).as_posix())}
    examples = {"kConstant", "kThis", "member_", "prepared_", "_impl", "snake_case"}
    named = {word for quoted in re.findall(r"`([^`\n]+)`", prose(paper))
             for word in re.findall(r"(?<![\w-])(?:k?[A-Z]\w+|\w+_\w*|\w+(?=\())", quoted)}
    assert len(named) > 10
    assert sorted(named - known - examples) == []


# Where lines may be over 120 columns, and why: data and texts of others.
LONG = {
    "docs/": "prose and tables of figures, which a browser wraps",
    "fuzz/corpus/": "inputs, to the byte",
    "tests/chat_templates/": "templates as their models have them",
    "demo/tiny-deepseekv3/": "a checkpoint: JSON that programs wrote",
    "demo/stories.txt": "text to measure with: a paragraph is a line",
    "demo/style_pirate.jsonl": "rows of a dataset: each is a line",
}


def tracked():
    """Every file that is ours, from git, or without it all that is not a build's."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True).stdout.split("\0")
    if any(listed):
        return [ROOT / name for name in listed if name and (ROOT / name).is_file()]
    return [path for path in ROOT.rglob("*")
            if path.is_file() and not path.relative_to(ROOT).parts[0].startswith("build")]


def test_no_long_lines():
    files = {path.relative_to(ROOT).as_posix(): path for path in tracked()}
    assert len(files) > 1000
    for name in LONG:
        assert any(file.startswith(name) for file in files), f"{name} is excepted and not there"
    texts = {}
    for name, path in files.items():
        if name.startswith(tuple(LONG)):
            continue
        try:
            texts[name] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a picture or an archive
    assert not [f"{name}:{number}" for name, text in texts.items()
                for number, line in enumerate(text.splitlines(), 1) if len(line) > 120]


# --- files by which others build -------------------------------------------------------------------------------------

def test_presets_set_what_there_is():
    presets = json.loads((ROOT / "CMakePresets.json").read_text())
    told = (DOCS / "building.md").read_text()
    names = {preset["name"] for preset in presets["configurePresets"]}
    assert {"all", "native", "test"} <= names and all(f"`{name}`" in told for name in names)
    for preset in presets["configurePresets"]:
        for variable in preset["cacheVariables"]:
            assert variable == "CMAKE_BUILD_TYPE" or f"`{variable}`" in told, variable
    if shutil.which("cmake"):
        listed = subprocess.run(["cmake", "--list-presets=all"], cwd=ROOT, capture_output=True, text=True)
        assert listed.returncode == 0 and all(f'"{name}"' in listed.stdout for name in names), listed.stderr


def test_what_was_not_run_says_so_and_calls_what_there_is():
    docker, workflow = (ROOT / "Dockerfile").read_text(), (ROOT / ".github/workflows/test.yml").read_text()
    for text in (docker, workflow):
        assert "NOT RUN" in "".join(line for line in text.splitlines(True)[:3] if line.startswith("#"))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    called = set(re.findall(r"\bmake ([a-z-]+)", docker.split("FROM", 1)[1] + workflow.split("steps:", 1)[1]))
    assert called == {"program", "test"} <= targets
    for path in re.findall(r"\bscripts/\w+\.sh\b", docker + workflow):
        assert os.access(ROOT / path, os.X_OK)


def test_metadata_of_the_package(tmp_path, monkeypatch):
    build = pytest.importorskip("scikit_build_core.build", reason="scikit-build-core is not installed")
    monkeypatch.chdir(ROOT)
    at = tmp_path / build.prepare_metadata_for_build_wheel(str(tmp_path))
    said = email.message_from_string((at / "METADATA").read_text())
    assert (at / "licenses" / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert (said["Name"] == "kt-kernel" and said["License-Expression"] == "Apache-2.0" and said["Author"]
            and said["Keywords"])
    assert re.search(rf"project\(kt VERSION {re.escape(said['Version'])} ", (ROOT / "CMakeLists.txt").read_text())
    assert {"torch", "transformers", "sft", "llamafactory"} <= set(said.get_all("Provides-Extra"))


def test_a_family_costs_what_design_says():
    """Its file, its declaration and its row: no other file knows a family's function."""
    told = (ROOT / "DESIGN.md").read_text()
    assert "`models/<x>.cc`, its declaration in `models/family.h`, 1 row in `models/families.cc`" in told
    texts = {path.relative_to(ROOT / "src").as_posix(): path.read_text() for path in (ROOT / "src").rglob("*.[ch]*")}
    texts = {name: text for name, text in texts.items() if "describe_" in text}
    families = re.findall(r"^ModelSpec describe_(\w+)\(const ConfigReader& config\);", texts["models/family.h"], re.M)
    assert len(families) >= 19
    for family in families:
        where = {name for name, text in texts.items() if re.search(rf"\bdescribe_{family}\b", text)}
        assert where == {f"models/{family}.cc", "models/family.h", "models/families.cc"}, family


def sources():
    listed = subprocess.run(["git", "ls-files", "src", "python/kt_kernel"], cwd=ROOT, capture_output=True, text=True)
    names = listed.stdout.split() or [str(p.relative_to(ROOT)) for d in ("src", "python/kt_kernel")
                                      for p in (ROOT / d).rglob("*.*")]
    for name in names:
        fake = "_test." in name or "/fake_gpu" in name
        if name.endswith((".cc", ".h", ".py")) and not fake:
            yield (ROOT / name).read_text()


def test_every_variable_is_in_the_table():
    read = set()
    for text in sources():
        read.update(ASKED.findall(text))
        if "getenv" in text:
            for names in LISTED.findall(text):
                read.update(re.findall(r'"([A-Z][A-Z_0-9]{3,})"', names))
    assert {"KT_ISA", "KT_LOG_LEVEL", "HF_HUB_CACHE", "KT_PYTHON",
            "KT_KERNEL_DEBUG"} <= read  # the search finds them at all
    told = set(re.findall(r"`([A-Z][A-Z_0-9]+)[`*]", (DOCS / "environment.md").read_text()))
    assert sorted(read - told - SET_FOR_OTHERS) == []
    # Nobody reads what is told: each name stands somewhere in the sources, scripts or tests.
    tree = "\n".join(path.read_text(errors="ignore") for folder in ("src", "python", "scripts", "tests", "cmake")
                     for path in (ROOT / folder).rglob("*") if path.suffix in {".cc", ".h", ".py", ".sh", ".cmake"})
    tree += (ROOT / "install.sh").read_text()
    driver_or_curl = {"CUDA_VISIBLE_DEVICES", "HTTPS_PROXY"}
    assert sorted(name for name in told - driver_or_curl if name not in tree) == []
