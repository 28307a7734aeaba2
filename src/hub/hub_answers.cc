// Answers of hubs, read. None of it is trusted.
#include <algorithm>
#include <set>

#include "base/error.h"
#include "hub/hub_client.h"
#include "text/json.h"
#include "text/shown.h"

namespace kt::inline hub {
namespace {

constexpr uint64_t kLargestFile = uint64_t{1} << 43;  // 8 TiB

std::string text_at(const Json& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() && found->is_string() ? found->get<std::string>() : "";
}

uint64_t size_at(const Json& object, const char* key, const std::string& where) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_number_unsigned() || found->get<uint64_t>() > kLargestFile)
    fail("{}: expected {}, a size in bytes of at most {}", where, key, human_bytes(kLargestFile));
  return found->get<uint64_t>();
}

std::string lower_sum(std::string sum, size_t digits, const std::string& where) {
  for (char& c : sum)
    if (c >= 'A' && c <= 'F') c = static_cast<char>(c - 'A' + 'a');
  if (!sum.empty() && !is_hex(sum, digits))
    fail("{}: expected a sum of {} hexadecimal digits", where, digits);
  return sum;
}

HubFile file_of_entry(const Json& entry, const std::string& where) {
  HubFile out{.path = text_at(entry, "path")};
  check_repo_path(out.path, where);
  const std::string name = text("{}: {}", where, out.path);
  out.size = size_at(entry, "size", name);
  const auto lfs = entry.find("lfs");
  if (lfs != entry.end() && lfs->is_object()) {
    std::string sum = text_at(*lfs, "oid");
    if (sum.starts_with("sha256:")) sum.erase(0, 7);
    out.sha256 = lower_sum(sum, 64, name);
    if (lfs->contains("size")) out.size = size_at(*lfs, "size", name);
  } else {
    out.git_sha1 = lower_sum(text_at(entry, "oid"), 40, name);
  }
  if (out.sum().empty()) fail("{}: no sum", name);
  return out;
}

void check_unique(std::vector<HubFile>& files, const std::string& where) {
  std::ranges::sort(files, {}, &HubFile::path);
  const auto twice = std::ranges::adjacent_find(files, {}, &HubFile::path);
  if (twice != files.end()) fail("{}: {} is listed twice", where, shown(twice->path));
}

}  // namespace

std::string commit_of_answer(std::string_view answer, const std::string& where) {
  const Json json = parse_json(answer, where);
  const std::string commit = json.is_object() ? text_at(json, "sha") : "";
  if (!is_hex(commit, 40)) fail("{}: expected sha, a commit of 40 hexadecimal digits", where);
  return commit;
}

std::vector<HubFile> files_of_tree(std::string_view answer, const std::string& where) {
  const Json json = parse_json(answer, where);
  if (!json.is_array()) fail("{}: expected a list of files", where);
  std::vector<HubFile> out;
  for (const Json& entry : json) {
    if (!entry.is_object()) fail("{}: expected files", where);
    if (text_at(entry, "type") == "file") out.push_back(file_of_entry(entry, where));
  }
  check_unique(out, where);
  return out;
}

std::vector<HubFile> files_of_modelscope(std::string_view answer, const std::string& where) {
  const Json json = parse_json(answer, where);
  const auto data = json.is_object() ? json.find("Data") : json.end();
  if (!json.is_object() || data == json.end() || !data->is_object() || !data->contains("Files") ||
      !data->at("Files").is_array())
    fail("{}: expected Data.Files, a list{}", where,
         json.is_object() && !text_at(json, "Message").empty()
             ? "; it says: " + shown(text_at(json, "Message"))
             : "");
  std::vector<HubFile> out;
  for (const Json& entry : data->at("Files")) {
    if (!entry.is_object()) fail("{}: expected files", where);
    if (text_at(entry, "Type") == "tree") continue;
    HubFile file{.path = text_at(entry, "Path")};
    check_repo_path(file.path, where);
    file.size = size_at(entry, "Size", text("{}: {}", where, file.path));
    file.sha256 = lower_sum(text_at(entry, "Sha256"), 64, text("{}: {}", where, file.path));
    out.push_back(std::move(file));
  }
  check_unique(out, where);
  return out;
}

}  // namespace kt::inline hub
