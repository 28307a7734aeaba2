// kt doctor on GPUs, through the driver's own libraries opened at run time: a build needs no CUDA, and a
// machine without a GPU is a plain statement.
#include <dlfcn.h>

#include <filesystem>

#include "base/error.h"
#include "base/text.h"
#include "bench/gpu_check.h"
#include "cli/doctor/doctor.h"
#include "terminal/language.h"
#include "terminal/report.h"

namespace kt::inline cli {
namespace {

// A library for the life of the object; functions of it by name, null when it lacks one.
class Library {
 public:
  explicit Library(const std::string& name) : handle_(::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL)) {}
  ~Library() {
    if (handle_) ::dlclose(handle_);
  }
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  explicit operator bool() const { return handle_ != nullptr; }
  template <typename Function>
  Function* function(const char* name) const {
    return reinterpret_cast<Function*>(::dlsym(handle_, name));
  }

 private:
  void* handle_;
};

// The few functions of libcuda that are asked; numbers are the driver interface's own.
constexpr int kMultiprocessors = 16, kTimeLimit = 17, kMajor = 75, kMinor = 76;
// What kt --gpu needs (cuda/device.cc).
constexpr int kLeastMajor = 8, kLeastCuda = 12'000;

struct Card {
  std::string name, bus;
  uint64_t total = 0, unused = 0;                 // bytes
  int major = 0, minor = 0, multiprocessors = 0;  // compute capability
  int screen = 0;                                 // kernels that take seconds are killed
  unsigned width = 0, width_most = 0, generation = 0, generation_most = 0;  // PCIe; 0: unknown

