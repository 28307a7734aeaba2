// Which route a multiplication takes and what memory it needs: decided once per expert and call, from the
// number of rows, and printable.
#pragma once
#include <string>

#include "kernels/table.h"

namespace kt::inline kernels {

// How precise activations are: kInt8 where weights are integers, bf16 or better for float weights by default.
enum class Precision : uint8_t { kDefault, kInt8, kBf16, kF32 };
Precision precision_named(std::string_view name);  // "int8", "bf16", "f32", "default"

inline constexpr int kManyRows = 512;   // rows whose sums `many` keeps in scratch at once
inline constexpr int kExactK = 512;     // K block of exact s8 panels
inline constexpr int kFloatK = 512;     // K block of float panels
inline constexpr int kPlainK = 512;     // K block of rounded panels where both sides are plain bytes
inline constexpr int kRoundedK = 2048;  // the longest one of rounded panels that meet far codes
// Three row blocks by 2048 columns of s8 or 1024 of bf16 (tile units), or two by 512 of f32 and anything
// narrower
inline constexpr int kPanelBytes = 3 * kBlockRows * 2048;

enum class Route : uint8_t { kFew, kManySpans, kManyS8, kManyBf16, kManyF32 };

const char* name_of(Route route);  // "few", "many_spans", "many_s8", "many_bf16" or "many_f32"

struct Plan {
  Route route = Route::kFew;
  Kernels::Multiply multiply = nullptr;
  ActShape acts;
  size_t scratch_bytes = 0;
  std::string describe() const;
};

// For m >= 1 rows of activations against matrices packed as `packing`. Float weights never take int8
// activations: kInt8 means kBf16 for them.
Plan plan_for(const Kernels& kernels, const Packing& packing, Precision precision, int m);
// The plan of one route, whether or not plan_for would take it; multiply is null where the table has no such
// kernel. many_s8 lists far codes unless `precision` is kInt8, plain bytes.
Plan plan_route(const Kernels& kernels, const Packing& packing, Route route, int m,
                Precision precision = Precision::kDefault);

// Bytes of one block of memory that holds activations of this shape, and the pointers into it (64-byte
// aligned).
size_t act_bytes(const ActShape& shape);
Acts acts_in(const ActShape& shape, std::byte* memory);
// `rows` of them from row `row` on, a multiple of `side`.
Acts rows_from(const Acts& acts, int row, int rows);

}  // namespace kt::inline kernels
