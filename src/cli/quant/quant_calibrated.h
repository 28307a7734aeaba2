// Calibrated conversions: what `kt quant gpu --method GPTQ` and `kt quant --calibrate` share.
#pragma once
#include <string>
#include <vector>

#include "cli/quant/quant.h"
#include "cli/quant/quant_perplexity.h"
#include "engine/calibration/calibration_text.h"
#include "nn/gptq.h"

namespace kt::inline cli {

struct CalibrationFlags {
  TextRequest text;
  PerplexityRequest perplexity;
  double dampening = CalibrationDefaults{}.gptq.damping;
  std::string actorder = "static";
  bool download = false;  // --download: of a dataset that is not here
  // All but the dataset, which verbs spell differently.
  std::vector<CLI::Option*> add_to(CLI::App& verb);
};

// Plans, calibrates, converts, measures what was asked for and reports. `source` may be null with
// options.all_linears. Leaves kt_calibration.json, whose content is part of what --json prints, and
// kt_calibration.svg beside the weights.
void convert_calibrated(const Checkpoint& checkpoint, const ExpertSource* source,
                        CompressedPlanOptions options, const CalibrationFlags& flags, const RunFlags& run);

}  // namespace kt::inline cli
