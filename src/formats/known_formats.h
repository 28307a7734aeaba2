// The formats that have names, and what follows from the list. Not part of format.h: no kernel asks for a name, so a
// row more compiles no kernel again.
#pragma once
#include <array>
#include <string_view>
#include <vector>

#include "formats/format.h"

namespace kt::inline formats {

struct NamedFormat {
  std::string_view name;
  Format format;
  double bits;  // per weight as stored in a checkpoint, scales included, for long rows
};

// Every format the product speaks of by name. A new one made of known parts is one more line.
inline constexpr auto kFormats = std::to_array<NamedFormat>({
    {"int8", {Code::kI8, 0, Scale::kF32, Min::kNone, {}}, 8},
    {"int4", {Code::kU4, 8, Scale::kF32, Min::kNone, {}}, 4},
    {"int4_g32", {Code::kU4, 8, Scale::kBf16, Min::kNone, {.k = 32}}, 4.5},
    {"int4_g64", {Code::kU4, 8, Scale::kBf16, Min::kNone, {.k = 64}}, 4.25},
    {"int4_g128", {Code::kU4, 8, Scale::kBf16, Min::kNone, {.k = 128}}, 4.125},
    {"int4_g256", {Code::kU4, 8, Scale::kBf16, Min::kNone, {.k = 256}}, 4.0625},
    {"int4_g32_zero", {Code::kU4, 0, Scale::kF16, Min::kZero, {.k = 32}}, 4.625},
    {"int4_g64_zero", {Code::kU4, 0, Scale::kF16, Min::kZero, {.k = 64}}, 4.3125},
    {"int4_g128_zero", {Code::kU4, 0, Scale::kF16, Min::kZero, {.k = 128}}, 4.15625},
    {"int4_g256_zero", {Code::kU4, 0, Scale::kF16, Min::kZero, {.k = 256}}, 4.078125},
    {"fp8", {Code::kE4m3, 0, Scale::kF32, Min::kNone, {.k = 128, .n = 128}}, 8 + 32.0 / (128 * 128)},
    {"fp8_row", {Code::kE4m3, 0, Scale::kF32, Min::kNone, {}}, 8},
    {"bf16", {Code::kBf16, 0, Scale::kNone, Min::kNone, {}}, 16},
    {"fp16", {Code::kF16, 0, Scale::kNone, Min::kNone, {}}, 16},
    {"f32", {Code::kF32, 0, Scale::kNone, Min::kNone, {}}, 32},
    {"mxfp4", {Code::kE2m1, 0, Scale::kE8m0, Min::kNone, {.k = 32}}, 4.25},
    {"mxfp8", {Code::kE4m3, 0, Scale::kE8m0, Min::kNone, {.k = 32}}, 8.25},
    {"q4_0", {Code::kU4, 8, Scale::kF16, Min::kNone, {.k = 32}}, 4.5},
    {"q4_1", {Code::kU4, 0, Scale::kF16, Min::kF16, {.k = 32}}, 5},
    {"q5_0", {Code::kU5, 16, Scale::kF16, Min::kNone, {.k = 32}}, 5.5},
    {"q5_1", {Code::kU5, 0, Scale::kF16, Min::kF16, {.k = 32}}, 6},
    {"q8_0", {Code::kI8, 0, Scale::kF16, Min::kNone, {.k = 32}}, 8.5},
    {"q2_k", {Code::kU2, 0, Scale::kS8F16, Min::kS8F16, {.k = 16, .super_k = 256}}, 2.625},
    {"q3_k", {Code::kU3, 4, Scale::kS8F16, Min::kNone, {.k = 16, .super_k = 256}}, 3.4375},
    {"q4_k", {Code::kU4, 0, Scale::kS8F16, Min::kS8F16, {.k = 32, .super_k = 256}}, 4.5},
    {"q5_k", {Code::kU5, 0, Scale::kS8F16, Min::kS8F16, {.k = 32, .super_k = 256}}, 5.5},
    {"q6_k", {Code::kU6, 32, Scale::kS8F16, Min::kNone, {.k = 16, .super_k = 256}}, 6.5625},
    {"iq4_nl", {Code::kIq4, 0, Scale::kF16, Min::kNone, {.k = 32}}, 4.5},
    {"iq4_xs", {Code::kIq4, 0, Scale::kS8F16, Min::kNone, {.k = 32, .super_k = 256}}, 4.25},
    {"iq2_xxs", {Code::kIq2Xxs, kGridBias, Scale::kS8F16, Min::kNone, {.k = 32, .super_k = 256}}, 2.0625},
    {"iq2_xs", {Code::kIq2Xs, kGridBias, Scale::kS8F16, Min::kNone, {.k = 16, .super_k = 256}}, 2.3125},
    {"iq2_s", {Code::kIq2S, kGridBias, Scale::kS8F16, Min::kNone, {.k = 16, .super_k = 256}}, 2.5625},
    {"iq3_xxs", {Code::kIq3Xxs, kGridBias, Scale::kS8F16, Min::kNone, {.k = 32, .super_k = 256}}, 3.0625},
    {"iq3_s", {Code::kIq3S, kGridBias, Scale::kS8F16, Min::kNone, {.k = 32, .super_k = 256}}, 3.4375},
    {"iq1_s", {Code::kIq1, kGridBias, Scale::kS8F16, Min::kNone, {.k = 32, .super_k = 256}}, 1.5625},
    {"iq1_m", {Code::kIq1, kGridBias, Scale::kS8F16, Min::kNone, {.k = 16, .super_k = 256}}, 1.75},
    {"nvfp4", {Code::kE2m1, 0, Scale::kE4m3, Min::kNone, {.k = 16}}, 4.5},
});

// Those that quantise() makes of other weights.
std::vector<NamedFormat> rounded_formats();

// The group sizes there are: columns of one scale in every named format that is `like` but for them, ascending.
std::vector<int> group_sizes(Format like);

}  // namespace kt::inline formats
