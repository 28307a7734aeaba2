#include "cli/chat/chat_session.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <thread>

#include "base/error.h"
#include "base/file.h"
#include "cli/chat/chat_console.h"
#include "terminal/input_history.h"

namespace kt::inline cli {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

class Folder {
 public:
  Folder() {
    std::string name = testing::TempDir() + "chatXXXXXX";
    path_ = ::mkdtemp(name.data());
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  std::string file(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

// Answers "number N" with the number of messages it got; fails or stops on demand.
class Echo final : public ChatBackend {
 public:
  ChatPlace place() const override { return {.model = "echo", .where = "a test", .context = 100}; }
  void stop() noexcept override {}
  ChatFinish stream(const std::vector<ChatMessage>& messages, const ChatOptions& options,
                    const std::function<void(const ChatPiece&)>& on_piece) override {
    got = messages;
    with = options;
    if (fails) fail("no answer today");
    if (silent) return {.reason = "cancelled"};
    if (thinks) on_piece({.text = "hm\x1b[2J", .reasoning = true});
    on_piece({.text = "\n\nnumber "});
    on_piece({.text = std::to_string(++answers)});
    return {.reason = stops ? "cancelled" : "stop",
            .prompt_tokens = 30,
            .output_tokens = 20,
            .cached_tokens = 10,
            .seconds_to_first = 1,
            .seconds = 3};
  }

  std::vector<ChatMessage> got;
  ChatOptions with;
  bool fails = false, silent = false, stops = false, thinks = false;
  int answers = 0;
};

struct Fixture {
  Echo backend;
  ChatSession session{backend, "be brief", {}};
  std::string shown;
  ChatConsole console{session, [this](std::string_view bytes) { shown += bytes; }, ChatScreen{}};

  std::string type(const std::string& line) {
    shown.clear();
    goes_on = console.take(line);
    return shown;
  }
  bool goes_on = true;
};

const ChatSession::OnPiece kIgnore = [](const ChatPiece&) {};

TEST(ChatSession, SendsTheConversation) {
  Fixture f;
  f.session.ask("one", kIgnore);
  f.session.ask("two", kIgnore);
  EXPECT_THAT(f.backend.got,
              ElementsAre(ChatMessage{"system", "be brief"}, ChatMessage{"user", "one"},
                          ChatMessage{"assistant", "\n\nnumber 1"}, ChatMessage{"user", "two"}));
}

TEST(ChatSession, FailuresLeaveItAsItWas) {
  Fixture f;
  f.session.ask("one", kIgnore);
  f.backend.fails = true;
  EXPECT_THROW(f.session.ask("two", kIgnore), Error);
  EXPECT_EQ(f.session.messages().size(), 2u);
  f.backend.fails = false;
  f.session.retry(kIgnore);
  ASSERT_EQ(f.session.messages().size(), 4u);
  EXPECT_EQ(f.session.messages()[2].content, "two");
  f.backend.fails = true;
  const std::vector<ChatMessage> before = f.session.messages();
  EXPECT_THROW(f.session.retry(kIgnore), Error);
  EXPECT_EQ(f.session.messages(), before);
  f.backend.fails = false;
  f.backend.silent = true;
  f.session.retry(kIgnore);
  EXPECT_EQ(f.session.messages(), before);
}

TEST(ChatSession, StoppedAnswersKeepWhatCame) {
  Fixture f;
  f.backend.silent = true;
  f.session.ask("one", kIgnore);
  EXPECT_TRUE(f.session.messages().empty());
  f.backend.silent = false;
  f.backend.stops = true;
  f.session.retry(kIgnore);
  EXPECT_EQ(f.session.messages().at(1).content, "\n\nnumber 1");
}

TEST(ChatSession, RetryReplacesTheAnswer) {
  Fixture f;
  EXPECT_THROW(f.session.retry(kIgnore), Error);
  f.session.ask("one", kIgnore);
  f.session.retry(kIgnore);
  ASSERT_EQ(f.session.messages().size(), 2u);
  EXPECT_EQ(f.session.messages()[1].content, "\n\nnumber 2");
}

TEST(ChatSession, SaveAndLoad) {
  const Folder folder;
  Fixture f, g;
  f.backend.thinks = true;
  f.session.ask("one \"quoted\"\nline", kIgnore);
  f.session.save(folder.file("chat.json"));
  f.session.save(folder.file("chat.json"));  // its own kind is replaced
  g.session.load(folder.file("chat.json"));
  EXPECT_EQ(g.session.messages(), f.session.messages());
  EXPECT_EQ(g.session.system(), "be brief");
  write_atomically(folder.file("precious"), "no chat");
  EXPECT_THROW(f.session.save(folder.file("precious")), Error);
  EXPECT_EQ(read_small_file(folder.file("precious")), "no chat");
}

TEST(ChatSession, LoadRefusesWhatIsNoConversation) {
  const Folder folder;
  const std::pair<const char*, const char*> bad[] = {
      {"{", "byte"},
      {"{}", "messages"},
      {R"([{"role": "user"}])", "messages[0]"},
      {R"([{"role": "user", "content": 1}])", "content"},
      {R"([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])", "messages[1]"},
      {R"([7])", "messages[0]"}};
  for (const auto& [file, expected] : bad) {
    Fixture f;
    f.session.ask("one", kIgnore);
    write_atomically(folder.file("x"), file);
    EXPECT_THAT(f.type("/load " + folder.file("x")), HasSubstr(expected)) << file;
    EXPECT_EQ(f.session.messages().size(), 2u);
  }
  Fixture f;
  write_atomically(folder.file("x"), R"([{"role": "user", "content": "asked"}])");
  f.type("/load " + folder.file("x"));
  f.type("/retry");
  EXPECT_EQ(f.session.messages().at(0).content, "asked");
}

TEST(ChatConsole, AnswersAndErrorsAreText) {
  Fixture f;
  EXPECT_EQ(f.type("hello"), "number 1\n");
  f.backend.thinks = true;
  EXPECT_EQ(f.type("hello"), "[thinking]\nhm[2J\n[answer]\nnumber 2\n");
  f.backend.stops = true;
  EXPECT_THAT(f.type("hello"), HasSubstr("number 3\n(stopped)\n"));
  f.backend.fails = true;
  EXPECT_EQ(f.type("hello"), "kt: no answer today\n");
  EXPECT_EQ(f.session.messages().size(), 6u);
}

TEST(ChatConsole, DimsThoughts) {
  std::string shown;
  AnswerPrinter printer([&](std::string_view bytes) { shown += bytes; }, {.colour = true});
  printer.add({.text = "\nhm", .reasoning = true});
  printer.add({.text = "m\n", .reasoning = true});
  printer.add({.text = "\n\n"});
  printer.add({.text = "yes"});
  printer.end();
  EXPECT_EQ(shown, "\x1b[2mhmm\n\x1b[0m\nyes\n");
}

TEST(ChatConsole, Commands) {
  Fixture f;
  EXPECT_THAT(f.type("/help"), HasSubstr("/retry"));
  EXPECT_THAT(f.type("/hlep"), HasSubstr("/help?"));
  EXPECT_THAT(f.type("/retyr"), HasSubstr("/retry?"));
  EXPECT_THAT(f.type("/retry"), HasSubstr("kt: "));
  f.type(" /etc is a folder");
  EXPECT_EQ(f.backend.got.back().content, "/etc is a folder");
  EXPECT_THAT(f.type("/history"), HasSubstr("you: /etc is a folder\nmodel: number 1\n"));
  EXPECT_THAT(f.type("/info"), HasSubstr("50 of 100 tokens"));
  EXPECT_THAT(f.type("/info"), HasSubstr("20 tokens at 9.50 tokens/s"));
  EXPECT_THAT(f.type("/info"), HasSubstr("10 of 30 prompt tokens"));
  EXPECT_EQ(f.type("/system"), "system: be brief\n");
  EXPECT_EQ(f.type("/system be  long"), "system: be  long\n");
  f.type("/system \"\"");
  EXPECT_EQ(f.session.system(), "");
  f.type("/clear");
  EXPECT_TRUE(f.session.messages().empty());
  EXPECT_TRUE(f.goes_on);
  EXPECT_EQ(f.type("  "), "");
  f.type("/exit");
  EXPECT_FALSE(f.goes_on);
}

TEST(ChatConsole, Set) {
  Fixture f;
  f.type("/set temperature 0.5");
  f.type("/set top-k 7");
  f.type("/set max_tokens 9");
  f.type("/set seed 18446744073709551615");
  f.type("go");
  EXPECT_EQ(f.backend.with.temperature, 0.5);
  EXPECT_EQ(f.backend.with.top_k, 7);
  EXPECT_EQ(f.backend.with.max_tokens, 9);
  EXPECT_EQ(f.backend.with.seed, UINT64_MAX);
  EXPECT_FALSE(f.backend.with.top_p);
  EXPECT_EQ(f.type("/set temperature default"), "temperature default\n");
  EXPECT_FALSE(f.session.options().temperature);
  EXPECT_THAT(f.type("/set temprature 1"), HasSubstr("temperature"));
  for (const char* bad :
       {"/set temperature hot", "/set top_p 2", "/set top_p nan", "/set max_tokens 0", "/set seed -1"})
    EXPECT_THAT(f.type(bad), HasSubstr("kt: ")) << bad;
}

TEST(ChatConsole, Completes) {
  Fixture f;
  EXPECT_THAT(f.console.complete("/h"), ElementsAre("/help", "/history"));
  EXPECT_THAT(f.console.complete("/set t"), ElementsAre("/set temperature", "/set top_p", "/set top_k"));
  EXPECT_THAT(f.console.complete("h"), ElementsAre());
}

TEST(ChatConsole, MultiLineRules) {
  EXPECT_EQ(unfinished("a\\"), "a\n");
  EXPECT_EQ(unfinished("a"), std::nullopt);
  EXPECT_EQ(unfinished("\"\"\"a"), "\"\"\"a\n");
  EXPECT_EQ(unfinished("\"\"\"a\\"), "\"\"\"a\\\n");
  EXPECT_EQ(unfinished("\"\"\"a\n\"\"\""), std::nullopt);
  EXPECT_EQ(unfinished("\"\"\"\"\""), "\"\"\"\"\"\n");
  EXPECT_EQ(message_of("\"\"\"\n a\nb\n\"\"\""), " a\nb");
  EXPECT_EQ(message_of("  a \n"), "a");
  EXPECT_EQ(message_of("\"\"\"\"\"\""), "");
}

TEST(InputHistory, EscapesLines) {
  for (const std::string entry : {"plain", "two\nlines", "back\\slash", "\\n is not a line", "end\\"}) {
    EXPECT_EQ(unescape_entry(escape_entry(entry)), entry);
    EXPECT_THAT(escape_entry(entry), Not(HasSubstr("\n")));
  }
}

TEST(InputHistory, SeveralWritersLoseNothing) {
  const Folder folder;
  const std::string path = folder.file("deep/chat_history");
  InputHistory first(path), second(path);
  first.add("one\nline");
  second.add("two");
  first.add("three");
  first.add("three");
  first.add("  ");
  EXPECT_THAT(first.entries(), ElementsAre("one\nline", "three"));
  EXPECT_THAT(InputHistory(path).entries(), ElementsAre("one\nline", "two", "three"));
  struct stat facts = {};
  ASSERT_EQ(::stat(path.c_str(), &facts), 0);
  EXPECT_EQ(facts.st_mode & 0777, 0600u);
}

TEST(InputHistory, StaysBounded) {
  const Folder folder;
  const std::string path = folder.file("chat_history");
  std::string full;
  for (size_t i = 0; i < InputHistory::kMostEntries - 8; ++i) full += "old " + std::to_string(i) + "\n";
  write_atomically(path, full);
  // Both pass the bound while the other adds.
  const auto writer = [&](const std::string& name) {
    InputHistory history(path);
    for (int i = 0; i < 20; ++i) history.add(name + std::to_string(i));
  };
  std::thread a(writer, "a"), b(writer, "b");
  a.join();
  b.join();
  const std::vector<std::string> entries = InputHistory(path).entries();
  EXPECT_EQ(entries.size(), InputHistory::kMostEntries);
  for (int i = 0; i < 20; ++i) {
    EXPECT_THAT(entries, testing::Contains("a" + std::to_string(i)));
    EXPECT_THAT(entries, testing::Contains("b" + std::to_string(i)));
  }
  EXPECT_EQ(entries.front(), "old 32");
}

TEST(InputHistory, WithoutAFile) {
  InputHistory memory("");
  memory.add("one");
  EXPECT_THAT(memory.entries(), ElementsAre("one"));
  InputHistory nowhere("/proc/nowhere/chat_history");
  EXPECT_THROW(nowhere.add("one"), Error);
  EXPECT_THAT(nowhere.entries(), ElementsAre("one"));
}

}  // namespace
}  // namespace kt::inline cli
