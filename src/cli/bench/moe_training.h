// kt microbench moe --train: flags, table and JSON of training calls; the measuring is in train_bench.cc.
#pragma once
#include <span>
#include <vector>

#include "bench/moe_bench.h"
#include "cli/bench/measure_flags.h"
#include "formats/known_formats.h"

namespace kt::inline cli {

struct TrainFlags {
  bool on = false, recompute = false;
  std::vector<int> ranks = {8};

  void add_to(CLI::App& verb);
};

// What the flags of the verb say of the layer and of the measuring.
struct TrainRun {
  const MoeSetup& setup;
  std::span<const NamedFormat> formats;
  std::span<const int> tokens;
  Routing routing;
  const MeasureFlags& measure;
};
void run_training(const TrainFlags& flags, const TrainRun& run);

}  // namespace kt::inline cli
