#include "formats/grids.h"

#include <array>
#include <cstring>
#include <vector>

#include "base/error.h"

namespace kt::inline formats {
namespace {

#include "formats/grids.inc"

// The numbers a grid is made of, ascending.
constexpr std::array<int, 3> kIq2Levels = {8, 25, 43};
constexpr std::array<int, 8> kIq3XxsLevels = {4, 12, 20, 28, 36, 44, 52, 62};
constexpr std::array<int, 8> kIq3SLevels = {1, 3, 5, 7, 9, 11, 13, 15};
constexpr std::array<int, 3> kIq1Levels = {-8, 0, 8};

// Bits of one number of an entry.
constexpr int level_bits(int numbers) { return numbers == 8 ? 2 : 3; }

template <int kNumbers, size_t kEntries, size_t kLevels>
constexpr auto table_of(const std::array<uint16_t, kEntries>& steps, const std::array<int, kLevels>& levels) {
  std::array<uint8_t, kEntries * kNumbers> out{};
  unsigned entry = 0;
  for (size_t e = 0; e < kEntries; ++e) {
    entry += steps[e];
    for (int i = 0; i < kNumbers; ++i) {
      const unsigned level = entry >> level_bits(kNumbers) * i & ((1u << level_bits(kNumbers)) - 1);
      out[e * kNumbers + static_cast<size_t>(i)] = static_cast<uint8_t>(kGridBias + levels[level]);
    }
  }
  return out;
}

template <int kNumbers, size_t kLevels>
constexpr GridTables tables_of(const std::array<uint8_t, 256 * kNumbers>& table,
                               const std::array<int, kLevels>& levels) {
  constexpr GridWords kWords{kNumbers};
  constexpr GridBytes kBytes{kNumbers};
  GridTables out{};
  for (size_t e = 0; e < 256; ++e) {
    unsigned word = 0, bytes = 0;
    for (int i = 0; i < kNumbers; ++i) {
      unsigned level = 0;
      while (kGridBias + levels[level] != table[e * kNumbers + static_cast<size_t>(i)]) ++level;
      word |= level << kWords.place(i);
      bytes |= level << kBytes.place(i);
    }
    out.words[e] = static_cast<uint16_t>(word);
    for (int h = 0; h < 2; ++h) out.halves[h][e] = static_cast<uint8_t>(bytes >> 8 * h);
  }
  const auto code = [&](int index, int level_at, int sign_at) {
    const auto level = static_cast<size_t>(index >> level_at & ((1 << kBytes.bits()) - 1));
    if (level >= kLevels) return uint8_t{0};  // of no entry
    return static_cast<uint8_t>(index >> sign_at & 1 ? kGridBias - levels[level] : kGridBias + levels[level]);
  };
  for (int step = 0; step < 4; ++step)
    for (int i = 0; i < 64; ++i) out.by_byte[step][i] = code(i, kBytes.level(step), kBytes.sign(step));
  for (int step = 0; step < 2; ++step)
    for (int i = 0; i < 16; ++i) out.by_word[step][i] = code(i, 0, kWords.sign(step));
  return out;
}

alignas(64) constexpr auto kIq2Xxs = table_of<8>(kIq2XxsSteps, kIq2Levels);
alignas(64) constexpr auto kIq2Xs = table_of<8>(kIq2XsSteps, kIq2Levels);
alignas(64) constexpr auto kIq2S = table_of<8>(kIq2SSteps, kIq2Levels);
alignas(64) constexpr auto kIq3Xxs = table_of<4>(kIq3XxsSteps, kIq3XxsLevels);
alignas(64) constexpr auto kIq3S = table_of<4>(kIq3SSteps, kIq3SLevels);
alignas(64) constexpr auto kIq1 = table_of<8>(kIq1Steps, kIq1Levels);
constexpr auto kIq2XxsTables = tables_of<8>(kIq2Xxs, kIq2Levels);
constexpr auto kIq3XxsTables = tables_of<4>(kIq3Xxs, kIq3XxsLevels);

// A number's code without its sign, and without the eighth.
uint8_t plain_code(Code grid, uint8_t code) {
  if (grid == Code::kIq1) return static_cast<uint8_t>((code + 1) & ~7);
  return code < kGridBias ? negated_code(code) : code;
}

// From numbers to indices: an entry's levels side by side are a place in `index`.
struct Inverse {
  std::array<int8_t, 128> level;  // of a code; -1: of none
  std::vector<int16_t> index;

