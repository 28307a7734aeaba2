// kt doctor on the kernels: which instruction set is used and what a forced one gives away, how fast memory
// is read, and whether the real kernels compute what the portable ones compute.
#include <algorithm>

#include "base/memory.h"
#include "base/text.h"
#include "bench/measure.h"
#include "cli/doctor/doctor.h"
#include "formats/known_formats.h"
#include "terminal/language.h"
#include "terminal/report.h"

namespace kt::inline cli {
namespace {

struct Bandwidths {
  double huge = 0, ordinary = 0;  // bytes per second
};

// Windows alternate, so that a disturbance meets both; the best of each is compared.
Bandwidths measure_bandwidths(const std::shared_ptr<Pool>& pool, size_t bytes) {
  Reader huge(pool, best_kernels(), bytes, HugePages::kAdvise);
  Reader ordinary(pool, best_kernels(), bytes, HugePages::kNone);
  const size_t window = std::min<size_t>(huge.size(), size_t{128} << 20);
  Bandwidths best;
  for (int i = 0; i < 12; ++i) {
    best.huge = std::max(best.huge, static_cast<double>(window) / huge.window(window));
    best.ordinary = std::max(best.ordinary, static_cast<double>(window) / ordinary.window(window));
  }
  return best;
}

void look_at_huge_pages(Diagnosis& d, const std::string& mode, double gain) {
  d.facts["huge_pages"] = mode;
  if (mode != "never" && mode != "unknown") {
    d.findings.push_back(
        {tr_later("huge pages"),
         gain > 0 ? text(tr("{}; reading is {}x as fast as with ordinary pages"), mode, fixed(gain, 2))
                  : mode});
    return;
  }
  d.findings.push_back(
      {tr_later("huge pages"), text(tr("transparent huge pages: {}"), mode), Level::kWarning,
       tr_now("every 4 KiB of weights needs its own address translation; usually a few percent of the "
              "read bandwidth"),
       "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"});
}

// Measures what a forced choice gives away, instead of guessing it.
std::string cost_of(const Kernels& used, const Kernels& best, const std::shared_ptr<Pool>& pool) {
  if (!pool) return tr_now("slower products (kt doctor without --quick measures how much)");
  const auto s8 = [&](const Kernels& k) { return Multiplier(pool, k, Product::kS8).window(10e-3) / 1e12; };
  return text(tr("multiplies at {} instead of {} TOPS (s8)"), three_digits(s8(used)), three_digits(s8(best)));
}

}  // namespace

IsaChoice isa_choice(const Machine& machine) {
  IsaChoice choice{.all = known_isas(), .used = &best_kernels(), .forced_by = {}};
  for (const char* variable : {"KT_KERNEL_CPU_VARIANT", "KT_ISA"})
    if (!machine.variable(variable).empty()) choice.forced_by = variable;
  return choice;
}

void look_at_isa(Diagnosis& d, const IsaChoice& choice, const std::shared_ptr<Pool>& pool) {
  const Kernels *best = nullptr, *portable = &kernels_named("portable");
  const KnownIsa* runs = nullptr;  // the best of all, compiled or not
  std::string lacking, left_out;
  int compiled = 0;
  auto table = nlohmann::ordered_json::array();
  for (const KnownIsa& isa : choice.all) {
    if (isa.table) ++compiled;
    if (isa.missing)
      lacking += text(tr("{}{} (no {})"), lacking.empty() ? tr_now("; not on this CPU: ") : tr_now(", "),
                      isa.name, isa.missing);
    else if (!isa.table)
      left_out +=
          text("{}{}", left_out.empty() ? tr_now("; left out of this build: ") : tr_now(", "), isa.name);
    else
      best = isa.table;
    if (!isa.missing) runs = &isa;
    table.push_back({{"name", isa.name},
                     {"missing", isa.missing ? nlohmann::ordered_json(isa.missing) : nullptr},
                     {"compiled", isa.table != nullptr}});
  }
  d.facts["isa"] = {{"used", choice.used->name}, {"best", best->name}, {"all", table}};
  Finding f{tr_later("isa"), text(tr("{} in use, the best of {} compiled in{}{}"), choice.used->name,
                                  compiled, left_out, lacking)};
  if (best != choice.used) {
    f.level = Level::kWarning;
    f.found = text(tr("{} in use, forced by {}; {} would run here"), choice.used->name, choice.forced_by,
                   best->name);
    f.cost = cost_of(*choice.used, *best, pool);
    f.fix = "unset " + choice.forced_by;
  } else if (!runs->table) {
    f.level = Level::kWarning;
    f.found = text(tr("{} in use; {} would run here and was left out of this build"), choice.used->name,
                   runs->name);
    f.cost = tr_now("slower products");
    f.fix = tr_now("make compiles every instruction set (cmake -DKT_ISAS=all)");
  } else if (best == portable) {
    f.level = Level::kBad;
    f.cost = tr_now("no vector instructions: every product runs in plain C++");
    f.fix = tr_now(
        "run kt on x86-64 with AVX2 or on arm64; in a virtual machine, pass the host's CPU through: qemu "
        "-cpu host");
  }
  d.findings.push_back(f);
}

// Read bandwidth, with huge pages and without: their worth is measured, not assumed.
void look_at_bandwidth(Diagnosis& d, const Machine& machine, const std::shared_ptr<Pool>& pool) {
  const std::string mode = huge_page_mode(machine.root);
  if (!pool) return look_at_huge_pages(d, mode, 0);
  const size_t bytes = read_buffer_bytes() / 2;
  const Bandwidths best = measure_bandwidths(pool, bytes);
  const double ordinary = best.ordinary / 1e9, read = std::max(best.huge, best.ordinary) / 1e9;
  look_at_huge_pages(d, mode, best.huge / best.ordinary);
  d.facts["read_gb_per_s"] = read;
  d.facts["read_gb_per_s_ordinary_pages"] = ordinary;
  d.facts["read_threads"] = pool->threads();
  d.findings.push_back(
      {tr_later("read"), text(tr("{} GB/s with {}, over {}"), three_digits(read),
                              tr_counted(pool->threads(), "{} thread", "{} threads"), human_bytes(bytes))});
}

void look_at_kernels(Diagnosis& d, const Kernels& used) {
  const Kernels& portable = kernels_named("portable");
  double worst = 0;
  std::string closest, failed;
  auto table = nlohmann::ordered_json::array();
  for (const NamedFormat& named : kFormats) {
    for (const int rows : {1, 3, used.few_limit + 13}) {
      const KernelCheck check = check_kernel(used, portable, named.format, rows);
      d.checks.push_back({named.name, check});
      const std::string where =
          text(tr("{} {} with {}"), named.name, check.route, tr_counted(rows, "{} row", "{} rows"));
      if (!check.ok()) failed += text("{}{}", failed.empty() ? "" : ", ", where);
      if (check.difference / check.bound > worst) {
        worst = check.difference / check.bound;
        closest = where;
      }
      table.push_back({{"format", named.name},
                       {"route", check.route},
                       {"rows", rows},
                       {"difference", check.difference},
                       {"bound", check.bound},
                       {"ok", check.ok()}});
    }
  }
  d.facts["kernels"] = table;
  Finding f{tr_later("kernels"), text(tr("{} computes what portable does: {} formats x 3 row counts"),
                                      used.name, kFormats.size())};
  if (!closest.empty()) f.found += text(tr("; closest to its bound: {} ({})"), closest, percent(worst));
  if (!failed.empty()) {
    f = {tr_later("kernels"), text(tr("{} disagrees with portable on: {}"), used.name, failed), Level::kBad,
         tr_now("wrong results"),
         tr_now("KT_ISA=portable kt ... works meanwhile; please report this with the output of kt doctor "
                "--json")};
  }
  d.findings.push_back(f);
}

}  // namespace kt::inline cli
