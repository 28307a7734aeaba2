#include "engine/calibration/calibration_text.h"
#include "hub/cache.h"

#include <gmock/gmock.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>

#include "base/testing/error_of.h"
#include "engine/calibration/document_tokens.h"
#include "engine/calibration/sample_sources.h"
#include "engine/model_perplexity.h"

namespace kt::inline engine {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::ElementsAre;
using testing::EndsWith;
using testing::HasSubstr;
using testing::StartsWith;

void write(const fs::path& path, std::string_view content) {
  fs::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary) << content;
}

// Rows that differ: each says its number and takes about twenty tokens.
std::string rows(int first, int count) {
  std::string out;
  for (int i = first; i < first + count; ++i)
    out +=
        text("{\"text\": \"The fox number {} met an owl by the river, and they shared {} plums.\"}\n", i, i);
  return out;
}

class CalibrationTextTest : public testing::Test {
 protected:
  CalibrationTextTest() {
    folder_ = fs::temp_directory_path() / text("kt-text-{}", ::getpid());
    fs::create_directories(folder_);
    ::setenv("HF_HUB_CACHE", (folder_ / "hub").c_str(), 1);
  }
  ~CalibrationTextTest() override {
    ::unsetenv("HF_HUB_CACHE");
    fs::remove_all(folder_);
  }
  static const DescribedModel& model() {
    static const DescribedModel described(KT_DEMO_MODEL);
    return described;
  }
  fs::path snapshot(const std::string& name = "org--tales", const std::string& revision = "abc") const {
    return folder_ / "hub" / ("datasets--" + name) / "snapshots" / revision;
  }
  CalibrationText read(const std::string& dataset, int samples = 20, const std::string& split = "",
                       int length = 64) const {
    TextRequest request;
    request.dataset = dataset;
    request.split = split;
    request.samples = samples;
    request.max_length = length;
    return read_calibration_text(request, model());
  }
  std::string refusal(const std::string& dataset, const std::string& split = "") const {
    return error_of([&] { read(dataset, 20, split); });
  }
  std::string file(const std::string& name, std::string_view content) const {
    write(folder_ / name, content);
    return (folder_ / name).string();
  }
  std::string said(const std::vector<TokenId>& tokens) const { return model().tokenizer().decode(tokens); }

  fs::path folder_;
};

TEST_F(CalibrationTextTest, SnapshotsGiveTheirDataAndNothingElse) {
  for (const char* name : {"LICENSE.txt", "README.txt", "notice.txt", "requirements-dev.txt", ".hidden.jsonl",
                           "dataset_infos.json"})
    write(snapshot() / name, "Permission is hereby granted.");
  EXPECT_THAT(refusal("org/tales"), HasSubstr("no .jsonl or .txt file"));
  write(snapshot() / "tales.txt", "A fox. ");
  EXPECT_THAT(find_dataset({.dataset = "org/tales", .split = {}}).names, ElementsAre("tales.txt"));
  write(snapshot() / "data" / "train-00000.parquet", "PAR1");
  EXPECT_THAT(refusal("org/tales"), AllOf(HasSubstr(".parquet"), HasSubstr("pyarrow")));
  write(snapshot() / "train.jsonl", rows(0, 40));
  const CalibrationText found = read("org/tales");
  EXPECT_THAT(found.files.names, ElementsAre("train.jsonl"));
  EXPECT_EQ(found.files.revision, "abc");
  EXPECT_EQ(found.samples.size(), 20u);
  EXPECT_THAT(said(found.samples[0]), HasSubstr("The fox number"));
}

TEST_F(CalibrationTextTest, SplitsAreWholeWords) {
  for (const char* name : {"train-00000-of-00002.jsonl", "train/x.jsonl", "constraints.jsonl",
                           "train_sft.jsonl", "pretrain.jsonl", "a.train.jsonl"})
    write(snapshot() / name, rows(0, 40));
  EXPECT_THAT(find_dataset({.dataset = "org/tales", .split = "train"}).names,
              ElementsAre("a.train.jsonl", "train-00000-of-00002.jsonl", "train/x.jsonl"));
  EXPECT_THAT(find_dataset({.dataset = "org/tales", .split = "train_sft"}).names,
              ElementsAre("train_sft.jsonl"));
  EXPECT_THAT(refusal("org/tales", "dev"), AllOf(HasSubstr("split dev"), HasSubstr("constraints.jsonl")));
}