  explicit Inverse(Code code) {
    const int numbers = grid_of(code).numbers;
    const uint8_t* codes = grid_codes(code);
    level.fill(-1);
    std::array<bool, 128> occurs{};
    for (int i = 0; i < grid_entries(code) * numbers; ++i) occurs[codes[i]] = true;
    int8_t next = 0;
    for (size_t i = 0; i < occurs.size(); ++i)
      if (occurs[i]) level[i] = next++;
    index.assign(size_t{1} << level_bits(numbers) * numbers, -1);
    for (int e = 0; e < grid_entries(code); ++e)
      index[static_cast<size_t>(place(code, codes + e * numbers))] = static_cast<int16_t>(e);
  }
  // -1 for numbers that no entry has.
  int place(Code code, const uint8_t* codes) const {
    const int numbers = grid_of(code).numbers;
    int out = 0;
    for (int i = 0; i < numbers; ++i) {
      const int8_t at = codes[i] < 128 ? level[plain_code(code, codes[i]) & 127] : int8_t{-1};
      if (at < 0) return -1;
      out |= at << level_bits(numbers) * i;
    }
    return out;
  }
};

const Inverse& inverse_of(Code code) {
  static const std::array<Inverse, 6> all = {Inverse(Code::kIq2Xxs), Inverse(Code::kIq2Xs),
                                             Inverse(Code::kIq2S),   Inverse(Code::kIq3Xxs),
                                             Inverse(Code::kIq3S),   Inverse(Code::kIq1)};
  return all[static_cast<size_t>(code) - static_cast<size_t>(Code::kIq2Xxs)];
}

}  // namespace

const uint8_t* grid_codes(Code code) {
  switch (code) {
    case Code::kIq2Xxs:
      return kIq2Xxs.data();
    case Code::kIq2Xs:
      return kIq2Xs.data();
    case Code::kIq2S:
      return kIq2S.data();
    case Code::kIq3Xxs:
      return kIq3Xxs.data();
    case Code::kIq3S:
      return kIq3S.data();
    case Code::kIq1:
      return kIq1.data();
    default:
      return nullptr;
  }
}

const GridTables* grid_tables(Code code) {
  return code == Code::kIq2Xxs ? &kIq2XxsTables : code == Code::kIq3Xxs ? &kIq3XxsTables : nullptr;
}

void look_up(Code code, int index, uint8_t* codes) {
  const int numbers = grid_of(code).numbers, entry = index & (grid_entries(code) - 1);
  std::memcpy(codes, grid_codes(code) + entry * numbers, static_cast<size_t>(numbers));
  if (code != Code::kIq1) return;
  const int eighth = entry == index ? 1 : -1;
  for (int i = 0; i < numbers; ++i) codes[i] = static_cast<uint8_t>(codes[i] + eighth);
}

int grid_index(Code code, const uint8_t* codes) {
  const Inverse& inverse = inverse_of(code);
  const int place = inverse.place(code, codes);
  const int entry = place < 0 ? -1 : inverse.index[static_cast<size_t>(place)];
  if (entry < 0 || code != Code::kIq1) return entry;
  const int eighth = codes[0] & 7;  // 1 or 7, of all of them
  for (int i = 0; i < grid_of(code).numbers; ++i)
    if ((codes[i] & 7) != eighth) return -1;
  return eighth == 1 ? entry : eighth == 7 ? entry + grid_entries(code) : -1;
}

}  // namespace kt::inline formats
