#include "engine/calibration/rounded_layer.h"

#include <cstring>
#include <filesystem>

#include "base/error.h"
#include "base/log.h"
#include "base/sha256.h"
#include "text/json.h"

namespace kt::inline engine {
namespace {

// Two 4-bit codes a byte, the first in the low half.
std::vector<uint8_t> packed_codes(const Matrix& matrix) {
  if (matrix.format.code != Code::kU4) return matrix.codes;
  std::vector<uint8_t> out((matrix.codes.size() + 1) / 2);
  for (size_t i = 0; i < matrix.codes.size(); ++i)
    out[i / 2] = static_cast<uint8_t>(out[i / 2] | matrix.codes[i] << (i % 2 * 4));
  return out;
}

Json record_of(const ExpertFigures& f) {
  return {static_cast<int>(f.by),
          f.tokens,
          f.held_out,
          f.signal,
          f.rtn_error,
          f.error,
          f.damping,
          f.down_damping,
          f.gptq_error ? Json(*f.gptq_error) : Json()};
}

ExpertFigures figures_from(const Json& json) {
  return {.by = static_cast<RoundedBy>(json.at(0).get<int>()),
          .tokens = json.at(1),
          .held_out = json.at(2),
          .signal = json.at(3),
          .rtn_error = json.at(4),
          .error = json.at(5),
          .gptq_error = json.at(8).is_null() ? std::nullopt : std::optional(json.at(8).get<double>()),
          .damping = json.at(6),
          .down_damping = json.at(7)};
}

Json record_of(const LayerFigures& figures) {
  Json experts = Json::array(), linears = Json::array();
  for (const ExpertFigures& f : figures.experts) experts.push_back(record_of(f));
  for (const LinearFigures& f : figures.linears) linears.push_back({f.module, record_of(f.figures)});
  return {{"layer", figures.layer}, {"experts", std::move(experts)}, {"linears", std::move(linears)}};
}

// Of everything a file of a layer says: its metadata but for the sum itself, then what it holds.
class LayerSum {
 public:
  void add(const Metadata& metadata) {
    for (const auto& [key, value] : metadata)
      if (key != kSum) {
        const std::string line = text("{} {}\n", key, value);
        add(std::as_bytes(std::span(line)));
      }
  }
  void add(std::span<const std::byte> bytes) { sum_.add(bytes); }
  std::string hex() { return sum_.hex(); }
  static constexpr const char* kSum = "sha256";

