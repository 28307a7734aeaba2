#include "cli/doctor/doctor.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "formats/known_formats.h"
#include "kernels/table.h"

namespace kt::inline cli {
namespace {

using ::testing::HasSubstr;
namespace fs = std::filesystem;

// A machine of 8 cores in two nodes whose files are in a folder of the test's own.
class Doctor : public ::testing::Test {
 protected:
  Doctor() {
    char name[] = "/tmp/kt_doctor_XXXXXX";
    machine.root = ::mkdtemp(name);
    machine.topology = Topology::synthetic("numa:2 core:4 pu:2");
    machine.pus_online = 16;
    machine.amx_usable = true;
    machine.home = machine.root + "/home";
    machine.folder = machine.root;
    machine.cuda_library = machine.nvml_library = machine.root + "/no_such_library.so";
    write("/proc/self/cgroup", "0::/\n");
    write("/proc/meminfo",
          "MemTotal: 67108864 kB\nMemFree: 50331648 kB\nMemAvailable: 58720256 kB\nSwapTotal: 0 kB\n"
          "SwapFree: 0 kB\nHugePages_Free: 0\nHugepagesize: 2048 kB\n");
  }
  ~Doctor() override {
    // Whatever a test showed it: what is not ok says what it costs and what to type.
    for (const Finding& f : d.findings) {
      EXPECT_EQ(f.cost.empty(), f.level == Level::kOk) << f.found;
      EXPECT_EQ(f.fix.empty(), f.level == Level::kOk) << f.found;
      EXPECT_THAT(f.found, ::testing::Not(HasSubstr("{}")));
    }
    fs::remove_all(machine.root);
  }

  void write(const std::string& path, const std::string& content) {
    const fs::path file = machine.root + path;
    fs::create_directories(file.parent_path());
    std::ofstream(file) << content;
  }

  // The worst finding of a topic; an ok one with an empty text when there is none.
  Finding about(std::string_view topic) const {
    Finding worst;
    for (const Finding& f : d.findings)
      if (f.topic == topic && (worst.found.empty() || f.level > worst.level)) worst = f;
    return worst;
  }

