// arm64: Neon (any ARMv8), NeonDotprod (+SDOT), NeonI8mm (+SMMLA, BFMMLA). A part is 4 rows: two registers of
// 2 rows x 8 bytes, the shape SMMLA multiplies.
//
// s8 dot products, per register w = (row0 k0..7; row1 k0..7) and activation a:
//   Neon         pairs = SMULL/SMULL2 + ADDP in 16 bits (2 * 128 * 127 < 2^15: exact), SADALP into 32 bits
//   NeonDotprod  SDOT with a repeated in both halves; lanes (row0, row0, row1, row1), added pairwise at the end
//   NeonI8mm     SMMLA with a = (token0 k0..7; token1 k0..7); lanes (t0 r0, t0 r1, t1 r0, t1 r1): two tokens for one
// All exact in 32 bits. BFMMLA sums pairs of bf16 products in f32 with its own rounding and flushes denormals.
#pragma once
#include <arm_neon.h>

#include "kernels/isa/inline.h"

namespace KT_ISA_NAMESPACE {
namespace {

struct Neon {
  static constexpr int kLanes = 4;
  static constexpr int kStep = 8;
  static constexpr bool kUnsigned = false;
  static constexpr int kTokens = 1;
  static constexpr int kActRows = 1;
  static constexpr int few_parts(int groups) { return groups <= 2 ? 4 : groups <= 4 ? 2 : 1; }
  static constexpr int kTileGroups = 4, kTileParts = 2;
  static constexpr int kTileRows = 4;
  static constexpr int kFewLimit = 8;
  static constexpr int kFewPass = 8;
  static constexpr int kPanelBlocks = 4;
  static constexpr int kPrefetch = 1024;
  static constexpr bool kBf16Product = false;
  static constexpr bool kBf16Rows = true;
  static constexpr bool kWideColumns = true;
  static constexpr bool kTileUnit = false;
  static constexpr bool kGridTables = false;
  static constexpr bool kGathersTwo = false;
  static constexpr bool kRoundedPanels = false;
  static constexpr int kPeakWeights = 3, kPeakActs = 3;

  using F32 = float32x4_t;
  using I32 = int32x4_t;
  struct Bytes { uint8x16_t a, b; };
  struct Acc { int32x4_t a, b; };
  using Act = int8x16_t;
  using U16 = uint16x4_t;
  using Table = int8x16_t;

