// The vocabulary in 256-bit registers: 8 rows to a vector, a row block is two parts.
//
// acc[row] += sum_4 u8 * s8, exact:
//   codes below 128  maddubs (u8*s8, pairs summed in s16) -> madd by ones -> add.
//                    2 * 127 * 127 = 32,258 < 2^15: the saturating sum never saturates.
//   any u8           2 * 255 * 127 does not fit 16 bits, so weights and activations are widened to even and odd
//                    16-bit lanes (an and and a shift per weight vector, three shifts per activation, shared by
//                    the whole tile) and multiplied by madd: 2 * 255 * 127 < 2^31. Four operations a dot, as
//                    many as the abs/sign form takes, and no correction by 128 * sum(a) after it.
//   AVX-VNNI         dpbusd, which does not saturate: one operation.
// int32 sums hold for 2^31 / (255 * 127) = 66,000 columns; packing refuses longer spans.
//
// e4m3, in pairs of columns (layout.h) -> f16 bits (sign, 0eeee, mmm0000000) in 16-bit lanes, where even bytes make
// columns 0 and 2 and odd ones 1 and 3, four rows to 64 bits -> vpermq puts eight rows side by side -> vcvtph2ps,
// value * 2^-8: exact, subnormals included, and no f32 denormal ever enters an FMA. e2m1 -> a permute of its eight
// magnitudes, and the sign bit.
#pragma once
#include <immintrin.h>

#include "kernels/isa/inline.h"

namespace KT_ISA_NAMESPACE {
namespace {

struct Avx2 {
  static constexpr int kLanes = 8;
  static constexpr int kStep = 4;
  static constexpr bool kUnsigned = true;
  static constexpr int kTokens = 1;
  static constexpr int kActRows = 1;
  static constexpr int few_parts(int groups) { return groups <= 2 ? 2 : 1; }
  static constexpr int kTileGroups = 4, kTileParts = 2;
  static constexpr int kTileRows = kTileGroups * kTokens;
  static constexpr int kFewLimit = 8;
  static constexpr int kFewPass = 8;
  static constexpr int kPanelBlocks = 8;
  static constexpr int kPrefetch = 1024;
  static constexpr bool kBf16Product = false;
  static constexpr bool kBf16Rows = false;
  static constexpr bool kWideColumns = false;
  static constexpr bool kTileUnit = false;
  static constexpr bool kGridTables = false;
  static constexpr bool kGathersTwo = true;
  static constexpr bool kRoundedPanels = false;
  static constexpr int kPeakWeights = 2, kPeakActs = 4;

  struct F32 { __m256 v; };
  struct I32 { __m256i v; };
  struct Bytes { __m256i v; };
  struct Act { __m256i v; };    // the same 4 bytes for every row
  struct U16 { __m256i v; };    // twice in each 32-bit lane
  struct Table { __m256i v; };  // twice
  using Acc = I32;

