#include "weights/plans/conversion.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>

#include "base/error.h"
#include "base/sha256.h"

namespace kt::inline weights {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

// A new folder that goes away with the test.
class Folder {
 public:
  Folder()
      : path_(testing::TempDir() + "kt_conversion_" + std::to_string(getpid()) + "_" +
              std::to_string(count_++)) {
    fs::create_directories(path_);
  }
  ~Folder() { fs::remove_all(path_); }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  static inline std::atomic<int> count_{0};
  std::string path_;
};

std::map<std::string, std::string> contents(const std::string& folder) {
  std::map<std::string, std::string> out;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (!entry.is_regular_file()) continue;
    std::ifstream file(entry.path(), std::ios::binary);
    out[fs::relative(entry.path(), folder)] = std::string(std::istreambuf_iterator<char>(file), {});
  }
  return out;
}

// `layers` shards of `pieces` tensors of 1000 bytes each and a last one without a layer; piece p of layer l writes
// bytes l * 16 + p. `before` is called by every piece first.
ConversionPlan small_plan(const std::string& output, int layers, int pieces, bool folder = false,
                          std::function<void(int layer, int piece)> before = {}) {
  ConversionPlan plan{.output = output, .settings = {{"method", "test"}, {"layers", layers}}};
  for (int l = 0; l <= layers; ++l) {
    ShardPlan shard{
        .file = folder ? text("_layer_{}", l) : text("model-0000{}-of-0000{}.safetensors", l + 1, layers + 1),
        .folder = folder,
        .layer = l < layers ? l : -1};
    for (int p = 0; p < pieces; ++p) {
      shard.tensors.push_back(
          {folder ? text("_layer_{}/_numa_0/{}.kt", l, p) : text("blk.{}.{}", l, p), Dtype::kI8, {1000}});
      shard.pieces.push_back({.source_bytes = 2000,
                              .scratch_bytes = 4096,
                              .run = [=](ShardOutput& out, Scratch& scratch, PieceReport& report) {
                                if (before) before(l, p);
                                scratch.packed.assign(500, std::byte(l * 16 + p));
                                out.write(static_cast<size_t>(p), 500, scratch.packed);
                                out.write(static_cast<size_t>(p), 0, scratch.packed);
                                report.gate = {
                                    .signal = 4.0 + l, .noise = 0.1 * p, .largest = 0.1, .weights = 1000};
                              }});
    }
    plan.shards.push_back(std::move(shard));
  }
  plan.index = !folder;
  plan.side_files = {{"config.json", "{}", ""}};
  return plan;
}

