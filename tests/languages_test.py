"""kt in English and Chinese: which language it chooses, what stays English for programs, and the first page, the
questions, kt doctor and kt chat on terminals of 80 and 40 columns.

KT_PROGRAM names kt. What needs a terminal skips without tmux."""
import json
import os
import pathlib
import re
import subprocess
import sys
import unicodedata

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from tmux_pane import KT, Pane, on_terminal

pytestmark = pytest.mark.skipif(not KT, reason="KT_PROGRAM does not name the kt program")
SCREENS = [(width, language) for width in (80, 40) for language in ("en", "zh")]
on_screens = pytest.mark.parametrize("width, language", SCREENS, ids=lambda value: str(value))
HAN = re.compile("[\u4e00-\u9fff]")
CLOSING = "，。；：、！？）"


def kt(*words, home, input=None, **variables):
    clean = {key: value for key, value in os.environ.items()
             if key not in ("KT_LANG", "LC_ALL", "LC_MESSAGES", "LANG", "LANGUAGE")}
    return subprocess.run([KT, *map(str, words)], env={**clean, "KT_HOME": str(home), **variables}, input=input,
                          capture_output=True, text=True, encoding="utf-8", timeout=300)


def cells(line):
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in line)


def check_screen(shown, width, language, whole=r"\$ kt ", typed="\n"):
    """Every line fits without what was typed behind it, but those that are there to be copied; nothing is broken;
    Chinese only where it was asked for."""
    assert "\ufffd" not in shown
    assert bool(HAN.search(shown)) == (language == "zh")
    for line in shown.splitlines():
        assert cells(line.rstrip().removesuffix(typed).rstrip()) <= width or re.match(whole, line), (cells(line), line)
        assert line.strip()[:1] not in CLOSING or not line.strip(), line


@pytest.fixture
def pane(tmp_path):
    opened = []

    def open_pane(*args, language, width, home=None):
        opened.append(Pane(home or tmp_path / "home", *args, width=width, height=40, cwd=tmp_path,
                           env={"KT_LANG": language}))
        return opened[-1]

    yield open_pane
    for each in opened:
        each.close()


# --- which language --------------------------------------------------------------------------------------------------

MISTAKE = ("generat",)  # a usage error names the help to read
IN = {"en": "see kt --help", "zh": "参见 kt --help"}


@pytest.mark.parametrize("variables, language", [
    ({}, "en"),
    ({"LANG": "zh_CN.UTF-8"}, "zh"),
    ({"LANG": "zh_CN.GB18030"}, "en"),  # not what we write
    ({"LANG": "zh_CN.UTF-8", "LC_ALL": "C.UTF-8"}, "en"),
    ({"LANG": "de_DE.UTF-8", "LC_MESSAGES": "zh_TW.utf8"}, "zh"),
    ({"KT_LANG": "zh"}, "zh"),
    ({"KT_LANG": "en", "LANG": "zh_CN.UTF-8"}, "en"),
    ({"KT_LANG": "auto", "LANG": "zh_CN.UTF-8"}, "zh"),
    ({"KT_LANG": "", "LANG": "zh_CN.UTF-8"}, "zh"),
], ids=str)
def test_variables_choose(variables, language, tmp_path):
    done = kt(*MISTAKE, home=tmp_path, **variables)
    assert done.returncode == 2 and IN[language] in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_settings_choose(tmp_path):
    assert kt("config", "get", "general.language", home=tmp_path).stdout == "auto\n"
    assert kt("config", "set", "general.language", "zh", home=tmp_path).returncode == 0
    assert IN["zh"] in kt(*MISTAKE, home=tmp_path).stderr
    assert IN["en"] in kt(*MISTAKE, home=tmp_path, KT_LANG="en").stderr
    assert IN["en"] in kt(*MISTAKE, home=tmp_path, KT_LANG="auto").stderr  # auto is the locale
    kt("config", "set", "general.language", "en", home=tmp_path)
    assert IN["en"] in kt(*MISTAKE, home=tmp_path, LANG="zh_CN.UTF-8").stderr


@pytest.mark.parametrize("language, message", [("en", "general.language: expected one of auto|en|zh, found 'fr'"),
                                               ("zh", "general.language：应为 auto|en|zh 之一，实际是 'fr'")])
