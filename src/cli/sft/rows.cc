#include "cli/sft/rows.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <numeric>
#include <random>

#include "base/error.h"
#include "base/file.h"
#include "base/utf8.h"
#include "text/jinja/characters.h"
#include "text/shown.h"

namespace kt::inline cli {
namespace {

constexpr size_t kShownRows = 8;
constexpr JsonLimits kRowLimits{.bytes = size_t{4} << 30, .values = size_t{1} << 28};

// Why a row is no example.
struct Unfit {
  std::string why;
};
// NOLINTNEXTLINE(bugprone-std-exception-baseclass): never leaves this file, and what takes any error lets it pass.
[[noreturn]] void unfit(std::string why) { throw Unfit{std::move(why)}; }

// Of Python: what `if value` asks.
bool is_something(const OrderedJson& value) {
  if (value.is_null()) return false;
  if (value.is_boolean()) return value.get<bool>();
  if (value.is_number()) return value.get<double>() != 0;
  return !value.empty() && value != "";
}

bool is_blank(std::string_view string) { return jinja::strip_space(string, jinja::Side::kBoth).empty(); }

OrderedJson message(std::string_view role, OrderedJson content) {
  return {{"role", role}, {"content", std::move(content)}};
}

const OrderedJson& member(const OrderedJson& object, const std::string& name) {
  static const OrderedJson none;
  const auto found = object.find(name);
  return found == object.end() ? none : *found;
}

bool said(const OrderedJson& one) {
  const OrderedJson& content = member(one, "content");
  if (is_something(member(one, "tool_calls"))) return true;
  return content.is_string() ? !is_blank(content.get_ref<const std::string&>()) : is_something(content);
}
bool all_said(const OrderedJson& messages) {
  return !messages.empty() && std::ranges::all_of(messages, said);
}

// The same as Json, whose keys nlohmann sorts, asks by name only.
std::string text_at(const Json& names, const std::string& key) {
  const auto found = names.find(key);
  return found == names.end() ? "" : found->get<std::string>();
}

// JSON within text, which need not be any.
std::optional<OrderedJson> json_in(const std::string& string) {
  try {
    return parse_ordered_json(string, "");
  } catch (const Error&) {
    return std::nullopt;
  }
}

// A function call, as text of JSON.
OrderedJson call_message(const OrderedJson& content) {
  if (!content.is_string()) unfit("a function call without text");
  const std::optional<OrderedJson> said = json_in(content.get<std::string>());
  const OrderedJson plain = message("assistant", content);
  if (!said || !said->is_structured()) return plain;
  OrderedJson calls = OrderedJson::array();
  for (const OrderedJson& call : said->is_array() ? *said : OrderedJson::array({*said})) {
    if (!call.is_object() || !call.contains("name") || !call.contains("arguments")) return plain;
    calls.push_back(
        {{"type", "function"}, {"function", {{"name", call["name"]}, {"arguments", call["arguments"]}}}});
  }
  OrderedJson out = message("assistant", "");
  out["tool_calls"] = calls;
  return out;
}

const Json& chat_tags() {
  static const Json tags = {{"role_tag", "role"},        {"content_tag", "content"},
                            {"user_tag", "user"},        {"assistant_tag", "assistant"},
                            {"observation_tag", "tool"}, {"function_tag", "function"},
                            {"system_tag", "system"}};
  return tags;
}

// The columns of one row.
class ColumnReader {
 public:
  ColumnReader(const TrainingRows& source, const OrderedJson& raw)
      : columns_(source.columns), tags_(source.tags), raw_(raw) {}

