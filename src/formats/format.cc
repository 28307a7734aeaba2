#include "formats/format.h"

#include <algorithm>
#include <iterator>

#include "base/error.h"
#include "base/text.h"
#include "formats/known_formats.h"
#include "formats/matrix.h"

namespace kt::inline formats {
namespace {

std::string_view name_of(Code code) {
  switch (code) {
    case Code::kI8:
      return "i8";
    case Code::kU2:
      return "u2";
    case Code::kU3:
      return "u3";
    case Code::kU4:
      return "u4";
    case Code::kU5:
      return "u5";
    case Code::kU6:
      return "u6";
    case Code::kIq4:
      return "iq4";
    case Code::kE2m1:
      return "e2m1";
    case Code::kE4m3:
      return "e4m3";
    case Code::kBf16:
      return "bf16";
    case Code::kF16:
      return "f16";
    case Code::kF32:
      return "f32";
    case Code::kIq2Xxs:
      return "iq2_xxs";
    case Code::kIq2Xs:
      return "iq2_xs";
    case Code::kIq2S:
      return "iq2_s";
    case Code::kIq3Xxs:
      return "iq3_xxs";
    case Code::kIq3S:
      return "iq3_s";
    case Code::kIq1:
      return "iq1";
  }
  return "?";
}

std::string_view name_of(Scale scale) {
  switch (scale) {
    case Scale::kNone:
      return "none";
    case Scale::kF32:
      return "f32";
    case Scale::kBf16:
      return "bf16";
    case Scale::kF16:
      return "f16";
    case Scale::kE8m0:
      return "e8m0";
    case Scale::kS8F16:
      return "s8*f16";
    case Scale::kE4m3:
      return "e4m3";
  }
  return "?";
}

std::string_view name_of(Min min) {
  switch (min) {
    case Min::kNone:
      return "none";
    case Min::kZero:
      return "zero point";
    case Min::kF16:
      return "f16";
    case Min::kS8F16:
      return "s8*f16";
  }
  return "?";
}

// Bits of one scale and of one min as a checkpoint stores them: integers of a super-block are packed tighter
// than the byte they take in a MatrixView, and a zero point has as many bits as a code.
int stored_scale_bits(const Format& format) {
  return format.scale == Scale::kS8F16 ? span_scale_bits(format.code) : 8 * scale_bytes(format.scale);
}

int stored_min_bits(const Format& format) {
  if (format.min == Min::kS8F16) return span_scale_bits(format.code);
  return format.min == Min::kZero ? code_bits(format.code) : 8 * min_bytes(format.min);
}

// Bits of one code there. Signs that a rule gives, and what several columns share, take none of their own.
double stored_code_bits(const Format& format) {
  switch (format.code) {
    case Code::kIq2Xxs:
      return (8 + 7) / 8.0;
    case Code::kIq2Xs:
      return (9 + 7) / 8.0;
    case Code::kIq2S:
      return (10 + 8) / 8.0;
    case Code::kIq3Xxs:
      return 8 / 4.0 + 7 / 8.0;
    case Code::kIq3S:
      return (9 + 4) / 4.0;
    case Code::kIq1:
      return 11 / 8.0 + 1.0 / std::max(format.span.k == 16 ? 8 : format.span.k, 8);
    default:
      return code_bits(format.code);
  }
}

}  // namespace

std::vector<NamedFormat> rounded_formats() {
  std::vector<NamedFormat> out;
  std::ranges::copy_if(kFormats, std::back_inserter(out),
                       [](const NamedFormat& entry) { return can_round_to(entry.format); });
  return out;
}

Format format_named(std::string_view name) {
  std::string known;
  for (const NamedFormat& entry : kFormats) {
    if (entry.name == name) return entry.format;
    if (!known.empty()) known += ", ";
    known += entry.name;
  }
  fail("format '{}': unknown, expected one of {}", name, known);
}

std::string name_of(const Format& format) {
  for (const NamedFormat& entry : kFormats) {
    if (entry.format == format) return std::string(entry.name);
  }
  std::string out(name_of(format.code));
  if (format.bias != 0) out += text("-{}", format.bias);
  if (format.scale != Scale::kNone) out += text(" * {}", name_of(format.scale));
  if (format.min != Min::kNone) out += text(" - {}", name_of(format.min));
  if (format.span.k != 0) out += text(" per {} columns", format.span.k);
  if (format.span.n != 1) out += text(" and {} rows", format.span.n);
  if (format.span.super_k != 0) out += text(", super-blocks of {}", format.span.super_k);
  return out;
}

std::vector<int> group_sizes(Format like) {
  std::vector<int> out;
  for (const NamedFormat& entry : kFormats) {
    like.span.k = entry.format.span.k;
    if (like.span.k > 0 && entry.format == like) out.push_back(like.span.k);
  }
  std::ranges::sort(out);
  return out;
}

double stored_bits(const Format& format, int64_t n, int64_t k) {
  check_shape(format, n, k, "stored_bits");
  const auto rows = static_cast<double>(n), columns = static_cast<double>(k);
  const int64_t scale_rows = (n + format.span.n - 1) / format.span.n;
  const auto row_spans = static_cast<double>(spans(format, k));
  const auto row_supers = static_cast<double>(supers(format, k));
  double bits = rows * columns * stored_code_bits(format);
  bits += static_cast<double>(scale_rows) * row_spans * stored_scale_bits(format);
  bits += rows * row_spans * stored_min_bits(format);
  if (format.scale == Scale::kS8F16) bits += rows * row_supers * 16;
  if (format.min == Min::kS8F16) bits += rows * row_supers * 16;
  return bits / (rows * columns);
}

}  // namespace kt::inline formats
