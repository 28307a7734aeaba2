#include "weights/weight_method.h"

#include <algorithm>
#include <array>
#include <vector>

#include "base/error.h"
#include "base/log.h"
#include "text/shown.h"
#include "weights/requantise.h"

namespace kt::inline weights {
namespace {

bool is_float(Code code) { return code == Code::kBf16 || code == Code::kF16 || code == Code::kF32; }

constexpr auto kMethods = std::to_array<WeightMethod>({
    {"AMXINT4", "int4", "kt int4 weights", "int4", 4},
    {"AMXINT8", "int8", "kt int8 weights", "int8", 8},
    {"RAWINT4", "", "symmetric int4 in groups"},
    {"FP8", "", "FP8 in 128x128 blocks", "fp8"},
    {"FP8_PERCHANNEL", "", "FP8 with a scale for each row", "fp8_row"},
    {"BF16", "", "bf16", "bf16"},
    {"GPTQ_INT4", "gptq", "int4 in groups as GPTQ and AWQ store it"},
    {"MXFP4", "", "MXFP4", "mxfp4"},
    {"MXFP8", "", "MXFP8", "mxfp8"},
    {"LLAMAFILE", "gguf", "GGUF"},
    {"MOE_INT8", "", "kt int8 weights", "int8", 8},
    {"MOE_INT4", "", "kt int4 weights", "int4", 4},
});

bool same_but_for_case(std::string_view a, std::string_view b) {
  const auto lower = [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c; };
  return std::ranges::equal(a, b, {}, lower, lower);
}

// How a layer's experts are stored, in words, and the method that loads them as they are.
struct Stored {
  std::string description;
  std::string_view method;
  bool floats = false;
};

Stored stored_in(const ExpertSource& source, int layer) {
  const std::string_view dialect = source.dialect();
  const Format gate = source.at(layer, 0, Projection::kGate)->format;
  const bool floats = is_float(gate.code);
  if (dialect == "gguf") return {text("GGUF ({})", name_of(gate)), "LLAMAFILE", floats};
  if (dialect == "kt-int4") return {"converted kt int4 weights", "AMXINT4"};
  if (dialect == "kt-int8") return {"converted kt int8 weights", "AMXINT8"};
  if (floats) return {name_of(gate), "BF16", floats};
  if (dialect == "mxfp4" || dialect == "mxfp8")
    return {text("{} in blocks of 32", dialect), dialect == "mxfp4" ? "MXFP4" : "MXFP8"};
  if (dialect == "nvfp4") return {"nvfp4 in blocks of 16", "MXFP4"};
  if (gate.code == Code::kE4m3) {
    if (gate.span.n == 1 && gate.span.k == 0) return {"FP8 with a scale for each row", "FP8_PERCHANNEL"};
    return {text("FP8 in {}x{} blocks", gate.span.n, gate.span.k), "FP8"};
  }
  if (gate.code == Code::kI8) return {text("int8 ({})", dialect), "AMXINT8"};
  const std::string groups =
      gate.span.k ? text("in groups of {} ", gate.span.k) : "with a scale for each row ";
  const bool symmetric = gate.min == Min::kNone && dialect == "compressed-tensors";
  return {text("int4 {}({}{})", groups, dialect, gate.min == Min::kZero ? ", zero points" : ""),
          symmetric ? "RAWINT4" : "GPTQ_INT4"};
}

bool loads_as_stored(const WeightMethod& method, const Stored& stored) {
  if (stored.method == method.name || (stored.floats && method.name == "BF16")) return true;
  return method.kt_bits > 0 && method.kt_bits == weight_method_named(stored.method).kt_bits;
}

// Whether a method of converted weights may round these experts itself.
bool rounds_while_loading(const WeightMethod& method, const Stored& stored) {
  if (method.kt_bits == 0) return false;
  return stored.floats || stored.method == "FP8" || stored.method == "FP8_PERCHANNEL";
}

}  // namespace

std::span<const WeightMethod> weight_methods() { return kMethods; }

const WeightMethod& weight_method_named(std::string_view name) {
  std::string known;
  for (const WeightMethod& method : kMethods) {
    const bool short_name = !method.word.empty();
    if (same_but_for_case(method.name, name) || (short_name && same_but_for_case(method.word, name)))
      return method;
    known +=
        text("{}{}{}", known.empty() ? "" : ", ", method.name, short_name ? text(" ({})", method.word) : "");
  }
  fail("method '{}': expected one of {}", shown(name), known);
}

MethodFormats formats_of(const WeightMethod& method, int64_t hidden, int64_t inter, int group_size,
                         bool zero_point) {
  const auto both = [](const Format& format) { return MethodFormats{format, format}; };
  if (!method.format.empty()) return both(format_named(method.format));
  if (method.name == "RAWINT4" || method.name == "GPTQ_INT4") {
    if (group_size < 16 || group_size % 16 != 0)
      fail("method {}: group_size is {}, expected a multiple of 16", method.name, group_size);
    Format format{.code = Code::kU4, .bias = 8, .scale = Scale::kBf16, .span = {.k = group_size}};
    if (method.name == "GPTQ_INT4") format.scale = Scale::kF16;
    if (method.name == "GPTQ_INT4" && zero_point) {
      format.bias = 0;
      format.min = Min::kZero;
    }
    return both(format);
  }
  KT_CHECK(method.name == "LLAMAFILE", "method {} has no format", method.name);
  const auto fitting = [](int64_t k) { return format_named(k % 256 == 0 ? "q4_k" : "q4_0"); };
  return {fitting(hidden), fitting(inter)};
}

const WeightMethod& stored_method(const ExpertSource& source) {
  const std::vector<int> layers = source.layers();
  KT_CHECK(!layers.empty(), "a source of {} without layers", source.dialect());
  return weight_method_named(stored_in(source, layers.front()).method);
}

bool loads_method(const WeightMethod& method, const ExpertSource& source, int layer) {
  const Stored stored = stored_in(source, layer);
  return loads_as_stored(method, stored) || rounds_while_loading(method, stored);
}

void check_method(const WeightMethod& method, const ExpertSource& source, int layer,
                  const std::string& path) {
  const std::vector<int> layers = source.layers();
  if (!std::ranges::binary_search(layers, layer)) {
    if (layers.empty()) fail("{}: no layer with routed experts", path);
    fail("{}: layer {} has no routed experts; {} layers from {} to {} have", path, layer, layers.size(),
         layers.front(), layers.back());
  }
  if (loads_method(method, source, layer)) return;
  const Stored stored = stored_in(source, layer);
  fail("method {} is for {}, the experts under {} are stored as {}: use method {}", method.name,
       method.stored_as, path, stored.description, stored.method);
}

std::optional<Format> rounded_format(const WeightMethod& method, const ExpertSource& source, int layer) {
  if (loads_as_stored(method, stored_in(source, layer))) return std::nullopt;
  return format_named(method.format);
}

std::unique_ptr<ExpertSource> rounded_for(const WeightMethod& method, const ExpertSource& source, int layer,
                                          const std::string& path) {
  const std::optional<Format> format = rounded_format(method, source, layer);
  if (!format) return nullptr;
  log_once(LogLevel::kWarning,
           "{}: experts stored as {} are rounded to {} each time they are loaded; weights that `kt quant` "
           "converted load faster",
           path, stored_in(source, layer).description, name_of(*format));
  return requantised(source, RoundedFormats{.gate_up = format, .down = format, .through_bf16 = true});
}

}  // namespace kt::inline weights