  OrderedJson alpaca() const {
    OrderedJson out = OrderedJson::array();
    if (const std::string system = column_text("system"); !system.empty())
      out.push_back(message("system", system));
    if (const OrderedJson& history = column("history"); is_something(history)) {
      if (!history.is_array()) unfit("its history is no list of pairs");
      for (const OrderedJson& turn : history) {
        if (!turn.is_array() || turn.size() != 2 || !turn[0].is_string() || !turn[1].is_string())
          unfit("its history is no list of pairs");
        out.push_back(message("user", turn[0]));
        out.push_back(message("assistant", turn[1]));
      }
    }
    const std::string prompt = column_text("prompt"), query = column_text("query");
    out.push_back(message("user", prompt + (prompt.empty() || query.empty() ? "" : "\n") + query));
    const OrderedJson& answer = column("response");
    if (answer.is_string() && !is_blank(answer.get_ref<const std::string&>()))
      out.push_back(message("assistant", answer));
    return out;
  }

  OrderedJson conversation() const {
    const OrderedJson& turns = column("messages");
    if (!turns.is_array() || turns.empty()) unfit("without messages");
    OrderedJson out = OrderedJson::array();
    for (const OrderedJson& turn : turns) out.push_back(message_of(turn, tags_));
    if (const std::string system = column_text("system"); !system.empty())
      out.insert(out.begin(), message("system", system));
    return out;
  }

  OrderedJson prompt() const {
    const OrderedJson& value = column("prompt");
    return value.is_string() ? OrderedJson::array({message("user", value)}) : listed(value, "prompt");
  }

  OrderedJson answer(const char* role) const {
    const OrderedJson& value = column(role);
    if (value.is_string()) return OrderedJson::array({message("assistant", value)});
    return listed(value.is_object() ? OrderedJson::array({value}) : value, role);
  }

  bool label() const {
    const OrderedJson& value = column("kto_tag");
    if (!value.is_boolean()) unfit(text("{} is neither true nor false", text_at(columns_, "kto_tag")));
    return value.get<bool>();
  }

  OrderedJson tools() const {
    OrderedJson value = column("tools");
    if (value.is_string()) {
      const std::string written = value.get<std::string>();
      if (is_blank(written)) return nullptr;
      const std::optional<OrderedJson> read = json_in(written);
      if (!read) unfit("its tools are no JSON");
      value = *read;
    }
    return is_something(value) ? value : OrderedJson();
  }

 private:
  const OrderedJson& column(const std::string& role) const {
    static const OrderedJson none;
    const std::string name = text_at(columns_, role);
    return name.empty() ? none : member(raw_, name);
  }

  std::string column_text(const std::string& role) const {
    const OrderedJson& value = column(role);
    if (value.is_null()) return "";
    if (!value.is_string()) unfit(text("{} is no text", text_at(columns_, role)));
    return value.get<std::string>();
  }

  static std::string role_of(const OrderedJson& said, const Json& tags) {
    if (said.is_string()) {
      constexpr std::pair<const char*, const char*> kRoles[] = {{"function_tag", "function"},
                                                                {"system_tag", "system"},
                                                                {"observation_tag", "tool"},
                                                                {"assistant_tag", "assistant"},
                                                                {"user_tag", "user"}};
      const std::string word = said.get<std::string>();
      for (const auto& [tag, role] : kRoles)
        if (text_at(tags, tag) == word) return role;
      for (const char* const role : {"user", "assistant", "system", "tool", "developer"})
        if (word == role) return role;
      unfit(text("a message of {}, which no tag names", jinja::quote(word)));
    }
    unfit(text("a message of {}, which no tag names", said.is_null() ? "None" : said.dump()));
  }

  static OrderedJson message_of(const OrderedJson& turn, const Json& tags) {
    if (!turn.is_object()) unfit("a message is no object");
    const OrderedJson& content = member(turn, text_at(tags, "content_tag"));
    const std::string role = role_of(member(turn, text_at(tags, "role_tag")), tags);
    if (role == "function") return call_message(content);
    const OrderedJson& calls = member(turn, "tool_calls");
    if (!content.is_string() && !is_something(calls)) unfit("a message without text");
    OrderedJson out = message(role, is_something(content) ? content : OrderedJson(""));
    if (is_something(calls)) out["tool_calls"] = calls;
    return out;
  }

