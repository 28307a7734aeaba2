// The vocabulary in 512-bit registers: 16 rows to a vector, one vector to a step of a row block.
//
// acc[row] += sum_4 u8 * s8, exact:
//   F+BW             as in avx2.h. Codes below 128: maddubs, madd by ones, add (2 * 127 * 127 < 2^15 cannot
//                    saturate); any u8: even and odd bytes widened to 16 bits, two madds, two adds.
//   VNNI             vpdpbusd, which does not saturate.
// int32 sums hold for 2^31 / (255 * 127) = 66,000 columns; packing refuses longer spans.
//
// bf16 * bf16:
//   BF16             vdpbf16ps: the two products of a pair are added to f32 one after the other, each sum rounded once
//                    to nearest, inputs and results that are denormal as zeros: the error of a plain f32 sum.
//
// e4m3, in pairs of columns (layout.h) -> f16 bits (sign, 0eeee, mmm0000000) in 16-bit lanes, where even bytes make
// columns 0 and 2 and odd ones 1 and 3, four rows to 64 bits -> vpermq puts 16 rows side by side -> vcvtph2ps,
// value * 2^-8: exact, subnormals included, and no f32 denormal ever enters an FMA.
//   VBMI + BF16      two vpermi2b look up the low and the high byte of the bf16 of 128 magnitudes (the index's bit 7 is
//                    ignored), a vpternlog flips the sign, and unpacking them within 16 bytes makes two steps of bf16
//                    codes: 9 operations on ports 0 and 5 for 64 weights (vpermi2b: 3), 6 of them on port 5; through
//                    vcvtph2ps it takes 17. Exact: a value has 4 significant bits and is at least 2^-9, never denormal.
// e2m1 -> a permute of its 16 values, which reads the low four bits of each lane.
#pragma once
#include <immintrin.h>

#include "formats/grids.h"
#include "kernels/isa/inline.h"
#include "kernels/isa/look_up_bytes.h"

namespace KT_ISA_NAMESPACE {
namespace {

struct Avx512 {
  static constexpr int kLanes = 16;
  static constexpr int kStep = 4;
  static constexpr bool kUnsigned = true;
  static constexpr int kTokens = 1;
  static constexpr int kActRows = 1;
  static constexpr int few_parts(int) { return 1; }
  static constexpr int kTileGroups = 8, kTileParts = 2;  // parts of two neighbouring row blocks
  static constexpr int kTileRows = kTileGroups * kTokens;
  static constexpr int kFewLimit = 8;
  static constexpr int kFewPass = 8;
  static constexpr int kPanelBlocks = 16;
  static constexpr int kPrefetch = 4096;
  static constexpr bool kBf16Product = false;
  static constexpr bool kBf16Rows = false;
  static constexpr bool kWideColumns = false;
  static constexpr bool kTileUnit = false;
  static constexpr bool kGridTables = true;
  static constexpr bool kGathersTwo = true;
  static constexpr bool kRoundedPanels = false;
  static constexpr int kPeakWeights = 2, kPeakActs = 4;

  struct F32 { __m512 v; };
  struct I32 { __m512i v; };
  struct Bytes { __m512i v; };
  struct Act { __m512i v; };    // the same 4 bytes for every row
  struct U16 { __m512i v; };    // twice in each 32-bit lane
  struct Table { __m512i v; };  // four times
  using Acc = I32;

