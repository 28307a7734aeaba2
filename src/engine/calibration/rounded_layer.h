// The experts of one layer as calibration rounded them, kept on disk until they are written where they
// belong: what makes an interrupted calibration go on at the layer it was in.
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/calibration/expert_rounding.h"

namespace kt {

std::string rounded_layer_path(const std::string& folder, int layer);
// The file appears whole or not at all; `settings` names what it was made with.
void save_rounded_layer(const std::string& path, const std::vector<RoundedExpert>& experts,
                        const std::string& settings);

class RoundedLayer {
 public:
  explicit RoundedLayer(const std::string& path);
  int experts() const { return static_cast<int>(figures_.size()); }
  const std::string& settings() const { return header_.metadata.at("settings"); }
  const std::vector<ExpertFigures>& figures() const { return figures_; }
  // Any thread.
  Matrix at(int expert, Projection projection, const Format& format) const;

 private:
  MappedFile file_;
  SafetensorsHeader header_;
  std::vector<ExpertFigures> figures_;
};

// The layer of an earlier run; null where there is none, it cannot be read, or its settings were others.
std::unique_ptr<RoundedLayer> kept_layer(const std::string& path, const std::string& settings);

}  // namespace kt