TEST_F(CalibrationTextTest, NamesAndRevisionsOfTheHub) {
  EXPECT_THAT(refusal("wikitext"), AllOf(HasSubstr("datasets--wikitext"), HasSubstr(".jsonl")));
  EXPECT_THAT(refusal("a/b/c"), HasSubstr("no such file"));
  EXPECT_THAT(refusal("absent.jsonl"), HasSubstr("no such file"));
  write(snapshot("wikitext", "old") / "a.jsonl", rows(0, 40));
  write(snapshot("wikitext", "new") / "b.jsonl", rows(0, 40));
  fs::last_write_time(snapshot("wikitext", "old"), fs::file_time_type::clock::now() - std::chrono::hours(1));
  EXPECT_EQ(read("wikitext").files.revision, "new");
  write(snapshot("wikitext").parent_path().parent_path() / "refs" / "main", "old\n");
  EXPECT_EQ(read("wikitext").files.revision, "old");
}

TEST_F(CalibrationTextTest, TheCacheIsWhereHuggingfaceHubHasIt) {
  ::setenv("HUGGINGFACE_HUB_CACHE", "/second", 1);
  ::setenv("HF_HOME", "/third", 1);
  ::setenv("XDG_CACHE_HOME", "/fourth", 1);
  std::vector<std::string> found;
  for (const char* name : {"HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"}) {
    found.push_back(hub_cache_folder());
    ::unsetenv(name);
  }
  EXPECT_THAT(found,
              ElementsAre((folder_ / "hub").string(), "/second", "/third/hub", "/fourth/huggingface/hub"));
  EXPECT_THAT(hub_cache_folder(), EndsWith("/.cache/huggingface/hub"));
}

TEST_F(CalibrationTextTest, SeveralFilesAreAsOne) {
  for (int i = 0; i < 3; ++i) write(snapshot() / text("train-{}.jsonl", i), rows(40 * i, 40));
  const CalibrationText shards = read("org/tales"), whole = read(file("whole.jsonl", rows(0, 120)));
  EXPECT_EQ(shards.found, 120);
  EXPECT_EQ(shards.samples, whole.samples);
  EXPECT_EQ(shards.digest, whole.digest);
  std::set<std::string> files;
  for (const std::string& place : shards.places) files.insert(place.substr(0, place.find(" line")));
  EXPECT_EQ(files.size(), 3u);

  for (int i = 0; i < 2; ++i)
    write(snapshot("org--texts") / text("{}.txt", i), i == 0 ? rows(0, 300) : rows(300, 300));
  const CalibrationText parts = read("org/texts", 15);
  const CalibrationText one = read(file("one.txt", rows(0, 300) + "<|endoftext|>" + rows(300, 300)), 15);
  EXPECT_EQ(parts.samples, one.samples);
  EXPECT_EQ(parts.found, one.found);
}

TEST_F(CalibrationTextTest, ABadLineIsNamedInItsFile) {
  write(snapshot() / "0.jsonl", rows(0, 10));
  write(snapshot() / "1.jsonl", "\n" + rows(10, 1) + "{broken\n");
  EXPECT_THAT(refusal("org/tales"), HasSubstr("1.jsonl line 3: not JSON"));
  EXPECT_THAT(refusal(file("list.jsonl", "[\n{\"text\": \"a\"}\n]\n")), HasSubstr("not a list"));
}

