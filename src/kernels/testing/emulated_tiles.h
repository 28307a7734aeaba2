// The tile loops over an emulated unit, a table of tests alone: null where it is not linked.
#pragma once
#include "kernels/isas.h"

#ifdef KT_HAS_amx_emulated
namespace kt_isa_amx_emulated {
extern const kt::Kernels kTable;
extern const kt::GramKernels kGram;
extern const kt::BackKernels kBack;
}  // namespace kt_isa_amx_emulated
#endif

namespace kt::inline kernels {

inline const Kernels* emulated_tiles() {
#ifdef KT_HAS_amx_emulated
  static const Kernels* table = [] {
    know_table(kt_isa_amx_emulated::kTable, kt_isa_amx_emulated::kGram, kt_isa_amx_emulated::kBack);
    return &kt_isa_amx_emulated::kTable;
  }();
  return table;
#else
  return nullptr;
#endif
}

}  // namespace kt::inline kernels
