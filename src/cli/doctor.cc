// kt doctor: looks at this machine, runs the real kernels and a bandwidth test, and says for each finding
// what it costs and the fix to type. The CPU part; there is no GPU part yet.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "base/cpu.h"
#include "base/error.h"
#include "base/file.h"
#include "base/memory.h"
#include "base/text.h"
#include "cli/kernel_check.h"
#include "cli/measure.h"
#include "cli/report.h"
#include "cli/verbs.h"
#include "kernels/isas.h"

namespace kt {
namespace {

enum class Level { kOk, kWarning, kBad };

struct Finding {
  std::string topic, found;
  Level level = Level::kOk;
  std::string cost = {}, fix = {};  // empty when all is well
};

struct FormatCheck {
  std::string_view format;
  KernelCheck check;
};

struct Diagnosis {
  std::vector<Finding> findings;
  std::vector<FormatCheck> checks;
  nlohmann::ordered_json facts;
};

const char* level_name(Level level) {
  return level == Level::kOk ? "ok" : level == Level::kWarning ? "warning" : "FAIL";
}

void look_at_cpu(Diagnosis& d, const Topology& topology) {
  const CpuFacts& c = cpu();
  const std::string name = c.model.empty() ? c.vendor.empty() ? "unknown CPU" : c.vendor : c.model;
  Finding f{"cpu",
            text("{}; {}, {}, {}", name, counted(topology.cores(), "core"), counted(topology.pus(), "PU"),
                 counted(static_cast<int64_t>(topology.nodes.size()), "NUMA node"))};
  const long online = ::sysconf(_SC_NPROCESSORS_ONLN);
  if (topology.pus() < online) {
    f.level = Level::kWarning;
    f.found += text("; the machine has {} PUs online", online);
    f.cost = "threads outside the affinity mask are not used";
    f.fix = "start kt without taskset, or widen the container's cpuset";
  }
  d.findings.push_back(f);
  d.findings.push_back({"caches", text("L1d {}, L2 {}, last level {}", human_bytes(c.l1d), human_bytes(c.l2),
                                       human_bytes(c.l3))});
  d.facts["cpu"] = {{"model", name},
                    {"cores", topology.cores()},
                    {"pus", topology.pus()},
                    {"pus_online", online},
                    {"numa_nodes", topology.nodes.size()},
                    {"l1d_bytes", c.l1d},
                    {"l2_bytes", c.l2},
                    {"l3_bytes", c.l3}};
}

void look_at_load(Diagnosis& d, const Topology& topology) {
  double load = 0;
  if (::getloadavg(&load, 1) != 1) return;
  d.facts["load"] = load;
  if (load < 0.5 * topology.pus()) return;
  d.findings.push_back(
      {"load",
       text("{} runnable threads in the last minute on {}", fixed(load, 1), counted(topology.pus(), "PU")),
       Level::kWarning, "the bandwidth below is what was left over", "stop other work, see: top"});
}

// Measures what a forced choice gives away, instead of guessing it.
void look_at_isa(Diagnosis& d, const std::shared_ptr<Pool>& pool) {
  const Kernels& used = kernels();
  const Kernels* best = nullptr;
  std::string lacking;
  auto table = nlohmann::ordered_json::array();
  for (const IsaStatus& isa : isas()) {
    if (!isa.missing)
      best = isa.table;
    else
      lacking +=
          text("{}{} (no {})", lacking.empty() ? "; not on this CPU: " : ", ", isa.table->name, isa.missing);
    table.push_back({{"name", isa.table->name},
                     {"missing", isa.missing ? nlohmann::ordered_json(isa.missing) : nullptr}});
  }
  d.facts["isa"] = {{"used", used.name}, {"best", best->name}, {"all", table}};
  Finding f{"isa", text("{} in use{}", used.name, lacking)};
  if (best != &used) {
    const auto s8 = [&](const Kernels& k) { return Multiplier(pool, k, Product::kS8).window(10e-3) / 1e12; };
    const bool ours = std::getenv("KT_ISA") && *std::getenv("KT_ISA");
    f.level = Level::kWarning;
    f.found = text("{} in use, forced by {}; {} would run here", used.name,
                   ours ? "KT_ISA" : "KT_KERNEL_CPU_VARIANT", best->name);
    f.cost =
        text("multiplies at {} instead of {} TOPS (s8)", three_digits(s8(used)), three_digits(s8(*best)));
    f.fix = ours ? "unset KT_ISA" : "unset KT_KERNEL_CPU_VARIANT";
  }
  d.findings.push_back(f);
  const auto info = read_small_file("/proc/cpuinfo");
  if (info && info->find(" amx_tile") != std::string::npos && !cpu().amx_tile) {
    d.findings.push_back({"amx", "this CPU has AMX, the kernel does not let this process use it",
                          Level::kWarning, "prefill runs at the AVX-512 peak, about a third of the AMX peak",
                          "use Linux 5.16 or later, and a container runtime that allows arch_prctl"});
  }
}

void look_at_memory(Diagnosis& d) {
  const uint64_t total = total_memory(), available = available_memory();
  Finding f{"memory", text("{} of {} available", human_bytes(available), human_bytes(total))};
  if (available < total / 4) {
    f.level = Level::kWarning;
    f.cost = text("models above {} do not fit", human_bytes(available));
    f.fix = "stop other programs, see: ps aux --sort=-rss | head";
  }
  d.findings.push_back(f);
  d.facts["memory"] = {{"total_bytes", total}, {"available_bytes", available}};
}

struct Bandwidths {
  double huge = 0, ordinary = 0;  // bytes per second
};

// Windows alternate, so that a disturbance meets both; the best of each is compared.
Bandwidths measure_bandwidths(const std::shared_ptr<Pool>& pool, size_t bytes) {
  Reader huge(pool, kernels(), bytes, HugePages::kAdvise), ordinary(pool, kernels(), bytes, HugePages::kNone);
  const size_t window = std::min<size_t>(huge.size(), size_t{128} << 20);
  Bandwidths best;
  for (int i = 0; i < 12; ++i) {
    best.huge = std::max(best.huge, static_cast<double>(window) / huge.window(window));
    best.ordinary = std::max(best.ordinary, static_cast<double>(window) / ordinary.window(window));
  }
  return best;
}

// Read bandwidth, with huge pages and without: their worth is measured, not assumed.
void look_at_bandwidth(Diagnosis& d, const std::shared_ptr<Pool>& pool) {
  const size_t bytes = read_buffer_bytes() / 2;
  const std::string mode = huge_page_mode();
  const Bandwidths best = measure_bandwidths(pool, bytes);
  const double ordinary = best.ordinary / 1e9, read = std::max(best.huge, best.ordinary) / 1e9;
  d.facts["huge_pages"] = mode;
  d.facts["read_gb_per_s"] = read;
  d.facts["read_gb_per_s_ordinary_pages"] = ordinary;
  d.facts["read_threads"] = pool->threads();
  if (mode == "never" || mode == "unknown") {
    Finding f{"huge pages", text("transparent huge pages: {}", mode)};
    f.level = Level::kWarning;
    f.cost =
        "every 4 KiB of weights needs its own address translation; usually a few percent of the read "
        "bandwidth";
    f.fix = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled";
    d.findings.push_back(f);
  } else {
    d.findings.push_back({"huge pages", text("{}; reading is {}x as fast as with ordinary pages", mode,
                                             fixed(best.huge / best.ordinary, 2))});
  }
  d.findings.push_back({"read", text("{} GB/s with {}, over {}", three_digits(read),
                                     counted(pool->threads(), "thread"), human_bytes(bytes))});
}

void look_at_kernels(Diagnosis& d) {
  const Kernels &used = kernels(), &portable = kernels_named("portable");
  double worst = 0;
  std::string closest, failed;
  auto table = nlohmann::ordered_json::array();
  for (const NamedFormat& named : kFormats) {
    for (const int rows : {1, 3, used.few_limit + 13}) {
      const KernelCheck check = check_kernel(used, portable, named.format, rows);
      d.checks.push_back({named.name, check});
      const std::string where = text("{} {} with {}", named.name, check.route, counted(rows, "row"));
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
  Finding f{"kernels", text("{} formats x 3 row counts agree with portable", kFormats.size())};
  if (!closest.empty()) f.found += text("; closest to its bound: {} ({})", closest, percent(worst));
  if (!failed.empty()) {
    f = {"kernels", text("{} disagrees with portable on: {}", used.name, failed), Level::kBad,
         "wrong results",
         "KT_ISA=portable kt ... works meanwhile; please report this with the output of kt doctor --json"};
  }
  d.findings.push_back(f);
}

void print(const Diagnosis& d, bool details) {
  for (const Finding& f : d.findings) {
    const Ink ink = f.level == Level::kOk        ? Ink::kGood
                    : f.level == Level::kWarning ? Ink::kWarning
                                                 : Ink::kBad;
    const std::string level = level_name(f.level);
    std::printf("%-11s %s%*s %s\n", f.topic.c_str(), inked(ink, level).c_str(),
                8 - static_cast<int>(level.size()), "", f.found.c_str());
    if (!f.cost.empty()) std::printf("%21scost: %s\n", "", f.cost.c_str());
    if (!f.fix.empty()) std::printf("%21sfix:  %s\n", "", f.fix.c_str());
  }
  if (!details) return;
  std::printf("\n");
  Table table({"format", "route", "rows", "difference", "bound", ""}, 2);
  for (const FormatCheck& c : d.checks) {
    char difference[32], bound[32];
    std::snprintf(difference, sizeof difference, "%.1e", c.check.difference);
    std::snprintf(bound, sizeof bound, "%.1e", c.check.bound);
    table.add({std::string(c.format), c.check.route, std::to_string(c.check.rows), difference, bound,
               c.check.ok() ? "ok" : "FAIL"});
  }
  std::fputs(table.str().c_str(), stdout);
}

struct DoctorFlags {
  bool json = false, details = false, cpu = false;
};

void run_doctor(const DoctorFlags& flags) {
  Diagnosis d;
  const Topology topology = Topology::discover();
  const auto pool = std::make_shared<Pool>(PoolOptions{.topology = topology});
  {
    StatusLine status;
    look_at_cpu(d, topology);
    look_at_load(d, topology);
    look_at_isa(d, pool);
    look_at_memory(d);
    status.show("measuring the read bandwidth");
    look_at_bandwidth(d, pool);
    status.show("running the kernels");
    look_at_kernels(d);
  }
  bool healthy = true;
  auto findings = nlohmann::ordered_json::array();
  for (const Finding& f : d.findings) {
    healthy = healthy && f.level != Level::kBad;
    findings.push_back({{"topic", f.topic},
                        {"level", level_name(f.level)},
                        {"found", f.found},
                        {"cost", f.cost},
                        {"fix", f.fix}});
  }
  if (flags.json) {
    nlohmann::ordered_json out = {{"healthy", healthy}, {"version", version()}};
    out.update(d.facts);
    out["findings"] = findings;
    std::printf("%s\n", out.dump(2).c_str());
  } else {
    print(d, flags.details);
  }
  if (!healthy)
    fail_as(ErrorKind::kUnsupported, "the kernels of {} give wrong results on this CPU", kernels().name);
}

}  // namespace

void add_doctor(CLI::App& kt, Invocation& run) {
  CLI::App* verb = kt.add_subcommand("doctor", "Is this machine ready, and what would make it faster");
  const auto flags = std::make_shared<DoctorFlags>();
  verb->add_flag("--cpu", flags->cpu, "Look at the CPU and memory only (all there is for now)");
  verb->add_flag("--details", flags->details, "Print every kernel check");
  verb->add_flag("--json", flags->json, "Print JSON");
  verb->footer(
      "Takes a few seconds. Exit code 4 when a kernel computes something else than the portable one.\n\n"
      "Examples:\n"
      "  kt doctor\n"
      "  kt doctor --details\n"
      "  kt doctor --json | jq .read_gb_per_s");
  verb->callback([&run, flags] { run.action = [flags] { run_doctor(*flags); }; });
}

}  // namespace kt