TEST_F(CalibrationTextTest, ShortSamplesLeaveTheirPlaceToOthers) {
  std::string content;
  for (int i = 0; i < 800; ++i) content += "{\"text\": \"\"}\n";
  const CalibrationText found = read(file("empty.jsonl", content + rows(0, 40)), 16);
  EXPECT_EQ(found.samples.size(), 16u);
  EXPECT_EQ(found.found, 840);
  EXPECT_GT(found.too_short, 100);
  EXPECT_LE(found.too_short, 800);
  EXPECT_EQ(found.digest, read(folder_ / "empty.jsonl", 16).digest);
  EXPECT_EQ(read(folder_ / "empty.jsonl", 100).samples.size(), 40u);
}

TEST(SampleDraw, IsAPermutationInAnyPortions) {
  SampleDraw once(1000, 7), twice(1000, 7);
  const std::vector<size_t> all = once.next(600);
  std::vector<size_t> parts = twice.next(100);
  for (const size_t number : twice.next(500)) parts.push_back(number);
  std::ranges::sort(parts);
  EXPECT_EQ(all, parts);
  EXPECT_EQ(std::set<size_t>(all.begin(), all.end()).size(), 600u);
  EXPECT_NE(SampleDraw(1000, 8).next(600), all);
  EXPECT_EQ(once.next(1000).size(), 400u);
  EXPECT_TRUE(once.next(1).empty());
}

// The demo's folder with a tokenizer that puts a token before texts.
TEST_F(CalibrationTextTest, TextsBeginAsTheTokenizerSays) {
  const fs::path with = folder_ / "model";
  fs::create_directories(with);
  for (const auto& entry : fs::directory_iterator(KT_DEMO_MODEL))
    if (entry.path().filename() != "tokenizer.json")
      fs::create_symlink(entry.path(), with / entry.path().filename());
  Json tokenizer = read_json(text("{}/tokenizer.json", KT_DEMO_MODEL));
  const TokenId end = *model().tokenizer().id_of("<|endoftext|>");
  tokenizer["post_processor"] = Json::parse(
      R"({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
          {"Sequence": {"id": "A", "type_id": 0}}], "pair": []})");
  tokenizer["post_processor"]["special_tokens"]["<|endoftext|>"] = {
      {"id", "<|endoftext|>"}, {"ids", {end}}, {"tokens", {"<|endoftext|>"}}};
  write(with / "tokenizer.json", tokenizer.dump());
  const DescribedModel changed(with);
  TextRequest request;
  request.dataset = file("rows.jsonl", rows(0, 40));
  const CalibrationText plain = read(request.dataset, 512), begun = read_calibration_text(request, changed);
  ASSERT_EQ(begun.samples.size(), 40u);
  for (size_t i = 0; i < 40; ++i) {
    std::vector<TokenId> wanted = plain.samples[i];
    wanted.insert(wanted.begin(), end);
    EXPECT_EQ(begun.samples[i], wanted);
  }
  request.dataset = file("one.txt", rows(0, 40));
  EXPECT_EQ(read_calibration_text(request, changed).samples[0][0], end);
  const std::string two = file("two.txt", "A fox.<|endoftext|>An owl.");
  std::vector<TokenId> wanted{end};
  for (const char* document : {"A fox.", "An owl."}) {
    const std::vector<TokenId> tokens = model().tokenizer().encode(document);
    wanted.insert(wanted.end(), tokens.begin(), tokens.end());
    wanted.insert(wanted.end(), {end, end});
  }
  wanted.pop_back();
  EXPECT_EQ(file_tokens(changed, two, end), wanted);
  // A row is too short by its own tokens.
  EXPECT_THAT(error_of([&] {
                request.dataset = file("one.jsonl", "{\"text\": \"a\"}\n");
                read_calibration_text(request, changed);
              }),
              HasSubstr("empty"));
}

