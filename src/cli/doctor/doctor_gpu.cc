// kt doctor on GPUs, through the driver's own libraries opened at run time: a build needs no CUDA, and a
// machine without a GPU is a plain statement.
#include <dlfcn.h>

#include <filesystem>

#include "base/text.h"
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
constexpr int kCudaMajor = 75, kCudaMinor = 76;
// What kt --gpu needs (cuda/device.cc).
constexpr int kLeastMajor = 8, kLeastCuda = 12'000;

struct Gpu {
  std::string name;
  uint64_t total = 0, unused = 0;                                           // bytes
  int major = 0, minor = 0;                                                 // compute capability
  unsigned width = 0, width_most = 0, generation = 0, generation_most = 0;  // PCIe; 0: unknown
};

struct Driver {
  std::string version;  // of the kernel module, "560.35.03"
  int cuda = 0;         // 12060 for 12.6
  int failure = 0;      // of cuInit
  std::vector<Gpu> gpus;
};

void ask_cuda(Driver& driver, const Library& cuda) {
  const auto init = cuda.function<int(unsigned)>("cuInit");
  const auto version = cuda.function<int(int*)>("cuDriverGetVersion");
  const auto count = cuda.function<int(int*)>("cuDeviceGetCount");
  const auto device = cuda.function<int(int*, int)>("cuDeviceGet");
  const auto name = cuda.function<int(char*, int, int)>("cuDeviceGetName");
  const auto memory = cuda.function<int(size_t*, int)>("cuDeviceTotalMem_v2");
  const auto attribute = cuda.function<int(int*, int, int)>("cuDeviceGetAttribute");
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
    Gpu gpu;
    if (device(&id, i) != 0) continue;
    if (name(string, sizeof string - 1, id) == 0) gpu.name = string;
    if (memory(&bytes, id) == 0) gpu.total = bytes;
    attribute(&gpu.major, kCudaMajor, id);
    attribute(&gpu.minor, kCudaMinor, id);
    driver.gpus.push_back(gpu);
  }
}

struct NvmlMemory {
  unsigned long long total, unused, used;
};

// Free memory and the PCIe link; libcuda would have to make a context on each GPU to tell the first.
void ask_nvml(Driver& driver, const Library& nvml) {
  const auto init = nvml.function<int()>("nvmlInit_v2");
  const auto shutdown = nvml.function<int()>("nvmlShutdown");
  if (!init || !shutdown || init() != 0) return;
  char string[96] = {};
  if (const auto version = nvml.function<int(char*, unsigned)>("nvmlSystemGetDriverVersion");
      version && version(string, sizeof string - 1) == 0)
    driver.version = string;
  const auto device = nvml.function<int(unsigned, void**)>("nvmlDeviceGetHandleByIndex_v2");
  const auto memory = nvml.function<int(void*, NvmlMemory*)>("nvmlDeviceGetMemoryInfo");
  for (unsigned i = 0; device && i < driver.gpus.size(); ++i) {
    void* handle = nullptr;
    NvmlMemory bytes{};
    Gpu& gpu = driver.gpus[i];
    if (device(i, &handle) != 0) continue;
    if (memory && memory(handle, &bytes) == 0) gpu.unused = bytes.unused;
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

void report_gpu(Diagnosis& d, const Gpu& gpu, int cuda) {
  Finding f{tr_later("gpu"), text("{}, {}", gpu.name, human_bytes(gpu.total))};
  if (gpu.unused > 0) f.found += text(tr(" ({} free)"), human_bytes(gpu.unused));
  f.found += text(tr(", compute capability {}.{}"), gpu.major, gpu.minor);
  const bool enough = gpu.major >= kLeastMajor && cuda >= kLeastCuda;
  if (!enough) {
    f.level = Level::kWarning;
    f.cost = tr_now("kt --gpu cannot use it: that needs compute capability 8.0 and a driver with CUDA 12.0");
    f.fix = cuda < kLeastCuda ? tr_now("install driver 525 or newer, then restart") : "";
  }
  if (gpu.width > 0) f.found += text(tr(", PCIe {} x{}"), gpu.generation, gpu.width);
  // The generation drops when the card idles, the width does not.
  if (gpu.width > 0 && gpu.width < gpu.width_most) {
    f.level = Level::kWarning;
    f.cost = text(tr("{} of {} PCIe lanes: copies run at {} of their speed"), gpu.width, gpu.width_most,
                  percent(1.0 * gpu.width / gpu.width_most));
    f.fix = tr_now("put the card into a slot with all lanes; sudo lspci -vv shows LnkSta");
  }
  d.findings.push_back(f);
  d.facts["cuda"]["gpus"].push_back({{"name", gpu.name},
                                     {"total_bytes", gpu.total},
                                     {"free_bytes", gpu.unused},
                                     {"compute_capability", text("{}.{}", gpu.major, gpu.minor)},
                                     {"kt_gpu", enough},
                                     {"pcie_width", gpu.width},
                                     {"pcie_width_most", gpu.width_most},
                                     {"pcie_generation", gpu.generation},
                                     {"pcie_generation_most", gpu.generation_most}});
}

}  // namespace

void look_at_gpu(Diagnosis& d, const Machine& machine) {
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
  d.findings.push_back(
      {tr_later("cuda"),
       text(tr("driver {}, CUDA {}.{}; kt --gpu and the Python package kt_kernel run beside a GPU"),
            driver.version.empty() ? tr_now("of unknown version") : driver.version, driver.cuda / 1000,
            driver.cuda % 1000 / 10)});
  for (const Gpu& gpu : driver.gpus) report_gpu(d, gpu, driver.cuda);
}

}  // namespace kt::inline cli
