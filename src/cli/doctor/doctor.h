// What kt doctor finds out: findings for people, facts for programs, and the machine it looks at as a value,
// so that tests can show it another one. Each look_at_ function adds what it found; none throws for an odd
// machine.
#pragma once
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/pool.h"
#include "base/topology.h"
#include "bench/kernel_check.h"
#include "kernels/isas.h"

namespace kt::inline cli {

enum class Level {
  kOk,
  kWarning,  // works, but slower or less than it could
  kBad,      // kt gives wrong results here, or cannot do its work: exit code 4
};
const char* level_name(Level level);  // "ok", "warning", "FAIL"

struct Finding {
  std::string topic, found;
  Level level = Level::kOk;
  std::string cost = {}, fix = {};  // empty when all is well; the fix is a command to type
};

struct FormatCheck {
  std::string_view format;
  KernelCheck check;
};

struct Diagnosis {
  std::vector<Finding> findings;
  std::vector<FormatCheck> checks;
  nlohmann::ordered_json facts;

  bool healthy() const;  // nothing is kBad
};

// Limits of this process as getrlimit() has them; kUnlimited where there is none.
struct ProcessLimits {
  static constexpr uint64_t kUnlimited = UINT64_MAX;
  uint64_t files = kUnlimited, files_most = kUnlimited;  // descriptors: now, and what a user may raise it to
  uint64_t locked = kUnlimited, address_space = kUnlimited, data = kUnlimited,
           file_size = kUnlimited;  // bytes
};

struct Machine {
  std::string root;  // stands before /proc, /sys and /dev; other than "" is a copy of another machine's
  Topology topology;
  long pus_online = 0;
  double load = 0;           // runnable threads in the last minute
  bool amx_usable = false;   // this process may use the tile registers
  std::string home;          // kt's own folder of settings; "" when no variable says where
  std::string folder = ".";  // on the disk that models are read from
  int port = 30000;
  ProcessLimits limits;
  std::vector<std::string> environment;  // "NAME=value"
  std::chrono::milliseconds python_patience{60000};
  std::string cuda_library = "libcuda.so.1", nvml_library = "libnvidia-ml.so.1";

  // The value of an environment variable; "" when it is empty or not set.
  std::string variable(std::string_view name) const;
  // A file below root without the white space at its end; "" if it cannot be read.
  std::string content_of(const std::string& path) const;
};

Machine this_machine(const std::string& root);

// "key: 12 kB" or "key 12" in the lines of a /proc file; `fallback` when it is not there.
uint64_t number_in(std::string_view lines, std::string_view key, uint64_t fallback);

// The number that the string starts with; nullopt without one.
std::optional<uint64_t> leading_number(std::string_view string);

// The least of the cgroups' limits on processor time, in cores; 0: none. `throttled` is how many seconds the
// group has been held back so far, as far as the kernel tells.
struct CpuQuota {
  double cores = 0, throttled = 0;
};
CpuQuota cpu_quota(const Machine& machine);

// doctor_cpu.cc
void look_at_cpu(Diagnosis& d, const Machine& machine);
void look_at_frequency(Diagnosis& d, const Machine& machine);
void look_at_amx(Diagnosis& d, const Machine& machine);
// doctor_memory.cc
void look_at_memory(Diagnosis& d, const Machine& machine);
void look_at_numa(Diagnosis& d, const Machine& machine);
// doctor_kernels.cc. A null pool: nothing is measured.
struct IsaChoice {
  std::vector<KnownIsa> all;
  const Kernels* used = nullptr;
  std::string forced_by;  // the variable that chose it, or ""
};
IsaChoice isa_choice(const Machine& machine);
void look_at_isa(Diagnosis& d, const IsaChoice& choice, const std::shared_ptr<Pool>& pool);
void look_at_bandwidth(Diagnosis& d, const Machine& machine, const std::shared_ptr<Pool>& pool);
// Runs every format on every route of `used` and compares with the portable kernels.
void look_at_kernels(Diagnosis& d, const Kernels& used);
// doctor_disk.cc
enum class DiskTest { kRead, kSkip };
void look_at_disk(Diagnosis& d, const Machine& machine, DiskTest test);
// doctor_gpu.cc. Trying opens a context on each GPU, locks memory and runs a kernel.
enum class GpuTest { kTry, kSkip };
void look_at_gpu(Diagnosis& d, const Machine& machine, GpuTest test);
// doctor_python.cc
enum class PythonTest { kImport, kSkip };
void look_at_python(Diagnosis& d, const Machine& machine, PythonTest test);
// doctor_process.cc
void look_at_port(Diagnosis& d, const Machine& machine);
void look_at_files(Diagnosis& d, const Machine& machine);
void look_at_limits(Diagnosis& d, const Machine& machine);
void look_at_environment(Diagnosis& d, const Machine& machine);

}  // namespace kt::inline cli
