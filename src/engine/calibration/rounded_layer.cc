#include "engine/calibration/rounded_layer.h"

#include <cstring>
#include <filesystem>

#include "base/error.h"
#include "base/log.h"
#include "weights/json.h"
#include "weights/safetensors.h"

namespace kt {
namespace {

// Two 4-bit codes a byte, the first in the low half.
std::vector<uint8_t> packed_codes(const Matrix& matrix) {
  if (matrix.format.code != Code::kU4) return matrix.codes;
  std::vector<uint8_t> out((matrix.codes.size() + 1) / 2);
  for (size_t i = 0; i < matrix.codes.size(); ++i)
    out[i / 2] = static_cast<uint8_t>(out[i / 2] | matrix.codes[i] << (i % 2 * 4));
  return out;
}

Json to_json(const ExpertFigures& f) {
  return {static_cast<int>(f.by), f.tokens, f.held_out, f.signal, f.rtn_error, f.error, f.damping,
          f.down_damping};
}

ExpertFigures figures_from(const Json& json) {
  return {.by = static_cast<RoundedBy>(json.at(0).get<int>()),
          .tokens = json.at(1),
          .held_out = json.at(2),
          .signal = json.at(3),
          .rtn_error = json.at(4),
          .error = json.at(5),
          .damping = json.at(6),
          .down_damping = json.at(7)};
}

}  // namespace

std::string rounded_layer_path(const std::string& folder, int layer) {
  return text("{}/layer-{}.safetensors", folder, layer);
}

void save_rounded_layer(const std::string& path, const std::vector<RoundedExpert>& experts,
                        const std::string& settings) {
  std::vector<TensorSpec> tensors;
  std::vector<std::vector<uint8_t>> bytes;
  Json figures = Json::array();
  for (size_t e = 0; e < experts.size(); ++e) {
    const Matrix* const matrices[] = {&experts[e].gate, &experts[e].up, &experts[e].down};
    for (const Projection projection : kProjections) {
      const Matrix& matrix = *matrices[static_cast<size_t>(projection)];
      bytes.push_back(packed_codes(matrix));
      bytes.push_back(matrix.scales);
      // The shape, then what is stored of it.
      tensors.push_back({text("{}.{}.codes.{}.{}", e, name_of(projection), matrix.n, matrix.k),
                         Dtype::kU8,
                         {static_cast<int64_t>(bytes[bytes.size() - 2].size())}});
      tensors.push_back({text("{}.{}.scales", e, name_of(projection)),
                         Dtype::kU8,
                         {static_cast<int64_t>(matrix.scales.size())}});
    }
    figures.push_back(to_json(experts[e].figures));
  }
  SafetensorsWriter writer(path, tensors, {{"figures", figures.dump()}, {"settings", settings}});
  for (size_t i = 0; i < bytes.size(); ++i) writer.write(i, 0, std::as_bytes(std::span(bytes[i])));
  writer.commit();
}

RoundedLayer::RoundedLayer(const std::string& path)
    : file_(path), header_(parse_safetensors(file_.bytes(), path)) {
  const Json figures = Json::parse(header_.metadata.at("figures"));
  for (const Json& json : figures) figures_.push_back(figures_from(json));
  KT_CHECK(header_.tensors.size() == figures_.size() * 6, "{}: {} tensors of {} experts", path,
           header_.tensors.size(), figures_.size());
}

std::unique_ptr<RoundedLayer> kept_layer(const std::string& path, const std::string& settings) {
  if (!std::filesystem::exists(path)) return nullptr;
  try {
    auto layer = std::make_unique<RoundedLayer>(path);
    if (layer->settings() == settings) return layer;
    KT_LOG(LogLevel::kWarning, "{}: of a calibration with other settings; rounded again", path);
  } catch (const std::exception& fault) {
    KT_LOG(LogLevel::kWarning, "{}; rounded again", fault.what());
  }
  return nullptr;
}

Matrix RoundedLayer::at(int expert, Projection projection, const Format& format) const {
  const auto index = (static_cast<size_t>(expert) * 3 + static_cast<size_t>(projection)) * 2;
  const Tensor &codes = header_.tensors.at(index), &scales = header_.tensors.at(index + 1);
  long long n = 0, k = 0;
  KT_CHECK(std::sscanf(codes.name.c_str() + codes.name.find(".codes."), ".codes.%lld.%lld", &n, &k) == 2,
           "{}", codes.name);
  Matrix out(format, n, k);
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

}  // namespace kt
