// Which tables this build holds, which of them this CPU runs, and which one is used.
#include <array>
#include <cstdlib>
#include <string>
#include <vector>

#include "base/cpu.h"
#include "base/error.h"
#include "base/text.h"
#include "kernels/gram.h"
#include "kernels/isas.h"
#include "kernels/table.h"

#define KT_TABLE(isa)                   \
  namespace kt_isa_##isa {              \
    extern const kt::Kernels kTable;    \
    extern const kt::GramKernels kGram; \
  }
KT_TABLE(portable)
KT_TABLE(avx2)
KT_TABLE(avx_vnni)
KT_TABLE(avx512)
KT_TABLE(avx512_vnni)
KT_TABLE(avx512_bf16)
KT_TABLE(amx)
KT_TABLE(neon)
KT_TABLE(neon_dotprod)
KT_TABLE(neon_i8mm)

namespace kt {
namespace {

using Has = bool CpuFacts::*;
struct Need {
  Has has;
  const char* name;
};

struct Row {
  const Kernels* table;
  const GramKernels* gram;
  std::vector<Need> needs;
};

// Worst first.
const std::vector<Row>& rows() {
  static const std::vector<Row> all = [] {
    using C = CpuFacts;
    std::vector<Row> r;
    r.push_back({&kt_isa_portable::kTable, &kt_isa_portable::kGram, {}});
    const std::vector<Need> avx2 = {{&C::avx2, "avx2"}, {&C::fma, "fma"}, {&C::f16c, "f16c"}};
    [[maybe_unused]] const auto with = [](std::vector<Need> base, std::initializer_list<Need> more) {
      base.insert(base.end(), more);
      return base;
    };
#ifdef KT_HAS_avx2
    const auto avx512 = with(avx2, {{&C::avx512f, "avx512f"},
                                    {&C::avx512bw, "avx512bw"},
                                    {&C::avx512dq, "avx512dq"},
                                    {&C::avx512vl, "avx512vl"}});
    const auto vnni = with(avx512, {{&C::avx512_vnni, "avx512_vnni"}});
    const auto bf16 = with(vnni, {{&C::avx512_vbmi, "avx512_vbmi"}, {&C::avx512_bf16, "avx512_bf16"}});
    r.push_back({&kt_isa_avx2::kTable, &kt_isa_avx2::kGram, avx2});
    r.push_back(
        {&kt_isa_avx_vnni::kTable, &kt_isa_avx_vnni::kGram, with(avx2, {{&C::avx_vnni, "avx_vnni"}})});
    r.push_back({&kt_isa_avx512::kTable, &kt_isa_avx512::kGram, avx512});
    r.push_back({&kt_isa_avx512_vnni::kTable, &kt_isa_avx512_vnni::kGram, vnni});
    r.push_back({&kt_isa_avx512_bf16::kTable, &kt_isa_avx512_bf16::kGram, bf16});
    r.push_back(
        {&kt_isa_amx::kTable, &kt_isa_amx::kGram,
         with(bf16, {{&C::amx_tile, "amx_tile"}, {&C::amx_int8, "amx_int8"}, {&C::amx_bf16, "amx_bf16"}})});
#endif
#ifdef KT_HAS_neon
    r.push_back({&kt_isa_neon::kTable, &kt_isa_neon::kGram, {{&C::neon, "neon"}}});
    r.push_back({&kt_isa_neon_dotprod::kTable,
                 &kt_isa_neon_dotprod::kGram,
                 {{&C::neon, "neon"}, {&C::dotprod, "dotprod"}}});
    r.push_back({&kt_isa_neon_i8mm::kTable,
                 &kt_isa_neon_i8mm::kGram,
                 {{&C::dotprod, "dotprod"},
                  {&C::fp16, "fp16"},
                  {&C::fhm, "fhm"},
                  {&C::i8mm, "i8mm"},
                  {&C::bf16, "bf16"}}});
#endif
    return r;
  }();
  return all;
}

// The first feature this CPU lacks for the table, or null.
const char* missing(const Row& row) {
  for (const Need& need : row.needs)
    if (!(cpu().*need.has)) return need.name;
  return nullptr;
}

// Names of the compatible variable KT_KERNEL_CPU_VARIANT that differ from ours.
std::string_view our_name(std::string_view name) {
  if (name == "avx512_vbmi") return "avx512_vnni";
  if (name == "avx512_base") return "avx512";
  return name;
}

}  // namespace

std::vector<IsaStatus> isas() {
  std::vector<IsaStatus> out;
  for (const Row& row : rows()) out.push_back({row.table, missing(row)});
  return out;
}

const Kernels& kernels_named(std::string_view name) {
  std::string known;
  for (const Row& row : rows()) {
    if (our_name(name) == row.table->name) {
      if (const char* feature = missing(row))
        fail_as(ErrorKind::kUnsupported, "ISA '{}' needs {}, which this CPU does not offer", name, feature);
      return *row.table;
    }
    known += text("{}{}", known.empty() ? "" : ", ", row.table->name);
  }
  fail("unknown ISA '{}': this build knows {}", name, known);
}

const GramKernels& gram_kernels(const Kernels& table) {
  for (const Row& row : rows())
    if (row.table == &table) return *row.gram;
  KT_CHECK(false, "table {} is none of this build's", table.name);
}

const Kernels& kernels() {
  static const Kernels& chosen = []() -> const Kernels& {
    for (const char* variable : {"KT_ISA", "KT_KERNEL_CPU_VARIANT"})
      if (const char* name = std::getenv(variable); name && *name) return kernels_named(name);
    const Kernels* best = nullptr;
    for (const Row& row : rows())
      if (!missing(row)) best = row.table;
    return *best;
  }();
  return chosen;
}

}  // namespace kt