def test_unknown_languages_are_one_line(language, message, tmp_path):
    done = kt("config", "set", "general.language", "fr", home=tmp_path, KT_LANG=language)
    assert (done.returncode, done.stderr) == (2, f"kt: {message}\n")
    done = kt("version", home=tmp_path, KT_LANG="fr")
    assert (done.returncode, done.stderr) == (2, "kt: KT_LANG: expected one of auto|en|zh, found 'fr'\n")


def test_settings_that_cannot_be_read_are_no_obstacle(tmp_path):
    (tmp_path / "config.yaml").write_text("general:\n  language: [\n")
    done = kt(*MISTAKE, home=tmp_path, LANG="zh_CN.UTF-8")
    assert done.returncode == 2 and IN["zh"] in done.stderr


# --- what is said, and what is read by programs ----------------------------------------------------------------------

@pytest.mark.parametrize("words, says", [
    (("run",), "没有模型；请给出目录、.gguf 文件或 kt model list 中的名称，例如 kt run demo"),
    (("run", "no-such-model"), "没有名为 'no-such-model' 的模型：已知的有 demo"),
    (("generate", "demo"), "提示词为空；请用 -p TEXT 或 -f FILE 给出"),
    (("model", "scan"), "没有可扫描的目录：kt model scan PATH，或先 kt model path-add PATH"),
    (("config", "set", "server.prt", "1"), "未知的键 'server.prt'；最接近的是 server.port；kt config show 列出所有键"),
    (("config", "set", "server.port", "many"), "server.port：应为整数，实际是 'many'"),
    (("run", "demo", "--prot", "1"), "未知的选项 '--prot'；最接近的是 --port；参见 kt run --help"),
    (("chat", "--url", "http://127.0.0.1:9"), "kt run MODEL 启动服务，kt chat MODEL 则不需要服务"),
    (("quant", "demo", "-o", "out", "--calibrate", "x.txt"), "--calibrate：需要分组的 int4：请加 --group-size"),
], ids=lambda value: "-".join(value) if isinstance(value, tuple) else "")
def test_errors_that_name_a_mend(words, says, tmp_path):
    done = kt(*words, home=tmp_path, KT_LANG="zh")
    assert done.returncode == 2 and says in done.stderr and done.stdout == "", done.stderr
    other = kt(*words, home=tmp_path)
    assert other.returncode == 2 and not HAN.search(other.stderr) and len(other.stderr.splitlines()) == 1, other.stderr


@pytest.mark.parametrize("words",
                         [("model", "list"), ("model", "list", "--json"), ("config", "show"), ("--help",), ("version",),
                          ("config", "show", "--json")], ids="-".join)
def test_what_programs_read_is_english(words, tmp_path):
    done, english = kt(*words, home=tmp_path, KT_LANG="zh"), kt(*words, home=tmp_path)
    assert done.returncode == 0 and done.stdout == english.stdout and not HAN.search(done.stdout)


def test_json_of_the_doctor_is_english(tmp_path):
    done = kt("doctor", "--quick", "--cpu", "--json", home=tmp_path, KT_LANG="zh")
    found = json.loads(done.stdout)["findings"]
    assert {"cpu", "memory", "kernels"} <= {finding["topic"] for finding in found}
    assert not HAN.search(done.stdout)


# --- on terminals ----------------------------------------------------------------------------------------------------

@on_terminal
@on_screens
def test_first_page(pane, width, language):
    p = pane(language=language, width=width)
    p.ended(0)
    shown = p.everything()
    check_screen(shown, width, language)
    assert re.findall(r"^  (kt .*?) *(?:  .*)?$", shown, re.MULTILINE) == ["kt chat demo", "kt run demo", "kt doctor"]
    for phrase in {"en": ("Models", "Try", "talk to it here", "RAM"),
                   "zh": ("模型", "试试", "在这里与它对话", "内存")}[language]:
        assert phrase in shown
    assert "demo" in shown and "kt --help" in shown