TEST_F(CalibrationTextTest, Encodings) {
  using namespace std::string_view_literals;
  const std::string plain = rows(0, 40);
  const std::string& first = read(file("a.txt", plain)).digest;
  EXPECT_EQ(read(file("b.txt", "\xEF\xBB\xBF" + plain)).digest, first);
  EXPECT_EQ(read(file("b.jsonl", "\xEF\xBB\xBF" + plain)).samples.size(), 20u);
  std::string wide;
  for (const char c : plain) wide += {c, '\0'};
  for (const std::string& content : {"\xFF\xFE" + wide, "\xFE\xFF" + wide, wide}) {
    EXPECT_THAT(refusal(file("w.txt", content)),
                AllOf(HasSubstr("w.txt"), HasSubstr("UTF-16"), HasSubstr("iconv")));
    EXPECT_THAT(refusal(file("w.jsonl", content)), HasSubstr("UTF-16"));
  }
  EXPECT_THAT(refusal(file("l.txt", "Caf\xE9 " + plain)),
              AllOf(HasSubstr("l.txt"), HasSubstr("not UTF-8 at byte 3")));
}

TEST_F(CalibrationTextTest, ContentsOfMessages) {
  const auto said_of = [&](const std::string& messages) {
    return refusal(file("m.jsonl", rows(0, 1) + "{\"messages\": [" + messages + "]}\n"));
  };
  ASSERT_FALSE(model().chat_template().empty());
  const std::string parts =
      R"({"messages": [{"role": "user", "content": [{"type": "text", "text": "A fox"}, )"
      R"({"type": "text", "text": "and an owl"}]}, )"
      R"({"role": "assistant", "content": null, "tool_calls": [{}]}, {"role": "assistant", "content": "Yes."}]})";
  const std::string joined =
      R"({"messages": [{"role": "user", "content": "A fox\nand an owl"}, )"
      R"({"role": "assistant", "content": ""}, {"role": "assistant", "content": "Yes."}]})";
  EXPECT_EQ(read(file("parts.jsonl", rows(0, 20) + parts), 50).digest,
            read(file("joined.jsonl", rows(0, 20) + joined), 50).digest);
  for (const char* message : {R"({"role": "user", "content": null})", R"({"role": "user"})",
                              R"({"role": "assistant", "content": null})",
                              R"({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]})",
                              R"({"role": "user", "content": 3})"})
    EXPECT_THAT(said_of(message),
                AllOf(HasSubstr("m.jsonl line 2"), HasSubstr("role "), HasSubstr("content")));
}

TEST_F(CalibrationTextTest, QuestionsAndAnswersInColumns) {
  const std::string columns =
      R"({"instruction": "Name a bird.", "input": "Of the night.", "output": "An owl."}
{"instruction": "Name a fox.", "input": "", "output": "Reynard."}
)";
  const std::string messages =
      R"({"messages": [{"role": "user", "content": "Name a bird.\n\nOf the night."}, )"
      R"({"role": "assistant", "content": "An owl."}]}
{"messages": [{"role": "user", "content": "Name a fox."}, {"role": "assistant", "content": "Reynard."}]}
)";
  EXPECT_EQ(read(file("columns.jsonl", rows(0, 20) + columns), 50).digest,
            read(file("messages.jsonl", rows(0, 20) + messages), 50).digest);
  EXPECT_THAT(refusal(file("bad.jsonl", rows(0, 1) + R"({"instruction": 3, "output": "x"})")),
              AllOf(HasSubstr("bad.jsonl line 2"), HasSubstr("instruction is not a string")));
}

TEST_F(CalibrationTextTest, LongLinesAreNamedWithTheirSize) {
  std::string content = rows(0, 2) + "{\"text\": \"";
  content.append(kLongestLine, 'x') += "\"}\n";
  EXPECT_THAT(refusal(file("long.jsonl", content)),
              AllOf(HasSubstr("long.jsonl line 3"), HasSubstr("64.0 MiB")));
}

TEST_F(CalibrationTextTest, RowsAreMeasuredAsSamples) {
  const TokenId end = *model().tokenizer().id_of("<|endoftext|>");
  const std::string path =
      file("two.jsonl", "{\"text\": \"A fox.\"}\n\n{\"text\": \"\"}\n{\"text\": \"An owl.\"}\n");
  const std::vector<TokenId> tokens = file_tokens(model(), path, end);
  EXPECT_EQ(tokens, file_tokens(model(), file("two.txt", "A fox.<|endoftext|>An owl."), end));
  EXPECT_EQ(file_tokens(model(), path, end, "<|endoftext|>", 3),
            std::vector(tokens.begin(), tokens.begin() + 3));
}

