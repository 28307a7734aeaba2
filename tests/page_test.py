"""The web page in a real browser: sending, streaming, stopping, what the browser keeps, narrow and dark screens, the
keyboard, hostile text, errors, and the picture of experts. Against `kt run demo` where a model is enough, against a
scripted server (page_server.py) where a test needs certain words or failures.

KT_PROGRAM names kt; Chromium and its driver come from the system."""
import contextlib
import json
import pathlib
import shutil
import sys
import tempfile
import time

import pytest

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import server_process
from page_server import FakeServer, words_of

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="chromium or chromedriver is not installed")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--no-first-run", "--disable-dev-shm-usage",
         "--no-proxy-server", "--force-color-profile=srgb")


def wait_for(what, message, seconds=300):
    """The first true value of what()."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := what():
            return value
        time.sleep(0.03)
    raise AssertionError(f"{message}: not within {seconds} s")


class Page:
    """The page in a browser, in the words of a reader."""

    def __init__(self, browser):
        self.browser = browser
        self.errors, self.asked = [], []

    def run(self, script, *arguments):
        return self.browser.execute_script(script, *arguments)

    def command(self, name, **values):
        return self.browser.execute_cdp_cmd(name, values)

    def open(self, url):
        """A fresh visitor."""
        self.size(1280, 860)
        self.command("Emulation.setEmulatedMedia", features=[])
        self.browser.get(url + "/icon.svg")
        self.run("localStorage.clear(); sessionStorage.clear()")
        self.logs()
        self.errors, self.asked = [], []
        self.origin = url
        self.browser.get(url + "/")
        self.ready()

    def ready(self):
        wait_for(lambda: self.run("return document.body?.classList.contains('ready')"), "the page is ready")

    def reload(self):
        self.browser.refresh()
        self.ready()

    def size(self, width, height):
        self.command("Emulation.setDeviceMetricsOverride", width=width, height=height,
                     deviceScaleFactor=1, mobile=False)

    def all(self, selector):
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector):
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def text(self, selector):
        return self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector)

    def shown(self, selector):
        return self.run("const e = document.querySelector(arguments[0]); return Boolean(e && e.checkVisibility())",
                        selector)

    def keys(self, *keys):
        """To whatever has the focus."""
        webdriver.ActionChains(self.browser).send_keys(*keys).perform()

    def from_the_top(self):
        """The next Tab goes to the first thing on the page."""
        self.run("document.body.tabIndex = -1; document.body.focus(); document.body.removeAttribute('tabindex')")

    def send(self, text):
        self.one("#prompt").send_keys(text, Keys.ENTER)

    def answering(self):
        return self.run("return document.body.classList.contains('answering')")

    def answer(self):
        return self.run("const all = document.querySelectorAll('.answer'); return all[all.length - "
                        "1]?.querySelector('.answer > .prose').innerText ?? ''")

    def finished(self):
        wait_for(lambda: not self.answering(), "the answer ends")
        return self.answer()

    def ask(self, text):
        self.send(text)
        return self.finished()

    def colour(self, selector, name="background-color"):
        return self.run("return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]", selector, name)

    def picture(self):
        return self.run("return document.querySelector('#heat canvas').toDataURL()")

    def logs(self):
        """(console lines that are errors, addresses asked for) since the last call; `errors` and `asked` have all of
        them."""
        errors = [entry["message"] for entry in self.browser.get_log("browser") if entry["level"] == "SEVERE"]
        events = [json.loads(entry["message"])["message"] for entry in self.browser.get_log("performance")]
        asked = [event["params"]["request"]["url"] for event in events
                 if event["method"] == "Network.requestWillBeSent"]
        self.errors += errors
        self.asked += asked
        return errors, asked


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    # The browser's last helpers may still be writing there when it has quit.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for flag in FLAGS:
            options.add_argument(flag)
        options.add_argument(f"--user-data-dir={folder}")
        driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
        try:
            yield driver
        finally:
            driver.quit()


@pytest.fixture(scope="module")
def scripted():
    server = FakeServer()
    yield server
    server.close()


@pytest.fixture(scope="module")
def real():
    if not server_process.KT:
        pytest.skip("KT_PROGRAM does not name the kt program")
    with server_process.Server("demo", "--cpu-threads", "2") as process:
        yield process


def visit(browser, url, may_fail=()):
    """The page, checked at the end: no errors on the console but those named, no request to anybody else."""
    page = Page(browser)
    page.open(url)
    yield page
    with contextlib.suppress(Exception):
        page.run("document.getElementById('stop').click()")
    page.logs()
    assert [e for e in page.errors if not any(word in e for word in may_fail)] == []
    assert page.asked and [url for url in page.asked if not url.startswith((page.origin, "data:", "blob:"))] == []


@pytest.fixture
def page(browser, scripted):
    """The page of the scripted server."""
    scripted.reset()
    yield from visit(browser, scripted.url)


@pytest.fixture
def failing_page(browser, scripted):
    """The same, for tests in which the server fails: the browser then writes about it on the console."""
    scripted.reset()
    yield from visit(browser, scripted.url, may_fail=("Failed to load resource", "net::ERR"))


@pytest.fixture(params=["real", "scripted"])
def either(request, browser):
    """The page of a real server, and of the scripted one."""
    server = request.getfixturevalue(request.param)
    if request.param == "scripted":
        server.reset()
    yield from visit(browser, server.url)


STORY = "Tell me a story about a fox"


class TestConversation:
    def test_an_answer_streams_in(self, either):
        either.send(STORY)
        seen = set()
        wait_for(lambda: seen.add(len(either.answer())) or len(seen - {0}) >= 3 or not either.answering(),
                 "the text grows")
        assert len(seen - {0}) >= 2, seen
        assert len(either.finished()) > 20
        assert either.text(".question-text") == STORY
        assert "tokens" in either.text(".answer .stats")
        assert "demo" in either.text("#model")

    def test_a_starter_is_one_click(self, either):
        assert either.shown("#empty")
        either.one("#starters button").click()
        assert either.finished()
        assert not either.shown("#empty")

    @pytest.mark.parametrize("way", ["button", "escape"])
    def test_stop(self, either, way):
        for _ in range(40):  # the demo may be done before the browser has clicked
            either.send(STORY)
            wait_for(lambda: either.answer() or not either.answering(), "the first words")
            if either.answering():
                either.run("document.getElementById('stop').click()") if way == "button" else either.keys(Keys.ESCAPE)
            text = either.finished()
            if "stopped" in either.run("return [...document.querySelectorAll('.answer .stats')].at(-2).textContent"):
                break
        else:
            pytest.fail("no answer could be stopped")
        assert text
        time.sleep(0.3)
        assert either.answer() == text
        assert either.shown("#send") and not either.shown("#stop")
        # What was stopped is part of the conversation, and the next answer works.
        assert either.ask("And then?")

    def test_a_reload_keeps_the_conversation(self, either):
        text = either.ask(STORY)
        either.reload()
        assert either.answer() == text
        assert either.text(".question-text") == STORY
        assert STORY in either.text("#chat-list")

    def test_the_history_is_sent(self, page, scripted):
        scripted.script = words_of("An answer.")
        page.ask("First")
        page.ask("Second")
        sent = scripted.requests[-1]
        assert [m["content"] for m in sent["messages"]] == ["First", "An answer.", "Second"]
        assert sent["stream"] is True and sent["model"] == "demo"
        assert "temperature" not in sent and "seed" not in sent

    def test_regenerate_and_edit(self, page, scripted):
        scripted.script = words_of("One.")
        page.ask("Question")
        scripted.script = words_of("Two.")
        page.one("[aria-label='Answer again']").click()
        assert page.finished() == "Two."
        page.run("document.querySelector('[aria-label=\"Edit and send again\"]').click()")
        page.one(".edit textarea").send_keys(Keys.CONTROL, "a")
        page.one(".edit textarea").send_keys("Better question", Keys.ENTER)
        wait_for(lambda: len(scripted.requests) == 3, "the edited question is sent")
        page.finished()
        assert [m["content"] for m in scripted.requests[-1]["messages"]] == ["Better question"]
        assert len(page.all(".message")) == 2

    def test_several_conversations(self, page, scripted):
        scripted.script = words_of("First answer.")
        page.ask("First question")
        page.one("#new-chat").click()
        assert page.shown("#empty")
        scripted.script = words_of("Second answer.")
        page.ask("Second question")
        assert [e.text for e in page.all(".chat-open")] == ["Second question", "First question"]
        page.all(".chat-open")[1].click()
        assert page.answer() == "First answer."
        page.one("[aria-label='Rename First question']").click()
        page.one(".chat-rename").send_keys("A better title", Keys.ENTER)
        wait_for(lambda: "A better title" in page.text("#chat-list"), "the new title")
        page.one("[aria-label='Delete A better title']").click()
        assert "A better title" not in page.text("#chat-list") and page.shown("#empty")
        page.one("#toast button").click()
        assert "A better title" in page.text("#chat-list")
        page.reload()
        assert "A better title" in page.text("#chat-list") and "Second question" in page.text("#chat-list")

    def test_export(self, page, scripted):
        scripted.script = words_of("An answer.")
        page.ask("Question")
        page.run("window.saved = []; const make = URL.createObjectURL; "
                 "URL.createObjectURL = (blob) => { blob.text().then((text) => saved.push(text)); return make(blob); }")
        page.one("[aria-label='Export Question']").click()
        chat = json.loads(wait_for(lambda: page.run("return window.saved[0]"), "the file"))
        assert [(m["role"], m["content"]) for m in chat["messages"]] == [("user", "Question"),
                                                                         ("assistant", "An answer.")]

    def test_spoilt_storage_is_survived(self, page):
        page.run("localStorage.setItem('kt.chats', '{\"a\":1}'); localStorage.setItem('kt.settings', '[1'); "
                 "localStorage.setItem('kt.chat.x', 'null'); sessionStorage.setItem('kt.open', 'x')")
        page.reload()
        assert page.ask("Still there?")


class TestSettings:
    def test_they_persist_and_are_sent(self, page, scripted):
        page.one("#open-settings").click()
        values = {"system": "Be brief.", "temperature": "0.5", "top_p": "0.9", "max_tokens": "32", "seed": "7"}
        for name, value in values.items():
            page.one(f"#settings [name={name}]").send_keys(value)
        page.one("#settings .primary").click()
        page.reload()
        page.one("#open-settings").click()
        assert {n: page.one(f"#settings [name={n}]").get_attribute("value") for n in values} == values
        page.keys(Keys.ESCAPE)
        page.ask("Question")
        sent = scripted.requests[-1]
        assert sent["messages"][0] == {"role": "system", "content": "Be brief."}
        assert (sent["temperature"], sent["top_p"], sent["max_tokens"], sent["seed"]) == (0.5, 0.9, 32, 7)

    def test_an_api_key_is_used(self, failing_page, scripted):
        page, scripted.key = failing_page, "s3cret"
        page.reload()
        page.send("Question")
        page.finished()
        assert "API key" in page.text(".answer .error")
        page.one("#open-settings").click()
        page.one("#settings [name=key]").send_keys("s3cret")
        page.one("#settings .primary").click()
        page.one(".answer .error button").click()
        assert page.finished()
        assert page.text(".answer .error") == "" or not page.shown(".answer .error")
        wait_for(lambda: not page.shown("#live-note"), "the panel is let in")

    def test_dark_and_light(self, page):
        def brightness():
            return sum(int(x) for x in page.colour("body").strip("rgb()").split(",")[:3])
        page.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}])
        assert brightness() > 600
        page.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
        assert brightness() < 150
        page.one("#open-settings").click()
        page.run("document.querySelector('#settings [value=light]').click()")
        assert brightness() > 600
        page.reload()
        assert brightness() > 600


class TestScreens:
    @pytest.mark.parametrize("width", [360, 768, 1100, 1600])
    def test_nothing_is_wider_than_the_screen(self, page, scripted, width):
        scripted.script = words_of("A word " + "long" * 60 + "\n\n| " + "column | " * 12 + "\n|"
                                   + "---|" * 12 + "\n| " +
                                   "value | " * 12 + "\n\n```c\n" + "x" * 300 + "\n```\n\nhttps://example.org/"
                                   + "y" * 200, 40)
        page.size(width, 740)
        page.ask("Question " + "q" * 200)
        for _ in range(2):
            assert page.run("return document.documentElement.scrollWidth") <= width
            assert page.run("const s = document.getElementById('scroller'); return s.scrollWidth <= s.clientWidth")
            box = page.run("const r = document.getElementById('send').getBoundingClientRect(); "
                           "return [r.left, r.right]")
            assert 0 <= box[0] and box[1] <= width
            page.one("#new-chat").click() if page.shown("#new-chat") else page.run(
                "document.getElementById('new-chat').click()")

    def test_drawers(self, page):
        page.size(360, 740)
        wait_for(lambda: not page.shown("#live") and not page.shown("#chats"), "the sides fold")
        for side, inside in (("live", "#speed"), ("chats", "#new-chat")):
            page.one(f"#toggle-{side}").click()
            assert page.shown(inside)
            assert page.one(f"#toggle-{side}").get_attribute("aria-expanded") == "true"
            assert page.run("return document.getElementById(arguments[0]).contains(document.activeElement)", side)
            assert page.run("return document.documentElement.scrollWidth") <= 360
            page.keys(Keys.ESCAPE)
            assert not page.shown(inside)
            assert page.run("return document.activeElement.id") == f"toggle-{side}"

    def test_the_page_works_behind_a_prefix(self, browser, scripted):
        scripted.reset()
        scripted.prefix = "/models/demo"
        page = Page(browser)
        page.origin = scripted.url
        browser.get(scripted.url + "/models/demo/")
        page.ready()
        wait_for(lambda: page.text("#model") == "demo", "kt/status below the prefix")
        assert page.logs()[0] == []


class TestKeyboard:
    def test_a_conversation_without_a_mouse(self, either):
        either.from_the_top()
        either.keys(Keys.TAB)
        assert either.run("return document.activeElement.className") == "skip"
        either.keys(Keys.ENTER)
        assert either.run("return document.activeElement.id") == "prompt"
        either.keys("one")
        webdriver.ActionChains(either.browser).key_down(Keys.SHIFT).send_keys(Keys.ENTER).key_up(Keys.SHIFT).perform()
        either.keys("two", Keys.ENTER)
        either.finished()
        assert either.text(".question-text") == "one\ntwo"
        assert either.answer()
        assert either.run("return document.activeElement.id") == "prompt"

    def test_focus_is_visible_and_everything_is_named(self, page):
        page.ask("Question")
        unnamed = page.run("""return [...document.querySelectorAll('button, a, input, textarea, canvas[tabindex]')]
            .filter((e) => !(e.ariaLabel || e.textContent.trim() || e.labels?.length || e.title))
            .map((e) => e.outerHTML)""")
        assert unnamed == []
        page.from_the_top()
        for _ in range(12):
            page.keys(Keys.TAB)
            assert page.run("""const e = document.activeElement, s = getComputedStyle(e);
                return e === document.body || e.id === 'prompt' || (
                    s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) >= 2)"""), \
                page.run("return document.activeElement.outerHTML")

    def test_screen_readers_hear_the_answer_once(self, page, scripted):
        page.run("""window.heard = [];
            new MutationObserver(() => heard.push(document.getElementById('announce').textContent))
            .observe(document.getElementById('announce'), {childList: true, characterData: true, subtree: true})""")
        scripted.script = words_of("A short answer.", 2)
        page.ask("Question")
        wait_for(lambda: page.run("return heard.length"), "the announcement")
        assert page.run("return heard") == ["Answer: A short answer."]
        assert page.run("return document.getElementById('thread').getAttribute('aria-live')") == "off"

    @pytest.mark.parametrize("theme", ["light", "dark"])
    def test_contrast(self, page, scripted, theme):
        """Every text is at least 4.5 times as bright or dark as what is behind it (WCAG 2 AA)."""
        page.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        scripted.script = [{"reasoning_content": "Hm."}, *words_of(
            "# Title\n\nText with `code` and [a link](https://example.org).\n\n> quote\n\n1. item\n\n"
            "|a|b|\n|-|-|\n|1|2|\n\n"
            "```python\n# comment\ndef f(x): return 'text' + 1\n```\n", 9)]
        page.ask("Question")
        page.run("document.querySelector('.thinking').open = true")
        assert page.run(CONTRAST) == []


# The texts whose contrast is too low: [text, contrast].
CONTRAST = """
const parse = (c) => (c.match(/[\\d.]+/g) ?? []).map(Number);
const linear = (x) => (x /= 255) <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
function behind(e) {
  for (; e; e = e.parentElement) {
    const c = parse(getComputedStyle(e).backgroundColor);
    if (c.length && (c.length < 4 || c[3] === 1)) return c;
  }
  return [255, 255, 255];
}
const poor = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const node = walker.currentNode, e = node.parentElement;
  if (!node.data.trim() || !e.checkVisibility({opacityProperty: true})
    || e.closest('.hidden-text, .skip, noscript')) continue;
  const a = luminance(parse(getComputedStyle(e).color)), b = luminance(behind(e));
  const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (contrast < 4.5) poor.push([node.data.trim().slice(0, 40), contrast.toFixed(2)]);
}
return poor;
"""

HOSTILE = ("<img src=x onerror='window.hacked=1'>", "<script>window.hacked=1</script>", "<svg/onload=window.hacked=1>",
           "[a](javascript:window.hacked=1)", "[b](  JaVaScRiPt:window.hacked=1)",
           "[c](data:text/html,<script>1</script>)", "![d](https://elsewhere.example/pixel.png)",
           "<javascript:window.hacked=1>", "[e](vbscript:x)", "`<b>` **<i>x</i>**",
           "<iframe src='https://elsewhere.example'></iframe>",
           "| <img src=x onerror=hacked=1> | b |\n|-|-|\n| <script> | [f](file:///etc) |",
           "```<img src=x onerror=window.hacked=1>\n</code></pre><script>window.hacked=1</script>\n```")


class TestText:
    def draw(self, page, scripted, text, size=7):
        scripted.script, scripted.pause = words_of(text, size), 0.002
        page.ask("Question")
        return page.run("return document.querySelector('.answer > .prose').innerHTML")

    def test_hostile_text_is_inert(self, page, scripted):
        text = "\n\n".join(HOSTILE)
        scripted.script = [{"reasoning_content": text}, {"tool_calls": [{"index": 0, "function": {
            "name": HOSTILE[0], "arguments": json.dumps({"x": HOSTILE[1]})}}]}, *words_of(text, 5)]
        scripted.pause = 0.002
        page.ask(HOSTILE[0] + HOSTILE[1])  # also the title of the conversation
        page.run("document.querySelector('.thinking').open = true")
        page.reload()
        assert page.run("return window.hacked") is None
        assert page.run("return document.querySelectorAll('#thread :is(script, iframe, object, embed), #thread img, "
                        "#thread svg[onload]').length") == 0
        assert page.run("return document.querySelectorAll('#chat-list :is(img, script)').length") == 0
        assert HOSTILE[0] in page.text("#chat-list") and HOSTILE[0] in page.text(".question-text")
        links = page.run("return [...document.querySelectorAll('#thread a')].map((a) => "
                         "[a.protocol, a.rel.includes('noopener')])")
        # The picture and the address of the frame, as links, here and in the thinking.
        assert links == [["https:", True]] * 4
        assert page.run("""return [...document.querySelectorAll('#thread *')].flatMap((e) =>
            [...e.attributes].filter((a) => a.name.startsWith('on')).map((a) => a.name))""") == []

    @pytest.mark.parametrize("text, html", [
        ("plain *em* **strong** ***both*** ~~gone~~ `a*b`",
         "<p>plain <em>em</em> <strong>strong</strong> <em><strong>both</strong></em> <del>gone</del> "
         "<code>a*b</code></p>"),
        ("snake_case_word 2*3*4 a ** b \\*not\\*", "<p>snake_case_word 2<em>3</em>4 a ** b *not*</p>"),
        ("one\ntwo\n\nthree", "<p>one<br>two</p><p>three</p>"),
        ("### Title ###\ntext\n***\n", '<h5 class="level-3">Title</h5><p>text</p><hr>'),
        ("- a\n  - b\n    1. c\n- d", "<ul><li>a<ul><li>b<ol><li>c</li></ol></li></ul></li><li>d</li></ul>"),
        ("3. x\n4. y\n\n   more", '<ol start="3"><li><p>x</p></li><li><p>y</p><p>more</p></li></ol>'),
        ("1.\n2. x", "<ol><li></li><li>x</li></ol>"),
        ("> a\n> > b\n\nc", "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote><p>c</p>"),
        ("a & b < c &amp; <b>d</b>", "<p>a &amp; b &lt; c &amp;amp; &lt;b&gt;d&lt;/b&gt;</p>"),
    ])
    def test_markdown(self, page, scripted, text, html):
        assert self.draw(page, scripted, text, 3) == html

    def test_tables_code_and_links(self, page, scripted):
        self.draw(page, scripted, "|a|b|c|\n|:-|-:|:-:|\n|1|2|\n\n```python\n"
                                  "def f(x):\n    '''a\n    b'''\n    return \"<b>\"  # c\n```\n"
                  "see https://example.org/a_b_c. and [mail](mailto:a@example.org)\n\n```\nopen")
        cells = page.run("return [...document.querySelectorAll('.prose td, .prose th')].map((e) => "
                         "e.textContent + e.className)")
        assert cells == ["a", "bto-right", "cto-center", "1", "2to-right", "to-center"]
        assert (page.run("return [...document.querySelectorAll('.code figcaption')].map((e) => e.textContent)")
                == ["python", "text"])
        assert page.text(".code pre") == "def f(x):\n    '''a\n    b'''\n    return \"<b>\"  # c\n"
        assert (page.run("return [...document.querySelectorAll('.code .t-s')].map((e) => e.textContent)")
                == ["'''a", "    b'''", '"<b>"'])
        assert page.run("return [...document.querySelectorAll('.prose a')].map((a) => a.href)") == \
            ["https://example.org/a_b_c", "mailto:a@example.org"]

    def test_streamed_text_looks_like_whole_text(self, page, scripted):
        text = ("# T\n\n1. a\n   - b\n\n   text\n2. c\n\n|a|b|\n|-|-|\n|1|`2`|\n\n```js\nlet x = `a\nb`;\n```\n"
                "> q **b**\n\nEnd *here*.")
        grown = self.draw(page, scripted, text, 1)
        page.reload()  # drawn from storage in one go
        assert page.run("return document.querySelector('.answer > .prose').innerHTML") == grown

    def test_thinking_and_tool_calls(self, page, scripted):
        scripted.script = [{"reasoning_content": "Let me see. "}] * 20 + words_of("The answer.") + [
            {"tool_calls": [{"index": 0, "function": {"name": "weather", "arguments": '{"city":'}}]},
            {"tool_calls": [{"index": 0, "function": {"arguments": ' "Oslo"}'}}]}]
        scripted.pause = 0.03
        page.send("Question")
        wait_for(lambda: page.run("return document.querySelector('.thinking')?.open"),
                 "thinking is open while it is all there is")
        page.finished()
        assert not page.run("return document.querySelector('.thinking').open")
        assert page.text(".thinking summary").startswith("Thought for")
        assert page.answer() == "The answer."
        assert "weather" in page.text(".call-name") and json.loads(page.text(".call pre")) == {"city": "Oslo"}
        page.ask("Next")
        assert scripted.requests[-1]["messages"][1] == {"role": "assistant", "content": "The answer."}

    def test_a_long_answer_stays_smooth(self, page, scripted):
        text = "".join(f"## Part {n}\n\nSome *text* with `code` {n}.\n\n- one\n- two\n\n```c\nint x = {n};\n```\n\n"
                       for n in range(300))
        scripted.script, scripted.pause = words_of(text, 60), 0.001
        page.run("""window.longest = 0; let before = performance.now();
            (function look(now) {
                longest = Math.max(longest, now - before); before = now; requestAnimationFrame(look);
            })(before)""")
        page.ask("Question")
        assert len(page.all(".prose h4")) == 300
        # Drawing all of it each time takes more than this at the end; a busy machine makes single frames slow.
        assert page.run("return longest") < 1000


class TestTrouble:
    def test_a_refusal_is_one_line_with_a_way_on(self, failing_page, scripted):
        page, scripted.refuse = failing_page, (400, "messages: 1093 tokens do not fit the context of 1024")
        page.send("Question")
        page.finished()
        assert page.text(".answer .error span") == "messages: 1093 tokens do not fit the context of 1024"
        scripted.refuse = None
        page.one(".answer .error button").click()
        assert page.finished()
        assert len(page.all(".message")) == 2 and len(scripted.requests[-1]["messages"]) == 1

    def test_a_conversation_that_no_longer_fits_goes_on(self, failing_page, scripted):
        page, scripted.script = failing_page, words_of("Yes.")
        for question in ("One", "Two", "Three"):
            page.ask(question)
        scripted.refuse = (400, "prompt: 1113 tokens leave no room for an answer")
        page.send("Four")
        page.finished()
        scripted.refuse = None
        page.all(".error button")[1].click()
        wait_for(lambda: len(scripted.requests) == 5, "it is sent again")
        assert page.finished() == "Yes."
        assert [m["content"] for m in scripted.requests[-1]["messages"]] == ["Three", "Yes.", "Four"]
        assert len(page.all(".question")) == 4 and "no longer sees" in page.text(".forgotten")
        page.reload()
        page.ask("Five")
        assert [m["content"] for m in scripted.requests[-1]["messages"]] == ["Three", "Yes.", "Four", "Yes.", "Five"]

    def test_a_question_without_answer_joins_the_next(self, failing_page, scripted):
        page, scripted.refuse = failing_page, (503, "busy")
        page.send("One")
        page.finished()
        scripted.refuse = None
        page.ask("Two")
        assert scripted.requests[-1]["messages"] == [{"role": "user", "content": "One\n\nTwo"}]

    def test_an_answer_that_breaks_off_keeps_what_came(self, failing_page, scripted):
        page, scripted.fail_at = failing_page, 10
        page.send("Question")
        assert page.finished().startswith("Once upon a time")
        assert "closed before" in page.text(".answer .error") or "broke" in page.text(".answer .error")

    def test_an_answer_that_is_cut_says_so(self, page, scripted):
        scripted.script = []
        scripted.finish = "length"
        page.send("Question")
        page.finished()
        assert "token limit" in page.text(".answer .message-foot")

    def test_a_server_that_goes_and_comes_back(self, browser):
        server = FakeServer()
        checks = visit(browser, server.url, may_fail=("Failed to load resource", "net::ERR"))
        page = next(checks)
        port = server.port
        server.close()
        page.send("Anybody?")
        page.finished()
        assert page.shown(".answer .error button")
        wait_for(lambda: page.shown("#banner"), "the banner")
        assert "gone" in page.text("#banner")
        server = FakeServer(port=port)
        try:
            wait_for(lambda: not page.shown("#banner"), "the banner goes")
            page.one(".answer .error button").click()
            assert page.finished().startswith("Once upon a time")
            with contextlib.suppress(StopIteration):
                next(checks)
        finally:
            server.close()


class TestLive:
    def test_the_picture_changes_while_it_answers(self, either):
        before = either.run("return document.querySelector('#heat').textContent")
        pictures = set()
        for _ in range(20):  # a slow browser may see little of a fast answer
            either.send(STORY)
            wait_for(lambda: pictures.add(either.picture()) or not either.answering(), "the answer ends")
            pictures.add(either.picture())
            if len(pictures) >= 3:
                break
        assert len(pictures) >= 3, before
        assert either.shown("#heat canvas")
        label = either.run("return document.querySelector('#heat canvas').ariaLabel")
        assert "Hottest: layer" in label and "even share" in label

    def test_figures(self, either):
        seen = set()
        for _ in range(20):  # a slow browser may see little of a fast answer
            either.send(STORY)
            wait_for(lambda: seen.add(either.text("#speed")) or not either.answering(), "the answer ends")
            if seen - {"–", "0"}:
                break
        assert seen - {"–", "0"}, seen
        wait_for(lambda: "limit" in either.text("#limit-text") and "%" in either.text("#limit-text"), "the gauge")
        assert "%" in either.text("#kv-text")
        assert "running" in either.text("#requests-text")
        assert "Threads" in either.text("#facts")
        assert either.run("return document.querySelector('#spark .spark-line').getAttribute('d').length") > 10

    def test_one_cell_can_be_asked(self, page, scripted):
        wait_for(lambda: page.shown("#heat canvas"), "the picture")
        page.run("document.activeElement.blur(); document.getElementById('open-map').focus()")
        page.keys(Keys.TAB)
        assert page.run("return document.activeElement.tagName") == "CANVAS"
        page.keys(Keys.HOME, *[Keys.ARROW_UP] * 5, Keys.ARROW_DOWN, Keys.ARROW_DOWN, *[Keys.ARROW_RIGHT] * 7)
        assert (page.text("#heat .readout") == "layer 3, expert 7: "
                                               f"{scripted.status()['experts']['heat'][2][7]:.1f}× even share")

    def test_a_big_model(self, browser):
        server = FakeServer(layers=61, experts=256)
        checks = visit(browser, server.url)
        try:
            page = next(checks)
            wait_for(lambda: page.shown("#heat canvas"), "the picture")
            page.one("#open-map").click()
            wait_for(lambda: page.shown("#heat-large canvas"), "the large picture")
            boxes = page.run("return ['#heat', '#heat-large'].map((id) => { const r = "
                             "document.querySelector(id).getBoundingClientRect(), c = document.querySelector(id + ' "
                             "canvas').getBoundingClientRect(); return c.left >= r.left && c.right <= r.right })")
            assert boxes == [True, True]
            page.keys(Keys.ESCAPE)
            with contextlib.suppress(StopIteration):
                next(checks)
        finally:
            server.close()

    def test_it_asks_often_only_while_it_answers(self, page, scripted):
        """By the browser's own clock: a busy machine makes pauses longer, never shorter."""
        def pauses():
            times = page.run("return performance.getEntriesByType('resource').filter((e) => "
                             "e.name.endsWith('kt/status')).map((e) => e.startTime)")
            return [after - before for before, after in zip(times, times[1:])]
        page.run("performance.clearResourceTimings()")
        assert min(wait_for(pauses, "two questions")) > 2000
        scripted.script, scripted.pause = scripted.script * 20, 0.2
        page.send("Question")
        wait_for(lambda: min(pauses()) < 1000, "two questions within a second")
        scripted.pause = 0
        page.finished()