  static KT_INLINE __m128i load_64(const uint8_t* p) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)); }
  static KT_INLINE __m128i load_128(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }

  static KT_INLINE F32 set1(float x) { return {_mm256_set1_ps(x)}; }
  static KT_INLINE F32 load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static KT_INLINE void store(float* p, F32 x) { _mm256_storeu_ps(p, x.v); }
  static KT_INLINE F32 add(F32 a, F32 b) { return {_mm256_add_ps(a.v, b.v)}; }
  static KT_INLINE F32 sub(F32 a, F32 b) { return {_mm256_sub_ps(a.v, b.v)}; }
  static KT_INLINE F32 mul(F32 a, F32 b) { return {_mm256_mul_ps(a.v, b.v)}; }
  static KT_INLINE F32 div(F32 a, F32 b) { return {_mm256_div_ps(a.v, b.v)}; }
  static KT_INLINE F32 min(F32 a, F32 b) { return {_mm256_min_ps(a.v, b.v)}; }
  static KT_INLINE F32 max(F32 a, F32 b) { return {_mm256_max_ps(a.v, b.v)}; }
  static KT_INLINE F32 abs(F32 a) { return {_mm256_and_ps(a.v, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff)))}; }
  static KT_INLINE F32 fma(F32 a, F32 b, F32 c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
  static KT_INLINE F32 zero_below(F32 a, F32 x, F32 limit) {
    return {_mm256_and_ps(a.v, _mm256_cmp_ps(x.v, limit.v, _CMP_GE_OQ))};
  }
  static KT_INLINE F32 zero_under(F32 a, F32 x, F32 limit) {
    return {_mm256_and_ps(a.v, _mm256_cmp_ps(x.v, limit.v, _CMP_NLT_UQ))};
  }
  static KT_INLINE float max_of(F32 a) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
  }
  static KT_INLINE float sum_of(F32 a) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
  }

  static KT_INLINE I32 set1(int32_t x) { return {_mm256_set1_epi32(x)}; }
  static KT_INLINE I32 add(I32 a, I32 b) { return {_mm256_add_epi32(a.v, b.v)}; }
  static KT_INLINE I32 sub(I32 a, I32 b) { return {_mm256_sub_epi32(a.v, b.v)}; }
  static KT_INLINE I32 mul(I32 a, I32 b) { return {_mm256_mullo_epi32(a.v, b.v)}; }
  static KT_INLINE I32 load(const int32_t* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
  static KT_INLINE void store(int32_t* p, I32 x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.v); }
  static KT_INLINE int32_t sum_of(I32 a) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(a.v), _mm256_extracti128_si256(a.v, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
  }
  static KT_INLINE F32 to_f32(I32 a) { return {_mm256_cvtepi32_ps(a.v)}; }
  static KT_INLINE I32 round(F32 a) { return {_mm256_cvtps_epi32(a.v)}; }
  static KT_INLINE F32 exp2i(I32 a) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(a.v, _mm256_set1_epi32(127)), 23))};
  }
  static KT_INLINE F32 exp2_above(F32 a) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(a.v), 23))};
  }
  static KT_INLINE void store_s8(int8_t* p, I32 x) {
    const __m256i low = _mm256_shuffle_epi8(x.v, _mm256_set1_epi32(0x0c080400));  // four bytes at the foot of each half
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p),
                     _mm_unpacklo_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1)));
  }

  static KT_INLINE F32 load_f16(const uint8_t* p) { return {_mm256_cvtph_ps(load_128(p))}; }
  static KT_INLINE F32 load_bf16(const uint8_t* p) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_128(p)), 16))};
  }
  // 2^(b - 127); b = 0 is the f32 denormal 2^-127, bits 0x400000, below every other b << 23
  static KT_INLINE F32 load_e8m0(const uint8_t* p) {
    const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu8_epi32(load_64(p)), 23);
    return {_mm256_castsi256_ps(_mm256_max_epu32(bits, _mm256_set1_epi32(0x400000)))};
  }
  static KT_INLINE F32 load_ue4m3(const uint8_t* p) {
    const __m128i half = _mm_slli_epi16(_mm_cvtepu8_epi16(load_64(p)), 7);  // value * 2^-8
    return {_mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256))};
  }
  static KT_INLINE __m256i nearest_bf16(F32 x) {  // in the high halves
    const __m256i u = _mm256_castps_si256(x.v), odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    return _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  }
  // Finite numbers rounded to bf16, still f32.
  static KT_INLINE F32 round_bf16(F32 x) {
    return {_mm256_castsi256_ps(_mm256_and_si256(nearest_bf16(x), _mm256_set1_epi32(static_cast<int>(0xffff0000u))))};
  }
  static KT_INLINE I32 words_bf16(F32 a, F32 b) {
    const __m256i x = _mm256_srli_epi32(nearest_bf16(a), 16), y = _mm256_srli_epi32(nearest_bf16(b), 16);
    return {_mm256_permute4x64_epi64(_mm256_packus_epi32(x, y), 0xd8)};
  }
  static KT_INLINE I32 pair_bf16(F32 low, F32 high) {
    return {_mm256_blend_epi16(_mm256_srli_epi32(_mm256_castps_si256(low.v), 16), _mm256_castps_si256(high.v), 0xaa)};
  }
  static KT_INLINE void s8_bf16(I32 a, I32 (&out)[2]) {
    out[0] = pair_bf16(byte_s8<0>(a), byte_s8<1>(a));
    out[1] = pair_bf16(byte_s8<2>(a), byte_s8<3>(a));
  }
  static constexpr int kTurn = 4;
  static KT_INLINE void turn(const uint8_t* from, int64_t from_stride, uint8_t* to, int64_t to_stride) {
    const __m256i order =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
    unroll<2>([&](auto i) __attribute__((always_inline)) {
      const auto rows = [&](int first) __attribute__((always_inline)) {  // `first` and the one after next
        const uint8_t* at = from + first * from_stride + i * 16;
        return _mm256_shuffle_epi8(
            _mm256_inserti128_si256(_mm256_castsi128_si256(load_128(at)), load_128(at + 2 * from_stride), 1), order);
      };
      const __m256i a = rows(0), b = rows(1);
      store_bytes(to + 2 * i * to_stride, {_mm256_unpacklo_epi64(a, b)});
      store_bytes(to + (2 * i + 1) * to_stride, {_mm256_unpackhi_epi64(a, b)});
    });
  }
  // Of each 32-bit word: its halves as bf16, its byte kJ as a signed number.
  static KT_INLINE F32 low_bf16(I32 a) { return {_mm256_castsi256_ps(_mm256_slli_epi32(a.v, 16))}; }
  static KT_INLINE F32 high_bf16(I32 a) {
    return {_mm256_castsi256_ps(_mm256_and_si256(a.v, _mm256_set1_epi32(static_cast<int>(0xffff0000u))))};
  }
  template <int kJ> static KT_INLINE F32 byte_s8(I32 a) {
    return {_mm256_cvtepi32_ps(_mm256_srai_epi32(kJ < 3 ? _mm256_slli_epi32(a.v, 24 - 8 * kJ) : a.v, 24))};
  }
  static KT_INLINE I32 load_s8(const uint8_t* p) { return {_mm256_cvtepi8_epi32(load_64(p))}; }
  static KT_INLINE I32 load_u8(const uint8_t* p) { return {_mm256_cvtepu8_epi32(load_64(p))}; }
  template <bool kHigh> static KT_INLINE F32 load_e2m1(const uint8_t* p) {
    const __m256i x = _mm256_cvtepu8_epi32(load_64(p));
    const __m256 magnitudes = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
    const __m256i index = kHigh ? _mm256_srli_epi32(x, 4) : x;  // the permute reads three bits
    const __m256i sign = _mm256_and_si256(_mm256_slli_epi32(x, kHigh ? 24 : 28), _mm256_set1_epi32(INT32_MIN));
    return {_mm256_or_ps(_mm256_permutevar8x32_ps(magnitudes, index), _mm256_castsi256_ps(sign))};
  }
  static KT_INLINE void store_f16(void* p, F32 x) {
    _mm_storeu_si128(static_cast<__m128i*>(p), _mm256_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  static KT_INLINE void store_bf16(void* p, F32 x) {
    const __m256i u = _mm256_castps_si256(x.v), top = _mm256_srli_epi32(u, 16);
    const __m256i half = _mm256_add_epi32(_mm256_and_si256(top, _mm256_set1_epi32(1)), _mm256_set1_epi32(0x7fff));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(u, half), 16);
    const __m256i quiet = _mm256_or_si256(top, _mm256_set1_epi32(0x40));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x.v, x.v, _CMP_UNORD_Q));
    const __m256i r = _mm256_blendv_epi8(rounded, quiet, nan);
    _mm_storeu_si128(static_cast<__m128i*>(p),
                     _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1)));
  }

  static KT_INLINE Bytes load_bytes(const uint8_t* p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))};
  }
  static KT_INLINE void store_bytes(uint8_t* p, Bytes x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.v); }
  static KT_INLINE Bytes bor(Bytes a, Bytes b) { return {_mm256_or_si256(a.v, b.v)}; }
  static KT_INLINE Bytes flip_sign(Bytes a) { return {_mm256_xor_si256(a.v, _mm256_set1_epi8(-128))}; }
  // One 16-bit shift to the place, then a mask that drops what crossed from the neighbouring byte.
  template <int kBits, int kFrom, int kTo> static KT_INLINE Bytes field(Bytes a) {
    if constexpr (kFrom > kTo) a.v = _mm256_srli_epi16(a.v, kFrom - kTo);
    if constexpr (kFrom < kTo) a.v = _mm256_slli_epi16(a.v, kTo - kFrom);
    return {_mm256_and_si256(a.v, _mm256_set1_epi8(static_cast<char>(((1 << kBits) - 1) << kTo)))};
  }
  static KT_INLINE Table table(const int8_t* p) {
    return {_mm256_broadcastsi128_si256(load_128(reinterpret_cast<const uint8_t*>(p)))};
  }
  static KT_INLINE Bytes lookup(Table t, Bytes a) { return {_mm256_shuffle_epi8(t.v, a.v)}; }
  template <int kI> static KT_INLINE I32 quarter(const uint8_t* p) {
    const __m128i spread =
        _mm_add_epi8(_mm_setr_epi8(0, -128, -128, -128, 1, -128, -128, -128, 2, -128, -128, -128, 3, -128, -128, -128),
                     _mm_set1_epi8(4 * kI));
    return {_mm256_shuffle_epi8(load_bytes(p).v, _mm256_broadcastsi128_si256(spread))};
  }
  template <int kShift, int kBits> static KT_INLINE I32 with_high(I32 low, I32 high) {
    const __m256i bits =
        _mm256_and_si256(_mm256_slli_epi32(high.v, 8 - kShift), _mm256_set1_epi32(((1 << kBits) - 1) << 8));
    return {_mm256_or_si256(low.v, bits)};
  }
  // Entries are loaded one by one: a gather does no more at once, and where microcode keeps it from speculating it
  // takes several times as long.
  template <int kNumbers> static KT_INLINE Bytes gather(const uint8_t* table, I32 index, I32) {
    alignas(32) int32_t at[8];
    store(at, index);
    asm("" : "+m"(at));  // g++ would take them out of the register one by one
    const auto four = [&](int row) __attribute__((always_inline)) {
      const auto entry = [&](int i) __attribute__((always_inline)) {
        int32_t bytes;
        __builtin_memcpy(&bytes, table + static_cast<uint32_t>(at[row + i]) * uint64_t{kNumbers}, 4);
        return bytes;
      };
      __m128i x = _mm_cvtsi32_si128(entry(0));
      x = _mm_insert_epi32(x, entry(1), 1);
      x = _mm_insert_epi32(x, entry(2), 2);
      return _mm_insert_epi32(x, entry(3), 3);
    };
    return {_mm256_set_m128i(four(4), four(0))};
  }
  static KT_INLINE void gather_two(const uint8_t* table, I32 index, Bytes (&out)[2]) {
    alignas(32) int32_t at[8];
    store(at, index);
    asm("" : "+m"(at));  // g++ would take them out of the register one by one
    const auto rows = [&](int row) __attribute__((always_inline)) {  // and the next
      const auto entry = [&](int i) __attribute__((always_inline)) {
        return table + static_cast<uint32_t>(at[row + i]) * uint64_t{8};
      };
      const __m128i x = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(entry(0)));
      return _mm_loadh_pi(_mm_castsi128_ps(x), reinterpret_cast<const __m64*>(entry(1)));
    };
    const __m256 a = _mm256_set_m128(rows(4), rows(0)), b = _mm256_set_m128(rows(6), rows(2));
    out[0].v = _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0x88));
    out[1].v = _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0xdd));
  }
  template <int kBit> static KT_INLINE Bytes negate(Bytes a, const uint8_t* signs) {
    const __m256i top = _mm256_slli_epi16(load_bytes(signs).v, 7 - kBit);  // of each byte, which is what blendv reads
    return {_mm256_blendv_epi8(a.v, _mm256_sub_epi8(_mm256_set1_epi8(-128), a.v), top)};
  }
  template <int kBit> static KT_INLINE Bytes one_off(Bytes a, I32 rows) {
    const __m256i less = _mm256_srai_epi32(_mm256_slli_epi32(rows.v, 31 - kBit), 31);
    return {_mm256_add_epi8(a.v, _mm256_or_si256(less, _mm256_set1_epi8(1)))};
  }
  template <int kJ> static KT_INLINE F32 column(Bytes a) {
    __m256i x = a.v;
    if constexpr (kJ > 0) x = _mm256_srli_epi32(x, 8 * kJ);
    if constexpr (kJ < 3) x = _mm256_and_si256(x, _mm256_set1_epi32(0xff));
    return {_mm256_cvtepi32_ps(x)};
  }
  template <int kJ> static KT_INLINE F32 column_bf16(Bytes a) {
    if constexpr (kJ == 0) return {_mm256_castsi256_ps(_mm256_slli_epi32(a.v, 16))};
    else return {_mm256_castsi256_ps(_mm256_and_si256(a.v, _mm256_set1_epi32(static_cast<int>(0xffff0000u))))};
  }
  // Columns kJ and kJ ^ 2 share all but the conversion: the compiler finds that.
  template <int kJ> static KT_INLINE F32 column_e4m3(Bytes a) {
    const __m256i top = kJ % 2 == 0 ? _mm256_slli_epi16(a.v, 8) : a.v;  // s eeee mmm ........
    const __m256i half = _mm256_and_si256(_mm256_srai_epi16(top, 1), _mm256_set1_epi16(static_cast<short>(0xbf80)));
    const __m256i rows = _mm256_permute4x64_epi64(half, 0xd8);
    return {_mm256_cvtph_ps(kJ < 2 ? _mm256_castsi256_si128(rows) : _mm256_extracti128_si256(rows, 1))};
  }
  static KT_INLINE U16 to_u16(I32 a) {
    const __m256i twice = _mm256_broadcastsi128_si256(_mm_setr_epi32(0x01000100, 0x05040504, 0x09080908, 0x0d0c0d0c));
    return {_mm256_shuffle_epi8(a.v, twice)};
  }
  static KT_INLINE Bytes affine(Bytes a, U16 mul, U16 add) {
    const __m256i even = _mm256_and_si256(a.v, _mm256_set1_epi16(0xff)), odd = _mm256_srli_epi16(a.v, 8);
    const __m256i e = _mm256_add_epi16(_mm256_mullo_epi16(even, mul.v), add.v);
    const __m256i o = _mm256_add_epi16(_mm256_mullo_epi16(odd, mul.v), add.v);
    return {_mm256_or_si256(_mm256_srli_epi16(e, 8), _mm256_andnot_si256(_mm256_set1_epi16(0xff), o))};
  }

  static KT_INLINE Acc zero_acc() { return {_mm256_setzero_si256()}; }
  static KT_INLINE Act load_act(const int8_t* p) {
    int32_t four;
    __builtin_memcpy(&four, p, 4);
    return {_mm256_set1_epi32(four)};
  }
  template <bool kSmall> static KT_INLINE void dot(Acc& acc, Bytes w, Act a) {
    if constexpr (kSmall) {
      const __m256i pairs = _mm256_maddubs_epi16(w.v, a.v);
      acc.v = _mm256_add_epi32(acc.v, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    } else {
      const __m256i w_even = _mm256_and_si256(w.v, _mm256_set1_epi16(0xff)), w_odd = _mm256_srli_epi16(w.v, 8);
      const __m256i a_even = _mm256_srai_epi16(_mm256_slli_epi16(a.v, 8), 8), a_odd = _mm256_srai_epi16(a.v, 8);
      acc.v = _mm256_add_epi32(acc.v, _mm256_madd_epi16(w_even, a_even));
      acc.v = _mm256_add_epi32(acc.v, _mm256_madd_epi16(w_odd, a_odd));
    }
    // g++ would reassociate the sums of an unrolled loop, keep every product alive and spill them
    asm("" : "+x"(acc.v));
  }
  template <int kToken> static KT_INLINE I32 total(const Acc& acc) { return acc; }
  static KT_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
  static KT_INLINE void opaque(Bytes& x) { asm volatile("" : "+x"(x.v)); }
};

#ifdef __AVXVNNI__
struct AvxVnni : Avx2 {
  static constexpr int kPeakWeights = 2, kPeakActs = 5;

  template <bool kSmall> static KT_INLINE void dot(Acc& acc, Bytes w, Act a) {
    acc.v = _mm256_dpbusd_avx_epi32(acc.v, w.v, a.v);
  }
};
#endif

}  // namespace
}  // namespace KT_ISA_NAMESPACE