TEST_F(CalibrationTextTest, DocumentsAreSplitStrippedAndEnded) {
  const auto tokens_of = [&](std::string_view content, std::string_view separator = "<|endoftext|>") {
    return said(file_tokens(model(), file("d.txt", content), *model().tokenizer().id_of("!"), separator));
  };
  EXPECT_EQ(tokens_of("\n\nab\nc\n<|endoftext|>\n<|endoftext|>\n d<|endoftext|>\n"), "ab\nc! d!");
  EXPECT_EQ(tokens_of("x"), "x!");
  EXPECT_EQ(tokens_of(""), "");
  EXPECT_EQ(tokens_of("\n<|endoftext|>"), "");
  EXPECT_EQ(tokens_of("a|b", "|"), "a!b!");
}

// Documents longer than a piece, and reading from any mark on.
TEST_F(CalibrationTextTest, PiecesOfDocuments) {
  std::string content;
  for (int i = 0; i < 60; ++i) content += text("Line {} of the tale.\n{}", i, i % 7 == 0 ? "\n\n" : "");
  content += "no-space" + std::string(90, 'x') + "\xC3\xA9\xC3\xA9<|endoftext|>Z\n\n\n<|endoftext|>" +
             std::string(80, '\n');
  const std::vector<TextFile> files(2, TextFile(file("p.txt", content)));
  std::string joined;
  DocumentReader reader(files[0], "<|endoftext|>", 40);
  size_t begun = 0, ended = 0;
  for (DocumentPiece piece; reader.next(piece);) {
    joined += piece.text + (piece.ends ? "|" : "");
    begun += piece.begins;
    ended += piece.ends;
    EXPECT_LE(piece.text.size(), 40u);
  }
  EXPECT_EQ(joined, content.substr(0, content.find("<|")) + "|Z|");
  EXPECT_EQ(begun, 2u);
  EXPECT_EQ(ended, 2u);
  const TokenId end = *model().tokenizer().id_of("<|endoftext|>");
  DocumentTokens stream(model().tokenizer(), files, end, "<|endoftext|>", 40);
  std::vector<DocumentTokens::Mark> marks;
  std::vector<TokenId> all;
  do {
    EXPECT_EQ(stream.first(), all.size() - stream.tokens().size());
    marks.push_back(stream.mark());
    if (!stream.next()) break;
    all.insert(all.end(), stream.tokens().begin(), stream.tokens().end());
  } while (true);
  for (const DocumentTokens::Mark& mark : marks) {
    std::vector<TokenId> rest;
    for (stream.seek(mark); stream.next();)
      rest.insert(rest.end(), stream.tokens().begin(), stream.tokens().end());
    EXPECT_EQ(rest, std::vector(all.begin() + static_cast<ptrdiff_t>(mark.tokens), all.end()));
  }
}

// What is taken by number is what one pass over all of it gives.
TEST_F(CalibrationTextTest, StretchesAreOfTheWholeText) {
  std::string content;
  for (int i = 0; i < 40; ++i) content += rows(i * 100, 100) + "<|endoftext|>";  // some 340 kB: several marks
  const std::string path = file("long.txt", content);
  const std::vector<TokenId> all = file_tokens(model(), path, *model().tokenizer().id_of("<|endoftext|>"));
  const CalibrationText found = read(path, 30, "", 128);
  EXPECT_EQ(found.found, static_cast<int64_t>((all.size() + 127) / 128));
  auto at = all.begin();
  for (const std::vector<TokenId>& sample : found.samples) {
    at = std::search(at, all.end(), sample.begin(), sample.end());
    ASSERT_NE(at, all.end());
    EXPECT_EQ((at - all.begin()) % 128, 0);
    at += static_cast<ptrdiff_t>(sample.size());
  }
}

}  // namespace
}  // namespace kt::inline engine
