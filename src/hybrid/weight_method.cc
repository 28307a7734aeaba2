#include "hybrid/weight_method.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <mutex>
#include <optional>
#include <system_error>

#include "base/error.h"
#include "base/fork_mutex.h"
#include "base/log.h"
#include "weights/kt/kt_folder.h"
#include "weights/kt/kt_names.h"
#include "weights/requantise.h"

namespace kt {
namespace {

bool is_float(Code code) { return code == Code::kBf16 || code == Code::kF16 || code == Code::kF32; }

// "AMXINT4" or "AMXINT8" for the names that hold integers with one scale a row, which converted files hold
// and which other experts are rounded to; empty for the rest.
std::string_view converted_name(const WeightMethod& method) {
  if (method.name == "AMXINT4" || method.name == "MOE_INT4") return "AMXINT4";
  if (method.name == "AMXINT8" || method.name == "MOE_INT8") return "AMXINT8";
  return {};
}

// How a layer's experts are stored, in words, and the method that loads them as they are.
struct Stored {
  std::string words;
  std::string_view method;
};

Stored stored_in(const ExpertSource& source, int layer) {
  const std::string_view dialect = source.dialect();
  const Format gate = source.at(layer, 0, Projection::kGate)->format;
  if (dialect == "gguf")
    return {text("GGUF ({})", name_of(gate)), is_float(gate.code) ? "BF16" : "LLAMAFILE"};
  if (dialect == "kt-int4") return {"converted kt int4 weights", "AMXINT4"};
  if (dialect == "kt-int8") return {"converted kt int8 weights", "AMXINT8"};
  if (is_float(gate.code)) return {name_of(gate), "BF16"};
  if (dialect == "mxfp4" || dialect == "mxfp8")
    return {text("{} in blocks of 32", dialect), dialect == "mxfp4" ? "MXFP4" : "MXFP8"};
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

bool loads_as_stored(const WeightMethod& method, const Stored& stored, const ExpertSource& source) {
  if (stored.method == method.name || stored.method == converted_name(method)) return true;
  return method.name == "LLAMAFILE" && source.dialect() == "gguf";
}

// Whether a method of converted weights may round these experts itself.
bool rounds_while_loading(const WeightMethod& method, const Stored& stored) {
  if (converted_name(method).empty()) return false;
  return stored.method == "BF16" || stored.method == "FP8" || stored.method == "FP8_PERCHANNEL";
}

// Experts of a path with what they are read from.
struct Opened {
  std::optional<Checkpoint> checkpoint;
  std::unique_ptr<ExpertSource> source;
};

bool holds_kt_weights(const Checkpoint& checkpoint) {
  return !checkpoint.is_gguf() && std::ranges::any_of(checkpoint.tensors(), [](const Tensor& tensor) {
    return parse_kt_tensor_name(tensor.name).has_value();
  });
}

std::shared_ptr<const ExpertSource> open_path(const std::string& path) {
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) fail("{}: there is no such file or folder", path);
  auto opened = std::make_shared<Opened>();
  if (has_kt_layers(path)) {
    opened->source = open_kt_weights(path);
  } else {
    opened->checkpoint.emplace(path);
    if (holds_kt_weights(*opened->checkpoint)) {
      opened->checkpoint.reset();
      opened->source = open_kt_weights(path);
    } else {
      opened->source = open_experts(*opened->checkpoint);
    }
  }
  return {opened, opened->source.get()};
}

// Who has which path open. Entries of paths that nobody uses any more are dropped when another one is opened.
struct OpenPaths {
  ForkMutex mutex{4};
  std::map<std::string, std::weak_ptr<const ExpertSource>> sources;
};

// Never destroyed: layers may be loaded while the process ends.
OpenPaths& open_paths() {
  static OpenPaths& paths = *std::make_unique<OpenPaths>().release();
  return paths;
}

[[maybe_unused]] const OpenPaths& made_early = open_paths();  // before threads that fork

// One name for one place, however it was spelt.
std::string key_of(const std::string& path) {
  std::error_code error;
  const std::filesystem::path canonical = std::filesystem::weakly_canonical(path, error);
  return error ? path : canonical.string();
}

}  // namespace

const std::vector<WeightMethod>& weight_methods() {
  static const std::vector<WeightMethod> methods = {
      {"AMXINT4", "kt int4 weights"},
      {"AMXINT8", "kt int8 weights"},
      {"RAWINT4", "symmetric int4 in groups"},
      {"FP8", "FP8 in 128x128 blocks"},
      {"FP8_PERCHANNEL", "FP8 with a scale for each row"},
      {"BF16", "bf16"},
      {"GPTQ_INT4", "int4 in groups as GPTQ and AWQ store it"},
      {"MXFP4", "MXFP4"},
      {"MXFP8", "MXFP8"},
      {"LLAMAFILE", "GGUF"},
      {"MOE_INT8", "kt int8 weights"},
      {"MOE_INT4", "kt int4 weights"},
  };
  return methods;
}

const WeightMethod& weight_method_named(std::string_view name) {
  std::string known;
  for (const WeightMethod& method : weight_methods()) {
    if (method.name == name) return method;
    known += text(known.empty() ? "{}" : ", {}", method.name);
  }
  fail("method '{}': expected one of {}", name, known);
}

int kt_bits(const WeightMethod& method) {
  const std::string_view name = converted_name(method);
  return name == "AMXINT4" ? 4 : name == "AMXINT8" ? 8 : 0;
}

MethodFormats formats_of(const WeightMethod& method, int64_t hidden, int64_t inter, int group_size,
                         bool zero_point) {
  const auto both = [](const Format& format) { return MethodFormats{format, format}; };
  if (const int bits = kt_bits(method)) return both(format_named(bits == 4 ? "int4" : "int8"));
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
  if (method.name == "LLAMAFILE") {
    const auto fitting = [](int64_t k) { return format_named(k % 256 == 0 ? "q4_k" : "q4_0"); };
    return {fitting(hidden), fitting(inter)};
  }
  constexpr std::pair<std::string_view, std::string_view> kNames[] = {{"FP8", "fp8"},
                                                                      {"FP8_PERCHANNEL", "fp8_row"},
                                                                      {"BF16", "bf16"},
                                                                      {"MXFP4", "mxfp4"},
                                                                      {"MXFP8", "mxfp8"}};
  for (const auto& [name, format] : kNames)
    if (method.name == name) return both(format_named(format));
  fail_as(ErrorKind::kUnsupported, "method {}: values cannot be rounded to {}", method.name,
          method.stored_as);
}

std::shared_ptr<const ExpertSource> shared_experts(const std::string& path) {
  const std::string key = key_of(path);
  OpenPaths& open = open_paths();
  std::lock_guard lock(open.mutex);
  if (const auto found = open.sources.find(key); found != open.sources.end())
    if (auto source = found->second.lock()) return source;
  auto source = open_path(path);
  std::erase_if(open.sources, [](const auto& entry) { return entry.second.expired(); });
  open.sources[key] = source;
  return source;
}

void forget_experts(const std::string& path) {
  OpenPaths& open = open_paths();
  std::lock_guard lock(open.mutex);
  open.sources.erase(key_of(path));
}

void check_method(const WeightMethod& method, const ExpertSource& source, int layer,
                  const std::string& path) {
  const std::vector<int> layers = source.layers();
  if (!std::ranges::binary_search(layers, layer)) {
    if (layers.empty()) fail("{}: no layer with routed experts", path);
    fail("{}: layer {} has no routed experts; {} layers from {} to {} have", path, layer, layers.size(),
         layers.front(), layers.back());
  }
  const Stored stored = stored_in(source, layer);
  if (loads_as_stored(method, stored, source) || rounds_while_loading(method, stored)) return;
  fail("method {} is for {}, the experts under {} are stored as {}: use method {}", method.name,
       method.stored_as, path, stored.words, stored.method);
}

std::unique_ptr<ExpertSource> rounded_for(const WeightMethod& method, const ExpertSource& source, int layer,
                                          const std::string& path) {
  const Stored stored = stored_in(source, layer);
  if (loads_as_stored(method, stored, source)) return nullptr;
  const Format format = format_named(kt_bits(method) == 4 ? "int4" : "int8");
  log_once(LogLevel::kWarning,
           "{}: experts stored as {} are rounded to {} each time they are loaded; weights that `kt quant` "
           "converted load faster",
           path, stored.words, name_of(format));
  return requantised(source, RoundedFormats{.gate_up = format, .down = format, .through_bf16 = true});
}

}  // namespace kt