  static KT_INLINE F32 set1(float x) { return vdupq_n_f32(x); }
  static KT_INLINE F32 load(const float* p) { return vld1q_f32(p); }
  static KT_INLINE void store(float* p, F32 x) { vst1q_f32(p, x); }
  static KT_INLINE F32 add(F32 a, F32 b) { return vaddq_f32(a, b); }
  static KT_INLINE F32 sub(F32 a, F32 b) { return vsubq_f32(a, b); }
  static KT_INLINE F32 mul(F32 a, F32 b) { return vmulq_f32(a, b); }
  static KT_INLINE F32 div(F32 a, F32 b) { return vdivq_f32(a, b); }
  static KT_INLINE F32 min(F32 a, F32 b) { return vminq_f32(a, b); }
  static KT_INLINE F32 max(F32 a, F32 b) { return vmaxq_f32(a, b); }
  static KT_INLINE F32 abs(F32 a) { return vabsq_f32(a); }
  static KT_INLINE F32 fma(F32 a, F32 b, F32 c) { return vfmaq_f32(c, a, b); }
  static KT_INLINE F32 zero_below(F32 a, F32 x, F32 limit) {
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(a), vcgeq_f32(x, limit)));
  }
  static KT_INLINE F32 zero_under(F32 a, F32 x, F32 limit) {
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(a), vcltq_f32(x, limit)));
  }
  static KT_INLINE float max_of(F32 a) { return vmaxvq_f32(a); }
  static KT_INLINE float sum_of(F32 a) { return vaddvq_f32(a); }

  static KT_INLINE I32 set1(int32_t x) { return vdupq_n_s32(x); }
  static KT_INLINE I32 add(I32 a, I32 b) { return vaddq_s32(a, b); }
  static KT_INLINE I32 sub(I32 a, I32 b) { return vsubq_s32(a, b); }
  static KT_INLINE I32 mul(I32 a, I32 b) { return vmulq_s32(a, b); }
  static KT_INLINE I32 load(const int32_t* p) { return vld1q_s32(p); }
  static KT_INLINE void store(int32_t* p, I32 x) { vst1q_s32(p, x); }
  static KT_INLINE int32_t sum_of(I32 a) { return vaddvq_s32(a); }
  static KT_INLINE F32 to_f32(I32 a) { return vcvtq_f32_s32(a); }
  static KT_INLINE I32 round(F32 a) { return vcvtnq_s32_f32(a); }
  static KT_INLINE F32 exp2i(I32 a) { return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(a, vdupq_n_s32(127)), 23)); }
  static KT_INLINE F32 exp2_above(F32 a) { return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_f32(a), 23)); }
  static KT_INLINE void store_s8(int8_t* p, I32 x) {
    const int8x8_t b = vmovn_s16(vcombine_s16(vmovn_s32(x), vmovn_s32(x)));
    vst1_lane_s32(reinterpret_cast<int32_t*>(p), vreinterpret_s32_s8(b), 0);
  }

  static KT_INLINE uint16x4_t load4_u16(const uint8_t* p) { uint16x4_t v; __builtin_memcpy(&v, p, 8); return v; }
  static KT_INLINE uint8x8_t load4_u8(const uint8_t* p) {
    uint32_t v;
    __builtin_memcpy(&v, p, 4);
    return vreinterpret_u8_u32(vdup_n_u32(v));
  }
  static KT_INLINE F32 load_f16(const uint8_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(load4_u16(p))); }
  static KT_INLINE F32 load_bf16(const uint8_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(load4_u16(p), 16)); }
  // Finite numbers rounded to bf16, still f32.
  static KT_INLINE F32 round_bf16(F32 x) {
    const uint32x4_t u = vreinterpretq_u32_f32(x), odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
    return vreinterpretq_f32_u32(
        vandq_u32(vaddq_u32(u, vaddq_u32(odd, vdupq_n_u32(0x7fff))), vdupq_n_u32(0xffff0000u)));
  }
  static KT_INLINE uint16x8_t nearest_bf16(F32 x) {  // the odd ones of the eight halves
    const uint32x4_t u = vreinterpretq_u32_f32(x), odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
    return vreinterpretq_u16_u32(vaddq_u32(u, vaddq_u32(odd, vdupq_n_u32(0x7fff))));
  }
  static KT_INLINE I32 words_bf16(F32 a, F32 b) {
    return vreinterpretq_s32_u16(vuzp2q_u16(nearest_bf16(a), nearest_bf16(b)));
  }
  static KT_INLINE I32 pair_bf16(F32 low, F32 high) {
    return vreinterpretq_s32_u32(vsriq_n_u32(vreinterpretq_u32_f32(high), vreinterpretq_u32_f32(low), 16));
  }
  static KT_INLINE void s8_bf16(I32 a, I32 (&out)[2]) {
    out[0] = pair_bf16(byte_s8<0>(a), byte_s8<1>(a));
    out[1] = pair_bf16(byte_s8<2>(a), byte_s8<3>(a));
  }
  static constexpr int kTurn = 2;
  static KT_INLINE void turn(const uint8_t* from, int64_t from_stride, uint8_t* to, int64_t to_stride) {
    const uint8x16_t order = {0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15};
    const uint64x2_t a = vreinterpretq_u64_u8(vqtbl1q_u8(vld1q_u8(from), order));
    const uint64x2_t b = vreinterpretq_u64_u8(vqtbl1q_u8(vld1q_u8(from + from_stride), order));
    vst1q_u8(to, vreinterpretq_u8_u64(vzip1q_u64(a, b)));
    vst1q_u8(to + to_stride, vreinterpretq_u8_u64(vzip2q_u64(a, b)));
  }
  // Of each 32-bit word: its halves as bf16, its byte kJ as a signed number.
  static KT_INLINE F32 low_bf16(I32 a) { return vreinterpretq_f32_s32(vshlq_n_s32(a, 16)); }
  static KT_INLINE F32 high_bf16(I32 a) {
    return vreinterpretq_f32_s32(vandq_s32(a, vdupq_n_s32(static_cast<int>(0xffff0000u))));
  }
  // A byte plus 128 as the last bits of 2^23 + byte + 128: a conversion takes four times as long as a subtraction.
  template <int kJ> static KT_INLINE F32 byte_s8(I32 a) {
    constexpr uint64_t kNone = 0xffffff00ull;  // an index past the table gives 0
    const uint8x16_t index =
        vreinterpretq_u8_u64(vcombine_u64(vcreate_u64((kNone | kJ) | (kNone | (kJ + 4)) << 32),
                                          vcreate_u64((kNone | (kJ + 8)) | (kNone | (kJ + 12)) << 32)));
    const uint8x16_t above = veorq_u8(vreinterpretq_u8_s32(a), vdupq_n_u8(0x80));
    const uint32x4_t bits = vorrq_u32(vreinterpretq_u32_u8(vqtbl1q_u8(above, index)), vdupq_n_u32(0x4b000000));
    return vsubq_f32(vreinterpretq_f32_u32(bits), vdupq_n_f32(8388736.0f));
  }
  static KT_INLINE I32 load_s8(const uint8_t* p) {
    return vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(load4_u8(p)))));
  }
  static KT_INLINE I32 load_u8(const uint8_t* p) {
    return vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(vmovl_u8(load4_u8(p)))));
  }
  static KT_INLINE F32 load_e8m0(const uint8_t* p) {
    const uint32x4_t e = vreinterpretq_u32_s32(load_u8(p));
    return vreinterpretq_f32_u32(vmaxq_u32(vshlq_n_u32(e, 23), vdupq_n_u32(0x400000)));
  }
  // The 7 bits of exponent and mantissa, placed in an f16, are value * 2^-8, subnormals included.
  static KT_INLINE F32 load_e4m3(const uint8_t* p) {
    const int16x4_t wide = vget_low_s16(vshll_n_s8(vreinterpret_s8_u8(load4_u8(p)), 7));
    const uint16x4_t half = vand_u16(vreinterpret_u16_s16(wide), vdup_n_u16(0xbfff));
    return vcvt_f32_f16(vreinterpret_f16_u16(half));
  }
  static KT_INLINE F32 load_ue4m3(const uint8_t* p) { return vmulq_n_f32(load_e4m3(p), 256); }
  // 16 codes of a column, or 8: far cheaper together. E4M3 as load_e4m3 gives it.
  template <int kCount> static KT_INLINE uint8x16_t load_codes(const uint8_t* p) {
    if constexpr (kCount == 16) return vld1q_u8(p);
    else return vcombine_u8(vld1_u8(p), vdup_n_u8(0));
  }
  template <int kVectors> static KT_INLINE void upper_halves(uint8x16_t low, uint8x16_t high, F32 (&w)[kVectors]) {
    const uint16x8_t zero = vdupq_n_u16(0);
    const auto put = [&](int i, uint8x16_t pairs) {
      w[i] = vreinterpretq_f32_u16(vzip1q_u16(zero, vreinterpretq_u16_u8(pairs)));
      w[i + 1] = vreinterpretq_f32_u16(vzip2q_u16(zero, vreinterpretq_u16_u8(pairs)));
    };
    put(0, vzip1q_u8(low, high));
    if constexpr (kVectors == 4) put(2, vzip2q_u8(low, high));
  }
  template <int kVectors> static KT_INLINE void wide_e4m3(const uint8_t* p, F32 (&w)[kVectors]) {
    const int8x16_t codes = vreinterpretq_s8_u8(load_codes<kVectors * 4>(p));
    const auto put = [&](int i, int16x8_t wide) {
      const float16x8_t half = vreinterpretq_f16_u16(vandq_u16(vreinterpretq_u16_s16(wide), vdupq_n_u16(0xbfff)));
      w[i] = vcvt_f32_f16(vget_low_f16(half));
      w[i + 1] = vcvt_high_f32_f16(half);
    };
    put(0, vshll_n_s8(vget_low_s8(codes), 7));
    if constexpr (kVectors == 4) put(2, vshll_high_n_s8(codes, 7));
  }
  // The two bytes of the bf16 numbers 0 .5 1 1.5 2 3 4 6 and their negatives.
  template <bool kHigh, int kVectors> static KT_INLINE void wide_e2m1(const uint8_t* p, F32 (&w)[kVectors]) {
    constexpr uint64_t kLow = 0xc0804000c0800000ull, kTop = 0x404040403f3f3f00ull;
    const uint8x16_t low = vreinterpretq_u8_u64(vdupq_n_u64(kLow));
    const uint8x16_t top =
        vreinterpretq_u8_u64(vcombine_u64(vcreate_u64(kTop), vcreate_u64(kTop | 0x8080808080808080ull)));
    uint8x16_t n = load_codes<kVectors * 4>(p);
    n = kHigh ? vshrq_n_u8(n, 4) : vandq_u8(n, vdupq_n_u8(15));
    upper_halves(vqtbl1q_u8(low, n), vqtbl1q_u8(top, n), w);
  }
  template <bool kHigh> static KT_INLINE F32 load_e2m1(const uint8_t* p) {
    // high bytes of the f16 numbers 0 .5 1 1.5 2 3 4 6 and their negatives
    constexpr uint64_t kPositive = 0x464442403e3c3800ull, kNegative = 0xc6c4c2c0bebcb880ull;
    const uint8x16_t table = vreinterpretq_u8_u64(vcombine_u64(vcreate_u64(kPositive), vcreate_u64(kNegative)));
    uint8x8_t n = load4_u8(p);
    n = kHigh ? vshr_n_u8(n, 4) : vand_u8(n, vdup_n_u8(15));
    const uint16x8_t half = vshll_n_u8(vqtbl1_u8(table, n), 8);
    return vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(half)));
  }
  static KT_INLINE void store_f16(void* p, F32 x) {
    const uint16x4_t h = vreinterpret_u16_f16(vcvt_f16_f32(x));
    __builtin_memcpy(p, &h, 8);
  }
  static KT_INLINE uint16x4_t to_bf16(F32 x) {
    const uint32x4_t u = vreinterpretq_u32_f32(x);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(u, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    const uint32x4_t quiet = vorrq_u32(u, vdupq_n_u32(0x400000));
    return vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), rounded, quiet), 16);
  }
  static KT_INLINE void store_bf16(void* p, F32 x) { const uint16x4_t h = to_bf16(x); __builtin_memcpy(p, &h, 8); }

  static KT_INLINE Bytes load_bytes(const uint8_t* p) { return {vld1q_u8(p), vld1q_u8(p + 16)}; }
  static KT_INLINE void store_bytes(uint8_t* p, Bytes x) { vst1q_u8(p, x.a); vst1q_u8(p + 16, x.b); }
  static KT_INLINE Bytes bor(Bytes x, Bytes y) { return {vorrq_u8(x.a, y.a), vorrq_u8(x.b, y.b)}; }
  static KT_INLINE Bytes flip_sign(Bytes x) {
    const auto s = vdupq_n_u8(0x80);
    return {veorq_u8(x.a, s), veorq_u8(x.b, s)};
  }
  template <int kBits, int kFrom, int kTo> static KT_INLINE uint8x16_t field1(uint8x16_t x) {
    if constexpr (kFrom > kTo) x = vshrq_n_u8(x, kFrom - kTo);
    if constexpr (kFrom < kTo) x = vshlq_n_u8(x, kTo - kFrom);
    constexpr bool kClean = (kTo == 0 && kFrom + kBits == 8) || (kFrom == 0 && kTo + kBits == 8);
    return kClean ? x : vandq_u8(x, vdupq_n_u8(((1 << kBits) - 1) << kTo));
  }
  template <int kBits, int kFrom, int kTo> static KT_INLINE Bytes field(Bytes x) {
    return {field1<kBits, kFrom, kTo>(x.a), field1<kBits, kFrom, kTo>(x.b)};
  }
  static KT_INLINE Table table(const int8_t* p) { return vld1q_s8(p); }
  static KT_INLINE Bytes lookup(Table t, Bytes x) {
    return {vreinterpretq_u8_s8(vqtbl1q_s8(t, x.a)), vreinterpretq_u8_s8(vqtbl1q_s8(t, x.b))};
  }
  template <int kI> static KT_INLINE I32 quarter(const uint8_t* p) { return load_u8(p + 4 * kI); }
  template <int kShift, int kBits> static KT_INLINE I32 with_high(I32 low, I32 high) {
    return vorrq_s32(low, vandq_s32(vshlq_n_s32(high, 8 - kShift), vdupq_n_s32(((1 << kBits) - 1) << 8)));
  }
  template <int kNumbers> static KT_INLINE uint8x8_t entry(const uint8_t* table, int32_t a, int32_t b) {
    if constexpr (kNumbers == 8) return vld1_u8(table + a * 8);
    uint32_t low, high;
    __builtin_memcpy(&low, table + a * 4, 4);
    __builtin_memcpy(&high, table + b * 4, 4);
    return vreinterpret_u8_u32(vset_lane_u32(high, vdup_n_u32(low), 1));
  }
  template <int kNumbers> static KT_INLINE Bytes gather(const uint8_t* table, I32 a, I32 b) {
    return {vcombine_u8(entry<kNumbers>(table, vgetq_lane_s32(a, 0), vgetq_lane_s32(b, 0)),
                        entry<kNumbers>(table, vgetq_lane_s32(a, 1), vgetq_lane_s32(b, 1))),
            vcombine_u8(entry<kNumbers>(table, vgetq_lane_s32(a, 2), vgetq_lane_s32(b, 2)),
                        entry<kNumbers>(table, vgetq_lane_s32(a, 3), vgetq_lane_s32(b, 3)))};
  }
  template <int kBit> static KT_INLINE uint8x16_t negate1(uint8x16_t x, const uint8_t* signs) {
    return vbslq_u8(vtstq_u8(vld1q_u8(signs), vdupq_n_u8(1 << kBit)), vsubq_u8(vdupq_n_u8(128), x), x);
  }
  template <int kBit> static KT_INLINE Bytes negate(Bytes x, const uint8_t* signs) {
    return {negate1<kBit>(x.a, signs), negate1<kBit>(x.b, signs + 16)};
  }
  template <int kBit> static KT_INLINE Bytes one_off(Bytes x, I32 rows) {
    const int32x4_t less = vshrq_n_s32(vshlq_n_s32(rows, 31 - kBit), 31), by = vorrq_s32(less, vdupq_n_s32(0x01010101));
    return {vaddq_u8(x.a, vreinterpretq_u8_s32(vzip1q_s32(by, by))),
            vaddq_u8(x.b, vreinterpretq_u8_s32(vzip2q_s32(by, by)))};
  }
  template <int kJ> static KT_INLINE F32 column(Bytes x) {
    // lane r: byte kJ of row r, zero-extended (an index past the table gives 0)
    constexpr uint64_t kNone = 0xffffff00ull;
    const uint8x16_t index =
        vreinterpretq_u8_u64(vcombine_u64(vcreate_u64((kNone | kJ) | (kNone | (kJ + 8)) << 32),
                                          vcreate_u64((kNone | (kJ + 16)) | (kNone | (kJ + 24)) << 32)));
    return vcvtq_f32_u32(vreinterpretq_u32_u8(vqtbl2q_u8(uint8x16x2_t{{x.a, x.b}}, index)));
  }
  template <int kJ> static KT_INLINE F32 column_bf16(Bytes x) {
    constexpr uint64_t kNone = 0xffffull, kPair = (2 * kJ) | (2 * kJ + 1) << 8;
    const uint8x16_t index = vreinterpretq_u8_u64(vcombine_u64(
        vcreate_u64((kNone | kPair << 16) | (kNone | (kPair + 0x0808) << 16) << 32),
        vcreate_u64((kNone | (kPair + 0x1010) << 16) | (kNone | (kPair + 0x1818) << 16) << 32)));
    return vreinterpretq_f32_u8(vqtbl2q_u8(uint8x16x2_t{{x.a, x.b}}, index));
  }
  // A step of bf16 codes, four columns of each of four rows; and the sums of four rows' lanes.
  static KT_INLINE void rows_bf16(Bytes x, F32 (&w)[4]) {
    const uint16x8_t zero = vdupq_n_u16(0), a = vreinterpretq_u16_u8(x.a), b = vreinterpretq_u16_u8(x.b);
    w[0] = vreinterpretq_f32_u16(vzip1q_u16(zero, a));
    w[1] = vreinterpretq_f32_u16(vzip2q_u16(zero, a));
    w[2] = vreinterpretq_f32_u16(vzip1q_u16(zero, b));
    w[3] = vreinterpretq_f32_u16(vzip2q_u16(zero, b));
  }
  static KT_INLINE F32 sums_of(const F32 (&x)[4]) { return vpaddq_f32(vpaddq_f32(x[0], x[1]), vpaddq_f32(x[2], x[3])); }
  static KT_INLINE U16 to_u16(I32 a) { return vreinterpret_u16_s16(vmovn_s32(a)); }
  template <int kRow> static KT_INLINE uint8x16_t affine2(uint8x16_t x, U16 mul, U16 add) {
    const uint16x8_t r0 = vmlaq_lane_u16(vdupq_lane_u16(add, kRow), vmovl_u8(vget_low_u8(x)), mul, kRow);
    const uint16x8_t r1 = vmlaq_lane_u16(vdupq_lane_u16(add, kRow + 1), vmovl_high_u8(x), mul, kRow + 1);
    return vuzp2q_u8(vreinterpretq_u8_u16(r0), vreinterpretq_u8_u16(r1));
  }
  static KT_INLINE Bytes affine(Bytes x, U16 mul, U16 add) {
    return {affine2<0>(x.a, mul, add), affine2<2>(x.b, mul, add)};
  }

  static KT_INLINE Acc zero_acc() { return {vdupq_n_s32(0), vdupq_n_s32(0)}; }
  static KT_INLINE Act load_act(const int8_t* p) {
    const int8x8_t half = vld1_s8(p);
    return vcombine_s8(half, half);
  }
  static KT_INLINE int32x4_t dot1(int32x4_t acc, uint8x16_t w, Act a) {
    const int8x16_t s = vreinterpretq_s8_u8(w);
    return vpadalq_s16(acc, vpaddq_s16(vmull_s8(vget_low_s8(s), vget_low_s8(a)), vmull_high_s8(s, a)));
  }
  template <bool kSmall> static KT_INLINE void dot(Acc& acc, Bytes w, Act a) {
    acc.a = dot1(acc.a, w.a, a);
    acc.b = dot1(acc.b, w.b, a);
  }
  template <int kToken> static KT_INLINE I32 total(const Acc& acc) { return vpaddq_s32(acc.a, acc.b); }
  static KT_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
  static KT_INLINE void opaque(Bytes& x) { asm volatile("" : "+w"(x.a), "+w"(x.b)); }
};

