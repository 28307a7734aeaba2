#include "weights/checkpoint.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <system_error>

#include "base/error.h"
#include "base/file.h"
#include "text/shown.h"
#include "weights/checkpoint_files.h"
#include "weights/gguf/gguf_config.h"
#include "weights/gguf/gguf_model.h"
#include "weights/kt/kt_names.h"

namespace kt::inline weights {
namespace {

// What tells a replaced or rewritten file from the one that was mapped.
struct Identity {
  uint64_t device = 0, inode = 0, size = 0;
  int64_t seconds = 0, nanoseconds = 0;
  bool operator==(const Identity&) const = default;
};

Identity identity_of(const std::string& path) {
  struct stat facts{};
  if (stat(path.c_str(), &facts) != 0)
    fail("{}: cannot stat: {}", path, std::generic_category().message(errno));
  return {facts.st_dev, facts.st_ino, static_cast<uint64_t>(facts.st_size), facts.st_mtim.tv_sec,
          facts.st_mtim.tv_nsec};
}

}  // namespace

struct Checkpoint::State {
  std::string path;
  CheckpointFiles found;
  std::vector<MappedFile> maps;
  std::vector<Identity> identities;
  std::vector<Metadata> metadata;
  std::vector<Tensor> tensors;
  bool kt_experts = false;
  GgufHeader gguf;
  const GgufFamily* family = nullptr;
  GgufFamilies families;
  Json config_json = Json::object();
  ModelConfig config;

  const MappedFile& map(const std::string& file) {
    const Identity before = identity_of(file);
    maps.emplace_back(file);
    if (identity_of(file) != before || maps.back().size() != before.size)
      fail("{}: changed while it was opened", file);
    identities.push_back(before);
    return maps.back();
  }

  void add(std::vector<Tensor>&& more, size_t file) {
    for (Tensor& t : more) {
      t.file = static_cast<int>(file);
      tensors.push_back(std::move(t));
    }
    more.clear();
  }

  void open_safetensors() {
    for (const std::string& file : found.files) {
      SafetensorsHeader header = parse_safetensors(map(file).bytes(), file);
      metadata.push_back(std::move(header.metadata));
      add(std::move(header.tensors), maps.size() - 1);
    }
    sort_tensors();
    check_index();
    kt_experts = std::ranges::any_of(
        tensors, [](const Tensor& t) { return parse_kt_tensor_name(t.name).has_value(); });
    const std::string config_path = (std::filesystem::path(found.folder) / "config.json").string();
    std::error_code ignored;
    if (std::filesystem::exists(config_path, ignored)) config_json = read_json(config_path);
    config = read_model_config(config_json, config_path);
  }

  void open_gguf() {
    std::vector<GgufHeader> headers;
    for (const std::string& file : found.files) headers.push_back(parse_gguf(map(file).bytes(), file));
    if (found.unrelated) {
      drop_companions(headers);
      check_one_model(headers);
    } else {
      check_split(headers);
    }
    for (size_t i = 0; i < headers.size(); ++i) add(std::move(headers[i].tensors), i);
    gguf = std::move(headers.front());
    metadata.resize(found.files.size());
    sort_tensors();
    const TensorFinder finder = [this](std::string_view name) { return find(name); };
    family = find_gguf_family(families, gguf, finder);
    config_json = gguf_config(gguf, family);
    if (family) GgufFacts(gguf, finder, *family, config_json).add();
    config = read_model_config(config_json, found.files.front(), gguf_key_names(gguf));
  }

  // Vision projectors, importance matrices and adapters lie beside a model and are none.
  void drop_companions(std::vector<GgufHeader>& headers) {
    const auto is_companion = [](const GgufHeader& h) {
      const std::string_view type = gguf_string(h, "general.type");
      return gguf_string(h, "general.architecture") == "clip" || type == "imatrix" || type == "mmproj" ||
             type == "adapter";
    };
    if (std::all_of(headers.begin(), headers.end(), is_companion)) return;
    for (size_t i = headers.size(); i-- > 0;) {
      if (!is_companion(headers[i])) continue;
      const auto at = static_cast<std::ptrdiff_t>(i);
      headers.erase(headers.begin() + at);
      found.files.erase(found.files.begin() + at);
      maps.erase(maps.begin() + at);
      identities.erase(identities.begin() + at);
    }
  }

  // Files without numbers are one model when they name one architecture and no tensor twice.
  void check_one_model(const std::vector<GgufHeader>& headers) const {
    std::vector<std::string_view> names;
    std::string_view architecture;
    bool one = true;
    for (const GgufHeader& h : headers) {
      const std::string_view own = gguf_string(h, "general.architecture");
      if (!own.empty() && !architecture.empty() && own != architecture) one = false;
      if (!own.empty()) architecture = own;
      for (const Tensor& t : h.tensors) names.push_back(t.name);
    }
    std::sort(names.begin(), names.end());
    if (std::adjacent_find(names.begin(), names.end()) != names.end()) one = false;
    if (one) return;
    std::vector<std::string> files;
    for (const std::string& file : found.files)
      files.push_back(std::filesystem::path(file).filename().string());
    fail("{}: several GGUF models, name one: {}", path, shown_list(files));
  }

