// What every converting verb shows: a progress bar or plain lines while it works, a table of figures
// afterwards.
#pragma once
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "weights/plans/conversion.h"

namespace kt::inline cli {

// "41.2%  3 of 7 files  0.52 GB/s  ETA 3m12s"; no ETA in the first second, which tells nothing.
std::string progress_text(const ConversionProgress& at);
// Standard error: a bar that redraws itself on a terminal; elsewhere a line for what changed, every few
// seconds. Nothing with `quiet`.
std::function<void(const ConversionProgress&)> show_progress(bool quiet);

// The result on standard output: per-layer errors, sizes, time and rate; or the same as JSON.
void print_conversion(const ConversionPlan& plan, const ConversionResult& result);
nlohmann::ordered_json conversion_json(const ConversionPlan& plan, const ConversionResult& result);

}  // namespace kt::inline cli
