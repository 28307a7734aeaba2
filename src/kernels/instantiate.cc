// Compiled once per ISA (isa.cmake gives KT_ISA_HEADER, KT_ISA_CLASS, KT_ISA_NAMESPACE and the flags);
// exports one table.
#include "kernels/instantiate.h"

#include "kernels/routes.inl.h"
#include "kernels/rows.inl.h"

namespace KT_ISA_NAMESPACE {

extern const kt::AttentionKernels kAttention;  // instantiate_attention.cc
extern const kt::RowKernels kRowOps;           // instantiate_row_ops.cc

namespace {

constexpr kt::Kernels make() {
  kt::Kernels t{};
  t.name = KT_ISA_NAME;
  t.fragment = {Isa::kStep, Isa::kUnsigned};
  t.few_side = Isa::kActRows;
  t.few_step_bytes = Isa::kStep;
  t.many_side = kManySide;
  t.many_step_bytes = kManyStepBytes;
  t.tile_rows = Isa::kTileRows;
  t.few_limit = Isa::kFewLimit;
  t.panel_blocks = Isa::kPanelBlocks;
  t.panel_width = kPanelWidth;
  t.float_many = Isa::kBf16Product ? kt::ActCode::kBf16 : kt::ActCode::kF32;
  for (int i = 0; i < kt::kLayoutCount; ++i) t.few_acts[i] = few_acts(kt::kLayouts[i]);
  t.few_long = kFewLong.data();
  t.few_short = kFewShort.data();
  t.many_spans = kManySpans.data();
  t.many_s8 = kManyS8.data();
  t.many_bf16 = kManyBf16.data();
  t.many_f32 = kManyF32.data();
  t.pack_acts = pack_acts;
  t.copy_acts = copy_acts;
  t.activate = activate;
  t.add_scaled = add_scaled;
  t.store = store;
  t.attention = &kAttention;
  t.rows = &kRowOps;
  t.peak_s8 = peak_s8<Isa>;
  if constexpr (Isa::kBf16Product) t.peak_bf16 = peak_bf16<Isa>;
  t.peak_f32 = peak_f32;
  t.read = read_bytes;
  return t;
}

}  // namespace

extern const kt::Kernels kTable;
constexpr kt::Kernels kTable = make();

}  // namespace KT_ISA_NAMESPACE
