// What a CPU must offer to run each ISA that KT has kernels for, compiled into this build or not.
#pragma once
#include <string_view>
#include <vector>

#include "base/cpu.h"

namespace kt::inline kernels {

struct IsaNeeds {
  struct Feature {
    bool CpuFacts::* has;
    const char* name;
  };
  std::string_view isa;
  std::vector<Feature> features;
};

// Worst first, within a CPU family.
inline const std::vector<IsaNeeds>& isa_needs() {
  static const std::vector<IsaNeeds> all = [] {
    using C = CpuFacts;
    std::vector<IsaNeeds> rows = {{"portable", {}}};
    std::vector<IsaNeeds::Feature> needs;
    const auto add = [&](std::string_view isa, std::initializer_list<IsaNeeds::Feature> more) {
      needs.insert(needs.end(), more);
      rows.push_back({isa, needs});
    };
    add("avx2", {{&C::avx2, "avx2"}, {&C::fma, "fma"}, {&C::f16c, "f16c"}});
    const auto avx2 = needs;
    add("avx_vnni", {{&C::avx_vnni, "avx_vnni"}});
    needs = avx2;
    add("avx512", {{&C::avx512f, "avx512f"},
                   {&C::avx512bw, "avx512bw"},
                   {&C::avx512dq, "avx512dq"},
                   {&C::avx512vl, "avx512vl"}});
    add("avx512_vnni", {{&C::avx512_vnni, "avx512_vnni"}});
    add("avx512_bf16", {{&C::avx512_vbmi, "avx512_vbmi"}, {&C::avx512_bf16, "avx512_bf16"}});
    add("amx", {{&C::amx_tile, "amx_tile"}, {&C::amx_int8, "amx_int8"}, {&C::amx_bf16, "amx_bf16"}});
    needs.clear();
    add("neon", {{&C::neon, "neon"}});
    add("neon_dotprod", {{&C::dotprod, "dotprod"}});
    add("neon_i8mm", {{&C::fp16, "fp16"}, {&C::fhm, "fhm"}, {&C::i8mm, "i8mm"}, {&C::bf16, "bf16"}});
    return rows;
  }();
  return all;
}

// The first feature that this CPU lacks, or null.
inline const char* missing_feature(const IsaNeeds& needs) {
  for (const IsaNeeds::Feature& feature : needs.features)
    if (!(cpu().*feature.has)) return feature.name;
  return nullptr;
}

}  // namespace kt::inline kernels
