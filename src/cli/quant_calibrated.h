// Calibrated conversions: what `kt quant gpu --method GPTQ` and `kt quant --calibrate` share.
#pragma once
#include <string>
#include <vector>

#include "cli/quant.h"
#include "engine/calibration/calibration_text.h"
#include "nn/gptq.h"

namespace kt {

struct CalibrationFlags {
  TextRequest text;
  double dampening = CalibrationDefaults{}.gptq.damping;
  // All but the dataset, which verbs spell differently.
  std::vector<CLI::Option*> add_to(CLI::App& verb);
};

// Plans, calibrates, converts and reports. `source` may be null with options.all_linears. Leaves
// kt_calibration.json and kt_calibration.svg beside the weights.
void convert_calibrated(const Checkpoint& checkpoint, const ExpertSource* source,
                        CompressedPlanOptions options, const CalibrationFlags& flags, const RunFlags& run);

}  // namespace kt
