// How the kernel benchmarks show figures against a limit: the keys of their JSON and the columns of their
// tables.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "bench/limit_bench.h"

namespace kt::inline bench {

void put_limit(nlohmann::ordered_json& out, const LimitFigures& f);    // limit, fraction_of_limit, ...
void put_windows(nlohmann::ordered_json& out, const LimitFigures& f);  // windows, windows_discarded, noisy

std::string limit_heads();  // limit, limit us, of limit, best, p90
// As wide as the heads. Nothing beats the limit: a figure above it is shown as ">100%", and the table ends with
// limit_note.
std::string limit_cells(const LimitFigures& f);
bool above_limit(const LimitFigures& f);  // whether a cell is shown so
std::string_view limit_note();            // a line that says why
std::string dropped_cell(const LimitFigures& f);
std::string remark(const LimitFigures& f);  // after the last column: empty when nothing is wrong

}  // namespace kt::inline bench
