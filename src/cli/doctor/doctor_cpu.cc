// kt doctor on the processor: what there is, what this process may use of it, and how fast it is let run.
#include <cstdio>
#include <set>

#include "base/cgroups.h"
#include "base/cpu.h"
#include "base/text.h"
#include "cli/doctor/doctor.h"
#include "terminal/language.h"
#include "terminal/report.h"

namespace kt::inline cli {
namespace {

constexpr std::string_view kCpus = "/sys/devices/system/cpu";

// Both versions of the interface, from the process's own group up to the mount: a limit on any of them binds.
struct QuotaFiles {
  std::string mount;
  bool unified;
};

double group_quota(const Machine& machine, const QuotaFiles& files, const std::string& folder) {
  std::string quota, period;
  if (files.unified) {
    const std::string line = machine.content_of(folder + "cpu.max");  // "200000 100000" or "max 100000"
    quota = line.substr(0, line.find(' '));
    period = line.substr(std::min(line.size(), quota.size() + 1));
  } else {
    quota = machine.content_of(folder + "cpu.cfs_quota_us");  // "-1": none
    period = machine.content_of(folder + "cpu.cfs_period_us");
  }
  const uint64_t time = leading_number(quota).value_or(0), of = leading_number(period).value_or(0);
  return time > 0 && of > 0 ? static_cast<double>(time) / static_cast<double>(of) : 0;
}

double group_throttled(const Machine& machine, const QuotaFiles& files, const std::string& folder) {
  const std::string stat = machine.content_of(folder + "cpu.stat");
  return files.unified ? static_cast<double>(number_in(stat, "throttled_usec", 0)) / 1e6
                       : static_cast<double>(number_in(stat, "throttled_time", 0)) / 1e9;
}

void add_quota(CpuQuota& quota, const Machine& machine, const QuotaFiles& files, std::string path) {
  for (;;) {
    while (path.ends_with('/')) path.pop_back();
    const std::string folder = files.mount + path + "/";
    const double cores = group_quota(machine, files, folder);
    if (cores > 0 && (quota.cores == 0 || cores < quota.cores))
      quota = {.cores = cores, .throttled = group_throttled(machine, files, folder)};
    if (path.empty()) return;
    path.erase(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
  }
}

void look_at_quota(Diagnosis& d, const Machine& machine) {
  const CpuQuota quota = cpu_quota(machine);
  d.facts["cpu_quota"] = {{"cores", quota.cores > 0 ? nlohmann::ordered_json(quota.cores) : nullptr},
                          {"throttled_seconds", quota.throttled}};
  const int cores = machine.topology.cores();
  if (quota.cores == 0 || quota.cores >= cores) return;
  Finding f{tr_later("cpu quota"),
            text(tr("this container may use {} of {}"), fixed(quota.cores, 1),
                 tr_counted(cores, "{} core", "{} cores")),
            Level::kWarning};
  f.cost = text(tr("with one worker for each core all of them are stopped {} of the time"),
                percent(1 - quota.cores / cores));
  if (quota.throttled > 0) f.cost += text(tr("; held back for {} s so far"), fixed(quota.throttled, 1));
  f.fix = text(tr("start the container with --cpus={}, or run kt with --cpu-threads {}"), cores,
               std::max(1, static_cast<int>(quota.cores)));
  d.findings.push_back(f);
}

void look_at_load(Diagnosis& d, const Machine& machine) {
  d.facts["load"] = machine.load;
  const int pus = machine.topology.pus();
  if (machine.load < 0.5 * pus) return;
  d.findings.push_back({tr_later("load"),
                        text(tr("{} runnable threads in the last minute on {}"), fixed(machine.load, 1),
                             tr_counted(pus, "{} PU", "{} PUs")),
                        Level::kWarning, tr_now("what is measured here is what was left over"),
                        tr_now("stop other work, see: top")});
}

void look_at_smt(Diagnosis& d, const Machine& machine) {
  const std::string control = machine.content_of(std::string(kCpus) + "/smt/control");
  const int cores = machine.topology.cores(), pus = machine.topology.pus();
  d.facts["smt"] = {{"control", control}, {"pus_per_core", cores > 0 ? 1.0 * pus / cores : 0}};
  if (pus > cores)
    d.findings.push_back(
        {tr_later("smt"), text(tr("{} hardware threads a core; kt starts one worker for each core"),
                               fixed(1.0 * pus / cores, pus % cores ? 1 : 0))});
}

}  // namespace

CpuQuota cpu_quota(const Machine& machine) {
  CpuQuota quota;
  for_each_cgroup(machine.content_of("/proc/self/cgroup"),
                  [&](const std::string& controllers, const std::string& path) {
                    if (controllers.find(",cpu,") != std::string::npos)
                      add_quota(quota, machine, {"/sys/fs/cgroup/cpu", false}, path);
                    if (controllers == ",,") add_quota(quota, machine, {"/sys/fs/cgroup", true}, path);
                  });
  return quota;
}

void look_at_cpu(Diagnosis& d, const Machine& machine) {
  const CpuFacts& c = cpu();
  const Topology& topology = machine.topology;
  const std::string name = c.model.empty() ? c.vendor.empty() ? tr_now("unknown CPU") : c.vendor : c.model;
  Finding f{tr_later("cpu"),
            text(tr("{}; {}, {}, {}"), name, tr_counted(topology.cores(), "{} core", "{} cores"),
                 tr_counted(topology.pus(), "{} PU", "{} PUs"),
                 tr_counted(static_cast<int64_t>(topology.nodes.size()), "{} NUMA node", "{} NUMA nodes"))};
  if (topology.pus() < machine.pus_online) {
    f.level = Level::kWarning;
    f.found += text(tr("; the machine has {} PUs online"), machine.pus_online);
    f.cost = text(tr("{} of the machine is not used: it is outside the affinity mask"),
                  percent(1 - 1.0 * topology.pus() / static_cast<double>(machine.pus_online)));
    f.fix = tr_now("start kt without taskset, or widen the container's cpuset");
  }
  d.findings.push_back(f);
  d.findings.push_back({tr_later("caches"), text(tr("L1d {}, L2 {}, last level {}"), human_bytes(c.l1d),
                                                 human_bytes(c.l2), human_bytes(c.l3))});
  d.facts["cpu"] = {{"model", name},
                    {"cores", topology.cores()},
                    {"pus", topology.pus()},
                    {"pus_online", machine.pus_online},
                    {"numa_nodes", topology.nodes.size()},
                    {"l1d_bytes", c.l1d},
                    {"l2_bytes", c.l2},
                    {"l3_bytes", c.l3}};
  look_at_smt(d, machine);
  look_at_quota(d, machine);
  look_at_load(d, machine);
}

void look_at_frequency(Diagnosis& d, const Machine& machine) {
  std::set<std::string> governors;
  std::string folder;
  for (const Node& node : machine.topology.nodes)
    for (const auto& core : node.cores) {
      const std::string at = text("{}/cpu{}/cpufreq/", kCpus, core.front());
      const std::string governor = machine.content_of(at + "scaling_governor");
      if (governor.empty()) continue;
      governors.insert(governor);
      if (folder.empty() || governor == "powersave") folder = at;
    }
  if (governors.empty()) {
    d.facts["frequency"] = nullptr;
    d.findings.push_back({tr_later("frequency"),
                          tr_now("not visible here (a virtual machine or a container); the host decides")});
    return;
  }
  const auto ghz = [&](const char* file) {
    return static_cast<double>(leading_number(machine.content_of(folder + file)).value_or(0)) / 1e6;
  };
  const std::string driver = machine.content_of(folder + "scaling_driver");
  const double rated = ghz("cpuinfo_max_freq"), allowed = ghz("scaling_max_freq"),
               least = ghz("scaling_min_freq");
  const bool no_turbo = machine.content_of(std::string(kCpus) + "/intel_pstate/no_turbo") == "1" ||
                        machine.content_of(std::string(kCpus) + "/cpufreq/boost") == "0";
  std::string names;
  for (const std::string& name : governors) names += (names.empty() ? "" : ", ") + name;
  d.facts["frequency"] = {{"governors", governors},
                          {"driver", driver},
                          {"rated_ghz", rated},
                          {"allowed_ghz", allowed},
                          {"turbo", !no_turbo}};
  Finding f{tr_later("frequency"),
            text(tr("governor {} ({}), up to {} GHz"), names, driver, three_digits(allowed))};
  // The pstate drivers' powersave goes up with the work; everybody else's stays at the bottom.
  if (governors.contains("powersave") && driver.find("pstate") == std::string::npos) {
    f.level = Level::kWarning;
    f.cost = text(tr("cores stay at {} of {} GHz"), three_digits(least), three_digits(rated));
    f.fix = text("echo performance | sudo tee {}/cpu*/cpufreq/scaling_governor", kCpus);
  } else if (rated > 0 && allowed < 0.95 * rated) {
    f.level = Level::kWarning;
    f.cost = text(tr("the clock is held at {} of the {} GHz it could have"), percent(allowed / rated),
                  three_digits(rated));
    f.fix = text("echo {} | sudo tee {}/cpu*/cpufreq/scaling_max_freq",
                 machine.content_of(folder + "cpuinfo_max_freq"), kCpus);
  }
  d.findings.push_back(f);
  if (!no_turbo) return;
  const bool intel = !machine.content_of(std::string(kCpus) + "/intel_pstate/no_turbo").empty();
  d.findings.push_back({tr_later("turbo"), tr_now("switched off"), Level::kWarning,
                        tr_now("cores never go above their base clock"),
                        intel ? text("echo 0 | sudo tee {}/intel_pstate/no_turbo", kCpus)
                              : text("echo 1 | sudo tee {}/cpufreq/boost", kCpus)});
}

void look_at_amx(Diagnosis& d, const Machine& machine) {
  if (machine.content_of("/proc/cpuinfo").find(" amx_tile") == std::string::npos || machine.amx_usable)
    return;
  const std::string release = machine.content_of("/proc/sys/kernel/osrelease");
  int major = 0, minor = 0;
  const bool known = std::sscanf(release.c_str(), "%d.%d", &major, &minor) == 2;
  const bool old = known && (major < 5 || (major == 5 && minor < 16));
  d.findings.push_back(
      {tr_later("amx"),
       old ? text(tr("this CPU has AMX; Linux {} is too old to let a process use it"), release)
           : text(tr("this CPU has AMX; the kernel (Linux {}) does not let this process use it"), release),
       Level::kWarning, tr_now("prefill runs on AVX-512 instead of the tile unit"),
       old ? tr_now("boot Linux 5.16 or later: sudo apt-get install linux-image-$(dpkg --print-architecture)")
           : tr_now(
                 "use a container runtime whose seccomp profile allows arch_prctl: docker run --security-opt "
                 "seccomp=unconfined")});
}

}  // namespace kt::inline cli
