#include "server/prompt_guard.h"

#include <algorithm>
#include <bitset>
#include <charconv>

#include "base/error.h"
#include "base/utf8.h"

namespace kt::inline server {
namespace {

// Characters that stand for nothing and that no template contains, and those for private use if a text
// contains them all.
constexpr CodePoint kNoncharacters = 0xFDD0, kLastNoncharacter = 0xFDEF, kPrivate = 0xE000,
                    kLastPrivate = 0xF8FF;

bool is_bar_marker(std::string_view spelled) {
  return (spelled.starts_with("<|") && spelled.ends_with("|>")) ||
         (spelled.starts_with("<｜") && spelled.ends_with("｜>")) ||
         (spelled.size() > 6 && spelled.starts_with("｜") && spelled.ends_with("｜"));
}

bool is_token_name(std::string_view key) { return key.ends_with("_token"); }
bool is_thinking_marker(std::string_view spelled) { return spelled == "<think>" || spelled == "</think>"; }

// "\ufdd0", which a template gets that writes JSON in ASCII.
std::string escaped(std::string_view mark) {
  size_t at = 0;
  const CodePoint code = next_code_point(mark, at);
  std::array<char, 8> digits{};
  const auto end = std::to_chars(digits.begin(), digits.end(), code, 16).ptr;
  return "\\u" + std::string(digits.begin(), end);
}

std::string replaced(std::string_view text, std::string_view part, std::string_view by) {
  std::string out;
  size_t done = 0;
  for (size_t at = text.find(part); at != std::string_view::npos; at = text.find(part, done)) {
    out.append(text.substr(done, at - done)).append(by);
    done = at + part.size();
  }
  return out += text.substr(done);
}

// The characters of the text, and those that its escapes spell.
std::bitset<0x10000> used_characters(std::string_view text) {
  std::bitset<0x10000> used;
  for (size_t at = 0; at < text.size();) {
    const Utf8Step step = decode_utf8(text.substr(at));
    if (step.valid && step.code < used.size()) used.set(step.code);
    if (text[at] == '\\' && text.substr(at).starts_with("\\u") && text.size() - at >= 6) {
      unsigned code = 0;
      std::from_chars(text.data() + at + 2, text.data() + at + 6, code, 16);
      used.set(code & 0xFFFF);
    }
    at += step.bytes;
  }
  return used;
}

bool is_answer_message(const OrderedJson& value) {
  const auto role = value.find("role");
  return role != value.end() && *role == "assistant";
}

}  // namespace

PromptGuard::PromptGuard(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {
  for (const AddedToken& token : tokenizer.added_tokens()) {
    if (!token.special && !is_bar_marker(token.content)) continue;
    markers_.push_back(token.content);
    begins_[static_cast<uint8_t>(token.content[0])] = true;
  }
  std::ranges::sort(markers_);
}

const std::string* PromptGuard::marker_at(std::string_view text) const {
  if (text.empty() || !begins_[static_cast<uint8_t>(text[0])]) return nullptr;
  const std::string* longest = nullptr;
  auto from = markers_.begin(), to = markers_.end();
  for (size_t size = 1; size <= text.size() && from != to; ++size) {
    const std::string_view prefix = text.substr(0, size);
    const auto cut = [&](const std::string& marker) { return std::string_view(marker).substr(0, size); };
    from = std::ranges::lower_bound(from, to, prefix, {}, cut);
    to = std::ranges::upper_bound(from, to, prefix, {}, cut);
    if (from != to && from->size() == size) longest = &*from;
  }
  return longest;
}

bool PromptGuard::needs_mark(const OrderedJson& value) const {
  const auto has_marker = [&](const std::string& text) {
    for (size_t at = 0; at < text.size(); ++at)
      if (marker_at(std::string_view(text).substr(at))) return true;
    return false;
  };
  if (value.is_string()) return has_marker(value.get_ref<const std::string&>());
  if (value.is_object()) {
    for (const auto& [key, item] : value.items())
      if (has_marker(key) || needs_mark(item)) return true;
    return false;
  }
  return value.is_array() &&
         std::ranges::any_of(value, [&](const OrderedJson& item) { return needs_mark(item); });
}

void PromptGuard::choose_mark(const OrderedJson& variables) {
  std::string texts = variables.dump(-1, ' ', false, OrderedJson::error_handler_t::replace);
  for (const AddedToken& token : tokenizer_.added_tokens()) texts += token.content;
  const std::bitset<0x10000> used = used_characters(texts);
  for (const auto& [first, last] :
       {std::pair(kNoncharacters, kLastNoncharacter), std::pair(kPrivate, kLastPrivate)})
    for (CodePoint code = first; code <= last; ++code)
      if (!used.test(code)) {
        mark_ = to_utf8(code);
        return;
      }
  fail("the text of the request contains every character that is free to mark special tokens with");
}

std::string PromptGuard::mark_text(std::string_view text, Author author) const {
  std::string out;
  size_t done = 0;
  for (size_t at = 0; at < text.size(); ++at) {
    const std::string* const marker = marker_at(text.substr(at));
    if (!marker || (author == Author::kModel && is_thinking_marker(*marker))) continue;
    const size_t inside = at + decode_utf8(text.substr(at)).bytes;
    out.append(text.substr(done, inside - done)).append(mark_);
    done = inside;
  }
  return out += text.substr(done);
}

OrderedJson PromptGuard::mark_value(const OrderedJson& value, Author author) const {
  if (value.is_string()) return mark_text(value.get_ref<const std::string&>(), author);
  if (!value.is_structured()) return value;
  OrderedJson out = value.is_array() ? OrderedJson::array() : OrderedJson::object();
  if (value.is_array()) {
    for (const OrderedJson& item : value) out.push_back(mark_value(item, author));
    return out;
  }
  if (is_answer_message(value)) author = Author::kModel;
  for (const auto& [key, item] : value.items()) out[mark_text(key, author)] = mark_value(item, author);
  return out;
}

OrderedJson PromptGuard::protect(const OrderedJson& variables) {
  KT_CHECK(variables.is_object() && mark_.empty());
  OrderedJson users = OrderedJson::object();
  for (const auto& [key, value] : variables.items())
    if (!is_token_name(key)) users[key] = value;
  if (!needs_mark(users)) return variables;
  choose_mark(users);
  OrderedJson out = OrderedJson::object();
  for (const auto& [key, value] : variables.items())
    out[key] = is_token_name(key) ? value : mark_value(value, Author::kUser);
  return out;
}

std::string PromptGuard::plain(std::string_view rendered) const {
  if (mark_.empty()) return std::string(rendered);
  return replaced(replaced(rendered, escaped(mark_), ""), mark_, "");
}

std::vector<TokenId> PromptGuard::encode(std::string_view rendered) const {
  if (mark_.empty()) return tokenizer_.encode(rendered);
  return tokenizer_.encode(replaced(rendered, escaped(mark_), mark_), {.mark = mark_});
}

}  // namespace kt::inline server
