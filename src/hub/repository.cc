#include "hub/repository.h"

#include <fnmatch.h>

#include <algorithm>
#include <set>

#include "base/error.h"
#include "base/utf8.h"
#include "text/shown.h"

namespace kt::inline hub {
namespace {

constexpr std::string_view kGgufEnd = ".gguf";

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

bool is_repo_part(std::string_view word) {
  if (word.empty() || word.size() > 96) return false;
  const auto fits = [](char c) { return is_letter(c) || is_digit(c) || c == '-' || c == '_' || c == '.'; };
  const auto edge = [](char c) { return c == '-' || c == '.'; };
  return std::ranges::all_of(word, fits) && !edge(word.front()) && !edge(word.back()) &&
         word.find("--") == word.npos && word.find("..") == word.npos;
}

bool is_control_byte(char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; }

// "x-00002-of-00003.gguf": "x" and "00003"; both empty where no set is meant.
struct SplitName {
  std::string stem, parts, part;
};

SplitName split_name(std::string_view path) {
  if (!path.ends_with(kGgufEnd)) return {};
  path.remove_suffix(kGgufEnd.size());
  const auto take_digits = [&] {
    size_t start = path.size();
    while (start > 0 && is_digit(path[start - 1])) --start;
    const std::string out(path.substr(start));
    path = path.substr(0, start);
    return out;
  };
  SplitName out;
  out.parts = take_digits();
  if (out.parts.empty() || !path.ends_with("-of-")) return {};
  path.remove_suffix(4);
  out.part = take_digits();
  if (out.part.empty() || !path.ends_with('-')) return {};
  out.stem = path.substr(0, path.size() - 1);
  return out;
}

std::string last_name(const std::string& path) { return path.substr(path.rfind('/') + 1); }

}  // namespace

std::string_view name_of(HubSource source) { return source == HubSource::kHuggingFace ? "hf" : "modelscope"; }

std::string RepoId::folder() const {
  const std::string start = kind == RepoKind::kModel ? "models--" : "datasets--";
  return start + (owner.empty() ? name : owner + "--" + name);
}

std::optional<RepoId> parse_repo(std::string_view repo_id, RepoKind kind) {
  const size_t slash = repo_id.find('/');
  if (slash == repo_id.npos) {
    if (kind == RepoKind::kModel || !is_repo_part(repo_id)) return std::nullopt;
    return RepoId{.kind = kind, .owner = {}, .name = std::string(repo_id)};
  }
  const std::string_view owner = repo_id.substr(0, slash), name = repo_id.substr(slash + 1);
  if (!is_repo_part(owner) || !is_repo_part(name)) return std::nullopt;
  return RepoId{.kind = kind, .owner = std::string(owner), .name = std::string(name)};
}

std::optional<ModelReference> parse_model_reference(std::string_view reference) {
  const size_t colon = reference.find(':');
  const auto repo = parse_repo(reference.substr(0, colon));
  if (!repo) return std::nullopt;
  if (colon == reference.npos) {
    // "folder/model.gguf" is a path.
    if (repo->name.ends_with(kGgufEnd) || repo->name.ends_with(".safetensors")) return std::nullopt;
    return ModelReference{.repo = *repo, .file = {}};
  }
  const std::string_view file = reference.substr(colon + 1);
  if (!file.ends_with(kGgufEnd)) return std::nullopt;
  check_repo_path(file, reference.substr(0, colon));
  return ModelReference{.repo = *repo, .file = std::string(file)};
}

void check_repo_path(std::string_view path, std::string_view where) {
  const auto refuse = [&](std::string_view why) {
    fail("{}: a file called \"{}\" is refused: {}", where, shown(path), why);
  };
  if (path.empty() || path.size() > 1024) refuse("a name has 1 to 1024 bytes");
  if (std::ranges::any_of(path, is_control_byte)) refuse("it has control characters");
  if (printable(path, 2048) != path) refuse("it is not plain text");
  if (path.find('\\') != path.npos) refuse("it has a backslash");
  while (true) {
    const size_t slash = path.find('/');
    const std::string_view part = path.substr(0, slash);
    if (part.empty() || part == "." || part == "..") refuse("it is not below its repository");
    if (part.size() > 200) refuse("a part of it is longer than 200 bytes");
    if (slash == path.npos) return;
    path.remove_prefix(slash + 1);
  }
}

void check_revision(std::string_view revision) {
  const auto fits = [](char c) {
    return is_letter(c) || is_digit(c) || std::string_view("-_./+").find(c) != std::string_view::npos;
  };
  const bool parts = revision.find("..") == revision.npos && revision.find("//") == revision.npos;
  if (revision.empty() || revision.size() > 200 || !std::ranges::all_of(revision, fits) || !parts ||
      revision.front() == '/' || revision.back() == '/' || revision.front() == '.')
    fail("`revision` '{}': expected a branch, a tag or a commit", shown(revision));
}

bool matches_pattern(const std::string& path, const std::string& pattern) {
  return ::fnmatch((pattern.ends_with('/') ? pattern + "*" : pattern).c_str(), path.c_str(), 0) == 0;
}

bool is_hex(std::string_view word, size_t digits) {
  return word.size() == digits && word.find_first_not_of("0123456789abcdef") == word.npos;
}

std::vector<HubFile> gguf_set(std::span<const HubFile> files, const std::string& name,
                              const std::string& repo) {
  std::vector<HubFile> same;
  for (const HubFile& file : files)
    if (file.path == name) same = {file};
  if (same.empty())
    for (const HubFile& file : files)
      if (last_name(file.path) == name) same.push_back(file);
  if (same.empty()) return {};
  if (same.size() > 1)
    fail("{}: {} is in several folders ({}, {}, ...); name the folder too", repo, name, same[0].path,
         same[1].path);
  const SplitName split = split_name(same.front().path);
  if (split.stem.empty()) return same;
  std::vector<HubFile> out;
  for (const HubFile& file : files) {
    const SplitName other = split_name(file.path);
    if (other.stem == split.stem && other.parts == split.parts) out.push_back(file);
  }
  return out;
}

std::vector<std::string> gguf_models(std::span<const HubFile> files) {
  std::vector<std::string> paths, out;
  for (const HubFile& file : files)
    // Towers for images are no models of their own.
    if (file.path.ends_with(kGgufEnd) && !last_name(file.path).starts_with("mmproj"))
      paths.push_back(file.path);
  std::ranges::sort(paths);
  std::set<std::pair<std::string, std::string>> sets;
  for (const std::string& path : paths) {
    const SplitName split = split_name(path);
    if (split.stem.empty() || sets.emplace(split.stem, split.parts).second) out.push_back(path);
  }
  return out;
}

}  // namespace kt::inline hub
