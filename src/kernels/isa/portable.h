// The vocabulary in plain C++: the definition every other ISA is held against. 16 rows to a vector.
// KT_STEP_BYTES (4 or 8) and KT_UNSIGNED_BYTES come from the build, so that packed weights can be shared
// with the host family's faster tables.
#pragma once
#include <cstdint>
#include <cstring>

#include "kernels/isa/inline.h"

// Calls, not inlined loops: unrolled chunks of scalar loops would take the compiler minutes.
#define KT_PORTABLE_OP __attribute__((noinline))

namespace KT_ISA_NAMESPACE {
namespace {

struct Portable {
  static constexpr int kLanes = 16;                    // rows of one part
  static constexpr int kStep = KT_STEP_BYTES;          // bytes a row contributes to a step
  static constexpr bool kUnsigned = KT_UNSIGNED_BYTES; // 8-bit weights carry +128
  static constexpr int kTokens = 1;                    // token rows one Acc covers
  static constexpr int kActRows = 1;
  static constexpr int few_parts(int) { return 1; }
  static constexpr int kTileGroups = 4, kTileParts = 1;
  static constexpr int kTileRows = 4;
  static constexpr int kFewLimit = 8;
  static constexpr int kFewPass = 8;  // rows `few` takes at once: 8, or 1
  static constexpr int kPanelBlocks = 4;
  static constexpr int kPrefetch = 0;
  static constexpr bool kBf16Product = false;  // has dot_bf16 and store_bf16_step; with steps of 4 bytes, e4m3_bf16 too
  static constexpr bool kBf16Rows = false;  // `few` takes rows of bf16 codes as they lie
  static constexpr bool kWideColumns = false;  // has wide_e4m3 and wide_e2m1: codes of several parts at once
  static constexpr bool kTileUnit = false;     // has tiles_s8 and tiles_bf16
  static constexpr bool kGridTables = false;  // has look_up_four; with steps of 4 bytes
  static constexpr bool kGathersTwo = false;  // has gather_two: the two steps of entries of 8 bytes
  static constexpr bool kRoundedPanels = true;  // has many_s8, for tile units to be held against
  static constexpr int kPeakWeights = 1, kPeakActs = 4;

  struct F32 { float v[kLanes]; };
  struct I32 { int32_t v[kLanes]; };
  struct Bytes { uint8_t v[kLanes * kStep]; };
  struct Acc { int32_t v[kLanes]; };
  struct Act { int8_t v[kStep]; };
  struct U16 { uint16_t v[kLanes]; };
  struct Table { int8_t v[16]; };

