// Normal forms: decompose, order marks by class, compose (Unicode Standard Annex 15).
#include <algorithm>
#include <iterator>
#include <unordered_map>

#include "text/unicode.h"

namespace kt::inline texts {
namespace {

#include "text/unicode_tables.inc"

// Hangul syllables are arithmetic: (lead * 21 + vowel) * 28 + trail.
constexpr CodePoint kSyllables = 0xAC00, kLeads = 0x1100, kVowels = 0x1161, kTrails = 0x11A7;
constexpr CodePoint kLeadCount = 19, kVowelCount = 21, kTrailCount = 28;
constexpr CodePoint kSyllableCount = kLeadCount * kVowelCount * kTrailCount;

struct Facts {
  std::unordered_map<CodePoint, std::span<const uint32_t>> canonical, compatible;
  std::unordered_map<uint64_t, CodePoint> compositions;
};

void read_stream(std::span<const uint32_t> stream,
                 std::unordered_map<CodePoint, std::span<const uint32_t>>& out) {
  for (size_t i = 0; i < stream.size();) {
    const size_t count = stream[i] & 0xFF;
    out.emplace(stream[i] >> 8, stream.subspan(i + 1, count));
    i += 1 + count;
  }
}

const Facts& facts() {
  static const Facts made = [] {
    Facts f;
    read_stream(kCanonical, f.canonical);
    read_stream(kCompatible, f.compatible);
    for (size_t i = 0; i < std::size(kCompositions); i += 3)
      f.compositions.emplace(uint64_t{kCompositions[i]} << 32 | kCompositions[i + 1], kCompositions[i + 2]);
    return f;
  }();
  return made;
}

uint8_t combining_class(CodePoint code) {
  if (code < 0x300) return 0;
  const auto* after =
      std::upper_bound(std::begin(kCombiningRuns), std::end(kCombiningRuns), code << 8 | 0xFF);
  return static_cast<uint8_t>(*std::prev(after));
}

struct Character {
  CodePoint code;
  uint8_t rank;  // combining class
};

void decompose(CodePoint code, bool compatible, std::vector<Character>& out) {
  if (code - kSyllables < kSyllableCount) {
    const CodePoint index = code - kSyllables;
    out.push_back({kLeads + index / (kVowelCount * kTrailCount), 0});
    out.push_back({kVowels + index % (kVowelCount * kTrailCount) / kTrailCount, 0});
    if (index % kTrailCount) out.push_back({kTrails + index % kTrailCount, 0});
    return;
  }
  if (compatible) {
    if (const auto found = facts().compatible.find(code); found != facts().compatible.end()) {
      for (uint32_t part : found->second) out.push_back({part, combining_class(part)});
      return;
    }
  }
  if (const auto found = facts().canonical.find(code); found != facts().canonical.end()) {
    for (uint32_t part : found->second) out.push_back({part, combining_class(part)});
    return;
  }
  out.push_back({code, combining_class(code)});
}

void order_marks(std::vector<Character>& text) {
  for (size_t i = 0; i < text.size();) {
    if (text[i].rank == 0) {
      ++i;
      continue;
    }
    size_t end = i;
    while (end < text.size() && text[end].rank != 0) ++end;
    std::stable_sort(text.begin() + i, text.begin() + end,
                     [](const Character& a, const Character& b) { return a.rank < b.rank; });
    i = end;
  }
}

// 0: the two do not compose.
CodePoint composed(CodePoint first, CodePoint second) {
  if (first - kLeads < kLeadCount && second - kVowels < kVowelCount)
    return kSyllables + ((first - kLeads) * kVowelCount + (second - kVowels)) * kTrailCount;
  if (first - kSyllables < kSyllableCount && (first - kSyllables) % kTrailCount == 0 &&
      second - kTrails - 1 < kTrailCount - 1)
    return first + (second - kTrails);
  const auto found = facts().compositions.find(uint64_t{first} << 32 | second);
  return found == facts().compositions.end() ? 0 : found->second;
}

void compose(std::vector<Character>& text) {
  size_t starter = text.size();  // where the last starter went, or none
  int last_rank = -1;            // class of the last mark kept after it; -1: none
  size_t out = 0;
  for (const Character c : text) {
    if (starter < out && last_rank < static_cast<int>(c.rank)) {
      if (const CodePoint both = composed(text[starter].code, c.code)) {
        text[starter].code = both;
        continue;
      }
    }
    if (c.rank == 0) {
      starter = out;
      last_rank = -1;
    } else {
      last_rank = c.rank;
    }
    text[out++] = c;
  }
  text.resize(out);
}

}  // namespace

std::string normalised(std::string_view text, NormalForm form) {
  const bool compatible = form == NormalForm::kNfkc || form == NormalForm::kNfkd;
  const bool composes = form == NormalForm::kNfc || form == NormalForm::kNfkc;
  // Nothing below U+0300 changes under NFC, nothing below U+0080 under any form.
  const uint8_t changes_from = form == NormalForm::kNfc ? 0xCC : 0x80;
  if (std::ranges::all_of(text, [&](char c) {
        return static_cast<uint8_t>(c) < changes_from || (static_cast<uint8_t>(c) & 0xC0) == 0x80;
      }))
    return std::string(text);
  std::vector<Character> characters;
  characters.reserve(text.size());
  for (size_t at = 0; at < text.size();) decompose(next_code_point(text, at), compatible, characters);
  order_marks(characters);
  if (composes) compose(characters);
  std::string out;
  out.reserve(text.size());
  for (const Character& c : characters) append_utf8(out, c.code);
  return out;
}

}  // namespace kt::inline texts
