#include "weights/kt/kt_folder.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <functional>
#include <system_error>

#include "base/error.h"
#include "base/file.h"
#include "base/function_ref.h"

namespace kt::inline weights {
namespace {

namespace fs = std::filesystem;

void for_each_entry(const std::string& folder, FunctionRef<void(const fs::directory_entry&)> visit) {
  std::error_code error;
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error)) visit(*at);
  if (error) fail("{}: {}", folder, error.message());
}

bool is_folder(const fs::directory_entry& entry) {
  std::error_code ignored;
  return entry.is_directory(ignored);
}

}  // namespace

bool has_kt_layers(const std::string& path) {
  std::error_code error;
  for (fs::directory_iterator at(path, error), end; !error && at != end; at.increment(error))
    if (parse_kt_layer_folder(at->path().filename().string()) && is_folder(*at)) return true;
  return false;
}

KtFolder::KtFolder(std::string path) : path_(std::move(path)) {
  KtClaims claims;
  scan(claims.bits);
  std::ranges::sort(entries_, in_file_order, &KtEntry::name);
  for (size_t i = 1; i < entries_.size(); ++i) {
    if (entries_[i].name == entries_[i - 1].name)
      fail("{}: two files for one array, {} and {}", path_,
           kt_file_name(entries_[i].name, claims.bits, entries_[i - 1].bytes),
           kt_file_name(entries_[i].name, claims.bits, entries_[i].bytes));
  }
  KtModel facts;
  std::error_code ignored;
  const std::string facts_file = text("{}/{}", path_, kKtFactsFile), config_file = path_ + "/config.json";
  if (fs::exists(facts_file, ignored)) {
    facts = parse_kt_facts(read_json(facts_file), facts_file);
    if (claims.bits && facts.bits != claims.bits)
      fail("{}: says int{}, the files beside it are INT{}", facts_file, facts.bits, claims.bits);
    claims = {.bits = facts.bits, .parts = facts.parts, .hidden = facts.hidden, .inter = facts.inter};
  }
  has_config_ = fs::exists(config_file, ignored);
  const ModelConfig config =
      has_config_ ? read_model_config(read_json(config_file), config_file) : ModelConfig{};
  inventory_ = take_inventory(path_, entries_, claims, config);
  inventory_.model.rounding = facts.rounding;
  inventory_.model.source = facts.source;
  inventory_.model.tool = facts.tool;
}

void KtFolder::scan(int& bits) {
  for_each_entry(path_, [&](const fs::directory_entry& entry) {
    const std::optional<int> layer = parse_kt_layer_folder(entry.path().filename().string());
    if (!layer || !is_folder(entry)) return;
    for_each_entry(entry.path().string(), [&](const fs::directory_entry& inner) {
      const std::optional<int> part = parse_kt_part_folder(inner.path().filename().string());
      if (part && is_folder(inner)) scan_part(inner.path().string(), *layer, *part, bits);
    });
  });
}

void KtFolder::scan_part(const std::string& folder, int layer, int part, int& bits) {
  for_each_entry(folder, [&](const fs::directory_entry& entry) {
    const std::string name = entry.path().filename().string();
    if (!name.ends_with(".kt")) return;
    std::optional<KtFileName> file = parse_kt_file_name(name);
    if (!file) fail("{}: not a name of kt weights", entry.path().string());
    std::error_code error;
    const uintmax_t size = entry.file_size(error);
    if (error) fail("{}: {}", entry.path().string(), error.message());
    if (size != file->bytes)
      fail("{}: its name says {} bytes, it has {}", entry.path().string(), file->bytes, size);
    if (bits && bits != file->bits)
      fail("{}: INT{} beside INT{} in one folder", entry.path().string(), file->bits, bits);
    bits = file->bits;
    file->name.layer = layer;
    file->name.part = part;
    entries_.push_back({file->name, file->bytes});
  });
}

void KtFolder::read(const KtName& name, std::span<std::byte> out) const {
  const uint64_t size = bytes(name);
  KT_CHECK(out.size() == size, "{}: {} bytes for {}", kt_tensor_name(name), out.size(), size);
  const std::string path = path_ + "/" + kt_file_name(name, inventory_.model.bits, size);
  const Descriptor file = open_regular(path);
  struct stat status{};
  if (::fstat(file.get(), &status) != 0) fail("{}: {}", path, std::strerror(errno));
  if (static_cast<uint64_t>(status.st_size) != size)
    fail("{}: expected {} bytes, it has {} now", path, size, status.st_size);
  for (size_t at = 0; at < out.size();) {
    const ssize_t got = ::pread(file.get(), out.data() + at, out.size() - at, static_cast<off_t>(at));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail("{}: {}", path, std::strerror(errno));
    if (got == 0) fail("{}: ends at byte {} of {}", path, at, size);
    at += static_cast<size_t>(got);
  }
}

}  // namespace kt::inline weights
