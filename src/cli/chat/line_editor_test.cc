#include "terminal/line_editor.h"

#include <gtest/gtest.h>

#include <random>

#include "base/utf8.h"
#include "cli/chat/chat_console.h"
#include "terminal/terminal_text.h"
#include "terminal/testing/screen.h"

namespace kt::inline cli {
namespace {

struct EditorFixture {
  explicit EditorFixture(int width = 40, int height = 10, std::vector<std::string> past = {})
      : history(std::move(past)),
        screen(width, height),
        editor(options(), history),
        width(width),
        height(height) {
    begin();
  }
  static EditorOptions options() {
    EditorOptions out;
    out.complete = [](std::string_view before) {
      std::vector<std::string> fitting;
      for (const char* word : {"/help", "/history", "/quit"})
        if (std::string_view(word).starts_with(before)) fitting.emplace_back(word);
      return fitting;
    };
    out.go_on = unfinished;
    return out;
  }
  void begin() {
    editor.begin(width, height);
    screen.write(editor.take_output());
  }
  EditEvent type(std::string_view bytes) {
    const EditEvent event = editor.feed(bytes);
    screen.write(editor.take_output());
    return event;
  }
  // The cursor, marked in the text.
  std::string state() const {
    return editor.text().substr(0, editor.cursor()) + "|" + editor.text().substr(editor.cursor());
  }