  static KT_PORTABLE_OP F32 set1(float x) { F32 r; for (int i = 0; i < kLanes; ++i) r.v[i] = x; return r; }
  static KT_PORTABLE_OP F32 load(const float* p) { F32 r; std::memcpy(&r, p, sizeof r); return r; }
  static KT_PORTABLE_OP void store(float* p, F32 x) { std::memcpy(p, &x, sizeof x); }
  static KT_PORTABLE_OP F32 add(F32 a, F32 b) { for (int i = 0; i < kLanes; ++i) a.v[i] += b.v[i]; return a; }
  static KT_PORTABLE_OP F32 sub(F32 a, F32 b) { for (int i = 0; i < kLanes; ++i) a.v[i] -= b.v[i]; return a; }
  static KT_PORTABLE_OP F32 mul(F32 a, F32 b) { for (int i = 0; i < kLanes; ++i) a.v[i] *= b.v[i]; return a; }
  static KT_PORTABLE_OP F32 div(F32 a, F32 b) { for (int i = 0; i < kLanes; ++i) a.v[i] /= b.v[i]; return a; }
  static KT_PORTABLE_OP F32 min(F32 a, F32 b) {
    for (int i = 0; i < kLanes; ++i) a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i];
    return a;
  }
  static KT_PORTABLE_OP F32 max(F32 a, F32 b) {
    for (int i = 0; i < kLanes; ++i) a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
    return a;
  }
  static KT_PORTABLE_OP F32 abs(F32 a) { for (int i = 0; i < kLanes; ++i) a.v[i] = __builtin_fabsf(a.v[i]); return a; }
  // a*b + c, rounded once
  static KT_PORTABLE_OP F32 fma(F32 a, F32 b, F32 c) {
    for (int i = 0; i < kLanes; ++i) c.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]);
    return c;
  }
  // a where x >= limit, else 0
  static KT_PORTABLE_OP F32 zero_below(F32 a, F32 x, F32 limit) {
    for (int i = 0; i < kLanes; ++i)
      if (!(x.v[i] >= limit.v[i])) a.v[i] = 0;
    return a;
  }
  // 0 where x < limit, else a: what is no number stays
  static KT_PORTABLE_OP F32 zero_under(F32 a, F32 x, F32 limit) {
    for (int i = 0; i < kLanes; ++i)
      if (x.v[i] < limit.v[i]) a.v[i] = 0;
    return a;
  }
  static KT_PORTABLE_OP float max_of(F32 a) {
    float m = a.v[0];
    for (int i = 1; i < kLanes; ++i) m = m > a.v[i] ? m : a.v[i];
    return m;
  }

  static KT_PORTABLE_OP I32 set1(int32_t x) { I32 r; for (int i = 0; i < kLanes; ++i) r.v[i] = x; return r; }
  static KT_PORTABLE_OP I32 add(I32 a, I32 b) { for (int i = 0; i < kLanes; ++i) a.v[i] += b.v[i]; return a; }
  static KT_PORTABLE_OP I32 sub(I32 a, I32 b) { for (int i = 0; i < kLanes; ++i) a.v[i] -= b.v[i]; return a; }
  static KT_PORTABLE_OP I32 mul(I32 a, I32 b) { for (int i = 0; i < kLanes; ++i) a.v[i] *= b.v[i]; return a; }
  static KT_PORTABLE_OP I32 load(const int32_t* p) { I32 r; std::memcpy(&r, p, sizeof r); return r; }
  static KT_PORTABLE_OP void store(int32_t* p, I32 x) { std::memcpy(p, &x, sizeof x); }
  static KT_PORTABLE_OP float sum_of(F32 a) { float s = 0; for (int i = 0; i < kLanes; ++i) s += a.v[i]; return s; }
  static KT_PORTABLE_OP int32_t sum_of(I32 a) { int32_t s = 0; for (int i = 0; i < kLanes; ++i) s += a.v[i]; return s; }
  static KT_PORTABLE_OP F32 to_f32(I32 a) {
    F32 r;
    for (int i = 0; i < kLanes; ++i) r.v[i] = static_cast<float>(a.v[i]);
    return r;
  }
  // round half to even; |a| < 2^31
  static KT_PORTABLE_OP I32 round(F32 a) {
    I32 r;
    for (int i = 0; i < kLanes; ++i) r.v[i] = static_cast<int32_t>(__builtin_rintf(a.v[i]));
    return r;
  }
  // 2^a for -126 <= a <= 127
  static KT_PORTABLE_OP F32 exp2i(I32 a) {
    F32 r;
    for (int i = 0; i < kLanes; ++i) r.v[i] = float_of(static_cast<uint32_t>(a.v[i] + 127) << 23);
    return r;
  }
  // 2^n of a = 1.5 * 2^23 + 127 + n, -127 < n < 128: its bits moved up by 23
  static KT_PORTABLE_OP F32 exp2_above(F32 a) {
    for (int i = 0; i < kLanes; ++i) a.v[i] = float_of(bits_of(a.v[i]) << 23);
    return a;
  }
  // low byte of each lane to kLanes consecutive bytes
  static KT_PORTABLE_OP void store_s8(int8_t* p, I32 x) {
    for (int i = 0; i < kLanes; ++i) p[i] = static_cast<int8_t>(x.v[i]);
  }
  // Bit i: lane i is no s8.
  static KT_PORTABLE_OP uint32_t beyond_s8(I32 x) {
    uint32_t r = 0;
    for (int i = 0; i < kLanes; ++i) r |= uint32_t{x.v[i] < -128 || x.v[i] > 127} << i;
    return r;
  }

  static KT_PORTABLE_OP F32 load_f16(const uint8_t* p) {
    F32 r;
    for (int i = 0; i < kLanes; ++i) r.v[i] = f16_to_f32(u16_at(p + 2 * i));
    return r;
  }
  static KT_PORTABLE_OP F32 load_bf16(const uint8_t* p) {
    F32 r;
    for (int i = 0; i < kLanes; ++i) r.v[i] = float_of(uint32_t{u16_at(p + 2 * i)} << 16);
    return r;
  }
  static KT_PORTABLE_OP F32 load_e8m0(const uint8_t* p) {
    F32 r;
    for (int i = 0; i < kLanes; ++i) r.v[i] = float_of(p[i] ? uint32_t{p[i]} << 23 : 0x400000u);
    return r;
  }
  // Finite numbers rounded to bf16, still f32.
  static KT_PORTABLE_OP F32 round_bf16(F32 x) {
    for (int i = 0; i < kLanes; ++i) {
      const uint32_t u = bits_of(x.v[i]);
      x.v[i] = float_of((u + 0x7fffu + (u >> 16 & 1u)) & 0xffff0000u);
    }
    return x;
  }
  // Numbers of a, then of b, rounded to bf16, as they would lie in memory; of denormals anything near.
  static KT_PORTABLE_OP I32 words_bf16(F32 a, F32 b) {
    I32 r;
    a = round_bf16(a), b = round_bf16(b);
    for (int i = 0; i < kLanes; ++i) {
      const float *x = i < kLanes / 2 ? a.v + 2 * i : b.v + 2 * i - kLanes;
      r.v[i] = static_cast<int32_t>(bits_of(x[0]) >> 16 | (bits_of(x[1]) & 0xffff0000u));
    }
    return r;
  }
  // Words of two numbers that bf16 holds.
  static KT_PORTABLE_OP I32 pair_bf16(F32 low, F32 high) {
    I32 r;
    for (int i = 0; i < kLanes; ++i)
      r.v[i] = static_cast<int32_t>(bits_of(low.v[i]) >> 16 | (bits_of(high.v[i]) & 0xffff0000u));
    return r;
  }
  // Words of four signed bytes, -127 to 127, as words of two bf16: of the first two, of the others.
  static KT_INLINE void s8_bf16(I32 a, I32 (&out)[2]) {
    out[0] = pair_bf16(byte_s8<0>(a), byte_s8<1>(a));
    out[1] = pair_bf16(byte_s8<2>(a), byte_s8<3>(a));
  }
  // Words of bf16 turned: from kTurn rows of 2 * kTurn words, a row for two keys and a word for each column, to as many
  // rows for two columns with a word for each key. Strides in bytes.
  static constexpr int kTurn = 1;
  static KT_PORTABLE_OP void turn(const uint8_t* from, int64_t, uint8_t* to, int64_t) {
    uint16_t x[4];
    std::memcpy(x, from, 8);
    const uint16_t y[4] = {x[0], x[2], x[1], x[3]};
    std::memcpy(to, y, 8);
  }
  // Of each 32-bit word: its halves as bf16, its byte kJ as a signed number.
  static KT_PORTABLE_OP F32 low_bf16(I32 a) {
    F32 r;
    for (int i = 0; i < kLanes; ++i) r.v[i] = float_of(static_cast<uint32_t>(a.v[i]) << 16);
    return r;
  }
  static KT_PORTABLE_OP F32 high_bf16(I32 a) {
    F32 r;
    for (int i = 0; i < kLanes; ++i) r.v[i] = float_of(static_cast<uint32_t>(a.v[i]) & 0xffff0000u);
    return r;
  }
  template <int kJ> static KT_PORTABLE_OP F32 byte_s8(I32 a) {
    F32 r;
    for (int i = 0; i < kLanes; ++i)
      r.v[i] = static_cast<float>(static_cast<int8_t>(static_cast<uint32_t>(a.v[i]) >> (8 * kJ)));
    return r;
  }
  static KT_PORTABLE_OP I32 load_s8(const uint8_t* p) {
    I32 r;
    for (int i = 0; i < kLanes; ++i) r.v[i] = static_cast<int8_t>(p[i]);
    return r;
  }
  static KT_PORTABLE_OP I32 load_u8(const uint8_t* p) {
    I32 r;
    for (int i = 0; i < kLanes; ++i) r.v[i] = p[i];
    return r;
  }
  // E4M3 without a sign, whole
  static KT_PORTABLE_OP F32 load_ue4m3(const uint8_t* p) {
    F32 r;
    for (int i = 0; i < kLanes; ++i) r.v[i] = e4m3_to_f32(p[i]);
    return r;
  }
  // value * 2^-8: what the bits are when they stand in an f16 (code_factor undoes it, once a span)
  static KT_PORTABLE_OP F32 load_e4m3(const uint8_t* p) {
    F32 r;
    for (int i = 0; i < kLanes; ++i) r.v[i] = e4m3_to_f32(p[i]) * 0x1p-8f;
    return r;
  }
  // nibbles of kLanes bytes as e2m1: the low ones (high = false) or the high ones
  template <bool kHigh> static KT_PORTABLE_OP F32 load_e2m1(const uint8_t* p) {
    F32 r; for (int i = 0; i < kLanes; ++i) r.v[i] = e2m1_to_f32(kHigh ? p[i] >> 4 : p[i] & 15); return r;
  }
  static KT_PORTABLE_OP void store_f16(void* p, F32 x) {
    auto* q = static_cast<uint8_t*>(p);
    for (int i = 0; i < kLanes; ++i) put_u16(q + 2 * i, f32_to_f16(x.v[i]));
  }
  static KT_PORTABLE_OP void store_bf16(void* p, F32 x) {
    auto* q = static_cast<uint8_t*>(p);
    for (int i = 0; i < kLanes; ++i) put_u16(q + 2 * i, f32_to_bf16(x.v[i]));
  }

  // Bytes: kStep codes of each of kLanes rows.
  static KT_PORTABLE_OP Bytes load_bytes(const uint8_t* p) { Bytes r; std::memcpy(&r, p, sizeof r); return r; }
  static KT_PORTABLE_OP void store_bytes(uint8_t* p, Bytes x) { std::memcpy(p, &x, sizeof x); }
  static KT_PORTABLE_OP Bytes bor(Bytes a, Bytes b) {
    for (unsigned i = 0; i < sizeof a.v; ++i) a.v[i] |= b.v[i];
    return a;
  }
  static KT_PORTABLE_OP Bytes flip_sign(Bytes a) { for (unsigned i = 0; i < sizeof a.v; ++i) a.v[i] ^= 0x80; return a; }
  // the field of kBits bits at bit kFrom of every byte, moved to bit kTo
  template <int kBits, int kFrom, int kTo> static KT_PORTABLE_OP Bytes field(Bytes a) {
    for (unsigned i = 0; i < sizeof a.v; ++i)
      a.v[i] = static_cast<uint8_t>((a.v[i] >> kFrom & ((1 << kBits) - 1)) << kTo);
    return a;
  }
  static KT_PORTABLE_OP Table table(const int8_t* p) { Table t; std::memcpy(&t, p, 16); return t; }
  static KT_PORTABLE_OP Bytes lookup(Table t, Bytes a) {
    for (unsigned i = 0; i < sizeof a.v; ++i) a.v[i] = static_cast<uint8_t>(t.v[a.v[i]]);
    return a;
  }
  // Indices of a grid (grids.inl.h): byte 4 kI + row % 4 of every 16, of which 4 rows have theirs; with kBits of `high`
  // from bit kShift on above it.
  template <int kI>
  static KT_PORTABLE_OP I32 quarter(const uint8_t* p) {
    I32 r;
    for (int i = 0; i < kLanes; ++i) r.v[i] = p[i / 4 * 16 + kI * 4 + i % 4];
    return r;
  }
  template <int kShift, int kBits> static KT_PORTABLE_OP I32 with_high(I32 low, I32 high) {
    for (int i = 0; i < kLanes; ++i) low.v[i] |= (high.v[i] >> kShift & ((1 << kBits) - 1)) << 8;
    return low;
  }
  // kStep bytes from entry a of a table of kNumbers bytes an entry, the second half from entry b where an entry has
  // half.
  template <int kNumbers> static KT_PORTABLE_OP Bytes gather(const uint8_t* table, I32 a, I32 b) {
    constexpr int kPiece = kNumbers < kStep ? kNumbers : kStep;
    Bytes r;
    for (int i = 0; i < kLanes; ++i) {
      std::memcpy(r.v + i * kStep, table + a.v[i] * kNumbers, kPiece);
      if constexpr (kPiece < kStep) std::memcpy(r.v + i * kStep + kPiece, table + b.v[i] * kNumbers, kPiece);
    }
    return r;
  }
  // 128 - byte where bit kBit of the byte of `signs` is set
  template <int kBit> static KT_PORTABLE_OP Bytes negate(Bytes a, const uint8_t* signs) {
    for (int i = 0; i < kLanes * kStep; ++i)
      if (signs[i] >> kBit & 1) a.v[i] = static_cast<uint8_t>(128 - a.v[i]);
    return a;
  }
  // Every byte of a row one more, or one less where the row's bit kBit is set.
  template <int kBit> static KT_PORTABLE_OP Bytes one_off(Bytes a, I32 rows) {
    for (int i = 0; i < kLanes * kStep; ++i)
      a.v[i] = static_cast<uint8_t>(a.v[i] + (rows.v[i / kStep] >> kBit & 1 ? -1 : 1));
    return a;
  }
  // byte kJ of every row, unsigned
  template <int kJ>
  static KT_PORTABLE_OP F32 column(Bytes a) {
    F32 r;
    for (int i = 0; i < kLanes; ++i) r.v[i] = a.v[i * kStep + kJ];
    return r;
  }
  // bf16 number kJ of every row of a step of bf16 codes
  template <int kJ>
  static KT_PORTABLE_OP F32 column_bf16(Bytes a) {
    F32 r;
    for (int i = 0; i < kLanes; ++i) r.v[i] = float_of(uint32_t{u16_at(a.v + i * kStep + 2 * kJ)} << 16);
    return r;
  }
  // column kJ of a step of E4M3 codes in pairs (layout.h), value * 2^-8 as with load_e4m3
  template <int kJ> static KT_PORTABLE_OP F32 column_e4m3(Bytes a) {
    F32 r;
    for (int i = 0; i < kLanes; ++i) r.v[i] = e4m3_to_f32(a.v[i / 4 * 16 + kJ / 2 * 8 + i % 4 * 2 + kJ % 2]) * 0x1p-8f;
    return r;
  }
  // low 16 bits of each lane, to be used with affine
  static KT_PORTABLE_OP U16 to_u16(I32 a) {
    U16 r;
    for (int i = 0; i < kLanes; ++i) r.v[i] = static_cast<uint16_t>(a.v[i]);
    return r;
  }
  // high byte of (byte * mul + add) mod 2^16, mul and add per row
  static KT_PORTABLE_OP Bytes affine(Bytes a, U16 mul, U16 add) {
    for (int i = 0; i < kLanes * kStep; ++i)
      a.v[i] = static_cast<uint8_t>(static_cast<uint16_t>(a.v[i] * unsigned{mul.v[i / kStep]} + add.v[i / kStep]) >> 8);
    return a;
  }
  // and its low byte
  static KT_PORTABLE_OP Bytes affine_low(Bytes a, U16 mul, U16 add) {
    for (int i = 0; i < kLanes * kStep; ++i)
      a.v[i] = static_cast<uint8_t>(a.v[i] * unsigned{mul.v[i / kStep]} + add.v[i / kStep]);
    return a;
  }

  static KT_PORTABLE_OP Acc zero_acc() { Acc r{}; return r; }
  static KT_PORTABLE_OP Acc acc_of(I32 x) { Acc r; std::memcpy(r.v, x.v, sizeof r.v); return r; }
  static KT_PORTABLE_OP Act load_act(const int8_t* p) { Act r; std::memcpy(&r, p, sizeof r); return r; }
  // acc[row] += sum over the step of weight * activation; kSmall promises weights below 64
  template <bool kSmall> static KT_PORTABLE_OP void dot(Acc& acc, Bytes w, Act a) {
    for (int i = 0; i < kLanes; ++i)
      for (int j = 0; j < kStep; ++j)
        acc.v[i] += (kUnsigned ? int{w.v[i * kStep + j]} : int{static_cast<int8_t>(w.v[i * kStep + j])}) * a.v[j];
  }
  template <int kToken>
  static KT_PORTABLE_OP I32 total(const Acc& acc) {
    I32 r;
    std::memcpy(&r, &acc, sizeof r);
    return r;
  }
  static KT_PORTABLE_OP void prefetch(const void*) {}
  // the compiler must assume x has changed
  static KT_PORTABLE_OP void opaque(Bytes& x) { asm volatile("" : "+m"(x)); }
};

}  // namespace
}  // namespace KT_ISA_NAMESPACE
