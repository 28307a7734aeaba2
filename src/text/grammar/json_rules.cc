#include "text/grammar/json_rules.h"

#include <algorithm>

namespace kt::inline texts {
namespace {

// One character of a key, byte by byte; kDead where it is none.
enum KeyPlace : int8_t {
  kDead = -1,
  kBoundary,
  kEscape,  // after '\'
  kU,       // after 'u', and three hex digits
  kU0,
  kU00,
  kU000,
  kU001,
  kOneLeft,  // bytes of UTF-8
  kTwoLeft,
  kThreeLeft,
  kAfterE0,
  kAfterED,
  kAfterF0,
  kAfterF4,
  kKeyPlaces
};

bool between(int byte, int low, int high) { return low <= byte && byte <= high; }

KeyPlace lead(int byte) {
  if (byte == '\\') return kEscape;
  if (byte < 0x20 || byte == '"') return kDead;
  if (byte < 0x80) return kBoundary;
  if (between(byte, 0xC2, 0xDF)) return kOneLeft;
  if (byte == 0xE0) return kAfterE0;
  if (byte == 0xED) return kAfterED;
  if (between(byte, 0xE1, 0xEF)) return kTwoLeft;
  if (byte == 0xF0) return kAfterF0;
  if (byte == 0xF4) return kAfterF4;
  return between(byte, 0xF1, 0xF3) ? kThreeLeft : kDead;
}

KeyPlace after_key_byte(KeyPlace place, int byte) {
  const auto continues = [&](KeyPlace to, int low = 0x80, int high = 0xBF) {
    return between(byte, low, high) ? to : kDead;
  };
  const auto is = [&](char c, KeyPlace to) { return byte == c ? to : kDead; };
  switch (place) {
    case kBoundary:
      return lead(byte);
    case kEscape:
      if (byte == 'u') return kU;
      return std::string_view("\"\\bfnrt").find(static_cast<char>(byte)) != std::string_view::npos ? kBoundary
                                                                                                   : kDead;
    case kU:
      return is('0', kU0);
    case kU0:
      return is('0', kU00);
    case kU00:
      return byte == '0' ? kU000 : is('1', kU001);
    // \b \t \n \f \r have a shorter form.
    case kU000:
      return between(byte, '0', '7') || byte == 'b' || byte == 'e' || byte == 'f' ? kBoundary : kDead;
    case kU001:
      return between(byte, '0', '9') || between(byte, 'a', 'f') ? kBoundary : kDead;
    case kOneLeft:
      return continues(kBoundary);
    case kTwoLeft:
      return continues(kOneLeft);
    case kThreeLeft:
      return continues(kTwoLeft);
    case kAfterE0:
      return continues(kOneLeft, 0xA0);
    case kAfterED:
      return continues(kOneLeft, 0x80, 0x9F);
    case kAfterF0:
      return continues(kTwoLeft, 0x90);
    case kAfterF4:
      return continues(kTwoLeft, 0x80, 0x8F);
    default:
      return kDead;
  }
}

}  // namespace

std::string json_text_of(const std::string& text) {
  return nlohmann::ordered_json(text).dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

StateId JsonRules::space() {
  if (space_) return *space_;
  space_ = builder_.state();
  const StateId end = builder_.state();
  builder_.ends(*space_);
  builder_.ends(end);
  builder_.byte(*space_, end, ' ');
  StateId at = builder_.state();
  builder_.byte(*space_, at, '\n');
  builder_.ends(at);
  for (int i = 0; i < kMostIndent; ++i) {
    const StateId next = builder_.state();
    builder_.byte(at, next, ' ');
    builder_.byte(at, next, '\t');
    builder_.ends(next);
    at = next;
  }
  return *space_;
}

StateId JsonRules::colon(StateId from) {
  const StateId after = builder_.bytes(from, ":"), end = builder_.state();
  builder_.byte(after, end, ' ');
  builder_.empty(after, end);
  return end;
}

void JsonRules::hex(StateId from, StateId to, int low, int high) {
  for (int digit = low; digit <= high; ++digit) {
    builder_.byte(from, to, "0123456789abcdef"[digit]);
    if (digit > 9) builder_.byte(from, to, "0123456789ABCDEF"[digit]);
  }
}

void JsonRules::add_utf8(StateId from, StateId to) {
  const StateId one = builder_.state(), two = builder_.state(), three = builder_.state();
  builder_.byte(one, to, 0x80, 0xBF);
  builder_.byte(two, one, 0x80, 0xBF);
  builder_.byte(three, two, 0x80, 0xBF);
  const auto odd = [&](uint8_t lead, uint8_t low, uint8_t high, StateId rest) {
    const StateId after = builder_.state();
    builder_.byte(from, after, lead, lead);
    builder_.byte(after, rest, low, high);
  };
  builder_.byte(from, one, 0xC2, 0xDF);
  odd(0xE0, 0xA0, 0xBF, one);
  builder_.byte(from, two, 0xE1, 0xEC);
  odd(0xED, 0x80, 0x9F, one);  // no surrogates
  builder_.byte(from, two, 0xEE, 0xEF);
  odd(0xF0, 0x90, 0xBF, two);
  builder_.byte(from, three, 0xF1, 0xF3);
  odd(0xF4, 0x80, 0x8F, two);
}

void JsonRules::add_character(StateId from, StateId to) {
  builder_.byte(from, to, 0x20, 0x21);
  builder_.byte(from, to, 0x23, 0x5B);
  builder_.byte(from, to, 0x5D, 0x7F);
  add_utf8(from, to);
  const StateId escape = builder_.state(), u = builder_.state(), three = builder_.state(),
                two = builder_.state(), one = builder_.state(), d = builder_.state();
  builder_.byte(from, escape, '\\');
  for (char c : std::string_view("\"\\/bfnrt")) builder_.byte(escape, to, c);
  builder_.byte(escape, u, 'u');
  hex(u, three, 0, 12);
  hex(u, three, 14, 15);
  hex(three, two);
  hex(two, one);
  hex(one, to);
  hex(u, d, 13, 13);
  hex(d, two, 0, 7);
  // A pair of surrogates: d8-db.., then \udc-df..
  const StateId high2 = builder_.state(), high1 = builder_.state(), high0 = builder_.state();
  hex(d, high2, 8, 11);
  hex(high2, high1);
  hex(high1, high0);
  const StateId low = builder_.bytes(high0, "\\u"), low2 = builder_.state();
  hex(low, low2, 13, 13);
  hex(low2, two, 12, 15);
}

StateId JsonRules::character() {
  if (character_) return *character_;
  character_ = builder_.state();
  const StateId end = builder_.state();
  builder_.ends(end);
  add_character(*character_, end);
  return *character_;
}

StateId JsonRules::string() {
  if (string_) return *string_;
  string_ = builder_.state();
  const StateId inside = builder_.bytes(*string_, "\"");
  add_character(inside, inside);
  builder_.ends(builder_.bytes(inside, "\""));
  return *string_;
}

StateId JsonRules::chain_of_digits(StateId from, StateId to, int least, int most) {
  for (int i = 0; i < most; ++i) {
    if (i >= least) builder_.empty(from, to);
    const StateId next = builder_.state();
    builder_.byte(from, next, '0', '9');
    from = next;
  }
  builder_.empty(from, to);
  return to;
}

StateId JsonRules::integer() {
  if (integer_) return *integer_;
  integer_ = builder_.state();
  const StateId digits = builder_.state(), first = builder_.state(), end = builder_.state();
  builder_.byte(*integer_, digits, '-');
  builder_.empty(*integer_, digits);
  builder_.byte(digits, end, '0');
  builder_.byte(digits, first, '1', '9');
  chain_of_digits(first, end, 0, kMostDigits - 1);
  builder_.ends(end);
  return *integer_;
}

StateId JsonRules::number() {
  if (number_) return *number_;
  number_ = builder_.state();
  const StateId whole = builder_.after_call(*number_, integer()), scale = builder_.state();
  builder_.empty(whole, scale);
  chain_of_digits(builder_.bytes(whole, "."), scale, 1, kMostFraction);
  builder_.ends(scale);
  const StateId e = builder_.state(), sign = builder_.state(), end = builder_.state();
  builder_.byte(scale, e, 'e');
  builder_.byte(scale, e, 'E');
  builder_.byte(e, sign, '+');
  builder_.byte(e, sign, '-');
  builder_.empty(e, sign);
  chain_of_digits(sign, end, 1, 2);
  const StateId one = builder_.bytes(sign, "1"), two = builder_.bytes(sign, "2"), seven = builder_.state();
  chain_of_digits(one, end, 2, 2);
  builder_.byte(two, seven, '0', '7');
  builder_.byte(seven, end, '0', '9');
  builder_.ends(end);
  return *number_;
}

StateId JsonRules::key_except(const std::vector<std::string>& names) {
  if (!any_key_) {
    key_end_ = builder_.state();
    builder_.ends(*key_end_);
    std::array<StateId, kKeyPlaces> places;
    for (StateId& place : places) place = builder_.state();
    for (int place = 0; place < kKeyPlaces; ++place)
      for (int low = 0, high = 0; low < 256; low = high + 1) {
        const KeyPlace to = after_key_byte(static_cast<KeyPlace>(place), low);
        for (high = low; high < 255 && after_key_byte(static_cast<KeyPlace>(place), high + 1) == to;) ++high;
        if (to != kDead)
          builder_.byte(places[static_cast<size_t>(place)], places[static_cast<size_t>(to)],
                        static_cast<uint8_t>(low), static_cast<uint8_t>(high));
      }
    builder_.byte(places[kBoundary], *key_end_, '"', Mark::kKeyEnd);
    any_key_ = places[0];  // the others follow
  }
  if (names.empty()) return *any_key_;

  // A tree of the names; from each of its nodes, every byte that leaves it leads to where any key goes on.
  struct Node {
    std::map<uint8_t, size_t> children;
    bool is_name = false;
  };
  std::vector<Node> nodes(1);
  for (const std::string& name : names) {
    const std::string quoted = json_text_of(name);
    size_t at = 0;
    for (char c : quoted.substr(1, quoted.size() - 2)) {
      const auto [place, is_new] = nodes[at].children.emplace(static_cast<uint8_t>(c), nodes.size());
      at = place->second;
      if (is_new) nodes.emplace_back();
    }
    nodes[at].is_name = true;
  }
  std::vector<StateId> states;
  for (size_t i = 0; i < nodes.size(); ++i) states.push_back(builder_.state());
  std::vector<KeyPlace> places(nodes.size(), kBoundary);  // parents come first
  for (size_t i = 0; i < nodes.size(); ++i) {
    for (int byte = 0; byte < 256; ++byte) {
      const KeyPlace to = after_key_byte(places[i], byte);
      if (to == kDead) continue;
      const auto child = nodes[i].children.find(static_cast<uint8_t>(byte));
      const bool stays = child != nodes[i].children.end();
      if (stays) places[child->second] = to;
      builder_.byte(states[i], stays ? states[child->second] : *any_key_ + to, static_cast<uint8_t>(byte),
                    static_cast<uint8_t>(byte));
    }
    if (places[i] == kBoundary && !nodes[i].is_name) builder_.byte(states[i], *key_end_, '"', Mark::kKeyEnd);
  }
  return states[0];
}

StateId JsonRules::free_key(StateId from, StateId key) {
  const StateId open = builder_.state();
  builder_.byte(from, open, '"', Mark::kKeyBegin);
  return colon(builder_.after_call(open, key));
}

StateId JsonRules::object() {
  if (object_) return *object_;
  object_ = builder_.state();
  const StateId open = builder_.state(), first = builder_.state(), key = builder_.state(),
                close = builder_.state();
  builder_.byte(*object_, open, '{', Mark::kObjectBegin);
  builder_.call(open, first, space());
  builder_.empty(first, close);
  builder_.empty(first, key);
  const StateId after = builder_.after_call(free_key(key, key_except({})), value());
  builder_.call(builder_.bytes(after, ","), key, space());
  builder_.call(after, close, space());
  builder_.ends(builder_.bytes(close, "}"));
  return *object_;
}

StateId JsonRules::array() {
  if (array_) return *array_;
  array_ = builder_.state();
  const StateId first = builder_.after_call(builder_.bytes(*array_, "["), space());
  const StateId close = builder_.state(), after = builder_.state();
  builder_.empty(first, close);
  builder_.call(first, after, value());
  builder_.call(builder_.after_call(builder_.bytes(after, ","), space()), after, value());
  builder_.call(after, close, space());
  builder_.ends(builder_.bytes(close, "]"));
  return *array_;
}

StateId JsonRules::value() {
  if (value_) return *value_;
  value_ = builder_.state();
  const StateId end = builder_.state();
  builder_.ends(end);
  builder_.call(*value_, end, object());
  builder_.call(*value_, end, array());
  builder_.call(*value_, end, string());
  builder_.call(*value_, end, number());
  builder_.any_of(*value_, end, {"true", "false", "null"});
  return *value_;
}

StateId JsonRules::literal(StateId from, const nlohmann::ordered_json& value) {
  if (!value.is_structured()) {
    const std::string text = value.is_string() ? json_text_of(value.get<std::string>()) : value.dump();
    return builder_.bytes(from, text);
  }
  from = builder_.bytes(from, value.is_object() ? "{" : "[");
  bool first = true;
  for (const auto& [key, item] : value.items()) {
    if (!first) from = builder_.bytes(from, ",");
    first = false;
    from = builder_.after_call(from, space());
    if (value.is_object()) from = colon(builder_.bytes(from, json_text_of(key)));
    from = literal(from, item);
  }
  if (!value.empty()) from = builder_.after_call(from, space());
  return builder_.bytes(from, value.is_object() ? "}" : "]");
}

}  // namespace kt::inline texts