  OrderedJson listed(const OrderedJson& value, const std::string& role) const {
    if (!value.is_array() || value.empty()) {
      const std::string name = text_at(columns_, role);
      unfit(text("without {}", name.empty() ? role : name));
    }
    OrderedJson out = OrderedJson::array();
    for (const OrderedJson& turn : value)
      out.push_back(message_of(turn, tags_.empty() ? chat_tags() : tags_));
    return out;
  }

  const Json& columns_;
  const Json& tags_;
  const OrderedJson& raw_;
};

OrderedJson part(const OrderedJson& messages, size_t from, size_t to) {
  return OrderedJson(OrderedJson::array_t(messages.begin() + static_cast<ptrdiff_t>(from),
                                          messages.begin() + static_cast<ptrdiff_t>(to)));
}

// Answers that repeat the conversation before them: what both begin with is the prompt.
void take_apart(Row& row) {
  if (row.chosen.size() == 1 && row.rejected.size() == 1) return;
  const size_t shorter = std::min(row.chosen.size(), row.rejected.size());
  size_t same = 0;
  while (same + 1 < shorter && row.chosen[same] == row.rejected[same]) ++same;
  if (same > 0) row.messages = part(row.chosen, 0, same);
  row.chosen = part(row.chosen, same, row.chosen.size());
  row.rejected = part(row.rejected, same, row.rejected.size());
}

void read_answers(const TrainingRows& source, const ColumnReader& reader, Row& row) {
  const auto is_answer = [](const OrderedJson& one) { return member(one, "role") == "assistant"; };
  if (source.ranking) {
    row.chosen = reader.answer("chosen");
    row.rejected = reader.answer("rejected");
    take_apart(row);
    if (row.chosen == row.rejected) unfit("both answers the same");
    if (!all_said(row.chosen) || !all_said(row.rejected)) unfit("an answer is empty");
  } else if (source.columns.contains("kto_tag")) {
    row.wanted = reader.label();
    if (source.layout == "judged") {
      row.answer = reader.answer("completion");
    } else {
      const size_t last = std::max<size_t>(row.messages.size(), 1) - 1;
      row.answer = part(row.messages, last, row.messages.size());
      row.messages = part(row.messages, 0, last);
    }
    if (!all_said(row.answer) || !is_answer(row.answer.back())) unfit("without an answer");
  } else if (std::ranges::none_of(row.messages, is_answer)) {
    unfit("without an assistant turn");
  } else if (!is_answer(row.messages.back())) {
    unfit("the last turn is not the assistant's");
  } else if (!said(row.messages.back())) {
    unfit("its answer is empty");
  }
  if (std::ranges::none_of(row.messages, said)) unfit("empty");
}

Row row_of(const TrainingRows& source, const OrderedJson& raw) {
  if (!raw.is_object()) unfit(text("{} and no object", json_kind(raw)));
  const ColumnReader reader(source, raw);
  Row row;
  row.messages = source.layout == "alpaca"                                    ? reader.alpaca()
                 : source.layout == "sharegpt" || source.layout == "messages" ? reader.conversation()
                                                                              : reader.prompt();
  row.tools = reader.tools();
  read_answers(source, reader, row);
  row.choices = member(raw, "choices");
  return row;
}

using TakeRow = std::function<bool(const OrderedJson&)>;

// Objects a line. The first line is told by `whole`, where reading the file as one value has failed before.
void each_line(const std::string& path, std::string_view rest, const std::optional<Error>& whole,
               const TakeRow& take) {
  for (int64_t number = 1; !rest.empty(); ++number) {
    const size_t end = std::min(rest.find('\n'), rest.size());
    const std::string_view line = rest.substr(0, end);
    rest.remove_prefix(std::min(end + 1, rest.size()));
    if (is_blank(line)) continue;
    OrderedJson row;
    try {
      row = parse_ordered_json(line, text("{}: line {}", path, number), kRowLimits);
    } catch (const Error&) {
      if (number == 1 && whole) throw Error(*whole);
      throw;
    }
    if (!take(row)) return;
  }
}

// Calls `take` with each row until it says that this is enough: of a list, of an object alone, or of objects a line
// whatever the file is called.
void each_row(const std::string& path, const TakeRow& take) {
  const MappedFile file(path);
  std::string_view content(reinterpret_cast<const char*>(file.bytes().data()), file.size());
  if (content.starts_with("\xEF\xBB\xBF")) content.remove_prefix(3);
  if (path.ends_with(".jsonl")) return each_line(path, content, std::nullopt, take);
  OrderedJson rows;
  try {
    rows = parse_ordered_json(content, path, kRowLimits);
  } catch (const Error& error) {
    if (content.substr(std::min(content.find_first_not_of(" \t\r\n"), content.size())).starts_with('['))
      throw;
    return each_line(path, content, error, take);
  }
  if (!rows.is_array()) rows = OrderedJson::array({rows});
  for (const OrderedJson& row : rows)
    if (!take(row)) return;
}

void add_system(OrderedJson& messages, const std::string& system) {
  const auto is_system = [](const OrderedJson& one) { return member(one, "role") == "system"; };
  if (!system.empty() && std::ranges::none_of(messages, is_system))
    messages.insert(messages.begin(), message("system", system));
}

}  // namespace

void DroppedRows::add(const std::string& file, int64_t number, const std::string& reason) {
  const auto found = std::ranges::find_if(
      reasons_, [&](const Reason& one) { return one.file == file && one.why == reason; });
  if (found != reasons_.end())
    found->numbers.push_back(number);
  else
    reasons_.push_back({file, reason, {number}});
}

size_t DroppedRows::count() const {
  size_t out = 0;
  for (const Reason& one : reasons_) out += one.numbers.size();
  return out;
}

std::vector<std::string> DroppedRows::lines() const {
  std::vector<std::string> out;
  for (const auto& [file, why, numbers] : reasons_) {
    std::string named;
    for (size_t i = 0; i < std::min(numbers.size(), kShownRows); ++i)
      named += text("{}{}", i > 0 ? ", " : "", numbers[i]);
    if (numbers.size() > kShownRows) named += text(" and {} more", numbers.size() - kShownRows);
    out.push_back(text("{}: {} dropped, {}: {}", std::filesystem::path(file).filename().string(),
                       numbers.size() > 1 ? text("{} rows", numbers.size()) : "a row", printable(why, 300),
                       named));
  }
  return out;
}

std::vector<Row> read_rows(const TrainingRows& source, int64_t most, const std::string& system,
                           DroppedRows& dropped) {
  int64_t limit = std::numeric_limits<int64_t>::max();
  for (const int64_t one : {most, source.most})
    if (one > 0) limit = std::min(limit, one);
  std::vector<Row> out;
  for (const std::string& file : source.files) {
    int64_t number = 0;
    each_row(file, [&](const OrderedJson& raw) {
      if (static_cast<int64_t>(out.size()) >= limit) return false;
      ++number;
      try {
        Row row = row_of(source, raw);
        add_system(row.messages, system);
        row.file = file;
        row.number = number;
        out.push_back(std::move(row));
      } catch (const Unfit& reason) {
        dropped.add(file, number, reason.why);
      }
      return true;
    });
  }
  return out;
}

std::vector<Row> held_rows(std::vector<Row> rows, double size, uint32_t seed, const std::string& place) {
  const double wanted = size < 1 ? std::ceil(size * static_cast<double>(rows.size())) : std::floor(size);
  if (wanted >= static_cast<double>(rows.size()))
    fail("{}: leaves nothing to train on of {} rows", place, rows.size());
  // torch.randperm: a Fisher-Yates shuffle from the front, by the Mersenne twister that std has too.
  std::vector<size_t> order(rows.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::mt19937 random(seed);
  for (size_t i = 0; i + 1 < order.size(); ++i) std::swap(order[i], order[i + random() % (order.size() - i)]);
  order.resize(static_cast<size_t>(wanted));
  std::ranges::sort(order);
  std::vector<Row> out;
  for (const size_t index : order) out.push_back(std::move(rows[index]));
  return out;
}

}  // namespace kt::inline cli
