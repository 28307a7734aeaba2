"""kt help, kt completion and the man page: generated from the parser, so they must hold every verb and option that
--help shows, be clean for the shells and for groff, and really complete. KT_PROGRAM names the program."""
import os
import re
import shlex
import shutil
import subprocess

import pytest

KT = os.environ.get("KT_PROGRAM")
pytestmark = pytest.mark.skipif(not KT, reason="KT_PROGRAM does not name the kt program")
SHELLS = ("bash", "zsh", "fish")


def kt(*args):
    return subprocess.run([KT, *args], capture_output=True, text=True)


def needs(program):
    return pytest.mark.skipif(not shutil.which(program), reason=f"{program} is not installed")


def verbs_below(path):
    """Every verb path below `path`, by the help pages alone."""
    page = kt(*path, "--help").stdout
    section = re.search(r"^(?:Subcommands|SUBCOMMANDS):\n((?:  +.*\n?)+)", page, re.M)
    found = []
    for line in section[1].splitlines() if section else []:
        name = re.match(r"  ([a-z][\w-]*)", line)
        if name:
            found.append([*path, name[1]])
            found += verbs_below(found[-1])
    return found


def option_names(path):
    """Flags of one help page: each line of a section that starts with one. Long names go on in the next."""
    names = []
    for line in re.sub(r",\n {6}(?=--)", ", ", kt(*path, "--help").stdout).splitlines():
        flags = re.match(r"  ((?:--?[A-Za-z][\w-]*(?:, *)?)+)", line)
        if flags:
            names += re.split(r", *", flags[1])
    return names


@pytest.fixture(scope="module")
def commands():
    """{path: flags}, for the program (empty path) and every verb."""
    paths = [[], *verbs_below([])]
    assert len(paths) > 12 and ["quant", "gpu"] in paths
    return {tuple(path): option_names(path) for path in paths}


def test_help_is_dash_dash_help(commands):
    for path in commands:
        assert kt("help", *path).stdout == kt(*path, "--help").stdout


def test_help_of_an_unknown_verb():
    result = kt("help", "quant", "cpu")
    assert result.returncode == 2
    line, = result.stderr.splitlines()
    assert "quant cpu" in line and "merge" in line


# ---- the man page

def test_man_page_holds_everything(commands):
    page = kt("help", "--man").stdout
    plain = re.sub(r"\\f[BIR]|\\&", "", page)
    for roff, word in ("\\-", "-"), ("\\(aq", "'"), ("\\(ga", "`"), ("\\(ti", "~"), ("\\(ha", "^"), ("\\e", "\\"):
        plain = plain.replace(roff, word)
    joined = " ".join(plain.split())
    for title in ("NAME", "SYNOPSIS", "DESCRIPTION", "VERBS", "EXIT STATUS", "FILES", "ENVIRONMENT", "EXAMPLES"):
        assert f"\n.SH {title}\n" in plain
    for path, flags in commands.items():
        if not path:
            continue
        start = plain.index(f'.SS "kt {" ".join(path)}"\n')
        section = plain[start:re.compile(r"^\.S[SH] ", re.M).search(plain, start + 4).start()]
        for flag in flags:
            assert re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", section), (path, flag)
        # Help breaks examples at its width, the page leaves that to whoever shows it.
        examples = kt(*path, "--help").stdout.partition("Examples:\n")[2].split("\n\n")[0].replace(" \\\n", " ")
        for example in re.split(r"\n(?= {2}\S)", examples):
            assert " ".join(example.split()) in joined, example
    for code in ("0 done", "2 bad input", "3 not enough memory", "4 unsupported", "5 internal", "130"):
        assert code in plain


@needs("groff")
def test_man_page_is_clean(tmp_path):
    page = tmp_path / "kt.1"
    page.write_text(kt("help", "--man").stdout)
    made = subprocess.run(["groff", "-man", "-ww", "-Tutf8", page], capture_output=True, text=True)
    assert made.returncode == 0 and made.stderr == ""
    if shutil.which("man"):
        shown = subprocess.run(["man", "--warnings", "-l", page], capture_output=True, text=True,
                               env={**os.environ, "LC_ALL": "C.UTF-8", "MANWIDTH": "100"})
        assert shown.returncode == 0 and shown.stderr == "" and "kt quant gpu" in shown.stdout


# ---- the scripts

@pytest.mark.parametrize("shell", SHELLS)
def test_scripts_hold_everything(commands, shell):
    script = kt("completion", shell).stdout
    for path, flags in commands.items():
        assert not path or path[-1] in script
        for flag in flags:
            if shell == "fish":
                flag = f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}"
            assert re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", script), (path, flag)


@pytest.mark.parametrize("shell", SHELLS)
def test_scripts_parse(shell, tmp_path):
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed: its script is neither parsed nor tried (scripts/setup.sh --tests)")
    file = tmp_path / "script"
    file.write_text(kt("completion", shell).stdout)
    parsed = subprocess.run([shell, "-n", file], capture_output=True, text=True)
    assert (parsed.returncode, parsed.stderr) == (0, "")


