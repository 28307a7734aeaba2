// The methods of strings, dicts and lists that templates may call; there are no others.
#include <algorithm>
#include <array>
#include <unordered_map>

#include "base/checked.h"
#include "text/jinja/characters.h"
#include "text/jinja/operators.h"

namespace kt::inline texts::jinja {

namespace {

using Method = Value (*)(const Value& self, Reader& in, Meter& meter);
using Methods = std::unordered_map<std::string_view, Method>;
constexpr size_t kNowhere = std::string_view::npos;

template <Side kSide>
Value strip_method(const Value& self, Reader& in, Meter& meter) {
  const Value chars = in.optional("chars", None{});
  in.finish();
  if (chars.is(Kind::kNone)) return make_string(std::string(strip_space(self.string(), kSide)), meter);
  if (!chars.is(Kind::kString)) meter.fail("strip arg must be None or str");
  meter.work(checked_mul(self.string().size(), chars.string().size(), "strip()"));  // each against each
  return make_string(std::string(strip(self.string(), chars.string(), kSide)), meter);
}

Value strings(const std::vector<std::string_view>& parts, Meter& meter) {
  meter.value(parts.size() * sizeof(Value));
  std::vector<Value> out;
  for (std::string_view part : parts) out.push_back(make_string(std::string(part), meter));
  return make_list(std::move(out), meter);
}

// At white space, runs of it counting once; at most `limit` cuts unless negative.
std::vector<std::string_view> split_space(std::string_view s, int64_t limit, bool from_right, Meter& meter) {
  std::vector<std::string_view> out;
  const std::string_view whole = s;
  s = strip_space(s, Side::kBoth);
  std::vector<std::pair<size_t, size_t>> gaps;
  for (size_t at = 0; at < s.size();) {
    const size_t length = character_bytes(s, at);
    if (is_space(code_point(s, at))) {
      if (!gaps.empty() && gaps.back().second == at) {
        gaps.back().second += length;
      } else {
        meter.step();
        gaps.emplace_back(at, at + length);
      }
    }
    at += length;
  }
  const bool cut_short = limit >= 0 && static_cast<int64_t>(gaps.size()) >= limit;
  if (cut_short && from_right) gaps.erase(gaps.begin(), gaps.end() - limit);
  if (cut_short && !from_right) gaps.resize(static_cast<size_t>(limit));
  size_t start = 0;
  for (const auto& [first, last] : gaps) {
    out.push_back(s.substr(start, first - start));
    start = last;
  }
  if (!s.empty()) out.push_back(s.substr(start));
  if (cut_short && !out.empty()) {  // what is left uncut keeps the white space at its far end
    std::string_view& rest = from_right ? out.front() : out.back();
    const char* const first = from_right ? whole.data() : rest.data();
    const char* const last = from_right ? rest.data() + rest.size() : whole.data() + whole.size();
    rest = std::string_view(first, static_cast<size_t>(last - first));
  }
  return out;
}

std::vector<size_t> occurrences(std::string_view s, std::string_view what, Meter& meter) {
  std::vector<size_t> out;
  for (size_t at = find_bytes(s, what); at != kNowhere; at = find_bytes(s, what, at + what.size())) {
    meter.step();
    out.push_back(at);
  }
  return out;
}

// Non-overlapping occurrences counted from the end.
std::vector<size_t> occurrences_from_right(std::string_view s, std::string_view what, Meter& meter) {
  std::string reversed(s.rbegin(), s.rend());
  const std::string pattern(what.rbegin(), what.rend());
  std::vector<size_t> out = occurrences(reversed, pattern, meter);
  for (size_t& at : out) at = s.size() - at - what.size();
  std::reverse(out.begin(), out.end());
  return out;
}

template <bool kFromRight>
Value split_method(const Value& self, Reader& in, Meter& meter) {
  const Value separator = in.optional("sep", None{});
  const int64_t limit = in.integer("maxsplit", -1);
  in.finish();
  const std::string_view s = self.string();
  if (separator.is(Kind::kNone)) return strings(split_space(s, limit, kFromRight, meter), meter);
  if (!separator.is(Kind::kString)) meter.fail("must be str or None, not {}", type_name(separator));
  const std::string& what = separator.string();
  if (what.empty()) meter.fail("empty separator");
  std::vector<size_t> cuts =
      kFromRight ? occurrences_from_right(s, what, meter) : occurrences(s, what, meter);
  if (limit >= 0 && static_cast<int64_t>(cuts.size()) > limit) {
    if (kFromRight) {
      cuts.erase(cuts.begin(), cuts.end() - limit);
    } else {
      cuts.resize(static_cast<size_t>(limit));
    }
  }
  std::vector<std::string_view> out;
  size_t start = 0;
  for (size_t at : cuts) {
    out.push_back(s.substr(start, at - start));
    start = at + what.size();
  }
  out.push_back(s.substr(start));
  return strings(out, meter);
}

template <bool kFromRight>
Value partition_method(const Value& self, Reader& in, Meter& meter) {
  const std::string what = in.string("sep");
  in.finish();
  if (what.empty()) meter.fail("empty separator");
  const std::string_view s = self.string();
  const std::vector<size_t> hits =
      kFromRight ? occurrences_from_right(s, what, meter) : occurrences(s, what, meter);
  if (hits.empty()) {
    return kFromRight ? make_tuple({Value(""), Value(""), self}, meter)
                      : make_tuple({self, Value(""), Value("")}, meter);
  }
  const size_t at = kFromRight ? hits.back() : hits.front();
  return make_tuple({make_string(std::string(s.substr(0, at)), meter), make_string(what, meter),
                     make_string(std::string(s.substr(at + what.size())), meter)},
                    meter);
}

// The part of a string that start and end of a search select, with the characters before it.
struct Window {
  std::string_view part;
  size_t before;
  bool valid;
};
Window window(const Value& self, Reader& in, Meter& meter) {
  const Value start = in.optional("start", None{}), stop = in.optional("end", None{});
  in.finish();
  const auto size = static_cast<int64_t>(length(self, meter));
  const auto bound = [&](const Value& v, int64_t standard) {
    if (v.is(Kind::kNone)) return standard;
    if (!v.is_integer()) meter.fail("slice indices must be integers or None");
    const int64_t at =
        v.integer() < 0 ? std::max<int64_t>(0, v.integer() < -size ? 0 : v.integer() + size) : v.integer();
    return at;
  };
  const int64_t first = bound(start, 0), last = std::min(bound(stop, size), size);
  if (first > last || first > size) return {{}, 0, false};
  return {character_range(self.string(), static_cast<size_t>(first), static_cast<size_t>(last)),
          static_cast<size_t>(first), true};
}

template <bool kSuffix>
Value ends_method(const Value& self, Reader& in, Meter& meter) {
  const Value what = in.required("prefix");
  const Window w = window(self, in, meter);
  const auto fits = [&](const Value& v) {
    if (!v.is(Kind::kString)) {
      meter.fail("{} first arg must be str or a tuple of str, not {}", kSuffix ? "endswith" : "startswith",
                 type_name(v));
    }
    meter.step();
    if (!w.valid) return false;
    return kSuffix ? w.part.ends_with(v.string()) : w.part.starts_with(v.string());
  };
  if (!what.is(Kind::kSequence) || what.sequence().kind != SequenceKind::kTuple) return fits(what);
  return std::any_of(what.sequence().items.begin(), what.sequence().items.end(), fits);
}

template <bool kFromRight, bool kMustBe>
Value find_text(const Value& self, Reader& in, Meter& meter) {
  const std::string what = in.string("sub");
  const Window w = window(self, in, meter);
  size_t at = kNowhere;
  if (w.valid && kFromRight) {
    const std::string reversed(w.part.rbegin(), w.part.rend()), pattern(what.rbegin(), what.rend());
    at = find_bytes(reversed, pattern);
    if (at != kNowhere) at = w.part.size() - at - what.size();
  } else if (w.valid) {
    at = find_bytes(w.part, what);
  }
  if (at != kNowhere) return Value(w.before + count_characters(w.part.substr(0, at)));
  if (kMustBe) meter.fail("substring not found");
  return Value(-1);
}

Value count_method(const Value& self, Reader& in, Meter& meter) {
  const std::string what = in.string("sub");
  const Window w = window(self, in, meter);
  if (!w.valid) return Value(0);
  if (what.empty()) return Value(count_characters(w.part) + 1);
  return Value(occurrences(w.part, what, meter).size());
}

Value replace_method(const Value& self, Reader& in, Meter& meter) {
  const std::string old = in.string("old"), fresh = in.string("new");
  const int64_t limit = in.integer("count", -1);
  in.finish();
  const std::string_view s = self.string();
  std::string out;
  size_t at = 0;
  for (int64_t done = 0; limit < 0 || done < limit; ++done) {
    meter.step();
    meter.fits(out.size());
    meter.work(fresh.size());
    if (old.empty()) {
      out += fresh;
      if (at >= s.size()) break;
      const size_t length = character_bytes(s, at);
      out += s.substr(at, length);
      at += length;
      continue;
    }
    const size_t hit = find_bytes(s, old, at);
    if (hit == kNowhere) break;
    out += s.substr(at, hit - at);
    out += fresh;
    at = hit + old.size();
  }
  out += s.substr(std::min(at, s.size()));
  return make_string(std::move(out), meter);
}

Value join_method(const Value& self, Reader& in, Meter& meter) {
  const std::vector<Value> items = elements(in.required("iterable"), meter);
  in.finish();
  std::string out;
  for (size_t i = 0; i < items.size(); ++i) {
    if (!items[i].is(Kind::kString)) {
      meter.fail("sequence item {}: expected str instance, {} found", i, type_name(items[i]));
    }
    if (i) out += self.string();
    out += items[i].string();
    meter.work(self.string().size() + items[i].string().size());
    meter.fits(out.size());
  }
  return make_string(std::move(out), meter);
}

template <std::string (*kChange)(std::string_view)>
Value change_method(const Value& self, Reader& in, Meter& meter) {
  in.finish();
  return make_string(kChange(self.string()), meter);
}

template <bool (*kHas)(uint32_t)>
Value all_method(const Value& self, Reader& in, Meter&) {
  in.finish();
  const std::string_view s = self.string();
  for (size_t at = 0; at < s.size(); at += character_bytes(s, at)) {
    if (!kHas(code_point(s, at))) return false;
  }
  return !s.empty();
}

bool has_case(uint32_t p) { return upper_point(p) != p || lower_point(p) != p; }
bool is_digit_point(uint32_t p) { return p >= '0' && p <= '9'; }
// Letters past ASCII: everything that is not known for white space or punctuation.
bool is_letter_point(uint32_t p) {
  if (p < 0x80) return (p | 32) >= 'a' && (p | 32) <= 'z';
  return has_case(p) || p == 0xDF || (p >= 0x370 && p < 0x2000) || (p >= 0x3040 && p < 0xD7A4);
}
bool is_alnum_point(uint32_t p) { return is_digit_point(p) || is_letter_point(p); }

template <bool kUpper>
Value case_test(const Value& self, Reader& in, Meter&) {
  in.finish();
  bool any = false;
  const std::string_view s = self.string();
  for (size_t at = 0; at < s.size(); at += character_bytes(s, at)) {
    const uint32_t p = code_point(s, at);
    if (!has_case(p)) continue;
    if ((kUpper ? upper_point(p) : lower_point(p)) != p) return false;
    any = true;
  }
  return any;
}

Value lines_method(const Value& self, Reader& in, Meter& meter) {
  in.finish();
  meter.step(static_cast<int64_t>(std::count(self.string().begin(), self.string().end(), '\n')));
  return strings(split_lines(self.string()), meter);
}

template <bool kSuffix>
Value remove_method(const Value& self, Reader& in, Meter& meter) {
  const std::string what = in.string("prefix");
  in.finish();
  std::string_view s = self.string();
  if (kSuffix ? s.ends_with(what) : s.starts_with(what)) {
    s = kSuffix ? s.substr(0, s.size() - what.size()) : s.substr(what.size());
  }
  return make_string(std::string(s), meter);
}

// ljust, rjust and center: `kWhere` is the side of the text.
template <Side kWhere>
Value pad_method(const Value& self, Reader& in, Meter& meter) {
  const int64_t width = in.integer("width");
  const Value fill = in.optional("fillchar", " ");
  in.finish();
  const auto size = static_cast<int64_t>(length(self, meter));
  if (width <= size) return self;
  if (!fill.is(Kind::kString) || length(fill, meter) != 1)
    meter.fail("the fill character must be exactly one character long");
  const int64_t room = width - size;
  const int64_t left = kWhere == Side::kLeft    ? 0
                       : kWhere == Side::kRight ? room
                                                : room / 2 + (room & width & 1);
  const Value before = arithmetic("*", fill, Value(left), meter),
              after = arithmetic("*", fill, Value(room - left), meter);
  return make_string(before.string() + self.string() + after.string(), meter);
}

Value zfill_method(const Value& self, Reader& in, Meter& meter) {
  const int64_t room = in.integer("width") - static_cast<int64_t>(length(self, meter));
  in.finish();
  if (room <= 0) return self;
  const std::string& s = self.string();
  const size_t sign = !s.empty() && (s[0] == '-' || s[0] == '+') ? 1 : 0;
  const Value zeros = arithmetic("*", Value("0"), Value(room), meter);
  return make_string(s.substr(0, sign) + zeros.string() + s.substr(sign), meter);
}

const Methods& string_methods() {
  static const Methods table{
      {"strip", strip_method<Side::kBoth>},
      {"lstrip", strip_method<Side::kLeft>},
      {"rstrip", strip_method<Side::kRight>},
      {"split", split_method<false>},
      {"rsplit", split_method<true>},
      {"partition", partition_method<false>},
      {"rpartition", partition_method<true>},
      {"startswith", ends_method<false>},
      {"endswith", ends_method<true>},
      {"find", find_text<false, false>},
      {"rfind", find_text<true, false>},
      {"index", find_text<false, true>},
      {"rindex", find_text<true, true>},
      {"count", count_method},
      {"replace", replace_method},
      {"join", join_method},
      {"upper", change_method<upper>},
      {"lower", change_method<lower>},
      {"casefold", change_method<lower>},
      {"capitalize", change_method<capitalize>},
      {"title", change_method<title>},
      {"isdigit", all_method<is_digit_point>},
      {"isdecimal", all_method<is_digit_point>},
      {"isnumeric", all_method<is_digit_point>},
      {"isalpha", all_method<is_letter_point>},
      {"isalnum", all_method<is_alnum_point>},
      {"isspace", all_method<is_space>},
      {"isupper", case_test<true>},
      {"islower", case_test<false>},
      {"splitlines", lines_method},
      {"removeprefix", remove_method<false>},
      {"removesuffix", remove_method<true>},
      {"ljust", pad_method<Side::kLeft>},
      {"rjust", pad_method<Side::kRight>},
      {"center", pad_method<Side::kBoth>},
      {"zfill", zfill_method},
  };
  return table;
}

Value get_method(const Value& self, Reader& in, Meter& meter) {
  const Value key = in.required("key"), standard = in.optional("default", None{});
  in.finish();
  const Value* found = self.dict().find(key, meter);
  return found ? *found : standard;
}

template <int kWhat>  // 0 keys, 1 values, 2 both
Value view_method(const Value& self, Reader& in, Meter& meter) {
  in.finish();
  std::vector<Value> out;
  for (const auto& [key, value] : self.dict().items) {
    meter.step();
    out.push_back(kWhat == 0 ? key : kWhat == 1 ? value : make_tuple({key, value}, meter));
  }
  static constexpr std::array kLabels{"dict_keys", "dict_values", "dict_items"};
  return make_sequence(std::move(out), SequenceKind::kView, meter, kLabels[kWhat]);
}

Value copy_method(const Value& self, Reader& in, Meter&) {
  in.finish();
  return self;
}

Value index_of(const Value& self, Reader& in, Meter& meter) {
  const Value what = in.required("value");
  in.finish();
  const auto& items = self.sequence().items;
  for (size_t i = 0; i < items.size(); ++i) {
    if (equals(items[i], what, meter)) return Value(i);
  }
  meter.fail("{} is not in the list", to_repr(what, meter));
}

Value count_of(const Value& self, Reader& in, Meter& meter) {
  const Value what = in.required("value");
  in.finish();
  const auto& items = self.sequence().items;
  return Value(static_cast<int64_t>(
      std::count_if(items.begin(), items.end(), [&](const Value& v) { return equals(v, what, meter); })));
}

const Methods& dict_methods() {
  static const Methods table{{"get", get_method},       {"keys", view_method<0>}, {"values", view_method<1>},
                             {"items", view_method<2>}, {"copy", copy_method},    {"update", nullptr},
                             {"pop", nullptr},          {"popitem", nullptr},     {"setdefault", nullptr},
                             {"clear", nullptr}};
  return table;
}

const Methods& list_methods() {
  static const Methods table{{"index", index_of},  {"count", count_of}, {"copy", copy_method},
                             {"append", nullptr},  {"extend", nullptr}, {"insert", nullptr},
                             {"remove", nullptr},  {"pop", nullptr},    {"clear", nullptr},
                             {"reverse", nullptr}, {"sort", nullptr}};
  return table;
}

}  // namespace

Value find_method(const Value& of, std::string_view name, Meter&) {
  const Methods* table = nullptr;
  if (of.is(Kind::kString)) table = &string_methods();
  if (of.is(Kind::kDict)) table = &dict_methods();
  const bool list = of.is(Kind::kSequence) && of.sequence().kind == SequenceKind::kList;
  if (list) table = &list_methods();
  if (!table) return None{};
  if (of.is(Kind::kString) && name == "format") {
    auto out = std::make_shared<Callable>();
    out->name = "format";
    out->body = [of](Meter& meter, Arguments& arguments) {
      return make_string(format_braces(of.string(), arguments, meter), meter);
    };
    return out;
  }
  const auto found = table->find(name);
  if (found == table->end()) return None{};
  if (!found->second) {
    return Value::undefined(text("access to attribute '{}' of '{}' object is unsafe", name, type_name(of)));
  }
  auto out = std::make_shared<Callable>();
  out->name = found->first;
  out->depth = of.depth();
  out->body = [of, found](Meter& meter, Arguments& arguments) {
    if (of.is(Kind::kString)) meter.work(kSearchCost * of.string().size());
    Reader reader(found->first, arguments, meter);
    return found->second(of, reader, meter);
  };
  return out;
}

}  // namespace kt::inline texts::jinja
