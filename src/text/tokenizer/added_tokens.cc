#include "text/tokenizer/added_tokens.h"

#include <algorithm>

#include "text/unicode.h"

namespace kt::inline texts {
namespace {

bool word_before(std::string_view text, size_t at) {
  if (at == 0) return false;
  size_t before = previous_character(text, at);
  return rust_word_set().contains(next_code_point(text, before));
}

bool word_after(std::string_view text, size_t at) {
  return at < text.size() && rust_word_set().contains(next_code_point(text, at));
}

size_t before_spaces(std::string_view text, size_t at) {
  while (at > 0) {
    const size_t before = previous_character(text, at);
    size_t after = before;
    if (!whitespace_set().contains(next_code_point(text, after))) break;
    at = before;
  }
  return at;
}

size_t behind_spaces(std::string_view text, size_t at) {
  while (at < text.size()) {
    size_t after = at;
    if (!whitespace_set().contains(next_code_point(text, after))) break;
    at = after;
  }
  return at;
}

}  // namespace

void AddedTokenTrie::add(std::string_view content, const AddedToken& token) {
  uint32_t now = 0;
  for (char c : content) {
    const auto byte = static_cast<uint8_t>(c);
    auto& children = nodes_[now].children;
    const auto place = std::ranges::lower_bound(children, byte, {}, &std::pair<uint8_t, uint32_t>::first);
    if (place != children.end() && place->first == byte) {
      now = place->second;
      continue;
    }
    const auto made = static_cast<uint32_t>(nodes_.size());
    children.insert(place, {byte, made});
    nodes_.emplace_back();
    now = made;
  }
  begins_[static_cast<uint8_t>(content[0])] = true;
  if (!nodes_[now].token) nodes_[now].token = &token;  // the first of equals
}

AddedTokenTrie::Match AddedTokenTrie::next_match(std::string_view text, size_t from,
                                                 std::string_view mark) const {
  for (size_t begin = from; begin < text.size(); ++begin) {
    if (!begins_[static_cast<uint8_t>(text[begin])]) continue;
    Match longest;
    uint32_t now = 0;
    bool marked = false;
    for (size_t at = begin; at < text.size(); ++at) {
      if (!mark.empty() && at > begin && text.substr(at).starts_with(mark)) {
        marked = true;
        at += mark.size() - 1;
        continue;
      }
      const auto& children = nodes_[now].children;
      const auto byte = static_cast<uint8_t>(text[at]);
      const auto place = std::ranges::lower_bound(children, byte, {}, &std::pair<uint8_t, uint32_t>::first);
      if (place == children.end() || place->first != byte) break;
      now = place->second;
      if (nodes_[now].token) longest = {begin, at + 1, nodes_[now].token, marked};
    }
    if (longest.token) return longest;
  }
  return {};
}

void AddedTokenTrie::cut(std::string_view text, Rules rules,
                         FunctionRef<void(std::string_view, size_t)> between,
                         FunctionRef<void(const AddedToken&)> found) const {
  size_t done = 0;
  if (!empty()) {
    size_t from = 0;
    const auto next = [&] { return next_match(text, from, rules.mark); };
    for (Match match = next(); match.token; match = next()) {
      from = match.end;
      const AddedToken& token = *match.token;
      if (match.begin < done || match.marked || rules.skips(token)) continue;
      if (token.single_word && (word_before(text, match.begin) || word_after(text, match.end))) continue;
      if (token.lstrip) match.begin = std::max(done, before_spaces(text, match.begin));
      if (token.rstrip) match.end = behind_spaces(text, match.end);
      if (match.begin > done) between(text.substr(done, match.begin - done), done);
      found(token);
      done = match.end;
    }
  }
  if (done < text.size()) between(text.substr(done), done);
}

}  // namespace kt::inline texts
