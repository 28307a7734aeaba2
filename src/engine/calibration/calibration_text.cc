#include "engine/calibration/calibration_text.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <numeric>
#include <optional>
#include <random>

#include "base/error.h"
#include "base/file.h"
#include "base/sha256.h"
#include "engine/chat_template.h"
#include "engine/perplexity.h"

namespace kt {
namespace {

namespace fs = std::filesystem;

std::string_view characters_of(const MappedFile& file) {
  return {reinterpret_cast<const char*>(file.bytes().data()), file.size()};
}

std::string hub_folder() {
  const auto variable = [](const char* name) {
    const char* value = std::getenv(name);
    return std::string(value ? value : "");
  };
  if (const std::string cache = variable("HF_HUB_CACHE"); !cache.empty()) return cache;
  if (const std::string home = variable("HF_HOME"); !home.empty()) return home + "/hub";
  return variable("HOME") + "/.cache/huggingface/hub";
}

bool has_kind(const fs::path& path, std::initializer_list<const char*> kinds) {
  return std::any_of(kinds.begin(), kinds.end(), [&](const char* kind) { return path.extension() == kind; });
}

// Files of the newest snapshot whose names say the split, in order.
std::vector<std::string> hub_files(const TextRequest& request) {
  std::string name = request.dataset;
  for (size_t at; (at = name.find('/')) != std::string::npos;) name.replace(at, 1, "--");
  const fs::path snapshots = fs::path(hub_folder()) / ("datasets--" + name) / "snapshots";
  std::error_code code;
  std::vector<fs::path> revisions;
  for (const auto& entry : fs::directory_iterator(snapshots, code))
    if (entry.is_directory(code)) revisions.push_back(entry.path());
  if (revisions.empty())
    fail(
        "{} {}: not a file, and not in the local hub cache ({}); nothing is downloaded: pass a .jsonl "
        "or .txt file",
        request.flag, request.dataset, snapshots.string());
  const auto newest = [](const fs::path& a, const fs::path& b) {
    return std::pair(fs::last_write_time(a), a) < std::pair(fs::last_write_time(b), b);
  };
  const fs::path folder = *std::max_element(revisions.begin(), revisions.end(), newest);
  std::vector<std::string> files, others;
  for (const auto& entry : fs::recursive_directory_iterator(folder, code)) {
    const std::string within = entry.path().lexically_relative(folder).string();
    if (!request.split.empty() && within.find(request.split) == std::string::npos) continue;
    if (has_kind(entry.path(), {".jsonl", ".txt"})) files.push_back(entry.path().string());
    if (has_kind(entry.path(), {".parquet"})) others.push_back(entry.path().string());
  }
  std::sort(files.begin(), files.end());
  if (!files.empty()) return files;
  if (!others.empty())
    fail_as(ErrorKind::kUnsupported,
            "{} {}: its files are .parquet, which kt does not read; scripts/convert_gpu_weights.py "
            "converts them where pyarrow is installed, or pass a .jsonl or .txt file",
            request.flag, request.dataset);
  fail("{} {}: {} has no .jsonl or .txt file{}", request.flag, request.dataset, folder.string(),
       request.split.empty() ? "" : text(" of split {}", request.split));
}

std::vector<std::string> dataset_files(const TextRequest& request) {
  const fs::path path = request.dataset;
  std::error_code code;
  if (!fs::exists(path, code)) {
    const bool hub = std::count(request.dataset.begin(), request.dataset.end(), '/') == 1 &&
                     !has_kind(path, {".jsonl", ".txt", ".json", ".parquet"});
    if (hub) return hub_files(request);
    fail("{} {}: no such file", request.flag, request.dataset);
  }
  if (fs::is_directory(path, code)) fail("{} {}: a folder; expected a file", request.flag, request.dataset);
  if (has_kind(path, {".parquet"}))
    fail_as(ErrorKind::kUnsupported,
            "{} {}: kt does not read .parquet; scripts/convert_gpu_weights.py converts it where pyarrow "
            "is installed, or pass a .jsonl or .txt file",
            request.flag, request.dataset);
  if (!has_kind(path, {".jsonl", ".txt"}))
    fail("{} {}: expected a .jsonl or .txt file", request.flag, request.dataset);
  return {request.dataset};
}

// "from: human" and their like, as templates know them.
std::string role_named(const std::string& name) {
  if (name == "human") return "user";
  if (name == "gpt" || name == "model") return "assistant";
  return name;
}

class Reader {
 public:
  Reader(const TextRequest& request, const LoadedModel& model) : request_(request), model_(model) {
    out_.max_length = std::min(request.max_length, model.spec().context);
    if (!model.chat_template().empty()) template_.emplace(model.chat_template(), model.path());
  }
  CalibrationText read();

 private:
  void read_documents(const std::string& path);
  void read_lines(const std::string& path);
  std::string text_of(const Json& line, const std::string& where) const;
  std::string rendered(const Json& messages, const std::string& where) const;
  void take(std::vector<TokenId> tokens);
  std::vector<size_t> chosen(size_t count) const;

