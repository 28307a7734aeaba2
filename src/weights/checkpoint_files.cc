#include "weights/checkpoint_files.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <map>
#include <optional>

#include "base/error.h"
#include "base/file.h"
#include "base/log.h"
#include "text/json.h"
#include "text/shown.h"

namespace kt::inline weights {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kSafetensors = ".safetensors", kGguf = ".gguf";
constexpr std::string_view kIndexEnd = ".safetensors.index.json", kIndex = "model.safetensors.index.json";

// "name-00002-of-00003.gguf"
struct Numbered {
  std::string stem;  // "name"
  int part = 0, parts = 0;
  size_t digits = 0;

  std::string name(int i, std::string_view end) const {
    const auto padded = [this](int number) {
      const std::string plain = std::to_string(number);
      return std::string(digits > plain.size() ? digits - plain.size() : 0, '0') + plain;
    };
    return text("{}-{}-of-{}{}", stem, padded(i), padded(parts), end);
  }
};

// Takes the digits off the end of `rest`, and what must stand before them.
std::optional<int> take_number(std::string_view& rest, std::string_view before, size_t& digits) {
  size_t start = rest.size();
  while (start > 0 && rest[start - 1] >= '0' && rest[start - 1] <= '9') --start;
  digits = rest.size() - start;
  int value = 0;
  if (digits == 0 || digits > 6) return std::nullopt;
  std::from_chars(rest.data() + start, rest.data() + rest.size(), value);
  rest = rest.substr(0, start);
  if (!rest.ends_with(before)) return std::nullopt;
  rest.remove_suffix(before.size());
  return value;
}

std::optional<Numbered> numbered(std::string_view name, std::string_view end) {
  if (!name.ends_with(end)) return std::nullopt;
  name.remove_suffix(end.size());
  Numbered out;
  size_t digits = 0;
  const auto parts = take_number(name, "-of-", out.digits);
  const auto part = parts ? take_number(name, "-", digits) : std::nullopt;
  if (!part || digits != out.digits || *part < 1 || *part > *parts) return std::nullopt;
  out.stem = name;
  out.part = *part;
  out.parts = *parts;
  return out;
}

std::string join(const std::string& folder, std::string_view name) {
  return (fs::path(folder) / name).string();
}

struct Listing {
  std::vector<std::string> safetensors, gguf, indices, folders, pickles;  // names, ascending
  bool has_weights() const { return !safetensors.empty() || !gguf.empty() || !indices.empty(); }
};

Listing list(const std::string& folder) {
  Listing out;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (entry.is_directory()) {
      out.folders.push_back(name);
    } else if (name.ends_with(kIndexEnd)) {
      out.indices.push_back(name);
    } else if (name.ends_with(kSafetensors)) {
      out.safetensors.push_back(name);
    } else if (name.ends_with(kGguf)) {
      out.gguf.push_back(name);
    } else if (name.ends_with(".bin") || name.ends_with(".pth") || name.ends_with(".pt")) {
      out.pickles.push_back(name);
    }
  }
  for (auto* names : {&out.safetensors, &out.gguf, &out.indices, &out.folders, &out.pickles})
    std::sort(names->begin(), names->end());
  return out;
}

// A path below the index's folder and nowhere else.
void check_shard_name(const std::string& name, const std::string& index) {
  const fs::path path(name);
  const bool climbs = std::any_of(path.begin(), path.end(), [](const fs::path& p) { return p == ".."; });
  if (name.empty() || path.is_absolute() || climbs || name.find('\0') != name.npos)
    fail("{}: the shard \"{}\" is not below the folder of the index", index, shown(name));
  if (!name.ends_with(kSafetensors))
    fail("{}: the shard \"{}\" is not a {} file", index, shown(name), kSafetensors);
}

CheckpointFiles from_index(const std::string& path) {
  CheckpointFiles out;
  out.index = path;
  out.folder = fs::path(path).parent_path().string();
  if (out.folder.empty()) out.folder = ".";
  const Json index = read_json(path);
  const auto map = index.is_object() ? index.find("weight_map") : index.end();
  if (!index.is_object() || map == index.end() || !map->is_object() || map->empty())
    fail("{}: expected a \"weight_map\" of tensors to files", path);

  std::map<std::string, int> shards;
  for (const auto& [tensor, shard] : map->items()) {
    if (!shard.is_string()) fail("{}: {}: expected the name of a file", path, shown(tensor));
    shards.emplace(shard.get<std::string>(), 0);
  }
  std::vector<std::string> missing;
  for (auto& [name, number] : shards) {
    check_shard_name(name, path);
    number = static_cast<int>(out.files.size());
    out.files.push_back(join(out.folder, name));
    if (!fs::exists(out.files.back())) missing.push_back(name);
  }
  if (!missing.empty())
    fail("{}: {} of {} files are missing: {}", path, missing.size(), shards.size(), shown_list(missing));
  for (const auto& [tensor, shard] : map->items())
    out.map.push_back({tensor, shards.at(shard.get_ref<const std::string&>())});
  return out;
}

// All parts of the set that `one` belongs to.
std::vector<std::string> whole_set(const std::string& folder, const Numbered& one, std::string_view end) {
  std::vector<std::string> out, missing;
  // The number of parts is only a claim of a name: what is missing is counted, few of it listed.
  for (int i = 1; i <= one.parts; ++i) {
    const std::string name = one.name(i, end);
    if (!fs::exists(join(folder, name))) missing.push_back(name);
    out.push_back(join(folder, name));
  }
  if (!missing.empty())
    fail("{}: {} of {} parts are missing: {}", folder, missing.size(), one.parts, shown_list(missing));
  return out;
}

