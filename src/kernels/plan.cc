#include "kernels/plan.h"

#include <algorithm>

#include "base/checked.h"
#include "base/error.h"
#include "base/text.h"

namespace kt::inline kernels {
namespace {

// `few` takes rows in passes of 8 and a last one of 1, 2, 4 or 8.
int padded_rows(int m) {
  const int last = m % 8;
  return m - last + (last > 4 ? 8 : last > 2 ? 4 : last);
}

// Integer codes with one scale a row, which sums of whole rows need.
bool whole_rows(const Packing& p) {
  const Layout& layout = kLayouts[p.layout];
  return layout.span == SpanLength::kLong && layout.min == Min::kNone && p.span == p.k_pad;
}

// Columns of a K block of rounded panels that meet far codes: the row in even parts.
int rounded_k(int k_pad) {
  const int parts = ceil_div(k_pad, kRoundedK);
  return static_cast<int>(round_up(ceil_div(k_pad, parts), kChunk));
}

// Weights in spans whose codes times a scale of 12 bits are fine enough for outliers (panel.inl.h).
bool rounds_well(const Packing& p) {
  const Code code = kLayouts[p.layout].code;
  return (code_bits(code) <= 6 && code != Code::kIq4) || is_grid(code);
}

}  // namespace

Precision precision_named(std::string_view name) {
  if (name == "default") return Precision::kDefault;
  if (name == "int8") return Precision::kInt8;
  if (name == "bf16") return Precision::kBf16;
  if (name == "f32") return Precision::kF32;
  fail("unknown activation precision '{}': int8, bf16, f32 and default are known", name);
}

const char* name_of(Route route) {
  constexpr const char* kNames[] = {"few", "many_spans", "many_s8", "many_bf16", "many_f32"};
  return kNames[static_cast<int>(route)];
}

std::string Plan::describe() const {
  const char* codes[] = {"s8", "bf16", "f32"};
  return text("{}, {} activations, {} rows, scale every {}{}", name_of(route),
              codes[static_cast<int>(acts.code)], acts.rows, acts.scale_span, acts.far ? ", far codes" : "");
}

Plan plan_route(const Kernels& kernels, const Packing& p, Route route, int m, Precision precision) {
  Plan plan;
  plan.route = route;
  plan.acts = {.k_pad = p.k_pad, .scale_span = p.k_pad, .sum_span = p.k_pad};
  if (route == Route::kFew || route == Route::kManySpans) {
    plan.acts.scale_span = plan.acts.sum_span = kActSpan;
    plan.acts.sum_factor = -p.bias;
    if (p.format.min != Min::kNone) {
      plan.acts.sums = SumKind::kValues;
      plan.acts.sum_span = std::min(p.span, p.k_pad);
      plan.acts.sum_factor = 1;
    }
  }
  if (route == Route::kFew) {
    plan.multiply = kernels.few(p.layout);
    plan.acts.beside = true;
    plan.acts.side = kernels.few_side;
    plan.acts.step_bytes = kernels.few_step_bytes;
    plan.acts.code = kernels.few_acts[p.layout];
    plan.acts.rows = static_cast<int>(round_up(padded_rows(m), kernels.few_side));
    return plan;
  }
  plan.acts.side = kernels.many_side;
  plan.acts.step_bytes = kernels.many_step_bytes;
  if (route == Route::kManySpans) {
    plan.multiply = kernels.many_spans[p.layout];
    plan.acts.code = ActCode::kS8;
  } else if (route == Route::kManyS8) {
    plan.multiply = kernels.many_s8[p.layout];
    plan.acts.code = ActCode::kS8;
    // whole-row integer layouts stay exact; the others are rounded again in panels
    plan.acts.far = precision != Precision::kInt8;
    plan.acts.by_row = plan.acts.far && !whole_rows(p);
    if (plan.acts.by_row) plan.acts.sum_span = rounded_k(p.k_pad);  // a K block: the kernels ask for it there
    if (!whole_rows(p) && !plan.acts.far) plan.acts.scale_span = plan.acts.sum_span = kPlainK;
  } else if (route == Route::kManyBf16) {
    plan.multiply = kernels.many_bf16[p.layout];
    plan.acts.code = ActCode::kBf16;
  } else {
    plan.multiply = kernels.many_f32[p.layout];
    plan.acts.code = ActCode::kF32;
  }
  plan.acts.rows = static_cast<int>(round_up(m, kernels.tile_rows));
  plan.scratch_bytes =
      (plan.acts.by_row ? 2 : 1) * kPanelBytes + 3 * kBlockRows * sizeof(float) +
      std::min<size_t>(plan.acts.rows, kManyRows) * (kernels.panel_blocks + 2) * kBlockRows * sizeof(float);
  return plan;
}

Plan plan_for(const Kernels& kernels, const Packing& p, Precision precision, int m) {
  const bool integer = is_integer(kLayouts[p.layout].code);
  const bool native = integer ? precision == Precision::kDefault || precision == Precision::kInt8
                              : precision != Precision::kF32;
  if (native && m <= kernels.few_limit) return plan_route(kernels, p, Route::kFew, m);
  if (native && integer && kernels.many_spans[p.layout]) return plan_route(kernels, p, Route::kManySpans, m);
  // A tile unit: bytes, with far codes. Plain bytes are faster and cost perplexity where activations have outliers: on
  // request alone.
  if (native && integer && kernels.many_s8[p.layout] &&
      (whole_rows(p) || rounds_well(p) || precision == Precision::kInt8))
    return plan_route(kernels, p, Route::kManyS8, m, precision);
  const bool bf16 = precision != Precision::kF32 && kernels.many_bf16[p.layout];
  return plan_route(kernels, p, bf16 ? Route::kManyBf16 : Route::kManyF32, m);
}

size_t act_bytes(const ActShape& s) {
  size_t bytes = round_up(static_cast<size_t>(s.rows) * s.k_pad * bytes_of(s.code), size_t{64});
  if (s.code == ActCode::kS8) {
    bytes += round_up(static_cast<size_t>(s.rows) * s.scale_spans() * sizeof(float), size_t{64});
    bytes += round_up(static_cast<size_t>(s.rows) * s.sum_spans() * sizeof(int32_t), size_t{64});
    bytes += static_cast<size_t>(s.rows / s.side) * s.far_bytes();
  }
  return bytes;
}

Acts rows_from(const Acts& acts, int row, int rows) {
  const ActShape& s = acts.shape;
  Acts a = acts;
  a.shape.rows = rows;
  a.codes += static_cast<size_t>(row) * s.k_pad * bytes_of(s.code);
  if (a.scales) a.scales += static_cast<size_t>(row) * s.scale_spans();
  if (a.sums) a.sums += static_cast<size_t>(row) * s.sum_spans();
  if (a.values) a.values += static_cast<size_t>(row) * s.sum_spans();
  if (a.far) a.far += static_cast<size_t>(row / s.side) * s.far_bytes();
  return a;
}

Acts acts_in(const ActShape& s, std::byte* memory) {
  Acts a{.shape = s, .codes = memory};
  if (s.code == ActCode::kS8) {
    memory += round_up(static_cast<size_t>(s.rows) * s.k_pad, size_t{64});
    a.scales = reinterpret_cast<float*>(memory);
    memory += round_up(static_cast<size_t>(s.rows) * s.scale_spans() * sizeof(float), size_t{64});
    if (s.sums == SumKind::kCodes)
      a.sums = reinterpret_cast<int32_t*>(memory);
    else
      a.values = reinterpret_cast<float*>(memory);
    memory += round_up(static_cast<size_t>(s.rows) * s.sum_spans() * sizeof(int32_t), size_t{64});
    if (s.far) a.far = memory;
  }
  return a;
}

}  // namespace kt::inline kernels
