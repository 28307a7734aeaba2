#include "bench/stream_event.h"

#include <algorithm>
#include <nlohmann/json.hpp>

namespace kt::inline bench {
namespace {

using Json = nlohmann::json;

std::string_view after_spaces(std::string_view line) {
  return line.substr(std::min(line.size(), line.find_first_not_of(" \t\r\n")));
}

// What follows `"key":`, from `at` on; empty: no such key. A quoted word before a colon can only be a key:
// inside a string the quotes would be escaped.
std::string_view value_of(std::string_view data, std::string_view quoted_key, size_t at = 0) {
  while ((at = data.find(quoted_key, at)) != std::string_view::npos) {
    at += quoted_key.size();
    const std::string_view rest = after_spaces(data.substr(at));
    if (rest.starts_with(':')) return after_spaces(rest.substr(1));
  }
  return {};
}

bool is_text(std::string_view value) { return value.starts_with('"') && !value.starts_with("\"\""); }

int64_t count_of(const Json& usage, const char* name) {
  const auto at = usage.find(name);
  return at != usage.end() && at->is_number_integer() ? at->get<int64_t>() : 0;
}

constexpr size_t kMessage = 160;

std::string shortened(std::string message) {
  for (char& c : message)
    if (static_cast<unsigned char>(c) < ' ') c = ' ';
  if (message.size() > kMessage) {
    size_t cut = kMessage;
    while (cut && (static_cast<unsigned char>(message[cut]) & 0xC0) == 0x80) --cut;
    message.resize(cut);
    message += "...";
  }
  return message;
}

}  // namespace

StreamEvent read_stream_event(std::string_view data) {
  StreamEvent event;
  if (data == "[DONE]") {
    event.done = true;
    return event;
  }
  const std::string_view choices = value_of(data, "\"choices\"");
  if (choices.starts_with('[')) event.has_choice = !after_spaces(choices.substr(1)).starts_with(']');
  for (const char* key : {"\"content\"", "\"text\"", "\"reasoning_content\""})
    if (!event.has_text) event.has_text = is_text(value_of(choices, key));
  if (value_of(data, "\"usage\"").starts_with('{')) {
    const Json parsed = Json::parse(data, nullptr, false);
    if (parsed.is_object() && parsed.contains("usage") && parsed["usage"].is_object())
      event.usage = {.prompt = count_of(parsed["usage"], "prompt_tokens"),
                     .completion = count_of(parsed["usage"], "completion_tokens")};
  }
  const std::string_view error = value_of(data, "\"error\"");
  if (!event.has_choice && !error.empty() && !error.starts_with("null")) event.error = error_message(data);
  return event;
}

std::string error_message(std::string_view body) {
  const Json parsed = Json::parse(body, nullptr, false);
  const Json* at = &parsed;
  if (at->is_object() && at->contains("error")) at = &(*at)["error"];
  for (const char* name : {"message", "detail"})
    if (at->is_object() && at->contains(name) && (*at)[name].is_string())
      return shortened((*at)[name].get<std::string>());
  if (at->is_string()) return shortened(at->get<std::string>());
  return shortened(std::string(body.substr(0, kMessage)));
}

}  // namespace kt::inline bench