// Files by their sets, numbered or alone.
std::map<std::pair<std::string, int>, std::string> sets_of(const std::vector<std::string>& names,
                                                           std::string_view end) {
  std::map<std::pair<std::string, int>, std::string> out;
  for (const std::string& name : names) {
    const auto number = numbered(name, end);
    out.emplace(number ? std::pair(number->stem, number->parts) : std::pair(name, 0), name);
  }
  return out;
}

std::vector<std::string> whole_sets(const std::string& folder, const std::vector<std::string>& names,
                                    std::string_view end) {
  std::vector<std::string> out;
  for (const auto& [key, name] : sets_of(names, end)) {
    const auto number = numbered(name, end);
    if (!number) {
      out.push_back(join(folder, name));
      continue;
    }
    for (std::string& part : whole_set(folder, *number, end)) out.push_back(std::move(part));
  }
  return out;
}

// Some repositories hold the same weights twice, the second time as "consolidated*.safetensors".
std::vector<std::string> without_copies(const std::vector<std::string>& names) {
  std::vector<std::string> out;
  for (const std::string& name : names)
    if (!name.starts_with("consolidated")) out.push_back(name);
  return out.empty() ? names : out;
}

CheckpointFiles from_listing(const std::string& folder, const Listing& listing) {
  if (!listing.gguf.empty() && (!listing.safetensors.empty() || !listing.indices.empty()))
    fail("{}: holds both safetensors ({}, ...) and GGUF ({}, ...); name one file or index", folder,
         shown(listing.safetensors.empty() ? listing.indices.front() : listing.safetensors.front()),
         shown(listing.gguf.front()));
  if (!listing.indices.empty()) {
    const bool usual =
        std::find(listing.indices.begin(), listing.indices.end(), kIndex) != listing.indices.end();
    if (!usual && listing.indices.size() > 1)
      fail("{}: several indices, name one: {}", folder, shown_list(listing.indices));
    return from_index(join(folder, usual ? kIndex : std::string_view(listing.indices.front())));
  }
  CheckpointFiles out;
  out.folder = folder;
  out.gguf = !listing.gguf.empty();
  out.files = out.gguf ? whole_sets(folder, listing.gguf, kGguf)
                       : whole_sets(folder, without_copies(listing.safetensors), kSafetensors);
  out.unrelated = out.gguf && sets_of(listing.gguf, kGguf).size() > 1;
  return out;
}

// The snapshot of a hub cache folder that `main` names, else the only one.
std::string snapshot_of(const std::string& folder) {
  const std::vector<std::string> snapshots = list(join(folder, "snapshots")).folders;
  std::string main = read_small_file(join(folder, "refs/main")).value_or("");
  main.erase(main.find_last_not_of(" \r\n\t") + 1);
  for (const std::string& name : snapshots)
    if (name == main) return join(folder, "snapshots/" + name);
  if (snapshots.size() == 1) return join(folder, "snapshots/" + snapshots.front());
  if (snapshots.empty()) fail("{}: its snapshots folder is empty", folder);
  fail("{}: {} snapshots and no refs/main that names one: {}", folder, snapshots.size(),
       shown_list(snapshots));
}

CheckpointFiles from_folder(const std::string& folder, bool may_descend) {
  const Listing listing = list(folder);
  if (listing.has_weights()) return from_listing(folder, listing);
  if (may_descend &&
      std::find(listing.folders.begin(), listing.folders.end(), "snapshots") != listing.folders.end())
    return from_folder(snapshot_of(folder), true);
  // One level down, as repositories with a folder for each quantisation are.
  std::vector<std::string> inside;
  if (may_descend)
    for (const std::string& name : listing.folders)
      if (name != "original" && !name.starts_with('.') && list(join(folder, name)).has_weights())
        inside.push_back(name);
  if (inside.size() > 1) fail("{}: several folders hold weights, name one: {}", folder, shown_list(inside));
  if (inside.size() == 1) {
    CheckpointFiles out = from_folder(join(folder, inside.front()), false);
    log_once(LogLevel::kWarning, "{}: holds no weights itself; {} is taken, which lies one level down",
             folder, out.index.empty() ? out.files.front() : out.index);
    if (!fs::exists(join(out.folder, "config.json")) && fs::exists(join(folder, "config.json")))
      out.folder = folder;
    return out;
  }
  if (!listing.pickles.empty())
    fail("{}: holds {}, which is not read; convert it to safetensors first", folder,
         shown(listing.pickles.front()));
  fail("{}: holds no .safetensors and no .gguf file", folder);
}

CheckpointFiles from_file(const std::string& path) {
  const std::string name = fs::path(path).filename().string();
  if (name.ends_with(".index.json")) return from_index(path);
  CheckpointFiles out;
  out.folder = fs::path(path).parent_path().string();
  if (out.folder.empty()) out.folder = ".";
  out.gguf = name.ends_with(kGguf);
  if (!out.gguf && !name.ends_with(kSafetensors))
    fail("{}: expected a folder, a .safetensors or .gguf file, or a {} file", path, kIndex);
  const auto number = out.gguf ? numbered(name, kGguf) : std::nullopt;
  out.files = number ? whole_set(out.folder, *number, kGguf) : std::vector{path};
  return out;
}

}  // namespace

CheckpointFiles checkpoint_files(const std::string& path) {
  try {
    if (!fs::exists(path)) {
      // A missing part of a set says more than a missing file.
      if (numbered(path, kGguf) && fs::exists(fs::path(path).parent_path() / ".")) return from_file(path);
      fail("{}: no such file or folder", path);
    }
    return fs::is_directory(path) ? from_folder(path, true) : from_file(path);
  } catch (const fs::filesystem_error& error) {
    fail("{}: cannot list: {}", path, error.code().message());
  }
}

}  // namespace kt::inline weights