  Machine machine;
  Diagnosis d;
};

// ---- processor

TEST_F(Doctor, AffinityHasAPrice) {
  machine.pus_online = 64;
  look_at_cpu(d, machine);
  EXPECT_EQ(about("cpu").level, Level::kWarning);
  EXPECT_THAT(about("cpu").cost, HasSubstr("75.0%"));
  EXPECT_THAT(about("smt").found, HasSubstr("2 hardware threads"));
}

TEST_F(Doctor, NoQuota) {
  write("/sys/fs/cgroup/cpu.max", "max 100000\n");
  EXPECT_EQ(cpu_quota(machine).cores, 0);
  look_at_cpu(d, machine);
  EXPECT_EQ(about("cpu quota").found, "");
}

TEST_F(Doctor, QuotaOfAnyEnclosingGroupBinds) {
  write("/proc/self/cgroup", "0::/outer/inner\n");
  write("/sys/fs/cgroup/outer/cpu.max", "250000 100000\n");
  write("/sys/fs/cgroup/outer/cpu.stat", "usage_usec 5\nnr_throttled 3\nthrottled_usec 1500000\n");
  write("/sys/fs/cgroup/outer/inner/cpu.max", "600000 100000\n");
  EXPECT_EQ(cpu_quota(machine).cores, 2.5);
  EXPECT_EQ(cpu_quota(machine).throttled, 1.5);
  look_at_cpu(d, machine);
  EXPECT_EQ(about("cpu quota").level, Level::kWarning);
  EXPECT_THAT(about("cpu quota").cost, HasSubstr("68.8%"));
  EXPECT_THAT(about("cpu quota").cost, HasSubstr("1.5 s"));
  EXPECT_THAT(about("cpu quota").fix, HasSubstr("--cpu-threads 2"));
}

TEST_F(Doctor, QuotaOfTheFirstVersion) {
  write("/proc/self/cgroup", "4:cpu,cpuacct:/docker/x\n3:memory:/docker/x\n");
  write("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n");
  write("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(cpu_quota(machine).cores, 0);
  write("/sys/fs/cgroup/cpu/docker/x/cpu.cfs_quota_us", "50000\n");
  write("/sys/fs/cgroup/cpu/docker/x/cpu.cfs_period_us", "100000\n");
  write("/sys/fs/cgroup/cpu/docker/x/cpu.stat", "throttled_time 2000000000\n");
  EXPECT_EQ(cpu_quota(machine).cores, 0.5);
  EXPECT_EQ(cpu_quota(machine).throttled, 2);
}

TEST_F(Doctor, Load) {
  machine.load = 9;
  look_at_cpu(d, machine);
  EXPECT_EQ(about("load").level, Level::kWarning);
}

class Frequency : public Doctor {
 protected:
  void clocks(const std::string& governor, const std::string& driver, const std::string& most) {
    for (int cpu = 0; cpu < 16; ++cpu) {
      const std::string at = "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/cpufreq/";
      write(at + "scaling_governor", governor + "\n");
      write(at + "scaling_driver", driver + "\n");
      write(at + "cpuinfo_max_freq", "3500000\n");
      write(at + "scaling_max_freq", most + "\n");
      write(at + "scaling_min_freq", "1200000\n");
    }
    look_at_frequency(d, machine);
  }
};

TEST_F(Frequency, Unknown) {
  look_at_frequency(d, machine);
  EXPECT_EQ(about("frequency").level, Level::kOk);
}

TEST_F(Frequency, Performance) {
  clocks("performance", "acpi-cpufreq", "3500000");
  EXPECT_EQ(about("frequency").level, Level::kOk);
  EXPECT_THAT(about("frequency").found, HasSubstr("3.50 GHz"));
}

TEST_F(Frequency, PowersaveStaysAtTheBottom) {
  clocks("powersave", "acpi-cpufreq", "3500000");
  EXPECT_EQ(about("frequency").level, Level::kWarning);
  EXPECT_EQ(about("frequency").cost, "cores stay at 1.20 of 3.50 GHz");
  EXPECT_THAT(about("frequency").fix, HasSubstr("echo performance | sudo tee"));
}

TEST_F(Frequency, PowersaveOfPstateGoesUpWithTheWork) {
  clocks("powersave", "intel_pstate", "3500000");
  EXPECT_EQ(about("frequency").level, Level::kOk);
}

TEST_F(Frequency, CappedAndWithoutTurbo) {
  write("/sys/devices/system/cpu/intel_pstate/no_turbo", "1\n");
  clocks("performance", "intel_pstate", "1750000");
  EXPECT_THAT(about("frequency").cost, HasSubstr("50.0%"));
  EXPECT_THAT(about("frequency").fix, HasSubstr("echo 3500000"));
  EXPECT_THAT(about("turbo").fix, HasSubstr("echo 0 | sudo tee"));
}

TEST_F(Doctor, AmxNeedsANewKernel) {
  write("/proc/cpuinfo", "flags : avx2 amx_tile amx_int8\n");
  look_at_amx(d, machine);
  EXPECT_TRUE(d.findings.empty());
  machine.amx_usable = false;
  write("/proc/sys/kernel/osrelease", "5.10.0-28-amd64\n");
  look_at_amx(d, machine);
  EXPECT_THAT(about("amx").found, HasSubstr("5.10.0-28-amd64 is too old"));
  d = {};
  write("/proc/sys/kernel/osrelease", "6.1.0-18-amd64\n");
  look_at_amx(d, machine);
  EXPECT_THAT(about("amx").found, HasSubstr("does not let this process"));
}

// ---- kernels

TEST_F(Doctor, OnlyPortableIsAFailure) {
  const Kernels& portable = kernels_named("portable");
  IsaChoice choice{.all = known_isas(), .used = &portable, .forced_by = {}};
  for (KnownIsa& isa : choice.all) isa.missing = isa.table == &portable ? nullptr : "everything";
  look_at_isa(d, choice, nullptr);
  EXPECT_EQ(about("isa").level, Level::kBad);
  EXPECT_FALSE(d.healthy());
}

TEST_F(Doctor, ForcedIsaIsNamed) {
  IsaChoice choice{.all = known_isas(), .used = &kernels_named("portable"), .forced_by = "KT_ISA"};
  for (KnownIsa& isa : choice.all) isa.missing = nullptr;
  look_at_isa(d, choice, nullptr);
  EXPECT_EQ(about("isa").level, Level::kWarning);
  EXPECT_EQ(about("isa").fix, "unset KT_ISA");
}

TEST_F(Doctor, ABetterIsaThatWasLeftOutIsNamed) {
  const Kernels* portable = &kernels_named("portable");
  const IsaChoice choice{.all = {{"portable", portable, nullptr}, {"simd9", nullptr, nullptr}},
                         .used = portable};
  look_at_isa(d, choice, nullptr);
  EXPECT_EQ(about("isa").level, Level::kWarning);
  EXPECT_THAT(about("isa").found, HasSubstr("simd9 would run here and was left out"));
  EXPECT_THAT(about("isa").fix, HasSubstr("-DKT_ISAS=all"));
}

TEST_F(Doctor, IsasThatWereLeftOutAreNamed) {
  const Kernels* portable = &kernels_named("portable");
  const IsaChoice choice{
      .all = {{"portable", portable, "all"}, {"simd8", nullptr, nullptr}, {"simd9", portable, nullptr}},
      .used = portable};
  look_at_isa(d, choice, nullptr);
  EXPECT_THAT(about("isa").found, HasSubstr("the best of 2 compiled in; left out of this build: simd8"));
}

TEST_F(Doctor, KernelsAreRun) {
  look_at_kernels(d, best_kernels());
  EXPECT_EQ(about("kernels").level, Level::kOk);
  EXPECT_EQ(d.checks.size(), 3 * std::size(kFormats));
  EXPECT_THAT(about("kernels").found, HasSubstr(best_kernels().name));
}

// The promise behind the verb: a CPU path that does nothing cannot pass.
TEST_F(Doctor, KernelsThatDoNothingAreAFailure) {
  Kernels idle = best_kernels();
  const std::vector<Kernels::Multiply> nothing(kLayoutCount, [](const MultiplyArgs&) noexcept {});
  idle.few_long = idle.few_short = nothing.data();
  look_at_kernels(d, idle);
  EXPECT_EQ(about("kernels").level, Level::kBad);
  EXPECT_THAT(about("kernels").found, HasSubstr("int4 few with 1 row"));
  EXPECT_EQ(about("kernels").cost, "wrong results");
  EXPECT_FALSE(d.healthy());
}

TEST_F(Doctor, HugePagesOff) {
  write("/sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n");
  look_at_bandwidth(d, machine, nullptr);
  EXPECT_EQ(about("huge pages").level, Level::kWarning);
  EXPECT_FALSE(d.facts.contains("read_gb_per_s"));
}

// ---- memory

TEST_F(Doctor, PlentyOfMemory) {
  look_at_memory(d, machine);
  for (const Finding& f : d.findings) EXPECT_EQ(f.level, Level::kOk) << f.found;
  EXPECT_EQ(about("memory").found, "56.0 GiB of 64.0 GiB available");
}

TEST_F(Doctor, ContainerLimit) {
  write("/sys/fs/cgroup/memory.max", "8589934592\n");
  write("/sys/fs/cgroup/memory.current", "1073741824\n");
  write("/sys/fs/cgroup/memory.stat", "inactive_file 0\nactive_file 0\n");
  look_at_memory(d, machine);
  EXPECT_EQ(about("memory").found, "7.0 GiB of 8.0 GiB available");
  EXPECT_EQ(about("memory limit").cost, "models above 8.0 GiB do not fit");
  EXPECT_THAT(about("memory limit").fix, HasSubstr("--memory=64g"));
}

TEST_F(Doctor, HardlyAnyMemoryIsAFailure) {
  write("/proc/meminfo", "MemTotal: 67108864 kB\nMemAvailable: 102400 kB\n");
  look_at_memory(d, machine);
  EXPECT_EQ(about("memory").level, Level::kBad);
}

TEST_F(Doctor, SwapOvercommitAndReservedPages) {
  write("/proc/meminfo",
        "MemTotal: 67108864 kB\nMemAvailable: 58720256 kB\nSwapTotal: 16777216 kB\nSwapFree: 8388608 kB\n"
        "CommitLimit: 33554432 kB\nCommitted_AS: 12582912 kB\nHugePages_Free: 4096\nHugepagesize: 2048 kB\n");
  write("/proc/sys/vm/overcommit_memory", "2\n");
  look_at_memory(d, machine);
  EXPECT_THAT(about("swap").found, HasSubstr("8.0 GiB of 16.0 GiB used"));
  EXPECT_EQ(about("swap").level, Level::kWarning);
  EXPECT_THAT(about("overcommit").cost, HasSubstr("20.0 GiB"));
  EXPECT_THAT(about("reserved").found, HasSubstr("8.0 GiB"));
}

class Numa : public Doctor {
 protected:
  void node(int id, const std::string& cpus, uint64_t gib) {
    const std::string at = "/sys/devices/system/node/node" + std::to_string(id) + "/";
    write(at + "cpulist", cpus + "\n");
    write(at + "meminfo", "Node " + std::to_string(id) + " MemTotal:       " + std::to_string(gib << 20) +
                              " kB\nNode " + std::to_string(id) +
                              " MemFree:        " + std::to_string(gib << 19) + " kB\n");
  }
};

TEST_F(Numa, OneNode) {
  node(0, "0-15", 64);
  look_at_numa(d, machine);
  EXPECT_EQ(about("numa").found, "one node: all memory is equally near");
}

TEST_F(Numa, BalancedNodesAndACardOfMemory) {
  node(0, "0-7", 32);
  node(1, "8-15", 32);
  node(2, "", 512);
  write("/proc/sys/kernel/numa_balancing", "0\n");
  look_at_numa(d, machine);
  EXPECT_EQ(about("numa").level, Level::kOk);
  EXPECT_THAT(about("numa").found, HasSubstr("node 1 32.0 GiB (16.0 GiB free), 8 PUs"));
  EXPECT_EQ(d.facts["numa"]["nodes"].size(), 3u);
}

TEST_F(Numa, UnevenNodesAndBalancing) {
  node(0, "0-7", 48);
  node(1, "8-15", 16);
  write("/proc/sys/kernel/numa_balancing", "1\n");
  look_at_numa(d, machine);
  ASSERT_EQ(d.findings.size(), 2u);
  EXPECT_THAT(d.findings[0].cost, HasSubstr("16.0 GiB"));
  EXPECT_EQ(d.findings[1].fix, "sudo sysctl kernel.numa_balancing=0");
}

TEST_F(Numa, NodeWithoutMemory) {
  node(0, "0-7", 64);
  node(1, "8-15", 0);
  look_at_numa(d, machine);
  EXPECT_THAT(about("numa").cost, HasSubstr("node 1 has cores but no memory"));
}

// ---- disk

TEST_F(Doctor, DiskOfNowhere) {
  machine.folder = machine.root + "/nowhere";
  look_at_disk(d, machine, DiskTest::kRead);
  EXPECT_EQ(about("disk").level, Level::kWarning);
}

TEST_F(Doctor, DiskWithoutALargeFile) {
  look_at_disk(d, machine, DiskTest::kRead);
  EXPECT_THAT(about("disk read").found, HasSubstr("not measured"));
  EXPECT_GT(d.facts["disk"]["total_bytes"], 0);
}

TEST_F(Doctor, DiskIsRead) {
  write("/model/small.bin", "x");
  write("/model/large.bin", std::string(9 << 20, 'x'));
  look_at_disk(d, machine, DiskTest::kRead);
  EXPECT_THAT(about("disk read").found, HasSubstr("large.bin"));
  EXPECT_GT(d.facts["disk"]["read_gb_per_s"], 0);
  d = {};
  look_at_disk(d, machine, DiskTest::kSkip);
  EXPECT_EQ(about("disk read").found, "");
}

// ---- GPUs

TEST_F(Doctor, NoGpuIsAStatement) {
  look_at_gpu(d, machine, GpuTest::kSkip);
  EXPECT_EQ(about("cuda").found, "no GPU: everything runs on the CPU");
  EXPECT_EQ(about("cuda").level, Level::kOk);
}

TEST_F(Doctor, CardWithoutDriver) {
  write("/sys/bus/pci/devices/0000:01:00.0/vendor", "0x10de\n");
  write("/sys/bus/pci/devices/0000:01:00.0/class", "0x030000\n");
  look_at_gpu(d, machine, GpuTest::kSkip);
  EXPECT_EQ(about("cuda").level, Level::kWarning);
  EXPECT_THAT(about("cuda").found, HasSubstr("not installed"));
}

TEST_F(Doctor, Gpus) {
  machine.cuda_library = machine.nvml_library = KT_FAKE_GPU_LIBRARY;
  look_at_gpu(d, machine, GpuTest::kSkip);
  EXPECT_THAT(about("cuda").found, HasSubstr("driver 560.35.03, CUDA 12.6"));
  ASSERT_EQ(d.findings.size(), 3u);
  EXPECT_EQ(d.findings[1].found, "Fake A, 24.0 GiB (20.0 GiB free), compute capability 8.9, PCIe 1 x16");
  EXPECT_EQ(d.findings[1].level, Level::kOk);
  EXPECT_THAT(d.findings[2].cost, HasSubstr("8 of 16 PCIe lanes: copies run at 50.0%"));
  EXPECT_EQ(d.facts["cuda"]["gpus"].size(), 2u);
}

TEST_F(Doctor, DriverThatDoesNotStart) {
  machine.cuda_library = machine.nvml_library = KT_FAKE_GPU_LIBRARY;
  write("/sys/bus/pci/devices/0000:01:00.0/vendor", "0x10de\n");
  write("/sys/bus/pci/devices/0000:01:00.0/class", "0x030200\n");
  ::setenv("KT_FAKE_GPU", "broken", 1);
  look_at_gpu(d, machine, GpuTest::kSkip);
  ::unsetenv("KT_FAKE_GPU");
  EXPECT_EQ(about("cuda").level, Level::kWarning);
  EXPECT_THAT(about("cuda").found, HasSubstr("cuInit: 999"));
}

// ---- what surrounds the process

TEST_F(Doctor, TakenPortNamesItsHolder) {
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  ASSERT_EQ(::bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  ASSERT_EQ(::listen(fd, 1), 0);
  ASSERT_EQ(::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size), 0);
  Machine real = machine;
  real.root = "";
  real.port = ntohs(address.sin_port);
  look_at_port(d, real);
  EXPECT_EQ(about("port").level, Level::kWarning);
  if (fs::exists("/proc/net/tcp")) {
    EXPECT_THAT(about("port").found, HasSubstr("(pid " + std::to_string(::getpid()) + ")"));
  }
  ::close(fd);
  d = {};
  look_at_port(d, real);
  EXPECT_EQ(about("port").level, Level::kOk);
}

TEST_F(Doctor, FilesAreReadOrFail) {
  look_at_files(d, machine);
  EXPECT_THAT(about("files").found, HasSubstr("defaults are used"));
  d = {};
  write("/home/config.yaml", "server:\n  port: 30001\n");
  write("/home/models.yaml", "");
  look_at_files(d, machine);
  EXPECT_THAT(about("files").found, HasSubstr("config.yaml, models.yaml"));
  d = {};
  write("/home/config.yaml", "server: [1, 2\n");
  look_at_files(d, machine);
  EXPECT_EQ(about("files").level, Level::kBad);
  EXPECT_THAT(about("files").found, HasSubstr("config.yaml:"));
  d = {};
  write("/home/config.yaml", "- a list\n");
  look_at_files(d, machine);
  EXPECT_EQ(about("files").level, Level::kBad);
  d = {};
  machine.home = "";
  look_at_files(d, machine);
  EXPECT_EQ(about("files").level, Level::kWarning);
}

TEST_F(Doctor, Limits) {
  look_at_limits(d, machine);
  EXPECT_EQ(about("limits").level, Level::kOk);
  d = {};
  machine.limits = {.files = 256, .files_most = 4096, .locked = 65536, .address_space = uint64_t{1} << 30};
  look_at_limits(d, machine);
  ASSERT_EQ(d.findings.size(), 2u);
  EXPECT_EQ(d.findings[0].fix, "ulimit -n 4096");
  EXPECT_THAT(d.findings[0].cost, HasSubstr("192"));
  EXPECT_EQ(d.findings[1].fix, "ulimit -v unlimited");
  d = {};
  machine.limits = {.files = 256, .files_most = 256};
  look_at_limits(d, machine);
  EXPECT_THAT(d.findings[0].fix, HasSubstr("limits.conf"));
}

TEST_F(Doctor, EnvironmentVariables) {
  machine.environment = {"PATH=/bin", "KT_HOME=/x", "OMP_NUM_THREADS=4", "MALLOC_PERTURB_=1", "KT_ISA="};
  look_at_environment(d, machine);
  ASSERT_EQ(d.findings.size(), 2u);
  EXPECT_EQ(d.findings[0].fix, "unset MALLOC_PERTURB_");
  EXPECT_THAT(d.findings[1].found, HasSubstr("OMP_NUM_THREADS=4 (no effect"));
  EXPECT_FALSE(d.facts["environment"].contains("KT_ISA"));
  EXPECT_EQ(machine.variable("KT_HOME"), "/x");
  EXPECT_EQ(machine.variable("KT"), "");
}

}  // namespace
}  // namespace kt::inline cli