def test_unknown_shell():
    result = kt("completion", "tcsh")
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a folder `models` and a file `model.gguf`, and the scripts."""
    home = tmp_path_factory.mktemp("complete")
    (home / "models").mkdir()
    (home / "model.gguf").touch()
    for shell in SHELLS:
        (home / f"script.{shell}").write_text(kt("completion", shell).stdout)
    return home


def bash_completes(folder, words):
    """What bash offers for the last word; words are split as readline does, "=" alone."""
    program = f"""
      source script.bash
      COMP_WORDS=({' '.join(shlex.quote(word) for word in words)})
      COMP_CWORD={len(words) - 1}
      _kt
      printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "--norc", "-c", program], capture_output=True, text=True, cwd=folder)
    assert done.stderr == "", done.stderr
    return set(done.stdout.split())


def fish_completes(folder, words):
    line = " ".join(words).replace(" = ", "=")
    program = f"source script.fish; complete -C {shlex.quote(line)}"
    done = subprocess.run(["fish", "--no-config", "-c", program], capture_output=True, text=True, cwd=folder,
                          env={**os.environ, "HOME": str(folder), "XDG_CONFIG_HOME": str(folder),
                               "XDG_DATA_HOME": str(folder)})
    assert done.stderr == "", done.stderr
    return {line.split("\t")[0].split("=")[-1].rstrip("/") for line in done.stdout.splitlines()}


# words, what must be offered, what must not
CASES = [
    (["kt", ""], {"version", "doctor", "quant", "help", "completion"}, {"gpu", "model.gguf"}),
    (["kt", "do"], {"doctor"}, {"version"}),
    (["kt", "quant", ""], {"gpu", "merge", "model.gguf", "models"}, {"doctor"}),
    (["kt", "quant", "--me"], {"--method"}, {"--output"}),
    (["kt", "quant", "--method", ""], {"int4", "int8", "moe_int8"}, {"model.gguf", "gpu"}),
    (["kt", "quant", "--method", "=", "int"], {"int4", "int8"}, {"moe_int8"}),
    (["kt", "quant", "-o", "mo"], {"models"}, {"model.gguf"}),
    (["kt", "quant", "--group-size", ""], {"32", "64", "128"}, {"models"}),
    (["kt", "quant", "model.gguf", "-o", "gpu", "--meth"], {"--method"}, {"--dampening-frac"}),
    (["kt", "quant", "gpu", "--damp"], {"--dampening-frac"}, {"--method"}),
    (["kt", "quant", "gpu", "--type", "W"], {"W4A16", "W8A16"}, set()),
    (["kt", "microbench", "moe", "--de"], {"--debug"}, set()),
    (["kt", "microbench", "moe", "--threads", ""], set(), {"models", "model.gguf"}),
    (["kt", "generate", "mo"], {"models", "model.gguf"}, set()),
    (["kt", "completion", ""], {"bash", "zsh", "fish"}, {"models"}),
    (["kt", "help", "qu"], {"quant"}, {"model.gguf"}),
    (["kt", "help", "quant", ""], {"gpu", "merge"}, {"model.gguf"}),
    (["kt", "help", "--m"], {"--man"}, set()),
]


# Records what the completion system is given instead of reading a screen.
ZSH_INSIDE = r"""
autoload -Uz compinit; compinit -u -D; source ./script.zsh
compadd() {
  if [[ ${@[1,(i)(-|--)]} == *-(O|A|D)\ * ]]; then builtin compadd "$@"; return; fi
  local -a hits
  builtin compadd -A hits "$@"
  (( $#hits )) && print -rl -- $hits >> offered
  builtin compadd "$@"
}
_record() { _main_complete "$@"; print END >> offered }
zle -C record list-choices _record
bindkey '^I' record
print READY''NOW
"""


def zsh_completes(folder, words):
    """Types the line and a tab into a zsh on a pseudo-terminal."""
    (folder / "inside.zsh").write_text(ZSH_INSIDE)
    (folder / "offered").write_text("")
    line = " ".join(words).replace(" = ", "=")
    program = f"""
      zmodload zsh/zpty zsh/zselect
      zpty z zsh -f -i
      zpty -w z 'source ./inside.zsh'
      zpty -r z out '*READYNOW*'
      zpty -n -w z {shlex.quote(line)}$'\\t'
      repeat 2400 {{ zselect -t 5; [[ "$(<offered)" != *END* ]] || break; }}
      zpty -d z
    """
    done = subprocess.run(["zsh", "-f", "-c", program], capture_output=True, text=True, cwd=folder, timeout=300,
                          env={**os.environ, "TERM": "xterm", "HOME": str(folder)})
    offered = (folder / "offered").read_text().split()
    assert offered and offered[-1] == "END", done.stderr
    return {word.rstrip("=").rstrip("/") for word in offered[:-1]}


COMPLETES = {"bash": bash_completes, "zsh": zsh_completes, "fish": fish_completes}


# Rows of a shell that is not here are no tests: test_scripts_parse says that it is missing.
@pytest.mark.parametrize("words, wanted, unwanted", CASES)
@pytest.mark.parametrize("shell", [shell for shell in SHELLS if shutil.which(shell)])
def test_completes(folder, shell, words, wanted, unwanted):
    offered = COMPLETES[shell](folder, words)
    assert wanted <= offered and not (unwanted & offered), offered
