#include "weights/plans/conversion_output.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <filesystem>
#include <mutex>
#include <regex>
#include <system_error>

#include "base/error.h"
#include "base/file.h"
#include "base/log.h"
#include "base/pool.h"
#include "base/sha256.h"
#include "weights/plans/source_identity.h"

namespace kt::inline weights {
namespace {

namespace fs = std::filesystem;
constexpr std::string_view kManifest = "kt_manifest.json";
constexpr std::string_view kProgress = ".kt_progress";
constexpr std::string_view kIndex = "model.safetensors.index.json";
constexpr const char* kContents = "contents";  // source_contents() in a plan's settings

// Names in an output folder, by what this program gives them.
const std::regex& file_names() {
  static const std::regex names(R"(model-\d{5,}-of-\d{5,}\.safetensors|model\.safetensors\.index\.json|)"
                                R"(kt_calibration\.(json|svg)|kt_weights\.json)");
  return names;
}

const std::regex& folder_names() {
  static const std::regex names(R"(_layer_\d+)");
  return names;
}

const std::regex& temporary_names() {
  static const std::regex names(R"(.*\.\d+-\d+\.tmp)");
  return names;
}

std::string reason(const std::error_code& code) { return code.message(); }

// Links are shown by this iterator, not followed.
void refuse_links_below(const std::string& folder) {
  std::error_code code;
  fs::recursive_directory_iterator at(folder, code);
  for (const fs::recursive_directory_iterator end; !code && at != end; at.increment(code))
    refuse_link(at->path().string());
}

Json to_json(const WeightError& error) {
  return {{"signal", error.signal},
          {"noise", error.noise},
          {"largest", error.largest},
          {"weights", error.weights}};
}

WeightError weight_error(const Json& json) {
  return {.signal = json.at("signal").get<double>(),
          .noise = json.at("noise").get<double>(),
          .largest = json.at("largest").get<double>(),
          .weights = json.at("weights").get<int64_t>()};
}

Json to_json(const ShardRecord& record) {
  Json files = Json::array();
  for (const WrittenFile& file : record.files)
    files.push_back({{"name", file.name}, {"bytes", file.bytes}, {"sha256", file.sha256}});
  const PieceReport& report = record.report;
  return {{"files", files},
          {"error",
           {{"gate", to_json(report.gate)},
            {"up", to_json(report.up)},
            {"down", to_json(report.down)},
            {"output", to_json(report.output)}}}};
}

// Null if the record is not one: a damaged record only means that its shard is written again.
std::unique_ptr<ShardRecord> record_from(const Json& json) {
  auto record = std::make_unique<ShardRecord>();
  try {
    for (const Json& file : json.at("files"))
      record->files.push_back({file.at("name"), file.at("bytes"), file.at("sha256")});
    const Json& error = json.at("error");
    record->report = {weight_error(error.at("gate")), weight_error(error.at("up")),
                      weight_error(error.at("down")), weight_error(error.at("output"))};
  } catch (const nlohmann::json::exception&) {
    return nullptr;
  }
  return record;
}

bool sizes_match(const std::string& output, const ShardRecord& record) {
  return std::all_of(record.files.begin(), record.files.end(), [&](const WrittenFile& file) {
    std::error_code code;
    const auto size = fs::file_size(fs::path(output) / file.name, code);
    return !code && size == file.bytes;
  });
}

// Two values that differ, short: long ones from a little before the place where they do.
std::string shown_change(const Json* before, const Json* now) {
  constexpr size_t kMost = 60, kBefore = 12;
  const auto written = [](const Json* value) { return value ? value->dump() : std::string("absent"); };
  const std::string a = written(before), b = written(now);
  const auto differ = static_cast<size_t>(std::ranges::mismatch(a, b).in1 - a.begin());
  const auto shown = [&](const std::string& all) {
    if (all.size() <= kMost) return all;
    const size_t from = differ < kMost - kBefore ? 0 : std::min(differ, all.size()) - kBefore;
    return text("{}{}{}", from > 0 ? "..." : "", all.substr(from, kMost - 6),
                from + kMost - 6 < all.size() ? "..." : "");
  };
  return text("{} before, {} now", shown(a), shown(b));
}

// "method.dampening 0.5 before, 0.2 now" for every value that differs, by its place.
void find_changes(const std::string& place, const Json* before, const Json* now,
                  std::vector<std::string>& out) {
  if (before && now && *before == *now) return;
  if (before && now && before->is_object() && now->is_object()) {
    const auto in = [](const Json& json, const std::string& key) {
      const auto found = json.find(key);
      return found == json.end() ? nullptr : &*found;
    };
    Json keys = *before;
    keys.update(*now);
    for (const auto& [key, ignored] : keys.items())
      find_changes(place.empty() ? key : place + "." + key, in(*before, key), in(*now, key), out);
  } else if (before && now && before->is_array() && now->is_array() && before->size() == now->size()) {
    for (size_t i = 0; i < now->size(); ++i)
      find_changes(text("{}[{}]", place, i), &before->at(i), &now->at(i), out);
  } else {
    out.push_back(text("{} {}", place, shown_change(before, now)));
  }
}

std::string differences(const Json& before, const Json& now) {
  constexpr size_t kShown = 4;
  std::vector<std::string> changes;
  find_changes("", &before, &now, changes);
  std::string out;
  for (size_t i = 0; i < std::min(kShown, changes.size()); ++i) out += (i ? "; " : "") + changes[i];
  return changes.size() > kShown ? text("{}; and {} more", out, changes.size() - kShown) : out;
}

// Nothing where there is no such file or it is damaged: its shards are written again.
std::optional<Json> readable_json(const std::string& path) {
  if (!fs::exists(path)) return std::nullopt;
  try {
    return read_json(path, {.bytes = size_t{1} << 30});
  } catch (const Error&) {
    return std::nullopt;
  }
}

// A file that only this program writes, and whole.
Json own_record(const std::string& path) {
  try {
    Json json = read_json(path, {.bytes = size_t{1} << 30});
    if (json.is_object()) return json;
  } catch (const Error&) {
    // said below
  }
  fail("{}: damaged: the record of the conversion in this folder cannot be read; `overwrite` starts it anew",
       path);
}

}  // namespace

std::string conversion_work_folder(const std::string& output) {
  return text("{}/{}/work", output, kProgress);
}

void replace_side_file(const std::string& output, const std::string& name, std::string_view content) {
  const std::string path = text("{}/{}", output, kManifest);
  Json manifest = read_json(path, {.bytes = size_t{1} << 30});
  const auto bytes = std::as_bytes(std::span(content));
  Sha256 sum;
  sum.add(bytes);
  for (Json& file : manifest.at("files"))
    if (file.at("name") == name) file = {{"name", name}, {"bytes", bytes.size()}, {"sha256", sum.hex()}};
  write_atomically(output + "/" + name, bytes);
  write_atomically(path, manifest.dump(1));
}

OutputRecord::OutputRecord(std::string output, const ConversionPlan& plan, const ConversionOptions& options)
    : output_(std::move(output)), plan_(plan) {
  refuse_links();
  check_resumable(options);
  make_folder(progress_folder());
  const std::string lock = progress("lock");
  lock_ = open(lock.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0666);
  if (lock_ < 0)
    fail_as(write_error_kind(errno), "{}: cannot create: {}", lock, std::generic_category().message(errno));
  if (flock(lock_, LOCK_EX | LOCK_NB) != 0)
    fail("{}: another conversion is writing into this folder; wait for it or choose another `output`",
         output_);
  if (options.overwrite && !options.resume) clear_for_overwrite();
  remove_leftovers();
  records_.resize(plan.shards.size());
  if (options.resume || options.resume_layer) read_records();
  write_atomically(progress("settings.json"), plan.settings.dump(1));
}

OutputRecord::~OutputRecord() {
  if (lock_ >= 0) close(lock_);
}

// Without a slash behind it: with one, removing it would follow a link.
std::string OutputRecord::progress_folder() const { return text("{}/{}", output_, kProgress); }

std::string OutputRecord::progress(std::string_view name) const {
  return text("{}/{}/{}", output_, kProgress, name);
}

std::string OutputRecord::work_folder() const {
  std::string folder = conversion_work_folder(output_);
  make_folder(folder);
  return folder;
}

// Whether this conversion, or an earlier one, writes or removes this name in the output folder.
bool OutputRecord::is_ours(const std::string& name) const {
  if (name == kProgress || name == kManifest) return true;
  for (const std::regex* names : {&file_names(), &folder_names(), &temporary_names()})
    if (std::regex_match(name, *names)) return true;
  return std::ranges::find(plan_.shards, name, &ShardPlan::file) != plan_.shards.end() ||
         std::ranges::find(plan_.side_files, name, &SideFile::name) != plan_.side_files.end();
}

void OutputRecord::refuse_links() const {
  std::error_code code;
  fs::directory_iterator at(output_, code);
  for (const fs::directory_iterator end; !code && at != end; at.increment(code)) {
    const std::string path = at->path().string();
    if (!is_ours(at->path().filename().string())) continue;
    refuse_link(path);
    refuse_links_below(path);
  }
}

void OutputRecord::check_resumable(const ConversionOptions& options) const {
  std::error_code code;
  if (!fs::exists(output_, code)) return;
  if (!fs::is_directory(output_, code)) fail("{}: the output is a file; expected a folder", output_);
  const bool resume = options.resume || options.resume_layer;
  const std::string settings = progress("settings.json"), finished = text("{}/{}", output_, kManifest);
  const bool before = fs::exists(settings, code) || fs::exists(finished, code);
  if (before && resume)
    check_same(fs::exists(settings, code) ? own_record(settings)
                                          : own_record(finished).value("settings", Json::object()));
  if (resume || options.overwrite) return;
  for (const auto& entry : fs::directory_iterator(output_, code))
    if (entry.path().filename() != kProgress || before)
      fail("{}: the output exists ({}); `resume` finishes it, `overwrite` replaces it", output_,
           before ? "a conversion" : entry.path().filename().string() + " is there");
}

void OutputRecord::check_same(const Json& before) const {
  if (before == plan_.settings) return;
  if (plan_.settings.contains(kContents) && !before.contains(kContents))
    fail(
        "{}: cannot resume, the conversion there is of an older kt, which did not write down what its source "
        "holds; `overwrite` starts it anew",
        output_);
  const std::string hint = plan_.resume_hint ? plan_.resume_hint(before) : std::string();
  fail("{}: cannot resume, the conversion there was another one: {}; {}`overwrite` starts it anew", output_,
       differences(before, plan_.settings), hint.empty() ? "" : hint + ", ");
}

// Removes the files of an earlier conversion, and nothing that this program did not write. What says that
// they are ours goes last: one that was interrupted can be repeated.
void OutputRecord::clear_for_overwrite() const {
  const bool ours = fs::exists(progress("settings.json")) || fs::exists(text("{}/{}", output_, kManifest));
  std::error_code code;
  for (const auto& entry : fs::directory_iterator(output_)) {
    const std::string name = entry.path().filename().string();
    const bool folder = entry.is_directory(code);
    if (ours && std::regex_match(name, folder ? folder_names() : file_names())) {
      fs::remove_all(entry.path(), code);
      if (code) fail("{}: cannot remove: {}", entry.path().string(), reason(code));
    } else if (!folder && entry.path().extension() == ".safetensors") {
      fail("{}: holds {}, which no conversion of this program wrote; choose another `output`", output_, name);
    }
  }
  remove_side_files();
  for (const auto& entry : fs::directory_iterator(progress_folder()))
    if (entry.path().filename() != "lock" && entry.path().filename() != "settings.json")
      fs::remove_all(entry.path(), code);
  for (const std::string& last : {text("{}/{}", output_, kManifest), progress("settings.json")}) {
    fs::remove(last, code);
    if (code) fail("{}: cannot remove: {}", last, reason(code));
  }
}

// Those that the manifest names and that are still what was written: the next conversion may have others.
void OutputRecord::remove_side_files() const {
  const std::optional<Json> manifest = readable_json(text("{}/{}", output_, kManifest));
  if (!manifest || !manifest->is_object()) return;
  const Json files = manifest->value("files", Json::array());
  for (const Json& file : files) {
    const auto word = [&](const char* key) {
      return file.is_object() && file.contains(key) && file.at(key).is_string()
                 ? file.at(key).get<std::string>()
                 : std::string();
    };
    const std::string name = word("name"), path = text("{}/{}", output_, name);
    std::error_code code;
    if (name.empty() || name.find('/') != name.npos || !fs::is_regular_file(path, code)) continue;
    if (file_digest(path) != word("sha256")) continue;
    fs::remove(path, code);
    if (code) fail("{}: cannot remove: {}", path, reason(code));
  }
}

// Temporaries of killed runs; the lock says that nobody is using them.
void OutputRecord::remove_leftovers() const {
  std::error_code code;
  for (const fs::path& folder :
       {fs::path(output_), fs::path(progress_folder()), fs::path(conversion_work_folder(output_))})
    for (const auto& entry : fs::directory_iterator(folder, code))
      if (std::regex_match(entry.path().filename().string(), temporary_names()))
        fs::remove_all(entry.path(), code);
}

void OutputRecord::read_records() {
  const std::optional<Json> manifest = readable_json(text("{}/{}", output_, kManifest));
  for (size_t i = 0; i < records_.size(); ++i) {
    const std::string name = plan_.shards[i].file;
    std::optional<Json> json = readable_json(progress(name + ".json"));
    if (!json && manifest && manifest->contains("shards") && manifest->at("shards").contains(name))
      json = manifest->at("shards").at(name);
    if (!json) continue;
    std::unique_ptr<ShardRecord> record = record_from(*json);
    if (record && sizes_match(output_, *record)) records_[i] = std::move(record);
  }
}

void OutputRecord::check_finished(int threads, const std::function<void(uint64_t, uint64_t)>& read) {
  std::vector<size_t> shards;
  uint64_t total = 0, done = 0;
  for (size_t i = 0; i < records_.size(); ++i) {
    if (!records_[i]) continue;
    shards.push_back(i);
    for (const WrittenFile& file : records_[i]->files) total += file.bytes;
  }
  if (shards.empty()) return;
  std::atomic<size_t> next = 0;
  std::mutex mutex;
  Pool pool({.threads = std::min(threads, static_cast<int>(shards.size()))});
  pool.run([&](const Worker&) {
    for (size_t at = next++; at < shards.size(); at = next++) {
      std::unique_ptr<ShardRecord>& record = records_[shards[at]];
      const WrittenFile* changed = nullptr;
      for (const WrittenFile& file : record->files) {
        if (file_digest(text("{}/{}", output_, file.name)) != file.sha256) changed = &file;
        const std::lock_guard lock(mutex);
        done += file.bytes;
        if (read) read(done, total);
        if (changed) break;
      }
      if (!changed) continue;
      KT_LOG(LogLevel::kWarning, "{}/{}: not what was written there; it is written again", output_,
             changed->name);
      record.reset();
    }
  });
}

const ShardRecord* OutputRecord::finished(size_t shard) const { return records_[shard].get(); }

bool OutputRecord::exists(size_t shard) const {
  return fs::exists(fs::path(output_) / plan_.shards[shard].file);
}

void OutputRecord::add(size_t shard, ShardRecord record) {
  write_atomically(progress(plan_.shards[shard].file + ".json"), to_json(record).dump());
  records_[shard] = std::make_unique<ShardRecord>(std::move(record));
}

void OutputRecord::write_index() {
  Json map = Json::object();
  uint64_t total = 0;
  for (const ShardPlan& shard : plan_.shards)
    for (const TensorSpec& tensor : shard.tensors) {
      map[tensor.name] = shard.file;
      total += byte_count(tensor);
    }
  const std::string index =
      Json{{"metadata", {{"total_size", total}}}, {"weight_map", std::move(map)}}.dump(1);
  write_side(std::string(kIndex), std::as_bytes(std::span(index)));
}

Json OutputRecord::manifest() const {
  Json shards = Json::object(), layers = Json::array(), side = Json::array();
  for (size_t i = 0; i < records_.size(); ++i) {
    const ShardPlan& shard = plan_.shards[i];
    if (records_[i]) shards[shard.file] = to_json(*records_[i]);
    if (shard.layer < 0) continue;
    Json layer = {{"layer", shard.layer},
                  {"file", shard.file},
                  {"state", records_[i] ? "done"
                            : exists(i) ? "kept"
                                        : "absent"}};
    if (records_[i]) {
      const PieceReport& report = records_[i]->report;
      Json error = {
          {"gate", report.gate.relative()}, {"up", report.up.relative()}, {"down", report.down.relative()}};
      if (report.output.weights > 0) error["output"] = report.output.relative();
      layer["relative_error"] = std::move(error);
    }
    layers.push_back(std::move(layer));
  }
  for (const WrittenFile& file : side_)
    side.push_back({{"name", file.name}, {"bytes", file.bytes}, {"sha256", file.sha256}});
  return {{"manifest", 1},
          {"settings", plan_.settings},
          {"layers", std::move(layers)},
          {"shards", std::move(shards)},
          {"files", std::move(side)}};
}

void OutputRecord::write_side(const std::string& name, std::span<const std::byte> bytes) {
  write_atomically(output_ + "/" + name, bytes);
  Sha256 sum;
  sum.add(bytes);
  side_.push_back({name, bytes.size(), sum.hex()});
}

void OutputRecord::finish() {
  const bool whole =
      std::all_of(records_.begin(), records_.end(), [](const auto& record) { return record != nullptr; });
  if (plan_.index && whole) write_index();
  for (const SideFile& file : plan_.side_files) {
    if (file.from.empty()) {
      write_side(file.name, std::as_bytes(std::span(file.text)));
    } else {
      // What prepare made is gone once a conversion has ended; its copy is here.
      const bool prepared = file.from.starts_with(conversion_work_folder(output_) + "/");
      write_side(
          file.name,
          MappedFile(prepared && !fs::exists(file.from) ? output_ + "/" + file.name : file.from).bytes());
    }
  }
  write_atomically(text("{}/{}", output_, kManifest), manifest().dump(1));
  std::error_code ignored;
  fs::remove_all(progress_folder(), ignored);
}

}  // namespace kt::inline weights
