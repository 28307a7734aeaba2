#include "bench/random_matrix.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>

#include "formats/floats.h"
#include "formats/random_grid.h"

namespace kt::inline bench {
namespace {

constexpr float kReach = 0.05f;  // of the largest code times its scale

// The largest distance of a code from its bias.
float code_reach(const Format& f) {
  switch (f.code) {
    case Code::kI8:
      return 128;
    case Code::kIq4:
      return 127;
    case Code::kE2m1:
      return kE2m1Max;
    case Code::kE4m3:
      return kE4m3Max;
    case Code::kBf16:
    case Code::kF16:
    case Code::kF32:
      return 1;
    default:
      if (is_grid(f.code)) return static_cast<float>(grid_of(f.code).largest) * code_unit(f.code);
      return static_cast<float>(std::max(f.bias, (1 << code_bits(f.code)) - 1 - f.bias));
  }
}

template <typename T>
void put(std::vector<uint8_t>& to, size_t index, T value) {
  std::memcpy(to.data() + index * sizeof(T), &value, sizeof(T));
}

// A float with that many exponent and mantissa bits: either sign, between 2^-9 and 2^-4.
uint32_t random_float(uint64_t bits, int exponent_bits, int mantissa_bits) {
  const uint32_t bias = (1u << (exponent_bits - 1)) - 1;
  const uint32_t exponent = bias - 9 + static_cast<uint32_t>(bits >> 40) % 5;
  const auto mantissa = static_cast<uint32_t>(bits) & ((1u << mantissa_bits) - 1);
  const auto sign = static_cast<uint32_t>(bits >> 63);
  return sign << (exponent_bits + mantissa_bits) | exponent << mantissa_bits | mantissa;
}

void fill_codes(Matrix& w, RandomBits& random) {
  const auto count = static_cast<size_t>(w.n * w.k);
  switch (w.format.code) {
    case Code::kBf16:
      for (size_t i = 0; i < count; ++i)
        put(w.codes, i, static_cast<uint16_t>(random_float(random.next(), 8, 7)));
      return;
    case Code::kF16:
      for (size_t i = 0; i < count; ++i)
        put(w.codes, i, static_cast<uint16_t>(random_float(random.next(), 5, 10)));
      return;
    case Code::kF32:
      for (size_t i = 0; i < count; ++i) put(w.codes, i, random_float(random.next(), 8, 23));
      return;
    default:
      break;
  }
  if (is_grid(w.format.code)) return fill_grid_codes(w.format.code, w.codes, [&] { return random.next(); });
  const uint64_t mask = ((1ull << code_bits(w.format.code)) - 1) * 0x0101010101010101ull;
  for (size_t i = 0; i < count; i += 8) {
    const uint64_t eight = random.next() & mask;
    std::memcpy(w.codes.data() + i, &eight, std::min<size_t>(8, count - i));
  }
  if (w.format.code == Code::kE4m3)
    for (uint8_t& code : w.codes) code = is_nan_e4m3(code) ? code ^ 1 : code;
}

void fill_scales(Matrix& w, RandomBits& random) {
  const Format& f = w.format;
  const float step = kReach / code_reach(f);
  const auto jittered = [&](float value) { return value * static_cast<float>(0.5 + 0.5 * random.uniform()); };
  const size_t count =
      f.scale == Scale::kNone ? 0 : w.scales.size() / static_cast<size_t>(scale_bytes(f.scale));
  const int bits = span_scale_bits(f.code), most = (1 << (f.min == Min::kS8F16 ? bits : bits - 1)) - 1;
  for (size_t i = 0; i < count; ++i) {
    switch (f.scale) {
      case Scale::kNone:
        break;
      case Scale::kF32:
        put(w.scales, i, jittered(step));
        break;
      case Scale::kBf16:
        put(w.scales, i, to_bf16(jittered(step)).bits);
        break;
      case Scale::kF16:
        put(w.scales, i, to_f16(jittered(step)).bits);
        break;
      case Scale::kE8m0:
        w.scales[i] = static_cast<uint8_t>(127 + std::ilogb(step) - static_cast<int>(random.below(2)));
        break;
      case Scale::kE4m3:
        w.scales[i] = to_e4m3(jittered(step));
        break;
      case Scale::kS8F16:
        w.scales[i] = static_cast<uint8_t>(1 + random.below(static_cast<uint32_t>(most)));
        break;
    }
  }
  for (size_t i = 0; i < w.supers.size() / 2; ++i)
    put(w.supers, i, to_f16(jittered(step / static_cast<float>(most))).bits);
  const float middle = step * code_reach(f) / 2;  // centres codes that have no bias
  for (size_t i = 0; f.min != Min::kNone && i < w.mins.size() / static_cast<size_t>(min_bytes(f.min)); ++i) {
    if (f.min == Min::kF16)
      put(w.mins, i, to_f16(jittered(middle)).bits);
    else
      w.mins[i] =
          static_cast<uint8_t>(random.below(static_cast<uint32_t>(f.min == Min::kZero ? 16 : most + 1)));
  }
  for (size_t i = 0; i < w.super_mins.size() / 2; ++i)
    put(w.super_mins, i, to_f16(jittered(middle / static_cast<float>(most))).bits);
}

}  // namespace

uint64_t RandomBits::next() {
  uint64_t z = state_ += 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

double RandomBits::uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }

uint32_t RandomBits::below(uint32_t n) { return static_cast<uint32_t>(((next() >> 32) * n) >> 32); }

std::vector<int> shuffled(int count, RandomBits& random) {
  std::vector<int> out(static_cast<size_t>(count));
  std::iota(out.begin(), out.end(), 0);
  for (size_t i = out.size(); i > 1; --i) std::swap(out[i - 1], out[random.below(static_cast<uint32_t>(i))]);
  return out;
}

float random_activation(RandomBits& random) {
  const auto x = static_cast<float>(2 * random.uniform() - 1);
  return random.below(256) ? x : 20 * x;
}

Matrix random_matrix(const Format& format, int64_t n, int64_t k, uint64_t seed) {
  Matrix w(format, n, k);
  RandomBits random(seed);
  fill_codes(w, random);
  fill_scales(w, random);
  return w;
}

}  // namespace kt::inline bench