  std::vector<std::string> history;
  Screen screen;
  LineEditor editor;
  int width, height;
};

std::string after(std::string_view keys, std::vector<std::string> history = {}) {
  EditorFixture f(40, 10, std::move(history));
  f.type(keys);
  return f.state();
}

TEST(CellWidth, Characters) {
  EXPECT_EQ(text_width("abc"), 3);
  EXPECT_EQ(text_width("日本"), 4);
  EXPECT_EQ(text_width("한글"), 4);
  EXPECT_EQ(text_width("ｱ"), 1);                 // halfwidth
  EXPECT_EQ(text_width("！"), 2);                // fullwidth
  EXPECT_EQ(text_width("e\xCC\x81"), 1);         // with a combining acute accent
  EXPECT_EQ(text_width("\xF0\x9F\x98\x80"), 2);  // an emoji
  EXPECT_EQ(text_width("\xC2\xAD"), 1);          // soft hyphen
  EXPECT_EQ(text_width("éß–"), 3);
}

TEST(CellWidth, ClustersBothWays) {
  const std::string text = "ae\xCC\x81日\n\xCC\x81\xF0\x9F\x91\xA9\xE2\x80\x8D\xF0\x9F\x91\xA7z";
  std::vector<size_t> forward, backward;
  for (size_t at = 0; at < text.size(); at = next_cluster(text, at)) forward.push_back(at);
  for (size_t at = text.size(); at > 0;) backward.push_back(at = previous_cluster(text, at));
  std::ranges::reverse(backward);
  EXPECT_EQ(forward, backward);
  EXPECT_EQ(forward, (std::vector<size_t>{0, 1, 4, 7, 8, 10, 21}));
}

TEST(Harmless, NoEscapesReachTheTerminal) {
  EXPECT_EQ(harmless("a\x1b[2Jb\x07\tc\nd\xC2\x9B\x7f\r"), "a[2Jb\tc\nd");
  EXPECT_EQ(harmless("\xff"), kReplacement);
  EXPECT_EQ(harmless_line("two\nlines\n"), "two lines");
  EXPECT_LE(harmless_line(std::string(5000, 'x')).size(), 410u);
}

TEST(LineEditor, EditingKeys) {
  EXPECT_EQ(after("hello"), "hello|");
  EXPECT_EQ(after("hello\x1b[D\x1b[DX"), "helX|lo");
  EXPECT_EQ(after("hello\x02\x02\x06Y"), "hellY|o");
  EXPECT_EQ(after("hello\x01X\x05Y"), "XhelloY|");
  EXPECT_EQ(after("hello\x1b[HX\x1b[FY"), "XhelloY|");
  EXPECT_EQ(after("hello\x1bOHX\x1bOFY"), "XhelloY|");
  EXPECT_EQ(after("hello\x1b[1~\x1b[3~\x1b[4~!"), "ello!|");
  EXPECT_EQ(after("hello\x01\x04"), "|ello");
  EXPECT_EQ(after("ab\x7f\x08"), "|");
  EXPECT_EQ(after("ab\x14"), "ba|");
  EXPECT_EQ(after("abc\x02\x14"), "acb|");
  EXPECT_EQ(after("one two\x1b"
                  "bX"),
            "one X|two");
  EXPECT_EQ(after("one two\x01\x1b"
                  "fX"),
            "oneX| two");
  EXPECT_EQ(after("one two\x1b[1;5DX"), "one X|two");
  EXPECT_EQ(after("日本語\x1b[D\x7f"), "日|語");
  EXPECT_EQ(after("e\xCC\x81x\x1b[D\x1b[D!"), "!|e\xCC\x81x");
  EXPECT_EQ(after("\x1b[99;99zok\x1b[Z"), "ok|");  // sequences without a meaning
}

TEST(LineEditor, CutAndYank) {
  EXPECT_EQ(after("one two\x17\x19\x19"), "one twotwo|");
  EXPECT_EQ(after("one two three\x17\x17\x19"), "one two three|");  // cuts in a row collect
  EXPECT_EQ(after("one two\x15_\x19"), "_one two|");
  EXPECT_EQ(after("one two\x01\x0b\x19!"), "one two!|");
  EXPECT_EQ(after("a-b\x1b\x7f"), "a-|");
  EXPECT_EQ(after("ab cd\x01\x1b"
                  "d"),
            "| cd");
  EXPECT_EQ(after("ab\x1b\rcd\x15"), "ab\n|");
  EXPECT_EQ(after("ab\x1b\rcd\x15\x15"), "ab|");
}

TEST(LineEditor, Events) {
  EditorFixture f;
  EXPECT_EQ(f.type("\x04"), EditEvent::kEnd);
  f.begin();
  EXPECT_EQ(f.type("x\x03yz"), EditEvent::kInterrupt);
  EXPECT_EQ(f.editor.text(), "x");
  f.begin();
  EXPECT_EQ(f.type("\r"), EditEvent::kSubmit);  // what was typed ahead is not lost
  EXPECT_EQ(f.editor.text(), "yz");
  f.begin();
  EXPECT_EQ(f.type("a\rb\r"), EditEvent::kSubmit);
  EXPECT_EQ(f.editor.text(), "a");
  f.begin();
  EXPECT_EQ(f.type(""), EditEvent::kSubmit);
  EXPECT_EQ(f.editor.text(), "b");
  EXPECT_EQ(f.screen.text(), ">\n> x\n> yz\n> a\n> b\n");
}

TEST(LineEditor, EscapeAloneIsDecidedByTime) {
  EditorFixture f;
  f.type("ab\x1b");
  EXPECT_TRUE(f.editor.undecided());
  f.editor.settle();
  EXPECT_FALSE(f.editor.undecided());
  f.type("[D");
  EXPECT_EQ(f.state(), "ab[D|");
}

TEST(LineEditor, MultipleLines) {
  EXPECT_EQ(after("one\x1b\rtwo"), "one\ntwo|");
  EXPECT_EQ(after("one\\\rtwo"), "one\ntwo|");
  EXPECT_EQ(after("\"\"\"one\rtwo\r"), "\"\"\"one\ntwo\n|");
  EXPECT_EQ(after("one\x1b\rtwo\x01X"), "one\nX|two");
  EXPECT_EQ(after("one\x1b\rtwo\x1b[AX"), "oneX|\ntwo");
  EXPECT_EQ(after("one\x1b\rtwo\x1b[H\x1b[A\x1b[BX"), "one\nX|two");
  EditorFixture f;
  EXPECT_EQ(f.type("\"\"\"\ra\r\"\"\"\r"), EditEvent::kSubmit);
  EXPECT_EQ(message_of(f.editor.text()), "a");
  EXPECT_EQ(f.screen.text(), "> \"\"\"\n. a\n. \"\"\"\n");
}

TEST(LineEditor, PasteIsOneText) {
  EditorFixture f;
  EXPECT_EQ(f.type("x\x1b[200~one\r\ntwo\rthree\n\x1b[31m\ttab"), EditEvent::kNone);
  EXPECT_EQ(f.type("\x1b[20"), EditEvent::kNone);
  EXPECT_EQ(f.type("1~y"), EditEvent::kNone);
  EXPECT_EQ(f.editor.text(), "xone\ntwo\nthree\n[31m\ttaby");
  EXPECT_EQ(f.type("\r"), EditEvent::kSubmit);
}

// One whose end does not come must not hold the keyboard.
TEST(LineEditor, CtrlCEndsAPasteWithoutEnd) {
  EditorFixture f;
  EXPECT_EQ(f.type("x\x1b[200~some lines\r\nand no end"), EditEvent::kNone);
  EXPECT_FALSE(f.editor.undecided());
  EXPECT_EQ(f.type("\x03"), EditEvent::kNone);
  EXPECT_TRUE(f.editor.undecided());
  EXPECT_EQ(f.editor.settle(), EditEvent::kInterrupt);
  f.begin();
  EXPECT_EQ(f.type("y\r"), EditEvent::kSubmit);
  EXPECT_EQ(f.editor.text(), "y");
}

TEST(LineEditor, CtrlCInsideAPasteIsText) {
  EditorFixture f;
  EXPECT_EQ(f.type("\x1b[200~a\x03"), EditEvent::kNone);
  EXPECT_EQ(f.type("b\x03\x1b[201~c"), EditEvent::kNone);
  EXPECT_FALSE(f.editor.undecided());
  EXPECT_EQ(f.editor.text(), "abc");
}

TEST(LineEditor, HistoryKeepsTheDraft) {
  const std::vector<std::string> past = {"first", "second\nline"};
  EXPECT_EQ(after("draft\x1b[A", past), "second\nline|");
  EXPECT_EQ(after("draft\x1b[A\x1b[A\x1b[A", past), "first|");
  EXPECT_EQ(after("draft\x1b[A\x1b[A\x1b[A\x1b[A", past), "first|");
  EXPECT_EQ(after("draft\x10\x0e", past), "draft|");
  EXPECT_EQ(after("draft\x1b[A\x1b[A\x1b[A\x1b[B\x1b[B\x1b[B", past), "draft|");
}

TEST(LineEditor, IncrementalSearch) {
  const std::vector<std::string> past = {"red fox", "blue bird", "red bird"};
  EXPECT_EQ(after("\x12red", past), "|red bird");
  EXPECT_EQ(after("\x12red\x12", past), "|red fox");
  EXPECT_EQ(after("\x12red\x12\x1b[F!", past), "red fox!|");
  EXPECT_EQ(after("\x12"
                  "bird\x12",
                  past),
            "blue |bird");
  EXPECT_EQ(after("draft\x12red\x07", past), "draft|");
  EXPECT_EQ(after("draft\x12red\x03", past), "draft|");
  EXPECT_EQ(after("\x12redx\x7f\x7f\x7f\x7f"
                  "blue",
                  past),
            "|blue bird");
  EditorFixture f(40, 10, past);
  f.type(
      "\x12"
      "fox");
  EXPECT_EQ(f.screen.text(), "(search: fox) red fox\n");
  f.type("es");
  EXPECT_EQ(f.screen.text(), "(not found: foxes) red fox\n");
  EXPECT_EQ(f.type("\r"), EditEvent::kSubmit);
  EXPECT_EQ(f.editor.text(), "red fox");
  EXPECT_EQ(f.screen.text(), "> red fox\n");
}

TEST(LineEditor, Completion) {
  EXPECT_EQ(after("/q\t"), "/quit |");
  EXPECT_EQ(after("/h\t"), "/h|");
  EXPECT_EQ(after("/hi\t"), "/history |");
  EXPECT_EQ(after("hello\t"), "hello|");
  EditorFixture f;
  f.type("/h\t");
  EXPECT_EQ(f.screen.text(), "> /h\n/help  /history\n> /h\n");
}

TEST(LineEditor, LongLinesWrap) {
  EditorFixture f(20, 6);
  f.type("0123456789abcdefgh");
  EXPECT_EQ(f.screen.text(), "> 0123456789abcdefgh\n");
  EXPECT_EQ(f.screen.cursor(), (ScreenPlace{1, 0}));
  f.type("X");
  EXPECT_EQ(f.screen.text(), "> 0123456789abcdefgh\nX\n");
  f.type("\x01-");
  EXPECT_EQ(f.screen.text(), "> -0123456789abcdefg\nhX\n");
  EXPECT_EQ(f.screen.cursor(), (ScreenPlace{0, 3}));
  f.type("\x05\x7f\x7f\x7f");
  EXPECT_EQ(f.screen.text(), "> -0123456789abcdef\n");
  f.type("日");  // does not fit into the last column
  EXPECT_EQ(f.screen.text(), "> -0123456789abcdef\n日\n");
  f.type("\x1b[D");
  EXPECT_EQ(f.screen.cursor(), (ScreenPlace{1, 0}));
  EXPECT_EQ(f.type("\r"), EditEvent::kSubmit);
  EXPECT_EQ(f.screen.cursor(), (ScreenPlace{2, 0}));
}

TEST(LineEditor, TallerThanTheTerminal) {
  EditorFixture f(20, 3);
  f.type("1\x1b\r2\x1b\r3\x1b\r4\x1b\r5");
  EXPECT_EQ(f.screen.text(), ". 3\n. 4\n. 5\n");
  f.type("\x1b[A\x1b[A\x1b[A");
  EXPECT_EQ(f.screen.text(), ". 2\n. 3\n. 4\n");
  f.type("\x1b[Ax");
  EXPECT_EQ(f.screen.text(), "> 1x\n. 2\n. 3\n");
}

TEST(LineEditor, ClearScreenAndResize) {
  EditorFixture f(20, 6);
  f.type("old\r");
  f.begin();
  f.type("hello world, hello world\x0c");
  EXPECT_EQ(f.screen.text(), "> hello world, hello\n world\n");
  EditorFixture g(40, 6);
  g.type("hello");
  Screen wide(60, 6);
  wide.write("> hello");
  g.editor.resize(60, 6);
  wide.write(g.editor.take_output());
  EXPECT_EQ(wide.text(), "> hello\n");
}

// The screen after any keys is that of an editor that drew the text at once: nothing is left over, nothing
// is missing. And how the bytes are cut into pieces makes no difference.
TEST(LineEditor, RandomKeysLeaveTheRightScreen) {
  const std::vector<std::string> keys = {"a",
                                         "Z",
                                         " ",
                                         "日",
                                         "e\xCC\x81",
                                         "\xF0\x9F\x98\x80",
                                         "\t ",
                                         "\x1b[D",
                                         "\x1b[C",
                                         "\x1b[A",
                                         "\x1b[B",
                                         "\x01",
                                         "\x05",
                                         "\x0b",
                                         "\x15",
                                         "\x17",
                                         "\x19",
                                         "\x14",
                                         "\x7f",
                                         "\x04",
                                         "\x1b[3~",
                                         "\x1b\r",
                                         "\x1b"
                                         "b",
                                         "\x1b"
                                         "f",
                                         "\x12",
                                         "\x07",
                                         "\x1b[200~pa\nste and a long line\x1b[201~",
                                         "0123456789",
                                         "\x0c"};
  const std::vector<std::string> past = {"a", "two\nlines of history", "日本語日本語日本語日本語"};
  std::mt19937 random(7);
  for (int run = 0; run < 150; ++run) {
    const int width = 20 + run % 5, height = 4 + run % 9;
    EditorFixture f(width, height, past);
    std::string sent;
    for (int i = 0; i < 40; ++i) {
      const std::string& key = keys[random() % keys.size()];
      if (key == "\x04" && f.editor.text().empty()) continue;
      sent += key;
      for (const char byte : key) ASSERT_EQ(f.type({&byte, 1}), EditEvent::kNone);
    }
    if (f.editor.searching()) f.type("\x07"), sent += "\x07";
    f.type("\x0c"), sent += "\x0c";
    EditorFixture whole(width, height, past);
    whole.type(sent);
    ASSERT_EQ(f.state(), whole.state());
    TextLayout layout({.prompt = "> ",
                       .more_prompt = ". ",
                       .text = f.editor.text(),
                       .cursor = f.editor.cursor(),
                       .width = width});
    if (static_cast<int>(layout.rows().size()) > height) continue;
    Screen fresh(width, height);
    fresh.write(LineScreen().show(layout, height));
    ASSERT_EQ(f.screen.text(), fresh.text()) << f.state();
    ASSERT_EQ(f.screen.cursor(), fresh.cursor()) << f.state();
  }
}

TEST(LineEditor, EveryStepLeavesTheRightScreen) {
  const std::vector<std::string> keys = {"a",      "日",   "e\xCC\x81", "0123456789", "\x1b[D", "\x1b[A",
                                         "\x1b[B", "\x01", "\x05",      "\x0b",       "\x17",   "\x19",
                                         "\x7f",   "\x7f", "\x1b\r",    "\x12",       "\x07"};
  const std::vector<std::string> past = {"short", "two\nlines of history", "日本語日本語日本語日本語"};
  std::mt19937 random(11);
  for (int run = 0; run < 60; ++run) {
    EditorFixture f(20, 40, past);
    for (int i = 0; i < 60; ++i) {
      f.type(keys[random() % keys.size()]);
      if (f.editor.searching()) continue;
      const TextLayout layout({.prompt = "> ",
                               .more_prompt = ". ",
                               .text = f.editor.text(),
                               .cursor = f.editor.cursor(),
                               .width = 20});
      if (layout.rows().size() > 40) break;
      Screen fresh(20, 40);
      fresh.write(LineScreen().show(layout, 40));
      ASSERT_EQ(f.screen.text(), fresh.text()) << f.state();
      ASSERT_EQ(f.screen.cursor(), fresh.cursor()) << f.state();
    }
  }
}

}  // namespace
}  // namespace kt::inline cli