  // The driver names a slice "NVIDIA H200 MIG 1g.18gb".
  bool slice() const { return name.find(" MIG ") != std::string::npos; }
};

struct Driver {
  std::string version;  // of the kernel module, "560.35.03"
  int cuda = 0;         // 12060 for 12.6
  int failure = 0;      // of cuInit
  std::vector<Card> gpus;
};

void ask_cuda(Driver& driver, const Library& cuda) {
  const auto init = cuda.function<int(unsigned)>("cuInit");
  const auto version = cuda.function<int(int*)>("cuDriverGetVersion");
  const auto count = cuda.function<int(int*)>("cuDeviceGetCount");
  const auto device = cuda.function<int(int*, int)>("cuDeviceGet");
  const auto name = cuda.function<int(char*, int, int)>("cuDeviceGetName");
  const auto memory = cuda.function<int(size_t*, int)>("cuDeviceTotalMem_v2");
  const auto attribute = cuda.function<int(int*, int, int)>("cuDeviceGetAttribute");
  const auto bus = cuda.function<int(char*, int, int)>("cuDeviceGetPCIBusId");
  driver.failure = -1;
  if (!init || !version || !count || !device || !name || !memory || !attribute) return;
  version(&driver.cuda);
  driver.failure = init(0);
  int n = 0;
  if (driver.failure != 0 || count(&n) != 0) return;
  for (int i = 0; i < n; ++i) {
    int id = 0;
    size_t bytes = 0;
    char string[128] = {};
    Card gpu;
    if (device(&id, i) != 0) continue;
    if (name(string, sizeof string - 1, id) == 0) gpu.name = string;
    if (memory(&bytes, id) == 0) gpu.total = bytes;
    attribute(&gpu.major, kMajor, id);
    attribute(&gpu.minor, kMinor, id);
    attribute(&gpu.multiprocessors, kMultiprocessors, id);
    attribute(&gpu.screen, kTimeLimit, id);
    char place[32] = {};
    if (bus && bus(place, sizeof place - 1, id) == 0) gpu.bus = place;
    driver.gpus.push_back(gpu);
  }
}

struct NvmlMemory {
  unsigned long long total, unused, used;
};

// Free memory and the PCIe link; libcuda would have to make a context on each GPU to tell the first. Of a slice the
// memory is the whole card's and says nothing. CUDA numbers devices in an order of its own: places on the bus are the
// same for both.
void ask_nvml(Driver& driver, const Library& nvml) {
  const auto init = nvml.function<int()>("nvmlInit_v2");
  const auto shutdown = nvml.function<int()>("nvmlShutdown");
  if (!init || !shutdown || init() != 0) return;
  char string[96] = {};
  if (const auto version = nvml.function<int(char*, unsigned)>("nvmlSystemGetDriverVersion");
      version && version(string, sizeof string - 1) == 0)
    driver.version = string;
  const auto numbered = nvml.function<int(unsigned, void**)>("nvmlDeviceGetHandleByIndex_v2");
  const auto placed = nvml.function<int(const char*, void**)>("nvmlDeviceGetHandleByPciBusId_v2");
  const auto memory = nvml.function<int(void*, NvmlMemory*)>("nvmlDeviceGetMemoryInfo");
  const auto device = [&](const Card& gpu, unsigned i, void** handle) {
    if (placed && !gpu.bus.empty()) return placed(gpu.bus.c_str(), handle);
    return numbered ? numbered(i, handle) : -1;
  };
  for (unsigned i = 0; i < driver.gpus.size(); ++i) {
    void* handle = nullptr;
    NvmlMemory bytes{};
    Card& gpu = driver.gpus[i];
    if (device(gpu, i, &handle) != 0) continue;
    if (memory && !gpu.slice() && memory(handle, &bytes) == 0) gpu.unused = bytes.unused;
    const auto link = [&](const char* name, unsigned& value) {
      const auto get = nvml.function<int(void*, unsigned*)>(name);
      if (get) get(handle, &value);
    };
    link("nvmlDeviceGetCurrPcieLinkWidth", gpu.width);
    link("nvmlDeviceGetMaxPcieLinkWidth", gpu.width_most);
    link("nvmlDeviceGetCurrPcieLinkGeneration", gpu.generation);
    link("nvmlDeviceGetMaxPcieLinkGeneration", gpu.generation_most);
  }
  shutdown();
}

// An NVIDIA display or 3D controller on the bus, whatever the driver says.
bool has_card(const Machine& machine) {
  std::error_code error;
  const std::string devices = "/sys/bus/pci/devices";
  for (const auto& entry : std::filesystem::directory_iterator(machine.root + devices, error)) {
    const std::string at = devices + "/" + entry.path().filename().string();
    if (machine.content_of(at + "/vendor") == "0x10de" &&
        machine.content_of(at + "/class").starts_with("0x03"))
      return true;
  }
  return false;
}

void report_none(Diagnosis& d, const Machine& machine, const std::string& why) {
  d.facts["cuda"] = nullptr;
  Finding f{tr_later("cuda"), tr_now("no GPU: everything runs on the CPU")};
  if (has_card(machine)) {
    f.level = Level::kWarning;
    f.found = text(tr("an NVIDIA card is here, but {}"), why);
    f.cost =
        tr_now("everything runs on the CPU: --gpu and the Python package kt_kernel cannot use this card");
    f.fix = tr_now("sudo apt-get install nvidia-driver, then restart; in a container: docker run --gpus all");
  }
  d.findings.push_back(f);
}

// What --gpu does first, tried. An error is what it would say.
void try_gpu(Finding& f, nlohmann::ordered_json& facts, int number, uint64_t& unused) {
  try {
    const GpuCheck check = check_gpu(number);
    unused = check.free;
    facts = {{"to_gpu_bytes_per_s", check.to_gpu},
             {"compile_s", check.seconds_compile},
             {"difference", check.difference}};
    f.found += text(tr("; tried: page-locked memory is copied at {} GB/s, a kernel was compiled in {} s"),
                    three_digits(check.to_gpu / 1e9), fixed(check.seconds_compile, 1));
    if (check.ok()) return;
    f.level = Level::kWarning;
    f.cost = text(tr("kt --gpu gives wrong results: a kernel is off by {}, {} are allowed"),
                  text("{}", check.difference), text("{}", check.bound));
    f.fix = tr_now("look for the card's errors: sudo dmesg | grep -i nvrm");
  } catch (const Error& error) {
    facts = {{"error", error.what()}};
    f.level = Level::kWarning;
    f.cost = text(tr("kt --gpu cannot use it: {}"), error.what());
    f.fix =
        error.kind() == ErrorKind::kMemory
            ? tr_now(
                  "nvidia-smi names who has its memory; a container's own limit (docker run --memory) counts "
                  "page-locked memory too")
            : tr_now("look for the card's errors: sudo dmesg | grep -i nvrm");
  }
}

// Where --gpu cannot be had whatever is tried.
void refuse_old(Finding& f, const Card& gpu, int cuda) {
  if (gpu.major >= kLeastMajor && cuda >= kLeastCuda) return;
  f.level = Level::kWarning;
  f.cost = tr_now("kt --gpu cannot use it: that needs compute capability 8.0 and a driver with CUDA 12.0");
  f.fix = cuda < kLeastCuda
              ? tr_now("install driver 525 or newer, then restart")
              : tr_now("kt --gpu off says that the CPU is to be used; GPUs from 2020 on (Ampere) can");
}

void report_gpu(Diagnosis& d, Card gpu, int number, int cuda, GpuTest test) {
  Finding f{tr_later("gpu"), text("{}, {}", gpu.name, human_bytes(gpu.total))}, tried{tr_later("gpu"), ""};
  nlohmann::ordered_json trial = nullptr;
  refuse_old(f, gpu, cuda);
  const bool enough = f.level == Level::kOk;
  if (enough && test == GpuTest::kTry) try_gpu(tried, trial, number, gpu.unused);
  if (gpu.unused > 0) f.found += text(tr(" ({} free)"), human_bytes(gpu.unused));
  f.found += text(tr(", compute capability {}.{}"), gpu.major, gpu.minor);
  if (gpu.slice()) f.found += text(tr(", a slice (MIG) of {} multiprocessors"), gpu.multiprocessors);
  if (gpu.width > 0) f.found += text(tr(", PCIe {} x{}"), gpu.generation, gpu.width);
  f.found += tried.found;
  const auto warn = [&](std::string cost, std::string fix) {
    f.level = Level::kWarning;
    f.cost += (f.cost.empty() ? "" : "; ") + cost;
    f.fix += (f.fix.empty() ? "" : "; ") + fix;
  };
  if (tried.level != Level::kOk) warn(tried.cost, tried.fix);
  if (enough && gpu.unused > 0 && gpu.unused < gpu.total / 4)
    warn(text(tr("others have {} of its memory: that much less for kt --gpu"),
              human_bytes(gpu.total - gpu.unused)),
         tr_now("nvidia-smi names the processes"));
  if (enough && gpu.screen)
    warn(
        tr_now(
            "it shows a screen and ends kernels that wait: kt --gpu launches answers kernel by kernel, which "
            "is slower"),
        tr_now("show the screen with another card, or none: sudo systemctl isolate multi-user.target"));
  // The generation drops when the card idles, the width does not.
  if (gpu.width > 0 && gpu.width < gpu.width_most)
    warn(text(tr("{} of {} PCIe lanes: copies run at {} of their speed"), gpu.width, gpu.width_most,
              percent(1.0 * gpu.width / gpu.width_most)),
         tr_now("put the card into a slot with all lanes; sudo lspci -vv shows LnkSta"));
  d.findings.push_back(f);
  d.facts["cuda"]["gpus"].push_back({{"name", gpu.name},
                                     {"total_bytes", gpu.total},
                                     {"free_bytes", gpu.unused},
                                     {"compute_capability", text("{}.{}", gpu.major, gpu.minor)},
                                     {"multiprocessors", gpu.multiprocessors},
                                     {"slice", gpu.slice()},
                                     {"screen", gpu.screen != 0},
                                     {"kt_gpu", enough && !trial.contains("error")},
                                     {"tried", trial},
                                     {"pcie_width", gpu.width},
                                     {"pcie_width_most", gpu.width_most},
                                     {"pcie_generation", gpu.generation},
                                     {"pcie_generation_most", gpu.generation_most}});
}

}  // namespace