 private:
  Sha256 sum_;
};

Dtype scale_type(const Format& format) {
  return format.scale == Scale::kBf16  ? Dtype::kBf16
         : format.scale == Scale::kF16 ? Dtype::kF16
                                       : Dtype::kF32;
}

}  // namespace

ExpertFigures LayerFigures::total() const {
  ExpertFigures sum;
  for (const ExpertFigures& e : experts) {
    sum.tokens += e.tokens;
    sum.held_out += e.held_out;
    sum.signal += e.signal;
    sum.rtn_error += e.rtn_error;
    sum.error += e.error;
  }
  return sum;
}

std::string rounded_layer_path(const std::string& folder, int layer) {
  return text("{}/layer-{}.safetensors", folder, layer);
}

void save_rounded_layer(const std::string& path, const RoundedMatrices& layer, const std::string& settings) {
  std::vector<TensorSpec> tensors;
  Json shapes = Json::object();
  for (const auto& [module, matrix] : layer.matrices) {
    const auto codes = static_cast<int64_t>(matrix.codes.size());
    const Dtype type = scale_type(matrix.format);
    tensors.push_back(
        {module + ".codes", Dtype::kU8, {matrix.format.code == Code::kU4 ? (codes + 1) / 2 : codes}});
    tensors.push_back(
        {module + ".scales",
         type,
         {static_cast<int64_t>(matrix.scales.size()) * 8 / static_cast<int64_t>(dtype_bits(type))}});
    shapes[module] = {matrix.n, matrix.k};
  }
  Metadata metadata = {
      {"figures", record_of(layer.figures).dump()}, {"settings", settings}, {"shapes", shapes.dump()}};
  LayerSum sum;
  sum.add(metadata);
  for (const auto& [module, matrix] : layer.matrices) {
    const std::vector<uint8_t> codes = packed_codes(matrix);
    sum.add(std::as_bytes(std::span(codes)));
    sum.add(std::as_bytes(std::span(matrix.scales)));
  }
  metadata[LayerSum::kSum] = sum.hex();
  SafetensorsWriter writer(path, tensors, metadata);
  size_t tensor = 0;
  for (const auto& [module, matrix] : layer.matrices) {
    const std::vector<uint8_t> codes = packed_codes(matrix);
    writer.write(tensor++, 0, std::as_bytes(std::span(codes)));
    writer.write(tensor++, 0, std::as_bytes(std::span(matrix.scales)));
  }
  writer.commit();
}

RoundedLayer::RoundedLayer(const std::string& path)
    : file_(path), header_(parse_safetensors(file_.bytes(), path)) {
  const Json figures = Json::parse(header_.metadata.at("figures"));
  figures_.layer = figures.at("layer");
  for (const Json& json : figures.at("experts")) figures_.experts.push_back(figures_from(json));
  for (const Json& json : figures.at("linears"))
    figures_.linears.push_back({json.at(0).get<std::string>(), figures_from(json.at(1))});
  const Json shapes = Json::parse(header_.metadata.at("shapes"));
  std::map<std::string_view, const Tensor*> named;
  for (const Tensor& tensor : header_.tensors) named.emplace(tensor.name, &tensor);
  for (const auto& [module, shape] : shapes.items())
    places_[module] = {.n = shape.at(0),
                       .k = shape.at(1),
                       .codes = named.at(module + ".codes"),
                       .scales = named.at(module + ".scales")};
}

bool RoundedLayer::whole() const {
  const auto said = header_.metadata.find(LayerSum::kSum);
  if (said == header_.metadata.end()) return false;
  LayerSum sum;
  sum.add(header_.metadata);
  for (const auto& [module, place] : places_) {
    sum.add(place.codes->bytes);
    sum.add(place.scales->bytes);
  }
  return sum.hex() == said->second;
}

std::unique_ptr<RoundedLayer> kept_layer(const std::string& path, const std::string& settings) {
  if (!std::filesystem::exists(path)) return nullptr;
  try {
    auto layer = std::make_unique<RoundedLayer>(path);
    const bool ours = layer->settings() == settings;
    if (ours && layer->whole()) return layer;
    KT_LOG(
        LogLevel::kWarning, "{}: {}; rounded again", path,
        ours ? "damaged: its bytes are not those that were written" : "of a calibration with other settings");
  } catch (const std::exception& fault) {
    KT_LOG(LogLevel::kWarning, "{}: {}; rounded again", path, fault.what());
  }
  return nullptr;
}

std::optional<Matrix> RoundedLayer::at(const std::string& module, PackedSpec spec) const {
  const auto found = places_.find(module);
  if (found == places_.end()) return std::nullopt;
  const Place& place = found->second;
  const Tensor &codes = *place.codes, &scales = *place.scales;
  spec.type = scales.dtype;
  const Format format = packed_format(spec);
  Matrix out(format, place.n, place.k);
  const size_t expected = format.code == Code::kU4 ? (out.codes.size() + 1) / 2 : out.codes.size();
  KT_CHECK(codes.bytes.size() == expected, "{}: {} bytes", codes.name, codes.bytes.size());
  const auto* from = reinterpret_cast<const uint8_t*>(codes.bytes.data());
  if (format.code == Code::kU4) {
    for (size_t i = 0; i < out.codes.size(); ++i)
      out.codes[i] = static_cast<uint8_t>(from[i / 2] >> (i % 2 * 4) & 15);
  } else {
    std::copy_n(from, out.codes.size(), out.codes.data());
  }
  KT_CHECK(scales.bytes.size() == out.scales.size(), "{}: {} bytes", scales.name, scales.bytes.size());
  std::memcpy(out.scales.data(), scales.bytes.data(), out.scales.size());
  return out;
}

}  // namespace kt::inline engine