  const TextRequest& request_;
  const LoadedModel& model_;
  std::optional<ChatTemplate> template_;
  CalibrationText out_;
};

// At most as many as are wanted, by the seed, ascending. Fisher-Yates by hand: libraries differ in theirs.
std::vector<size_t> Reader::chosen(size_t count) const {
  std::vector<size_t> numbers(count);
  std::iota(numbers.begin(), numbers.end(), size_t{0});
  const auto left = static_cast<size_t>(request_.samples) -
                    std::min(out_.samples.size(), static_cast<size_t>(request_.samples));
  if (count <= left) return numbers;
  std::mt19937_64 random(request_.seed);
  for (size_t i = 0; i < left; ++i) std::swap(numbers[i], numbers[i + random() % (count - i)]);
  numbers.resize(left);
  std::sort(numbers.begin(), numbers.end());
  return numbers;
}

void Reader::take(std::vector<TokenId> tokens) {
  if (tokens.size() < 2) {
    ++out_.too_short;
    return;
  }
  if (tokens.size() > static_cast<size_t>(out_.max_length)) {
    ++out_.cut;
    tokens.resize(static_cast<size_t>(out_.max_length));
  }
  out_.tokens += static_cast<int64_t>(tokens.size());
  out_.samples.push_back(std::move(tokens));
}

void Reader::read_documents(const std::string& path) {
  const MappedFile file(path);
  constexpr std::string_view kSeparator = "<|endoftext|>";
  std::optional<TokenId> end = model_.tokenizer().id_of(kSeparator);
  if (!end && !model_.end_ids().empty()) end = model_.end_ids().front();
  if (!end) fail("{}: the tokenizer of {} has no token that ends a text", path, model_.path());
  const std::vector<TokenId> tokens =
      document_tokens(model_.tokenizer(), characters_of(file), *end, kSeparator);
  const auto length = static_cast<size_t>(out_.max_length);
  const size_t count = (tokens.size() + length - 1) / length;
  out_.found += static_cast<int64_t>(count);
  for (const size_t i : chosen(count))
    take({tokens.begin() + static_cast<int64_t>(i * length),
          tokens.begin() + static_cast<int64_t>(std::min(tokens.size(), (i + 1) * length))});
}

std::string Reader::rendered(const Json& messages, const std::string& where) const {
  if (!template_)
    fail("{}: messages, but {} has no chat template; pass lines with \"text\"", where, model_.path());
  TemplateVariables list = TemplateVariables::array();
  if (!messages.is_array()) fail("{}: messages are no list", where);
  for (const Json& message : messages) {
    const bool named = message.is_object() && message.contains("from");
    const char *role = named ? "from" : "role", *content = named ? "value" : "content";
    if (!message.is_object() || !message.contains(role) || !message.at(role).is_string() ||
        !message.contains(content) || !message.at(content).is_string())
      fail("{}: a message without {} and {}, both strings", where, role, content);
    list.push_back({{"role", role_named(message.at(role).get<std::string>())},
                    {"content", message.at(content).get<std::string>()}});
  }
  TemplateVariables variables = {{"messages", list}, {"add_generation_prompt", false}};
  for (const auto& [key, value] : model_.template_tokens().items()) variables[key] = value;
  try {
    return template_->render(variables);
  } catch (const Error& error) {
    fail_as(error.kind(), "{}: {}", where, error.what());
  }
}

std::string Reader::text_of(const Json& line, const std::string& where) const {
  if (!line.is_object()) fail("{}: expected an object", where);
  for (const char* key : {"messages", "conversations"})
    if (const auto found = line.find(key); found != line.end()) return rendered(*found, where);
  if (const auto found = line.find("text"); found != line.end()) {
    if (!found->is_string()) fail("{}: text is not a string", where);
    return found->get<std::string>();
  }
  std::string columns;
  for (const auto& [key, value] : line.items()) columns += text("{}{}", columns.empty() ? "" : ", ", key);
  fail("{}: columns {}; expected text, messages or conversations", where,
       columns.empty() ? "(none)" : columns.substr(0, 200));
}

void Reader::read_lines(const std::string& path) {
  const MappedFile file(path);
  const std::string_view all = characters_of(file);
  struct Line {
    size_t number;
    std::string_view words;
  };
  std::vector<Line> lines;
  for (size_t at = 0, number = 1; at < all.size(); ++number) {
    const size_t end = std::min(all.find('\n', at), all.size());
    const std::string_view words = all.substr(at, end - at);
    if (words.find_first_not_of(" \t\r") != std::string_view::npos) lines.push_back({number, words});
    at = end + 1;
  }
  out_.found += static_cast<int64_t>(lines.size());
  for (const size_t i : chosen(lines.size())) {
    const std::string where = text("{} line {}", path, lines[i].number);
    const Json line = Json::parse(lines[i].words, nullptr, false);
    if (line.is_discarded()) fail("{}: not JSON", where);
    take(model_.tokenizer().encode(text_of(line, where)));
  }
}

CalibrationText Reader::read() {
  out_.files = dataset_files(request_);
  for (const std::string& path : out_.files) {
    if (fs::path(path).extension() == ".txt") {
      read_documents(path);
    } else {
      read_lines(path);
    }
  }
  if (out_.tokens == 0)
    fail("{} {}: empty: no sample of two tokens or more", request_.flag, request_.dataset);
  if (out_.tokens < kLeastTokens)
    fail("{} {}: too short: {} tokens, calibration needs at least {}", request_.flag, request_.dataset,
         out_.tokens, kLeastTokens);
  Sha256 sum;
  for (const std::vector<TokenId>& sample : out_.samples) {
    const uint64_t length = sample.size();
    sum.add(std::as_bytes(std::span(&length, 1)));
    sum.add(std::as_bytes(std::span(sample)));
  }
  out_.digest = sum.hex();
  return std::move(out_);
}

}  // namespace

CalibrationText read_calibration_text(const TextRequest& request, const LoadedModel& model) {
  return Reader(request, model).read();
}

}  // namespace kt