void look_at_gpu(Diagnosis& d, const Machine& machine, GpuTest test) {
  const Library cuda(machine.cuda_library), nvml(machine.nvml_library);
  if (!cuda) return report_none(d, machine, tr_now("its driver is not installed (no libcuda.so.1)"));
  Driver driver;
  ask_cuda(driver, cuda);
  if (nvml) ask_nvml(driver, nvml);
  if (driver.failure != 0 || driver.gpus.empty())
    return report_none(d, machine, text(tr("the driver does not start (cuInit: {})"), driver.failure));
  d.facts["cuda"] = {{"driver", driver.version},
                     {"cuda", text("{}.{}", driver.cuda / 1000, driver.cuda % 1000 / 10)},
                     {"gpus", nlohmann::ordered_json::array()}};
  Finding f{tr_later("cuda"),
            text(tr("driver {}, CUDA {}.{}; kt --gpu and the Python package kt_kernel run beside a GPU"),
                 driver.version.empty() ? tr_now("of unknown version") : driver.version, driver.cuda / 1000,
                 driver.cuda % 1000 / 10)};
  if (driver.gpus.size() > 1) f.found += tr_now("; kt takes the first GPU that follows, --gpu N another one");
  d.findings.push_back(f);
  for (size_t i = 0; i < driver.gpus.size(); ++i)
    report_gpu(d, driver.gpus[i], static_cast<int>(i), driver.cuda, test);
}

}  // namespace kt::inline cli
