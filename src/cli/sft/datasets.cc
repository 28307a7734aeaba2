#include "cli/sft/datasets.h"

#include <algorithm>
#include <filesystem>

#include "base/file.h"
#include "text/shown.h"

namespace kt::inline cli {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMostFirstRow = 8 << 20;

bool exists(const std::string& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

std::vector<std::string> keys_of(const Json& object) {
  std::vector<std::string> out;
  for (const auto& [key, value] : object.items()) out.push_back(key);
  return out;
}

// Of a file of rows: a list of objects, or an object a line.
Json first_row(const std::string& path) {
  const MappedFile file(path);
  const std::string_view content(reinterpret_cast<const char*>(file.bytes().data()),
                                 std::min(file.size(), kMostFirstRow));
  const size_t begin = content.find_first_not_of("\xEF\xBB\xBF \t\r\n[");
  if (begin == content.npos) fail("{}: no rows", path);
  if (content[begin] != '{')
    fail("{}: expected rows that are JSON objects, found '{}'", path, shown(content.substr(begin, 1)));
  int depth = 0;
  bool quoted = false;
  for (size_t at = begin; at < content.size(); ++at) {
    const char c = content[at];
    if (quoted) {
      if (c == '\\') ++at;
      quoted = c != '"';
    } else if (c == '"') {
      quoted = true;
    } else if (c == '{') {
      ++depth;
    } else if (c == '}' && --depth == 0) {
      return parse_json(content.substr(begin, at + 1 - begin), path + ": row 1");
    }
  }
  fail("{}: row 1 does not end within {}", path, human_bytes(kMostFirstRow));
}

// What LLaMA-Factory takes where an entry names no column or tag.
const Json& usual_columns(const std::string& layout) {
  static const Json alpaca = {{"prompt", "instruction"}, {"query", "input"}, {"response", "output"}};
  static const Json sharegpt = {{"messages", "conversations"}};
  static const Json messages = {{"messages", "messages"}};
  static const Json pairs = {{"prompt", "prompt"}, {"chosen", "chosen"}, {"rejected", "rejected"}};
  static const Json judged = {{"prompt", "prompt"}, {"completion", "completion"}, {"kto_tag", "label"}};
  return layout == "alpaca"     ? alpaca
         : layout == "sharegpt" ? sharegpt
         : layout == "messages" ? messages
         : layout == "pairs"    ? pairs
                                : judged;
}

Json usual_tags(const std::string& layout) {
  if (layout == "messages")
    return {{"role_tag", "role"},           {"content_tag", "content"},  {"user_tag", "user"},
            {"assistant_tag", "assistant"}, {"observation_tag", "tool"}, {"function_tag", "tool_calls"},
            {"system_tag", "system"}};
  return {{"role_tag", "from"},     {"content_tag", "value"},           {"user_tag", "human"},
          {"assistant_tag", "gpt"}, {"observation_tag", "observation"}, {"function_tag", "function_call"},
          {"system_tag", "system"}};
}

// The layout of a file that nothing describes, by the keys of its first row.
std::string layout_of(const Json& row, const std::string& path) {
  const auto has = [&](const char* key) { return row.contains(key); };
  if (has("prompt") && has("chosen") && has("rejected")) return "pairs";
  if (has("prompt") && has("completion") && has("label")) return "judged";
  if (has("messages")) return "messages";
  if (has("conversations")) return "sharegpt";
  if (has("instruction")) return "alpaca";
  fail(
      "{}: row 1 has the columns {}; expected messages, conversations, instruction, prompt with chosen and "
      "rejected, or "
      "prompt with completion and label; dataset_info.json can say which column is what",
      path, shown_list(keys_of(row)));
}

class RowsFinder {
 public:
  RowsFinder(const Recipe& recipe, std::string_view key) : recipe_(recipe), key_(key) {
    folder_ = beside_recipe(recipe, recipe.text("dataset_dir"));
    const std::string path = folder_ + "/dataset_info.json";
    if (!exists(path)) return;
    info_ = read_json(path);
    if (!info_.is_object()) fail("{}: expected names of datasets, found {}", path, json_kind(info_));
  }

  TrainingRows find(const std::string& name) const {
    TrainingRows out = info_.contains(name) ? of_entry(name) : of_file(name);
    check_first_row(out);
    check_stage(out);
    return out;
  }

 private:
  std::string entry_place(const std::string& name) const {
    return text("{}/dataset_info.json: {}", folder_, shown(name));
  }

  static bool is_rows_file(const std::string& path) {
    return path.ends_with(".json") || path.ends_with(".jsonl");
  }

  TrainingRows of_file(const std::string& name) const {
    std::string path = beside_recipe(recipe_, name);
    if (!exists(path) && exists(folder_ + "/" + name)) path = folder_ + "/" + name;
    if (!is_rows_file(name) || !exists(path)) refuse(name);
    TrainingRows out{.name = name, .files = {path}, .layout = layout_of(first_row(path), path)};
    out.ranking = out.layout == "pairs";
    out.columns = usual_columns(out.layout);
    if (out.layout == "messages" || out.layout == "sharegpt") out.tags = usual_tags(out.layout);
    return out;
  }

  [[noreturn]] void refuse(const std::string& name) const {
    if (is_rows_file(name))
      recipe_.fail(key_, "{}: no such file, here, in {} or beside the recipe", shown(name), folder_);
    if (info_.is_null())
      recipe_.fail(key_,
                   "'{}': no {}/dataset_info.json that would say what it is; dataset_dir names its folder, "
                   "or give a .json or "
                   ".jsonl file",
                   shown(name), folder_);
    const std::vector<std::string> known = keys_of(info_);
    recipe_.fail(key_, "'{}': {}/dataset_info.json has no such dataset; the nearest is {}", shown(name),
                 folder_, shown(nearest_name(name, known)));
  }

  TrainingRows of_entry(const std::string& name) const {
    const Json& entry = info_[name];
    const std::string place = entry_place(name);
    if (!entry.is_object()) fail("{}: expected a mapping, found {}", place, json_kind(entry));
    for (const char* const far : {"hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name"})
      if (entry.contains(far) && !entry.contains("file_name"))
        fail("{}: {}: datasets are read from files; download it, and give its file_name", place, far);
    const std::string file = text_of(entry, "file_name", "", place);
    if (file.empty()) fail("{}: no file_name", place);
    TrainingRows out{.name = name, .files = {}, .layout = text_of(entry, "formatting", "alpaca", place)};
    if (out.layout == "openai") out.layout = "messages";
    if (out.layout != "alpaca" && out.layout != "sharegpt" && out.layout != "messages")
      fail("{}: formatting: expected alpaca, sharegpt or openai, found '{}'", place, shown(out.layout));
    out.files = files_of(folder_ + "/" + file, place);
    out.ranking = entry.contains("ranking") && entry["ranking"].is_boolean() && entry["ranking"].get<bool>();
    if (entry.contains("num_samples") && entry["num_samples"].is_number_integer())
      out.most = entry["num_samples"].get<int64_t>();
    out.columns = named(entry, "columns", usual_columns(out.layout), place);
    if (out.layout != "alpaca") out.tags = named(entry, "tags", usual_tags(out.layout), place);
    for (const auto& [key, value] : entry.items())
      if (key == "subset" || key == "split" || key == "folder")
        out.notes.push_back(text("{}: {}: of datasets on a hub; not used", place, key));
    return out;
  }

  static std::string text_of(const Json& entry, const char* key, const char* standard,
                             const std::string& place) {
    if (!entry.contains(key)) return standard;
    if (!entry[key].is_string()) fail("{}: {}: expected text, found {}", place, key, json_kind(entry[key]));
    return entry[key].get<std::string>();
  }

  // The usual names with those of the entry over them.
  static Json named(const Json& entry, const char* key, Json out, const std::string& place) {
    if (!entry.contains(key)) return out;
    if (!entry[key].is_object())
      fail("{}: {}: expected a mapping, found {}", place, key, json_kind(entry[key]));
    for (const auto& [name, value] : entry[key].items()) {
      if (value.is_null()) continue;
      if (!value.is_string())
        fail("{}: {}: {}: expected text, found {}", place, key, shown(name), json_kind(value));
      out[name] = value;
    }
    return out;
  }

  static std::vector<std::string> files_of(const std::string& path, const std::string& place) {
    if (!exists(path)) fail("{}: file_name: no such file: {}", place, path);
    std::vector<std::string> out;
    if (fs::is_directory(path)) {
      for (const auto& one : fs::directory_iterator(path))
        if (is_rows_file(one.path().string())) out.push_back(one.path().string());
      std::ranges::sort(out);
    } else if (is_rows_file(path)) {
      out.push_back(path);
    }
    if (out.empty()) fail("{}: file_name: expected .json or .jsonl, found {}", place, path);
    return out;
  }

  // Columns that every row must have.
  std::vector<std::string> needed_columns(const TrainingRows& rows) const {
    std::vector<const char*> roles;
    if (rows.layout == "sharegpt" || rows.layout == "messages")
      roles = {"messages"};
    else
      roles = {"prompt"};
    if (rows.ranking)
      roles.insert(roles.end(), {"chosen", "rejected"});
    else if (rows.layout == "alpaca")
      roles.push_back("response");
    else if (rows.layout == "judged")
      roles.push_back("completion");
    if (rows.columns.contains("kto_tag")) roles.push_back("kto_tag");
    std::vector<std::string> out;
    for (const char* const role : roles)
      out.push_back(rows.columns.contains(role) ? rows.columns[role].get<std::string>() : text("({})", role));
    return out;
  }

  void check_first_row(const TrainingRows& rows) const {
    for (const std::string& file : rows.files) {
      const Json row = first_row(file);
      for (const std::string& column : needed_columns(rows)) {
        if (column.starts_with('('))
          fail("{}: columns: no {}, which pairs need", entry_place(rows.name),
               column.substr(1, column.size() - 2));
        if (!row.contains(column))
          fail("{}: row 1 has no column '{}'; it has {}; dataset_info.json can say which column is what",
               file, shown(column), shown_list(keys_of(row)));
      }
    }
  }

  void check_stage(const TrainingRows& rows) const {
    const std::string stage = recipe_.text("stage");
    const bool judged = rows.columns.contains("kto_tag");
    const char* const has = rows.ranking ? "pairs of answers"
                            : judged     ? "single answers, judged"
                                         : "conversations";
    if (stage == "dpo" && !rows.ranking)
      recipe_.fail(key_, "{}: has {}; stage: dpo needs pairs (ranking: true, or prompt, chosen and rejected)",
                   rows.name, has);
    if (stage == "kto" && !judged)
      recipe_.fail(key_,
                   "{}: has {}; stage: kto needs judged answers (a kto_tag, or prompt, completion and label)",
                   rows.name, has);
    if (stage == "sft" && (rows.ranking || rows.layout == "judged"))
      recipe_.fail(key_, "{}: has {}; stage: sft needs conversations", rows.name, has);
  }

  const Recipe& recipe_;
  std::string key_, folder_;
  Json info_;
};

}  // namespace

OrderedJson TrainingRows::json() const {
  return {{"name", name},       {"files", files}, {"layout", layout}, {"ranking", ranking},
          {"columns", columns}, {"tags", tags},   {"most", most}};
}

std::string beside_recipe(const Recipe& recipe, const std::string& path) {
  if (path.empty() || exists(path) || fs::path(path).is_absolute()) return path;
  const std::string beside = recipe.folder() + "/" + path;
  return exists(beside) ? beside : path;
}

std::vector<TrainingRows> find_rows(const Recipe& recipe, std::string_view key) {
  const RowsFinder finder(recipe, key);
  std::vector<TrainingRows> out;
  for (const std::string& name : recipe.names(key)) out.push_back(finder.find(name));
  return out;
}

}  // namespace kt::inline cli
