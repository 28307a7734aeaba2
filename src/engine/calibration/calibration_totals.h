// The sums of a calibration's report: how many experts were calibrated and why others were not, what rounding
// cost in all, and whose damping had to be raised.
#pragma once
#include <string>

#include "text/json.h"

namespace kt::inline engine {

// Of CalibrationReport::json(), with the damping that was asked for: {"experts", "methods": {name: experts},
// "tokens", "held_out", "signal", "rtn_error", "error", "ratio", "damping_raised": [{"layer", "expert",
// "damping", "down_damping"}]}. Tokens are counted once for every expert they were sent to. Where matrices
// that every token visits were rounded too, "linears" has the same of them, with "linears" instead of
// "experts" and "module" instead of "expert".
Json calibration_totals(const Json& report, double damping);

// The same in a line for people; without a word of what did not happen.
std::string calibration_summary(const Json& totals);

}  // namespace kt::inline engine