@on_terminal
def test_questions_of_quant(pane, tmp_path):
    """The same answers make the same command and the same files."""
    commands = set()
    for width, language in SCREENS:
        p = pane("quant", language=language, width=width, home=tmp_path / f"{language}{width}")
        p.wait({"en": r"Model: a number", "zh": r"模型：输入"}[language])
        p.wait(r"\[demo\]:\s*\Z")
        p.say("1")
        p.wait(r"\[int4\]:\s*\Z")
        p.say("int5")
        p.wait({"en": r"expected a number from 1 to 3", "zh": "应为 1 到 3 的编号"}[language])
        p.say("2")
        p.wait(r"int8\]:\s*\Z")
        p.say(f"out-{language}-{width}")
        p.ended(0)
        shown = p.everything()
        # The report behind the questions is the verb's own.
        asked, command = re.match(r"(.*^\$ (kt quant .*?)\n)", shown, re.DOTALL | re.MULTILINE).groups()
        check_screen(asked, width, language, typed=f"out-{language}-{width}")
        for phrase in {"en": ("half the size", "Folder to write", "Ctrl-D ends"),
                       "zh": ("体积减半", "要写入的目录", "Ctrl-D 结束")}[language]:
            assert phrase in asked, asked
        assert {"en": "next: kt run", "zh": "下一步：kt run"}[language] in shown
        commands.add(command.replace(f"out-{language}-{width}", "OUT"))
        assert (tmp_path / f"out-{language}-{width}").is_dir()
    assert commands == {"kt quant demo --method int8 --output OUT"}


@on_terminal
@on_screens
def test_questions_of_the_first_configuration(pane, tmp_path, width, language):
    (tmp_path / "models").mkdir()
    p = pane("config", language=language, width=width)
    p.wait({"en": r"^What:\s*\Z", "zh": r"^选择操作:\s*\Z"}[language])
    p.say("init")
    p.wait({"en": "Folder with models", "zh": "存放模型的目录"}[language])
    p.say("nowhere")
    p.wait({"en": "^  no such folder", "zh": "^  没有这个目录"}[language])
    p.say("models")
    p.wait(r"\[30000\]:\s*\Z")
    p.say("70000")
    p.wait({"en": "expected a number of", "zh": "应为.*中的数"}[language])
    p.say("8080")
    p.wait(r"\[\d+\]:\s*\Z")
    p.say("2")
    p.ended(0)
    shown = p.everything()
    check_screen(shown, width, language, whole=r"\$ kt |/")
    assert "$ kt config init --model-path models --port 8080 --cpu-threads 2\n" in shown
    home = tmp_path / "home"
    assert kt("config", "get", "server.port", home=home).stdout == "8080\n"
    # Once more: the file exists, which is a question of its own.
    p = pane("config", "init", language=language, width=width)
    p.wait(r"\[no\]:\s*\Z")
    p.say("n" if language == "en" else "否")
    p.ended(2)
    assert {"en": "nothing was changed", "zh": "没有作任何改动"}[language] in p.everything()


@on_terminal
@on_screens
def test_menus_and_keys(pane, tmp_path, width, language):
    p = pane("config", "set", language=language, width=width)
    p.wait(r"server\.port:\s*\Z")
    p.say("general.language")
    p.wait({"en": r"Its value:\s*\Z", "zh": r"它的值:\s*\Z"}[language])
    p.say("zh")
    p.ended(0)
    shown = p.everything()
    check_screen(shown, width, language, typed="general.language")
    assert "$ kt config set general.language zh\n" in shown
    assert kt("config", "get", "general.language", home=tmp_path / "home").stdout == "zh\n"
    p = pane("model", language=language, width=width)
    p.wait({"en": r"^What:\s*\Z", "zh": r"^选择操作:\s*\Z"}[language])
    shown = p.everything()
    check_screen(shown, width, language)
    p.send("C-d")
    p.ended(130)


@on_terminal
@on_screens
def test_doctor(pane, width, language):
    p = pane("doctor", "--quick", language=language, width=width)
    shown = p.wait(r"^exit code \d")
    # The path of the test's folder is one word that no column holds.
    home = re.sub(r"KT_HOME=\S+|/\S+/home", "HOME", shown)
    check_screen(home, width, language, whole=r" *(fix:  |办法：)")
    for phrase in {"en": ("memory", "kernels", "computes what portable does"),
                   "zh": ("内存", "指令集", "正常", "的计算结果一致")}[language]:
        assert phrase in re.sub(r"\n +", "" if language == "zh" else " ", shown), phrase


@on_terminal
@on_screens
def test_chat(pane, width, language):
    p = pane("chat", "demo", "--max-tokens", "4", language=language, width=width)
    p.prompt()
    p.say("/help")
    p.wait({"en": "another answer", "zh": "重新作答"}[language])
    p.say("/system")
    shown = p.wait({"en": "no system message", "zh": "没有系统消息"}[language])
    assert "\ufffd" not in shown and bool(HAN.search(shown)) == (language == "zh")
    p.say("/quit")
    p.ended(0)