std::string error_of(const ConversionPlan& plan, const ConversionOptions& options) {
  try {
    run_conversion(plan, options);
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(Conversion, WritesShardsIndexSideFilesAndManifest) {
  const Folder folder;
  const ConversionPlan plan = small_plan(folder / "out", 3, 4);
  size_t calls = 0;
  const ConversionResult result =
      run_conversion(plan, {.threads = 2, .progress = [&](const ConversionProgress& at) {
                              ++calls;
                              EXPECT_EQ(at.source_total, 16u * 2000);
                            }});
  EXPECT_EQ(result.shards_written, 4u);
  EXPECT_EQ(result.source_bytes, 16u * 2000);
  EXPECT_GE(calls, 1u);
  ASSERT_EQ(result.layers.size(), 3u);
  EXPECT_DOUBLE_EQ(result.layers[2].report.gate.signal, 24);
  auto files = contents(folder / "out");
  EXPECT_EQ(files.size(), 4u + 3);
  const std::string& shard = files.at("model-00002-of-00004.safetensors");
  const SafetensorsHeader header = parse_safetensors(std::as_bytes(std::span(shard)), "shard");
  ASSERT_EQ(header.tensors.size(), 4u);
  for (const std::byte b : header.tensors[3].bytes) ASSERT_EQ(b, std::byte(16 + 3));
  const Json manifest = Json::parse(files.at("kt_manifest.json"));
  Sha256 sum;
  sum.add(std::as_bytes(std::span(shard)));
  EXPECT_EQ(manifest["shards"]["model-00002-of-00004.safetensors"]["files"][0]["sha256"], sum.hex());
  EXPECT_EQ(manifest["layers"][1]["state"], "done");
  const Json index = Json::parse(files.at("model.safetensors.index.json"));
  EXPECT_EQ(index["metadata"]["total_size"], 16000);
  EXPECT_EQ(index["weight_map"]["blk.3.0"], "model-00004-of-00004.safetensors");
}

TEST(Conversion, ResumeGivesTheSameBytesWhereverItStopped) {
  for (const bool in_folders : {false, true}) {
    const Folder folder;
    run_conversion(small_plan(folder / "whole", 3, 4, in_folders), {.threads = 2});
    const auto expected = contents(folder / "whole");
    for (int stop = 0; stop < 16; ++stop) {
      const std::string out = folder / ("out" + std::to_string(stop));
      std::atomic<int> count = 0;
      const ConversionPlan broken = small_plan(out, 3, 4, in_folders, [&](int, int) {
        if (count++ == stop) fail("stopped");
      });
      EXPECT_THAT(error_of(broken, {.threads = 2}), HasSubstr("stopped"));
      EXPECT_FALSE(fs::exists(out + "/kt_manifest.json"));
      std::atomic<int> again = 0;
      const ConversionResult result = run_conversion(
          small_plan(out, 3, 4, in_folders, [&](int, int) { ++again; }), {.threads = 2, .resume = true});
      EXPECT_EQ(again, 16 - 4 * static_cast<int>(result.shards_kept));
      EXPECT_EQ(contents(out), expected) << stop;
      EXPECT_EQ(result.layers.size(), 3u);
    }
  }
}

TEST(Conversion, ResumeOfAFinishedOneDoesNothing) {
  const Folder folder;
  run_conversion(small_plan(folder / "out", 2, 2), {.threads = 1});
  const auto expected = contents(folder / "out");
  const ConversionResult result =
      run_conversion(small_plan(folder / "out", 2, 2), {.threads = 1, .resume = true});
  EXPECT_EQ(result.shards_kept, 3u);
  EXPECT_EQ(result.shards_written, 0u);
  EXPECT_EQ(contents(folder / "out"), expected);
}

TEST(Conversion, OnlyWhatPrepareMadeIsTakenFromTheOutputAgain) {
  const Folder folder;
  const std::string out = folder / "out", source = folder / "vocabulary.json";
  const auto plan = [&] {
    ConversionPlan made = small_plan(out, 2, 2);
    made.side_files.push_back({"report.json", "", conversion_work_folder(out) + "/report.json"});
    made.side_files.push_back({"vocabulary.json", "", source});
    made.prepare = [](const std::string& work) { std::ofstream(work + "/report.json") << "figures"; };
    return made;
  };
  std::ofstream(source) << "words";
  run_conversion(plan(), {.threads = 1});
  const auto expected = contents(out);
  EXPECT_EQ(expected.at("report.json"), "figures");
  run_conversion(plan(), {.threads = 1, .resume = true});
  EXPECT_EQ(contents(out), expected);
  fs::remove(source);
  EXPECT_THAT(error_of(plan(), {.threads = 1, .resume = true}), HasSubstr(source));
}

TEST(Conversion, ASideFileIsReplacedInTheManifestToo) {
  const Folder folder;
  const std::string out = folder / "out";
  const auto plan = [&] {
    ConversionPlan made = small_plan(out, 2, 2);
    made.side_files.push_back({"report.json", "", conversion_work_folder(out) + "/report.json"});
    made.prepare = [](const std::string& work) { std::ofstream(work + "/report.json") << "figures"; };
    return made;
  };
  run_conversion(plan(), {.threads = 1});
  auto before = contents(out);
  replace_side_file(out, "report.json", "more figures");
  auto after = contents(out);
  EXPECT_EQ(after.at("report.json"), "more figures");
  // What a resumed conversion finds and records anew is the same.
  run_conversion(plan(), {.threads = 1, .resume = true});
  EXPECT_EQ(contents(out), after);
  EXPECT_NE(before.at("kt_manifest.json"), after.at("kt_manifest.json"));
  for (const char* name : {"report.json", "kt_manifest.json"}) {
    before.erase(name);
    after.erase(name);
  }
  EXPECT_EQ(before, after);
}

TEST(Conversion, AShardOfTheWrongSizeIsWrittenAgain) {
  const Folder folder;
  run_conversion(small_plan(folder / "out", 2, 2), {.threads = 1});
  const auto expected = contents(folder / "out");
  fs::resize_file(folder / "out/model-00002-of-00003.safetensors", 100);
  const ConversionResult result =
      run_conversion(small_plan(folder / "out", 2, 2), {.threads = 1, .resume = true});
  EXPECT_EQ(result.shards_written, 1u);
  EXPECT_EQ(contents(folder / "out"), expected);
}

// The promise of resuming is the same bytes, whatever a disk, a copy or an editor did meanwhile.
TEST(Conversion, AShardWhoseBytesChangedIsWrittenAgain) {
  for (const bool in_folders : {false, true})
    for (const bool finished : {false, true}) {
      const Folder folder;
      run_conversion(small_plan(folder / "whole", 2, 2, in_folders), {.threads = 1});
      const auto expected = contents(folder / "whole");
      const std::string out = folder / "out";
      if (finished) {
        run_conversion(small_plan(out, 2, 2, in_folders), {.threads = 1});
      } else {
        EXPECT_EQ(error_of(small_plan(out, 2, 2, in_folders,
                                      [](int layer, int) {
                                        if (layer == 2) fail("stopped");
                                      }),
                           {.threads = 1}),
                  "stopped");
      }
      const std::string spoilt =
          out + (in_folders ? "/_layer_1/_numa_0/0.kt" : "/model-00002-of-00003.safetensors");
      const auto time = fs::last_write_time(spoilt);
      {
        std::fstream file(spoilt, std::ios::in | std::ios::out | std::ios::binary);
        file.seekp(-3, std::ios::end);
        file.put('!');
      }
      fs::last_write_time(spoilt, time);  // sizes and times say nothing
      const ConversionResult result =
          run_conversion(small_plan(out, 2, 2, in_folders), {.threads = 2, .resume = true});
      EXPECT_EQ(result.shards_kept, finished ? 2u : 1u);
      EXPECT_EQ(result.shards_written, finished ? 1u : 2u);
      EXPECT_EQ(contents(out), expected);
    }
}

TEST(Conversion, LeftoversOfKilledRunsGo) {
  const Folder folder;
  fs::create_directories(folder / "out/.kt_progress");
  fs::create_directories(folder / "out/_layer_1.77-0.tmp/_numa_0");
  std::ofstream(folder / "out/model-00001-of-00003.safetensors.77-3.tmp") << "half";
  run_conversion(small_plan(folder / "out", 2, 2), {.threads = 1, .resume = true});
  for (const auto& [name, bytes] : contents(folder / "out"))
    EXPECT_THAT(name, testing::Not(HasSubstr(".tmp")));
  EXPECT_FALSE(fs::exists(folder / "out/_layer_1.77-0.tmp"));
}

// Whatever of the output is a link to somewhere else, that place keeps what it has.
TEST(Conversion, ALinkInPlaceOfOurFilesIsRefusedByName) {
  const Folder folder;
  fs::create_directories(folder / "precious/work");
  for (const char* name : {"settings.json", "lock", "a.77-3.tmp", "work/b.77-3.tmp", "letter"})
    std::ofstream(folder / ("precious/" + std::string(name))) << "mine";
  const auto before = contents(folder / "precious");
  const struct {
    const char *place, *to;
  } kLinks[] = {{".kt_progress", "precious"},
                {".kt_progress/lock", "precious/letter"},
                {".kt_progress/work", "precious/work"},
                {"_layer_1", "precious"},
                {"_layer_0/_numa_0", "precious"},
                {"_layer_1.77-0.tmp", "precious"},
                {"model-00002-of-00003.safetensors", "precious/letter"},
                {"config.json", "precious/letter"},
                {"kt_manifest.json", "precious/letter"}};
  for (const auto& [place, to] : kLinks)
    for (const bool in_folders : {false, true})
      for (const bool overwrite : {false, true}) {
        const std::string out = folder / "out", link = out + "/" + place;
        fs::create_directories(fs::path(link).parent_path());
        fs::create_symlink(folder / to, link);
        EXPECT_EQ(error_of(small_plan(out, 2, 2, in_folders),
                           {.threads = 1, .resume = !overwrite, .overwrite = overwrite})
                      .substr(0, link.size() + 17),
                  link + ": a symbolic link")
            << place;
        EXPECT_TRUE(fs::is_symlink(link)) << place;
        EXPECT_EQ(contents(folder / "precious"), before) << place;
        fs::remove_all(out);
      }
  // One that is nobody's stays and is no hindrance.
  fs::create_directories(folder / "out");
  fs::create_symlink(folder / "precious", folder / "out/notes");
  run_conversion(small_plan(folder / "out", 2, 2), {.threads = 1, .overwrite = true});
  EXPECT_EQ(contents(folder / "precious"), before);
}

TEST(Conversion, ResumeLayerLeavesLowerLayersAlone) {
  const Folder folder;
  const ConversionResult result =
      run_conversion(small_plan(folder / "out", 3, 2), {.threads = 1, .resume_layer = 2});
  EXPECT_EQ(result.shards_skipped, 2u);
  EXPECT_EQ(result.shards_written, 2u);
  EXPECT_FALSE(
      fs::exists(folder / "out/model.safetensors.index.json"));  // it would name files that are not there
  const Json manifest = Json::parse(contents(folder / "out").at("kt_manifest.json"));
  EXPECT_EQ(manifest["layers"][0]["state"], "absent");
  // The rest later; now the whole is the same as in one go.
  run_conversion(small_plan(folder / "out", 3, 2), {.threads = 1, .resume = true});
  run_conversion(small_plan(folder / "whole", 3, 2), {.threads = 1});
  EXPECT_EQ(contents(folder / "out"), contents(folder / "whole"));
}

TEST(Conversion, RefusesWhatWouldLoseData) {
  const Folder folder;
  run_conversion(small_plan(folder / "out", 2, 2), {.threads = 1});
  EXPECT_THAT(error_of(small_plan(folder / "out", 2, 2), {}), HasSubstr("`overwrite` replaces it"));
  ConversionPlan other = small_plan(folder / "out", 2, 2);
  other.settings["method"] = "another";
  EXPECT_THAT(error_of(other, {.resume = true}), HasSubstr("method \"test\" before, \"another\" now"));
  const ConversionResult replaced =
      run_conversion(small_plan(folder / "out", 1, 2), {.threads = 1, .overwrite = true});
  EXPECT_EQ(replaced.shards_written, 2u);
  EXPECT_FALSE(fs::exists(folder / "out/model-00003-of-00003.safetensors"));

  fs::create_directories(folder / "foreign");
  std::ofstream(folder / "foreign/weights.safetensors") << "precious";
  EXPECT_THAT(error_of(small_plan(folder / "foreign", 1, 1), {.overwrite = true}),
              HasSubstr("weights.safetensors"));
  EXPECT_EQ(contents(folder / "foreign").at("weights.safetensors"), "precious");
  std::ofstream(folder / "file") << "x";
  EXPECT_THAT(error_of(small_plan(folder / "file", 1, 1), {}), HasSubstr("is a file"));
}

TEST(Conversion, OverwritingTakesTheOtherFilesToo) {
  const Folder folder;
  ConversionPlan first = small_plan(folder / "out", 1, 1, true);
  for (const char* name : {"kt_weights.json", "tokenizer.json", "vocab.json", "merges.txt"})
    first.side_files.push_back({name, text("of the first: {}", name), ""});
  run_conversion(first, {.threads = 1});
  std::ofstream(folder / "out/vocab.json") << "mine by now";
  std::ofstream(folder / "out/notes.txt") << "mine";
  run_conversion(small_plan(folder / "out", 1, 1), {.threads = 1, .overwrite = true});
  auto left = contents(folder / "out");
  EXPECT_EQ(left.extract("vocab.json").mapped(), "mine by now");
  EXPECT_EQ(left.extract("notes.txt").mapped(), "mine");
  run_conversion(small_plan(folder / "fresh", 1, 1), {.threads = 1});
  EXPECT_EQ(left, contents(folder / "fresh"));
}

TEST(Conversion, ARefusedResumeNamesWhatDiffers) {
  const Folder folder;
  const std::string long_name(100, 'a');
  ConversionPlan plan = small_plan(folder / "out", 1, 1);
  plan.settings["contents"] = {{"config.json", long_name + "1"}, {"m.gguf", "x"}};
  plan.settings["method"] = {{"name", "gptq"}, {"seed", 1}, {"text", long_name}, {"ignore", {"a", "b"}}};
  run_conversion(plan, {.threads = 1});
  ConversionPlan other = plan;
  other.settings["method"]["seed"] = 2;
  EXPECT_THAT(error_of(other, {.resume = true}), HasSubstr("one: method.seed 1 before, 2 now; `overwrite`"));
  other.settings["method"]["ignore"][1] = "c";
  EXPECT_THAT(error_of(other, {.resume = true}), HasSubstr("method.ignore[1] \"b\" before, \"c\" now"));
  // The end of two long values that begin alike.
  other = plan;
  other.settings["contents"]["config.json"] = long_name + "2";
  EXPECT_THAT(error_of(other, {.resume = true}),
              HasSubstr("contents.config.json ...aaaaaaaaaaaa1\" before, ...aaaaaaaaaaaa2\" now"));
  other = plan;
  other.settings["method"].erase("text");
  EXPECT_THAT(error_of(other, {.resume = true}), HasSubstr("before, absent now"));
  other.resume_hint = [](const Json& before) { return "seed " + before["method"]["seed"].dump() + " helps"; };
  EXPECT_THAT(error_of(other, {.resume = true}), HasSubstr("; seed 1 helps, `overwrite`"));
  for (int i = 0; i < 9; ++i) other.settings[text("more{}", i)] = i;
  EXPECT_THAT(error_of(other, {.resume = true}), HasSubstr("; and 6 more; "));
}

TEST(Conversion, RecordsThatAreOldOrDamagedAreRefusedInWords) {
  const Folder folder;
  run_conversion(small_plan(folder / "old", 1, 1), {.threads = 1});
  ConversionPlan plan = small_plan(folder / "old", 1, 1);
  plan.settings["contents"] = {{"config.json", "x"}};
  EXPECT_THAT(error_of(plan, {.resume = true}), HasSubstr("older kt"));

  const ConversionPlan stopped = small_plan(folder / "out", 2, 1, false, [](int layer, int) {
    if (layer == 1) fail("stop");
  });
  EXPECT_EQ(error_of(stopped, {.threads = 1}), "stop");
  const std::string record = folder / "out/.kt_progress/model-00001-of-00003.safetensors.json";
  ASSERT_TRUE(fs::exists(record));
  std::ofstream(record) << "{\"fil";
  const ConversionResult result = run_conversion(small_plan(folder / "copy", 2, 1), {.threads = 1});
  EXPECT_EQ(result.shards_written, 3u);
  const std::string settings = folder / "out/.kt_progress/settings.json";
  const std::string whole = contents(folder / "out/.kt_progress").at("settings.json");
  std::ofstream(settings) << whole.substr(0, whole.size() / 2);
  const std::string message = error_of(small_plan(folder / "out", 2, 1), {.resume = true});
  EXPECT_THAT(message, HasSubstr(settings + ": damaged"));
  EXPECT_THAT(message, HasSubstr("`overwrite`"));
  // With the settings back, a damaged record only means that its shard is written again.
  std::ofstream(settings) << whole;
  EXPECT_EQ(run_conversion(small_plan(folder / "out", 2, 1), {.threads = 1, .resume = true}).shards_written,
            3u);
  EXPECT_EQ(contents(folder / "out"), contents(folder / "copy"));
  std::ofstream(folder / "out/kt_manifest.json") << "{";
  EXPECT_THAT(error_of(small_plan(folder / "out", 2, 1), {.resume = true}),
              HasSubstr("kt_manifest.json: damaged"));
  run_conversion(small_plan(folder / "out", 2, 1), {.threads = 1, .overwrite = true});
  EXPECT_EQ(contents(folder / "out"), contents(folder / "copy"));
}

TEST(Conversion, TheClockOfProgressStartsAfterPrepare) {
  const Folder folder;
  ConversionPlan plan = small_plan(folder / "out", 1, 1);
  plan.prepare = [](const std::string&) { std::this_thread::sleep_for(std::chrono::milliseconds(500)); };
  double seconds = -1;
  const ConversionResult result = run_conversion(
      plan, {.threads = 1, .progress = [&](const ConversionProgress& at) { seconds = at.seconds; }});
  EXPECT_GE(seconds, 0);
  EXPECT_GE(result.prepare_seconds, 0.5);
  EXPECT_LE(seconds, result.seconds - result.prepare_seconds);
}

TEST(Conversion, InputAndOutputStayApart) {
  const Folder folder;
  fs::create_directories(folder / "in/sub");
  for (const auto& [in, out, reason] : {std::tuple{"in", "in", "same folder"},
                                        {"in", "in/out", "inside the input"},
                                        {"in/sub", "in", "contains the input"}}) {
    ConversionPlan plan = small_plan(folder / out, 1, 1);
    plan.input = folder / in;
    EXPECT_THAT(error_of(plan, {}), HasSubstr(reason));
  }
  std::ofstream(folder / "in/file.gguf") << "x";
  ConversionPlan beside = small_plan(folder / "in/out", 1, 1);
  beside.input = folder / "in/file.gguf";
  EXPECT_EQ(run_conversion(beside, {}).shards_written, beside.shards.size());
  beside.output = folder / "in";
  EXPECT_THAT(error_of(beside, {}), HasSubstr("same folder"));
}

TEST(Conversion, MemoryBoundLimitsWorkers) {
  const Folder folder;
  ConversionPlan plan = small_plan(folder / "out", 2, 4);
  for (ShardPlan& shard : plan.shards)
    for (Piece& piece : shard.pieces) piece.scratch_bytes = 100u << 20;
  EXPECT_THAT(error_of(plan, {.threads = 2, .max_memory = 100u << 20}),
              HasSubstr("one worker needs 164.0 MiB"));
  EXPECT_FALSE(fs::exists(folder / "out"));
  EXPECT_EQ(run_conversion(plan, {.threads = 2, .max_memory = 170u << 20}).threads, 1);
}

TEST(Conversion, TooSmallADiskIsFoundBeforeTheFirstByte) {
  const Folder folder;
  ConversionPlan plan = small_plan(folder / "out", 1, 1);
  plan.shards[0].tensors[0].shape = {int64_t{1} << 60};
  try {
    run_conversion(plan, {.threads = 1});
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kMemory);
    EXPECT_THAT(error.what(), HasSubstr("not enough disk"));
  }
  EXPECT_FALSE(fs::exists(folder / "out"));
}

TEST(Conversion, DiskForWhatIsPreparedCountsWhileItIsLeftToDo) {
  const Folder folder;
  ConversionPlan plan = small_plan(folder / "out", 2, 2);
  plan.prepare = [](const std::string&) {};
  plan.prepare_bytes = uint64_t{1} << 60;
  EXPECT_THAT(error_of(plan, {.threads = 1}), HasSubstr("the work on it 1.0 EiB"));
  EXPECT_FALSE(fs::exists(folder / "out"));
  plan.prepare_bytes = 1;
  run_conversion(plan, {.threads = 1});
  plan.prepare_bytes = uint64_t{1} << 60;
  EXPECT_EQ(run_conversion(plan, {.threads = 1, .resume = true}).shards_written, 0u);
}

TEST(Conversion, ASourceThatChangesStopsIt) {
  const Folder folder;
  ConversionPlan plan = small_plan(folder / "out", 2, 2);
  plan.check_source = [] { fail("source.safetensors: changed"); };
  EXPECT_THAT(error_of(plan, {.threads = 1}), HasSubstr("changed"));
  EXPECT_FALSE(fs::exists(folder / "out/model-00001-of-00003.safetensors"));
}

TEST(Conversion, OneWriterAtATime) {
  const Folder folder;
  const ConversionPlan plan = small_plan(folder / "out", 1, 1, false, [&](int layer, int) {
    if (layer != 0) return;
    EXPECT_THAT(error_of(small_plan(folder / "out", 1, 1), {.threads = 1, .resume = true}),
                HasSubstr("another conversion"));
  });
  run_conversion(plan, {.threads = 1});
}

}  // namespace
}  // namespace kt::inline weights
