// The matrices of one layer as calibration rounded them, kept on disk until they are written where they
// belong: what makes an interrupted calibration go on at the layer it was in.
#pragma once
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/calibration/expert_rounding.h"
#include "weights/safetensors.h"

namespace kt::inline engine {

// Of a matrix that every token visits, or of a whole MLP that does.
struct LinearFigures {
  std::string module;
  ExpertFigures figures;
};

struct LayerFigures {
  int layer = 0;
  std::vector<ExpertFigures> experts;
  std::vector<LinearFigures> linears;
  ExpertFigures total() const;  // sums over experts; `by` and dampings mean nothing
};

// What rounding a layer gives. Kept matrices are in no list.
struct RoundedMatrices {
  LayerFigures figures;
  std::map<std::string, Matrix> matrices;  // by module, in packed_format
};

std::string rounded_layer_path(const std::string& folder, int layer);
// The file appears whole or not at all; `settings` names what it was made with.
void save_rounded_layer(const std::string& path, const RoundedMatrices& layer, const std::string& settings);

class RoundedLayer {
 public:
  explicit RoundedLayer(const std::string& path);
  const std::string& settings() const { return header_.metadata.at("settings"); }
  const LayerFigures& figures() const { return figures_; }
  bool whole() const;  // what it says and holds is what was saved, by its checksum; reads all of it
  bool has(const std::string& module) const { return places_.contains(module); }
  // Nothing for a matrix that is not in it. `spec` but for the type of scales, which the file knows. Any
  // thread.
  std::optional<Matrix> at(const std::string& module, PackedSpec spec) const;

 private:
  struct Place {
    int64_t n = 0, k = 0;
    const Tensor *codes = nullptr, *scales = nullptr;
  };
  MappedFile file_;
  SafetensorsHeader header_;
  LayerFigures figures_;
  std::map<std::string, Place> places_;
};

// The layer of an earlier run; null where there is none, it cannot be read, its checksum is wrong,
// or its settings were others.
std::unique_ptr<RoundedLayer> kept_layer(const std::string& path, const std::string& settings);

}  // namespace kt::inline engine
