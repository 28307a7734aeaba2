// How the kernel benchmarks show figures against a limit: the keys of their JSON and the columns of their
// tables.
#pragma once
#include <nlohmann/json.hpp>
#include <string>

#include "bench/limit_bench.h"

namespace kt {

void put_limit(nlohmann::ordered_json& out, const LimitFigures& f);    // limit, fraction_of_limit, ...
void put_windows(nlohmann::ordered_json& out, const LimitFigures& f);  // windows, windows_discarded, noisy
// One object, or an array when there are several rows.
void print_json(const nlohmann::ordered_json& rows);

std::string limit_heads();                       // limit, limit us, of limit, best, p90
std::string limit_cells(const LimitFigures& f);  // as wide as the heads
std::string dropped_cell(const LimitFigures& f);
std::string remark(const LimitFigures& f);  // after the last column: empty when nothing is wrong

}  // namespace kt