  void check_split(const std::vector<GgufHeader>& headers) const {
    uint64_t total = 0;
    for (size_t i = 0; i < headers.size(); ++i) {
      total += headers[i].tensors.size();
      const auto number = gguf_unsigned(headers[i], "split.no");
      const auto count = gguf_unsigned(headers[i], "split.count");
      if (headers.size() == 1 && count.value_or(0) > 1)
        fail("{}: part {} of {} of a split model, under a name that does not say where the others are",
             found.files[i], number.value_or(0) + 1, *count);
      if (count.value_or(0) > 0 && (*count != headers.size() || number.value_or(i) != i))
        fail("{}: says it is part {} of {}, its name says {} of {}", found.files[i], number.value_or(0) + 1,
             *count, i + 1, headers.size());
    }
    const auto expected = gguf_unsigned(headers.front(), "split.tensors.count");
    if (expected && *expected != total)
      fail("{}: split.tensors.count is {}, the {} parts hold {} tensors", found.files.front(), *expected,
           headers.size(), total);
  }

  void sort_tensors() {
    std::sort(tensors.begin(), tensors.end(),
              [](const Tensor& a, const Tensor& b) { return a.name < b.name; });
    for (size_t i = 1; i < tensors.size(); ++i)
      if (tensors[i - 1].name == tensors[i].name)
        fail("{}: {} is in two files, {} and {}", path, shown(tensors[i].name), file_of(tensors[i - 1]),
             file_of(tensors[i]));
  }

  const std::string& file_of(const Tensor& t) const { return found.files[static_cast<size_t>(t.file)]; }

  const Tensor* find(std::string_view name) const {
    const auto at = std::lower_bound(tensors.begin(), tensors.end(), name,
                                     [](const Tensor& t, std::string_view n) { return t.name < n; });
    return at != tensors.end() && at->name == name ? &*at : nullptr;
  }

  // Tensors that only a file has are welcome: loaders never minded them.
  void check_index() {
    std::vector<std::string> absent;
    for (const IndexEntry& entry : found.map) {
      const Tensor* const tensor = find(entry.tensor);
      if (tensor == nullptr) {
        absent.push_back(entry.tensor);
      } else if (tensor->file != entry.file) {
        fail("{}: says that {} is in {}, it is in {}", found.index, shown(entry.tensor),
             found.files[static_cast<size_t>(entry.file)], file_of(*tensor));
      }
    }
    if (!absent.empty())
      fail("{}: {} tensors are not in the files it names: {}", found.index, absent.size(),
           shown_list(absent));
    found.map.clear();
    found.map.shrink_to_fit();
  }

  // The name that shares the longest beginning and end with the one asked for.
  const Tensor* nearest(std::string_view name) const {
    const Tensor* best = nullptr;
    size_t most = 0;
    for (const Tensor& t : tensors) {
      const size_t least = std::min(name.size(), t.name.size());
      size_t front = 0, back = 0;
      while (front < least && t.name[front] == name[front]) ++front;
      while (back < least - front && t.name[t.name.size() - 1 - back] == name[name.size() - 1 - back]) ++back;
      if (front + back <= most) continue;
      most = front + back;
      best = &t;
    }
    return best;
  }
};

Checkpoint::Checkpoint(const std::string& path, GgufFamilies families) : state_(std::make_unique<State>()) {
  state_->path = path;
  state_->families = families;
  state_->found = checkpoint_files(path);
  if (state_->found.gguf)
    state_->open_gguf();
  else
    state_->open_safetensors();
}

Checkpoint::~Checkpoint() = default;
Checkpoint::Checkpoint(Checkpoint&&) noexcept = default;
Checkpoint& Checkpoint::operator=(Checkpoint&&) noexcept = default;

const std::string& Checkpoint::path() const { return state_->path; }
const std::string& Checkpoint::folder() const { return state_->found.folder; }
bool Checkpoint::is_gguf() const { return state_->found.gguf; }
bool Checkpoint::has_kt_experts() const { return state_->kt_experts; }
std::span<const Tensor> Checkpoint::tensors() const { return state_->tensors; }
const Tensor* Checkpoint::find(std::string_view name) const { return state_->find(name); }
std::span<const std::string> Checkpoint::files() const { return state_->found.files; }
const Json& Checkpoint::config_json() const { return state_->config_json; }
const ModelConfig& Checkpoint::config() const { return state_->config; }
const GgufHeader& Checkpoint::gguf() const { return state_->gguf; }
const GgufFamily* Checkpoint::gguf_family() const { return state_->family; }
GgufFamilies Checkpoint::known_families() const { return state_->families; }

const Tensor& Checkpoint::at(std::string_view name) const {
  if (const Tensor* const tensor = find(name)) return *tensor;
  const Tensor* const near = state_->nearest(name);
  if (near == nullptr) fail("{}: no tensor {}", path(), shown(name));
  fail("{}: no tensor {}; the nearest name is {}", path(), shown(name), shown(near->name));
}

const Metadata& Checkpoint::metadata(int file) const {
  KT_CHECK(file >= 0 && static_cast<size_t>(file) < state_->metadata.size(), "file {} of {}", file,
           state_->metadata.size());
  return state_->metadata[static_cast<size_t>(file)];
}

void Checkpoint::check_sizes() const {
  for (size_t i = 0; i < state_->found.files.size(); ++i) {
    struct stat now{};
    const Identity& then = state_->identities[i];
    if (stat(state_->found.files[i].c_str(), &now) != 0 || now.st_dev != then.device ||
        now.st_ino != then.inode)
      continue;
    if (static_cast<uint64_t>(now.st_size) != then.size)
      fail("{}: changed while it was read: {} bytes, it had {}", state_->found.files[i], now.st_size,
           then.size);
  }
}

void Checkpoint::check_unchanged() const {
  for (size_t i = 0; i < state_->found.files.size(); ++i) {
    const std::string& file = state_->found.files[i];
    const Identity now = identity_of(file), then = state_->identities[i];
    if (now.size != then.size)
      fail("{}: changed while it was read: {} bytes, it had {}", file, now.size, then.size);
    if (now != then) fail("{}: was replaced or rewritten while it was read", file);
  }
}

}  // namespace kt::inline weights