  static KT_INLINE __m128i load_128(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
  static KT_INLINE __m256i load_256(const uint8_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }

  static KT_INLINE F32 set1(float x) { return {_mm512_set1_ps(x)}; }
  static KT_INLINE F32 load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static KT_INLINE void store(float* p, F32 x) { _mm512_storeu_ps(p, x.v); }
  static KT_INLINE F32 add(F32 a, F32 b) { return {_mm512_add_ps(a.v, b.v)}; }
  static KT_INLINE F32 sub(F32 a, F32 b) { return {_mm512_sub_ps(a.v, b.v)}; }
  static KT_INLINE F32 mul(F32 a, F32 b) { return {_mm512_mul_ps(a.v, b.v)}; }
  static KT_INLINE F32 div(F32 a, F32 b) { return {_mm512_div_ps(a.v, b.v)}; }
  static KT_INLINE F32 min(F32 a, F32 b) { return {_mm512_min_ps(a.v, b.v)}; }
  static KT_INLINE F32 max(F32 a, F32 b) { return {_mm512_max_ps(a.v, b.v)}; }
  static KT_INLINE F32 abs(F32 a) { return {_mm512_abs_ps(a.v)}; }
  static KT_INLINE F32 fma(F32 a, F32 b, F32 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
  static KT_INLINE F32 zero_below(F32 a, F32 x, F32 limit) {
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, limit.v, _CMP_GE_OQ), a.v)};
  }
  static KT_INLINE F32 zero_under(F32 a, F32 x, F32 limit) {
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, limit.v, _CMP_NLT_UQ), a.v)};
  }
  static KT_INLINE float max_of(F32 a) { return _mm512_reduce_max_ps(a.v); }
  static KT_INLINE float sum_of(F32 a) { return _mm512_reduce_add_ps(a.v); }

  static KT_INLINE I32 set1(int32_t x) { return {_mm512_set1_epi32(x)}; }
  static KT_INLINE I32 add(I32 a, I32 b) { return {_mm512_add_epi32(a.v, b.v)}; }
  static KT_INLINE I32 sub(I32 a, I32 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
  static KT_INLINE I32 mul(I32 a, I32 b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
  static KT_INLINE I32 load(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
  static KT_INLINE void store(int32_t* p, I32 x) { _mm512_storeu_si512(p, x.v); }
  static KT_INLINE int32_t sum_of(I32 a) { return _mm512_reduce_add_epi32(a.v); }
  static KT_INLINE F32 to_f32(I32 a) { return {_mm512_cvtepi32_ps(a.v)}; }
  static KT_INLINE I32 round(F32 a) { return {_mm512_cvtps_epi32(a.v)}; }
  static KT_INLINE F32 exp2i(I32 a) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(a.v, _mm512_set1_epi32(127)), 23))};
  }
  static KT_INLINE F32 exp2_above(F32 a) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(a.v), 23))};
  }
  static KT_INLINE void store_s8(int8_t* p, I32 x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x.v));
  }
  // Bit i: lane i is no s8.
  static KT_INLINE uint32_t beyond_s8(I32 x) {
    return _mm512_cmpgt_epu32_mask(_mm512_add_epi32(x.v, _mm512_set1_epi32(128)), _mm512_set1_epi32(255));
  }

  static KT_INLINE F32 load_f16(const uint8_t* p) { return {_mm512_cvtph_ps(load_256(p))}; }
  static KT_INLINE F32 load_bf16(const uint8_t* p) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_256(p)), 16))};
  }
  static KT_INLINE F32 load_ue4m3(const uint8_t* p) {
    const __m256i half = _mm256_slli_epi16(_mm256_cvtepu8_epi16(load_128(p)), 7);  // value * 2^-8
    return {_mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256))};
  }
  static KT_INLINE __m512i nearest_bf16(F32 x) {  // in the high halves
    const __m512i u = _mm512_castps_si512(x.v), odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    return _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  }
  // Finite numbers rounded to bf16, still f32.
  static KT_INLINE F32 round_bf16(F32 x) {
    return {_mm512_castsi512_ps(_mm512_and_si512(nearest_bf16(x), _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
  }
  static KT_INLINE I32 words_bf16(F32 a, F32 b) {
    const __m512i odd =
        _mm512_setr_epi32(0x030001, 0x070005, 0x0b0009, 0x0f000d, 0x130011, 0x170015, 0x1b0019, 0x1f001d,
                          0x230021, 0x270025, 0x2b0029, 0x2f002d, 0x330031, 0x370035, 0x3b0039, 0x3f003d);
    return {_mm512_permutex2var_epi16(nearest_bf16(a), odd, nearest_bf16(b))};
  }
  static KT_INLINE I32 pair_bf16(F32 low, F32 high) {
    return {_mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(_mm512_castps_si512(low.v), 16),
                                    _mm512_castps_si512(high.v))};
  }
  static KT_INLINE void s8_bf16(I32 a, I32 (&out)[2]) {
    out[0] = pair_bf16(byte_s8<0>(a), byte_s8<1>(a));
    out[1] = pair_bf16(byte_s8<2>(a), byte_s8<3>(a));
  }
  static constexpr int kTurn = 8;
  static KT_INLINE void turn(const uint8_t* from, int64_t from_stride, uint8_t* to, int64_t to_stride) {
    const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
    unroll<4>([&](auto i) __attribute__((always_inline)) {
      const auto rows = [&](int first) __attribute__((always_inline)) {  // every other one
        const uint8_t* at = from + first * from_stride + i * 16;
        __m512i x = _mm512_inserti32x4(_mm512_castsi128_si512(load_128(at)), load_128(at + 2 * from_stride), 1);
        x = _mm512_inserti32x4(_mm512_inserti32x4(x, load_128(at + 4 * from_stride), 2), load_128(at + 6 * from_stride),
                               3);
        return _mm512_shuffle_epi8(x, order);
      };
      const __m512i a = rows(0), b = rows(1);
      _mm512_storeu_si512(to + 2 * i * to_stride, _mm512_unpacklo_epi64(a, b));
      _mm512_storeu_si512(to + (2 * i + 1) * to_stride, _mm512_unpackhi_epi64(a, b));
    });
  }
  // Of each 32-bit word: its halves as bf16, its byte kJ as a signed number.
  static KT_INLINE F32 low_bf16(I32 a) { return {_mm512_castsi512_ps(_mm512_slli_epi32(a.v, 16))}; }
  static KT_INLINE F32 high_bf16(I32 a) {
    return {_mm512_castsi512_ps(_mm512_and_si512(a.v, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
  }
  template <int kJ> static KT_INLINE F32 byte_s8(I32 a) {
    return {_mm512_cvtepi32_ps(_mm512_srai_epi32(kJ < 3 ? _mm512_slli_epi32(a.v, 24 - 8 * kJ) : a.v, 24))};
  }
  // 2^(b - 127); b = 0 is the f32 denormal 2^-127, bits 0x400000, below every other b << 23
  static KT_INLINE F32 load_e8m0(const uint8_t* p) {
    const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu8_epi32(load_128(p)), 23);
    return {_mm512_castsi512_ps(_mm512_max_epu32(bits, _mm512_set1_epi32(0x400000)))};
  }
  static KT_INLINE I32 load_s8(const uint8_t* p) { return {_mm512_cvtepi8_epi32(load_128(p))}; }
  static KT_INLINE I32 load_u8(const uint8_t* p) { return {_mm512_cvtepu8_epi32(load_128(p))}; }
  template <bool kHigh> static KT_INLINE F32 load_e2m1(const uint8_t* p) {
    const __m512 values = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f,
                                         -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
    __m512i x = _mm512_cvtepu8_epi32(load_128(p));
    if constexpr (kHigh) x = _mm512_srli_epi32(x, 4);
    return {_mm512_permutexvar_ps(x, values)};
  }
  static KT_INLINE void store_f16(void* p, F32 x) {
    _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  static KT_INLINE void store_bf16(void* p, F32 x) {
    const __m512i u = _mm512_castps_si512(x.v), top = _mm512_srli_epi32(u, 16);
    const __m512i half = _mm512_add_epi32(_mm512_and_si512(top, _mm512_set1_epi32(1)), _mm512_set1_epi32(0x7fff));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(u, half), 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
    const __m512i r = _mm512_mask_or_epi32(rounded, nan, top, _mm512_set1_epi32(0x40));
    _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtepi32_epi16(r));
  }

  static KT_INLINE Bytes load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
  static KT_INLINE void store_bytes(uint8_t* p, Bytes x) { _mm512_storeu_si512(p, x.v); }
  static KT_INLINE Bytes bor(Bytes a, Bytes b) { return {_mm512_or_si512(a.v, b.v)}; }
  static KT_INLINE Bytes flip_sign(Bytes a) { return {_mm512_xor_si512(a.v, _mm512_set1_epi8(-128))}; }
  // One 16-bit shift to the place, then a mask that drops what crossed from the neighbouring byte.
  template <int kBits, int kFrom, int kTo> static KT_INLINE Bytes field(Bytes a) {
    if constexpr (kFrom > kTo) a.v = _mm512_srli_epi16(a.v, kFrom - kTo);
    if constexpr (kFrom < kTo) a.v = _mm512_slli_epi16(a.v, kTo - kFrom);
    return {_mm512_and_si512(a.v, _mm512_set1_epi8(static_cast<char>(((1 << kBits) - 1) << kTo)))};
  }
  static KT_INLINE Table table(const int8_t* p) {
    return {_mm512_broadcast_i32x4(load_128(reinterpret_cast<const uint8_t*>(p)))};
  }
  static KT_INLINE Bytes lookup(Table t, Bytes a) { return {_mm512_shuffle_epi8(t.v, a.v)}; }
  template <int kI> static KT_INLINE I32 quarter(const uint8_t* p) {
    const __m128i spread =
        _mm_add_epi8(_mm_setr_epi8(0, -128, -128, -128, 1, -128, -128, -128, 2, -128, -128, -128, 3, -128, -128, -128),
                     _mm_set1_epi8(4 * kI));
    return {_mm512_shuffle_epi8(_mm512_loadu_si512(p), _mm512_broadcast_i32x4(spread))};
  }
  template <int kShift, int kBits> static KT_INLINE I32 with_high(I32 low, I32 high) {
    return {_mm512_ternarylogic_epi32(low.v, _mm512_slli_epi32(high.v, 8 - kShift),
                                      _mm512_set1_epi32(((1 << kBits) - 1) << 8), 0xf8)};  // a | (b & c)
  }
  template <int kNumbers> static KT_INLINE Bytes gather(const uint8_t* table, I32 index, I32) {
    return {_mm512_i32gather_epi32(index.v, table, kNumbers)};
  }
  // As in avx2.h: a gather does no more at once than loads, 8 bytes each.
  static KT_INLINE void gather_two(const uint8_t* table, I32 index, Bytes (&out)[2]) {
    alignas(64) int32_t at[16];
    store(at, index);
    const auto rows = [&](int row) __attribute__((always_inline)) {  // and the next
      const auto entry = [&](int i) __attribute__((always_inline)) {
        return table + static_cast<uint32_t>(at[row + i]) * uint64_t{8};
      };
      const __m128i x = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(entry(0)));
      return _mm_loadh_pi(_mm_castsi128_ps(x), reinterpret_cast<const __m64*>(entry(1)));
    };
    const auto lanes = [&](int row) __attribute__((always_inline)) {
      const __m256 low = _mm256_set_m128(rows(row + 4), rows(row));
      const __m256 high = _mm256_set_m128(rows(row + 12), rows(row + 8));
      return _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
    };
    const __m512 a = lanes(0), b = lanes(2);
    out[0].v = _mm512_castps_si512(_mm512_shuffle_ps(a, b, 0x88));
    out[1].v = _mm512_castps_si512(_mm512_shuffle_ps(a, b, 0xdd));
  }
  template <int kBit> static KT_INLINE Bytes negate(Bytes a, const uint8_t* signs) {
    const __m512i bit = _mm512_set1_epi8(static_cast<char>(1 << kBit));
    const __mmask64 less = _mm512_test_epi8_mask(_mm512_loadu_si512(signs), bit);
    return {_mm512_mask_sub_epi8(a.v, less, _mm512_set1_epi8(-128), a.v)};
  }
  // 64 indices of a grid of 256 entries, of 4 rows 4 after 4 in every 16, as numbers with their signs: the steps of
  // four groups of columns. An entry's levels are looked up as words, 64 entries of their table at a time; twice in 32
  // bits and shifted, each byte begins with a level, and with its sign above it looks up what both stand for. kOdd: the
  // steps' signs are the upper four bits.
  template <int kNumbers, bool kOdd>
  static KT_INLINE void look_up_four(const kt::GridTables& t, const uint8_t* index, const uint8_t* signs,
                                     uint8_t* to) {
    const __m512i bytes = _mm512_loadu_si512(index), less = _mm512_loadu_si512(signs);
    unroll<2>([&](auto half) __attribute__((always_inline)) {
      constexpr int kHalf = decltype(half)::value;  // two groups
      const __m512i i = kHalf == 0 ? _mm512_unpacklo_epi8(bytes, bytes) : _mm512_unpackhi_epi8(bytes, bytes);
      const __mmask32 bit7 = _mm512_movepi16_mask(i), bit6 = _mm512_movepi16_mask(_mm512_slli_epi16(i, 1));
      const auto quarter = [&](int q) __attribute__((always_inline)) {
        const uint16_t* table = t.words + 64 * q;
        return _mm512_permutex2var_epi16(_mm512_load_si512(table), i, _mm512_load_si512(table + 32));
      };
      const __m512i low = _mm512_mask_mov_epi16(quarter(0), bit6, quarter(1));
      const __m512i high = _mm512_mask_mov_epi16(quarter(2), bit6, quarter(3));
      const __m512i levels = _mm512_mask_mov_epi16(low, bit7, high);
      unroll<2>([&](auto second) __attribute__((always_inline)) {
        constexpr int kGroup = 2 * kHalf + decltype(second)::value;
        const __m512i twice =
            kGroup % 2 == 0 ? _mm512_unpacklo_epi16(levels, levels) : _mm512_unpackhi_epi16(levels, levels);
        unroll<kNumbers / 4>([&](auto s) __attribute__((always_inline)) {
          constexpr int kS = decltype(s)::value, kStepAt = kGroup * kNumbers / 4 + kS;
          _mm512_storeu_si512(to + kStepAt * 64, step_of_levels<kNumbers, kS, kStepAt + 4 * kOdd>(t, twice, less));
        });
      });
    });
  }
  // Step kS of an entry, whose signs are bit kBit of `less`.
  template <int kNumbers, int kS, int kBit>
  static KT_INLINE __m512i step_of_levels(const kt::GridTables& t, __m512i twice, __m512i less) {
    constexpr kt::GridWords kWords{kNumbers};
    constexpr int kShift = kWords.place(4 * kS) | kWords.place(4 * kS + 2) << 16, kUp = kWords.sign(kS) - kBit;
    const __m512i level = kShift ? _mm512_srlv_epi16(twice, _mm512_set1_epi32(kShift)) : twice;
    const __m512i sign = kUp < 0 ? _mm512_srli_epi16(less, -kUp) : _mm512_slli_epi16(less, kUp);
    __m512i both;
    if constexpr (kNumbers == 8)  // (level & c) | the signs of two steps
      both = _mm512_ternarylogic_epi64(level, _mm512_and_si512(sign, _mm512_set1_epi8(12)), _mm512_set1_epi8(3), 0xec);
    else  // c ? sign : level, whose top bits are zero
      both = _mm512_ternarylogic_epi64(sign, level, _mm512_set1_epi8(8), 0xe4);
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(load_128(t.by_word[kS])), both);
  }
  template <int kBit> static KT_INLINE Bytes one_off(Bytes a, I32 rows) {
    const __m512i less = _mm512_srai_epi32(_mm512_slli_epi32(rows.v, 31 - kBit), 31);
    return {_mm512_add_epi8(a.v, _mm512_or_si512(less, _mm512_set1_epi8(1)))};
  }
  template <int kJ> static KT_INLINE F32 column(Bytes a) {
    __m512i x = a.v;
    if constexpr (kJ > 0) x = _mm512_srli_epi32(x, 8 * kJ);
    if constexpr (kJ < 3) x = _mm512_and_si512(x, _mm512_set1_epi32(0xff));
    return {_mm512_cvtepi32_ps(x)};
  }
  template <int kJ> static KT_INLINE F32 column_bf16(Bytes a) {
    if constexpr (kJ == 0) return {_mm512_castsi512_ps(_mm512_slli_epi32(a.v, 16))};
    else return {_mm512_castsi512_ps(_mm512_and_si512(a.v, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
  }
  // Columns kJ and kJ ^ 2 share all but the conversion: the compiler finds that.
  template <int kJ> static KT_INLINE F32 column_e4m3(Bytes a) {
    const __m512i top = kJ % 2 == 0 ? _mm512_slli_epi16(a.v, 8) : a.v;  // s eeee mmm ........
    const __m512i half = _mm512_and_si512(_mm512_srai_epi16(top, 1), _mm512_set1_epi16(static_cast<short>(0xbf80)));
    const __m512i rows = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), half);
    return {_mm512_cvtph_ps(kJ < 2 ? _mm512_castsi512_si256(rows) : _mm512_extracti64x4_epi64(rows, 1))};
  }
  static KT_INLINE U16 to_u16(I32 a) {
    const __m512i twice = _mm512_broadcast_i32x4(_mm_setr_epi32(0x01000100, 0x05040504, 0x09080908, 0x0d0c0d0c));
    return {_mm512_shuffle_epi8(a.v, twice)};
  }
  static KT_INLINE Bytes affine(Bytes a, U16 mul, U16 add) {
    const __m512i even = _mm512_and_si512(a.v, _mm512_set1_epi16(0xff)), odd = _mm512_srli_epi16(a.v, 8);
    const __m512i e = _mm512_add_epi16(_mm512_mullo_epi16(even, mul.v), add.v);
    const __m512i o = _mm512_add_epi16(_mm512_mullo_epi16(odd, mul.v), add.v);
    // Odd bytes stand where they belong.
    return {_mm512_mask_mov_epi8(_mm512_srli_epi16(e, 8), 0xaaaaaaaaaaaaaaaaull, o)};
  }
  static KT_INLINE Bytes affine_low(Bytes a, U16 mul, U16 add) {  // of the products that affine takes
    const __m512i even = _mm512_and_si512(a.v, _mm512_set1_epi16(0xff)), odd = _mm512_srli_epi16(a.v, 8);
    const __m512i e = _mm512_add_epi16(_mm512_mullo_epi16(even, mul.v), add.v);
    const __m512i o = _mm512_add_epi16(_mm512_mullo_epi16(odd, mul.v), add.v);
    return {_mm512_mask_mov_epi8(e, 0xaaaaaaaaaaaaaaaaull, _mm512_slli_epi16(o, 8))};
  }

  static KT_INLINE Acc zero_acc() { return {_mm512_setzero_si512()}; }
  static KT_INLINE Acc acc_of(I32 x) { return x; }
  static KT_INLINE Act load_act(const int8_t* p) {
    int32_t four;
    __builtin_memcpy(&four, p, 4);
    return {_mm512_set1_epi32(four)};
  }
  template <bool kSmall> static KT_INLINE void dot(Acc& acc, Bytes w, Act a) {
    if constexpr (kSmall) {
      const __m512i pairs = _mm512_maddubs_epi16(w.v, a.v);
      acc.v = _mm512_add_epi32(acc.v, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
    } else {
      const __m512i w_even = _mm512_and_si512(w.v, _mm512_set1_epi16(0xff)), w_odd = _mm512_srli_epi16(w.v, 8);
      const __m512i a_even = _mm512_srai_epi16(_mm512_slli_epi16(a.v, 8), 8), a_odd = _mm512_srai_epi16(a.v, 8);
      acc.v = _mm512_add_epi32(acc.v, _mm512_madd_epi16(w_even, a_even));
      acc.v = _mm512_add_epi32(acc.v, _mm512_madd_epi16(w_odd, a_odd));
    }
    // g++ would reassociate the sums of an unrolled loop, keep every product alive and spill them
    asm("" : "+v"(acc.v));
  }
  template <int kToken> static KT_INLINE I32 total(const Acc& acc) { return acc; }
  static KT_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
  static KT_INLINE void opaque(Bytes& x) { asm volatile("" : "+v"(x.v)); }
};

#ifdef __AVX512VNNI__
struct Avx512Vnni : Avx512 {
  static constexpr int kPeakActs = 8;

  template <bool kSmall> static KT_INLINE void dot(Acc& acc, Bytes w, Act a) {
    acc.v = _mm512_dpbusd_epi32(acc.v, w.v, a.v);
  }
};
#endif

#ifdef __AVX512BF16__
struct E4m3Numbers {
  alignas(64) float magnitude[128];   // of code i
  alignas(64) uint8_t even[64];       // 0, 2, 4 ...
  constexpr E4m3Numbers() : magnitude(), even() {
    for (int i = 0; i < 128; ++i) magnitude[i] = e4m3_to_f32(static_cast<uint8_t>(i));
    for (int i = 0; i < 64; ++i) even[i] = static_cast<uint8_t>(2 * i);
  }
};
constexpr E4m3Numbers kE4m3Numbers;

// The bytes of bf16(i).
struct S8Numbers {
  alignas(64) uint8_t low[128];
  alignas(64) uint8_t high[128];
  constexpr S8Numbers() : low(), high() {
    for (int i = 0; i < 128; ++i) {
      const uint32_t bits = bits_of(static_cast<float>(i)) >> 16;
      low[i] = static_cast<uint8_t>(bits);
      high[i] = static_cast<uint8_t>(bits >> 8);
    }
  }
};
constexpr S8Numbers kS8Numbers;

struct Avx512Bf16 : Avx512Vnni {
  static constexpr bool kBf16Product = true;
  using AccF = F32;

  // The bytes of bf16(magnitude * scale), for codes 0-63 and 64-127. The sign is that of the scale.
  struct E4m3Table { __m512i low[2], high[2]; };
  static KT_INLINE E4m3Table e4m3_table(float scale) {
    const __m512 s = _mm512_set1_ps(scale);
    const __m512i even = _mm512_load_si512(kE4m3Numbers.even), odd = _mm512_or_si512(even, _mm512_set1_epi8(1));
    E4m3Table t;
    unroll<2>([&](auto h) __attribute__((always_inline)) {
      const float* from = kE4m3Numbers.magnitude + h * 64;
      const auto at = [&](int i) __attribute__((always_inline)) { return _mm512_mul_ps(_mm512_load_ps(from + i), s); };
      const __m512i a = (__m512i)_mm512_cvtne2ps_pbh(at(16), at(0)), b = (__m512i)_mm512_cvtne2ps_pbh(at(48), at(32));
      t.low[h] = _mm512_permutex2var_epi8(a, even, b);
      t.high[h] = _mm512_permutex2var_epi8(a, odd, b);
    });
    return t;
  }
  // A step of 64 codes in pairs as two steps of bf16 codes: columns 0 and 1, columns 2 and 3.
  static KT_INLINE void e4m3_bf16(const E4m3Table& t, Bytes w, Bytes (&out)[2]) {
    asm("" : "+v"(w.v));  // g++ would load w for each use, or spill it to do so
    const __m512i low = _mm512_permutex2var_epi8(t.low[0], w.v, t.low[1]);
    const __m512i magnitude = _mm512_permutex2var_epi8(t.high[0], w.v, t.high[1]);
    const __m512i high = _mm512_ternarylogic_epi64(magnitude, w.v, _mm512_set1_epi8(-128), 0x78);  // a ^ (b & c)
    out[0].v = _mm512_unpacklo_epi8(low, high);
    out[1].v = _mm512_unpackhi_epi8(low, high);
  }
  // The operations of look_up_bytes.h.
  struct Vbmi {
    using R = __m512i;
    static KT_INLINE R load(const uint8_t* p) { return _mm512_loadu_si512(p); }
    static KT_INLINE void store(uint8_t* p, R x) { _mm512_storeu_si512(p, x); }
    static KT_INLINE R shuffle(R x, R order) { return _mm512_shuffle_epi8(x, order); }
    static KT_INLINE __mmask64 tops(R x) { return _mm512_movepi8_mask(x); }
    static KT_INLINE __mmask64 both(__mmask64 a, __mmask64 b) { return a & b; }
    static KT_INLINE R twice(R x) { return _mm512_slli_epi16(x, 1); }
    static KT_INLINE R sixteenth(R x) { return _mm512_srli_epi16(x, 4); }
    static KT_INLINE R permute(R table, R index) { return _mm512_permutexvar_epi8(index, table); }
    static KT_INLINE R permute_some(R x, __mmask64 some, R table, R index) {
      return _mm512_mask_permutexvar_epi8(x, some, index, table);
    }
    static KT_INLINE R zip_low(R a, R b) { return _mm512_unpacklo_epi8(a, b); }
    static KT_INLINE R zip_high(R a, R b) { return _mm512_unpackhi_epi8(a, b); }
    static KT_INLINE R windows(R x, R from) { return _mm512_multishift_epi64_epi8(from, x); }
    template <int kBits> static KT_INLINE R choose(R a, R b) {
      return _mm512_ternarylogic_epi64(a, b, _mm512_set1_epi8(kBits), 0xe4);  // c ? a : b
    }
  };
  template <int kNumbers, bool kOdd>
  static KT_INLINE void look_up_four(const kt::GridTables& t, const uint8_t* index, const uint8_t* signs, uint8_t* to) {
    look_up_bytes<Vbmi, kNumbers, kOdd>(t, index, signs, to);
  }
  // As e4m3_bf16 does it, by the size of the code; bytes are brought in the order that unpacking wants.
  static KT_INLINE void s8_bf16(I32 a, I32 (&out)[2]) {
    const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
    const auto at = [](const uint8_t* p) __attribute__((always_inline)) { return _mm512_load_si512(p); };
    const __m512i x = _mm512_shuffle_epi8(a.v, order), size = _mm512_abs_epi8(x);
    const __m512i low = _mm512_permutex2var_epi8(at(kS8Numbers.low), size, at(kS8Numbers.low + 64));
    const __m512i magnitude = _mm512_permutex2var_epi8(at(kS8Numbers.high), size, at(kS8Numbers.high + 64));
    const __m512i high = _mm512_ternarylogic_epi64(magnitude, x, _mm512_set1_epi8(-128), 0x78);  // a ^ (b & c)
    out[0].v = _mm512_unpacklo_epi8(low, high);
    out[1].v = _mm512_unpackhi_epi8(low, high);
  }
  static KT_INLINE I32 words_bf16(F32 a, F32 b) { return {(__m512i)_mm512_cvtne2ps_pbh(b.v, a.v)}; }
  static KT_INLINE bool all_equal(F32 a) {
    const __m512i x = _mm512_castps_si512(a.v);
    return _mm512_cmpneq_epi32_mask(x, _mm512_broadcastd_epi32(_mm512_castsi512_si128(x))) == 0;
  }

  // 2^kBits + byte kJ of each lane, which is below that: the byte becomes the top of the fraction.
  template <int kJ, int kBits> static KT_INLINE F32 column_above(Bytes a) {
    constexpr int kShift = 23 - kBits - 8 * kJ;
    __m512i x = a.v;
    if constexpr (kShift > 0) x = _mm512_slli_epi32(x, kShift);
    if constexpr (kShift < 0) x = _mm512_srli_epi32(x, -kShift);
    return {
        _mm512_castsi512_ps(_mm512_ternarylogic_epi32(x, _mm512_set1_epi32(((1 << kBits) - 1) << (23 - kBits)),
                                                      _mm512_set1_epi32((127 + kBits) << 23), 0xea))};  // (a & b) | c
  }

  // The conversions take denormals as zeros; otherwise round half to even, as everywhere.
  // row r: columns[0][r] in the low half of lane r, columns[1][r] in the high half
  static KT_INLINE void store_bf16_step(uint8_t* p, const F32 (&columns)[2]) {
    const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(columns[1].v, columns[0].v);  // columns[0] in the low 256 bits
    const __m512i order =
        _mm512_setr_epi32(0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005, 0x160006, 0x170007,
                          0x180008, 0x190009, 0x1a000a, 0x1b000b, 0x1c000c, 0x1d000d, 0x1e000e, 0x1f000f);
    _mm512_storeu_si512(p, _mm512_permutexvar_epi16(order, halves));
  }
  static KT_INLINE AccF zero_accf() { return {_mm512_setzero_ps()}; }
  static KT_INLINE void dot_bf16(AccF& acc, Bytes w, Act a) {
    acc.v = _mm512_dpbf16_ps(acc.v, (__m512bh)w.v, (__m512bh)a.v);
  }
  template <int kToken> static KT_INLINE I32 total(const Acc& acc) { return acc; }
  template <int kToken> static KT_INLINE F32 total(const AccF& acc) { return acc; }
};
#endif

}  // namespace
}  // namespace KT_ISA_NAMESPACE
