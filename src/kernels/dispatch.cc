// Which tables this build holds, which of them this CPU runs, and which one is used.
#include <cstdlib>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/text.h"
#include "kernels/gram.h"
#include "kernels/isa_needs.h"
#include "kernels/isas.h"
#include "kernels/table.h"
#include "kernels/transpose.h"

// isa_rows.inc, written by isa.cmake, is KT_COMPILED(isa) or KT_LEFT_OUT(isa) for each ISA of this CPU family, worst
// first.
#define KT_LEFT_OUT(isa)
#define KT_COMPILED(isa)                \
  namespace kt_isa_##isa {              \
    extern const kt::Kernels kTable;    \
    extern const kt::GramKernels kGram; \
    extern const kt::BackKernels kBack; \
  }
#include "isa_rows.inc"
#undef KT_LEFT_OUT
#undef KT_COMPILED

namespace kt::inline kernels {
namespace {

struct Row {
  const char* name;
  const Kernels* table;  // null: left out of this build
  const GramKernels* gram;
  const BackKernels* back;
};

constexpr Row kRows[] = {
#define KT_LEFT_OUT(isa) {#isa, nullptr, nullptr, nullptr},
#define KT_COMPILED(isa) {#isa, &kt_isa_##isa::kTable, &kt_isa_##isa::kGram, &kt_isa_##isa::kBack},
#include "isa_rows.inc"
#undef KT_LEFT_OUT
#undef KT_COMPILED
};

// The first feature this CPU lacks for the table, or null.
const char* missing(const Row& row) {
  for (const IsaNeeds& needs : isa_needs())
    if (needs.isa == row.name) return missing_feature(needs);
  KT_CHECK(false, "nobody knows what {} needs", row.name);
}

std::vector<Row>& further_rows() {
  static std::vector<Row> rows;
  return rows;
}

const Row& row_of(const Kernels& table) {
  for (const Row& row : kRows)
    if (row.table == &table) return row;
  for (const Row& row : further_rows())
    if (row.table == &table) return row;
  KT_CHECK(false, "table {} is none of this build's", table.name);
}

std::string compiled_names() {
  std::string names;
  for (const Row& row : kRows)
    if (row.table) names += text("{}{}", names.empty() ? "" : ", ", row.name);
  return names;
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
  for (const Row& row : kRows)
    if (row.table) out.push_back({row.table, missing(row)});
  return out;
}

std::vector<KnownIsa> known_isas() {
  std::vector<KnownIsa> out;
  for (const Row& row : kRows) out.push_back({row.name, row.table, missing(row)});
  return out;
}

const Kernels& kernels_named(std::string_view name) {
  for (const Row& row : kRows) {
    if (our_name(name) != row.name) continue;
    if (const char* feature = missing(row))
      fail_as(ErrorKind::kUnsupported, "ISA '{}' needs {}, which this CPU does not offer", name, feature);
    if (!row.table)
      fail("ISA '{}' was left out of this build, which holds {}; cmake -DKT_ISAS=all compiles every one",
           name, compiled_names());
    return *row.table;
  }
  fail("unknown ISA '{}': this build knows {}", name, compiled_names());
}

void know_table(const Kernels& table, const GramKernels& gram, const BackKernels& back) {
  further_rows().push_back({table.name, &table, &gram, &back});
}

const GramKernels& gram_kernels(const Kernels& table) { return *row_of(table).gram; }
const BackKernels& back_kernels(const Kernels& table) { return *row_of(table).back; }

const Kernels& best_kernels() {
  static const Kernels* chosen = [] {
    for (const char* variable : {"KT_ISA", "KT_KERNEL_CPU_VARIANT"})
      if (const char* name = std::getenv(variable); name && *name) return &kernels_named(name);
    const Kernels* best = nullptr;
    for (const Row& row : kRows)
      if (row.table && !missing(row)) best = row.table;
    return best;
  }();
  return *chosen;
}

}  // namespace kt::inline kernels