#ifdef __ARM_FEATURE_DOTPROD
struct NeonDotprod : Neon {
  template <bool kSmall> static KT_INLINE void dot(Acc& acc, Bytes w, Act a) {
    acc.a = vdotq_s32(acc.a, vreinterpretq_s8_u8(w.a), a);
    acc.b = vdotq_s32(acc.b, vreinterpretq_s8_u8(w.b), a);
  }
};
#endif

#if defined(__ARM_FEATURE_MATMUL_INT8) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
struct NeonI8mm : NeonDotprod {
  static constexpr int kTokens = 2;
  static constexpr int kActRows = 2;
  static constexpr int few_parts(int groups) { return groups <= 2 ? 4 : 2; }
  static constexpr int kTileRows = 8;
  static constexpr bool kBf16Product = true;
  struct AccF { float32x4_t a, b; };

  static KT_INLINE Act load_act(const int8_t* p) { return vld1q_s8(p); }
  template <bool kSmall> static KT_INLINE void dot(Acc& acc, Bytes w, Act a) {
    acc.a = vmmlaq_s32(acc.a, a, vreinterpretq_s8_u8(w.a));
    acc.b = vmmlaq_s32(acc.b, a, vreinterpretq_s8_u8(w.b));
  }
  template <int kToken> static KT_INLINE I32 total(const Acc& acc) {
    return kToken == 0 ? vcombine_s32(vget_low_s32(acc.a), vget_low_s32(acc.b))
                       : vcombine_s32(vget_high_s32(acc.a), vget_high_s32(acc.b));
  }
  static KT_INLINE AccF zero_accf() { return {vdupq_n_f32(0), vdupq_n_f32(0)}; }
  static KT_INLINE void dot_bf16(AccF& acc, Bytes w, Act a) {
    const bfloat16x8_t x = vreinterpretq_bf16_s8(a);
    acc.a = vbfmmlaq_f32(acc.a, x, vreinterpretq_bf16_u8(w.a));
    acc.b = vbfmmlaq_f32(acc.b, x, vreinterpretq_bf16_u8(w.b));
  }
  template <int kToken> static KT_INLINE F32 total(const AccF& acc) {
    return kToken == 0 ? vcombine_f32(vget_low_f32(acc.a), vget_low_f32(acc.b))
                       : vcombine_f32(vget_high_f32(acc.a), vget_high_f32(acc.b));
  }
  // 4 columns of 4 rows to 4 rows of 4 bf16
  static KT_INLINE void store_bf16_step(uint8_t* p, const F32 (&c)[4]) {
    const float32x4_t a = vtrn1q_f32(c[0], c[1]), b = vtrn2q_f32(c[0], c[1]);
    const float32x4_t d = vtrn1q_f32(c[2], c[3]), e = vtrn2q_f32(c[2], c[3]);
    const auto low = [](float32x4_t x, float32x4_t y) {
      return vreinterpretq_f32_f64(vtrn1q_f64(vreinterpretq_f64_f32(x), vreinterpretq_f64_f32(y)));
    };
    const auto high = [](float32x4_t x, float32x4_t y) {
      return vreinterpretq_f32_f64(vtrn2q_f64(vreinterpretq_f64_f32(x), vreinterpretq_f64_f32(y)));
    };
    const bfloat16x8_t r01 = vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(low(a, d)), low(b, e));
    const bfloat16x8_t r23 = vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(high(a, d)), high(b, e));
    vst1q_u8(p, vreinterpretq_u8_bf16(r01));
    vst1q_u8(p + 16, vreinterpretq_u8_bf16(r23));
  }
};
#endif

}  // namespace
}  // namespace KT_ISA_NAMESPACE
