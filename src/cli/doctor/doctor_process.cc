// kt doctor on what surrounds the process: the server's port, kt's own files, limits and environment
// variables.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <charconv>
#include <filesystem>

#include "base/error.h"
#include "base/text.h"
#include "cli/doctor/doctor.h"
#include "cli/registry/registry.h"
#include "cli/settings.h"
#include "terminal/language.h"
#include "terminal/report.h"
#include "text/yaml.h"

namespace kt::inline cli {
namespace {

// As the server binds: an address in TIME_WAIT is free.
bool can_bind(int port) {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return true;  // no network at all is not the port's fault
  const int yes = 1;
  ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const bool bound = ::bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
  ::close(fd);
  return bound;
}

// The inode of the listening socket on a port, from lines "0: 0100007F:7530 00000000:0000 0A ... inode ...".
std::string listening_inode(const Machine& machine, int port) {
  char wanted[8];
  std::snprintf(wanted, sizeof wanted, ":%04X", static_cast<unsigned>(port));
  for (const char* file : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    const std::string lines = machine.content_of(file);
    for (size_t at = 0; at < lines.size();) {
      const size_t end = std::min(lines.find('\n', at), lines.size());
      std::vector<std::string> words;
      for (size_t i = at; i < end;) {
        const size_t from = std::min(lines.find_first_not_of(' ', i), end);
        const size_t to = std::min(lines.find(' ', from), end);
        if (to > from) words.push_back(lines.substr(from, to - from));
        i = to;
        if (to == from) break;
      }
      at = end + 1;
      if (words.size() > 9 && words[1].ends_with(wanted) && words[3] == "0A") return words[9];
    }
  }
  return "";
}

// "name (pid 12)" of the process with that socket; "" when it is another user's.
std::string holder_of(const Machine& machine, const std::string& inode) {
  namespace fs = std::filesystem;
  if (inode.empty()) return "";
  std::error_code error;
  for (const auto& process : fs::directory_iterator(machine.root + "/proc", error)) {
    const std::string pid = process.path().filename().string();
    if (pid.find_first_not_of("0123456789") != std::string::npos) continue;
    std::error_code denied;
    for (fs::directory_iterator at(process.path() / "fd", denied), end; !denied && at != end;
         at.increment(denied)) {
      std::error_code gone;
      if (fs::read_symlink(at->path(), gone) == "socket:[" + inode + "]")
        return text("{} (pid {})", machine.content_of("/proc/" + pid + "/comm"), pid);
    }
  }
  return "";
}

std::string limit_text(uint64_t bytes) {
  return bytes == ProcessLimits::kUnlimited ? tr_now("unlimited") : human_bytes(bytes);
}

enum class Effect { kNone, kChanges, kSlows };

struct KnownVariable {
  std::string_view name;  // a prefix when it ends in '_'
  Effect effect;
  std::string_view what;
};

// Variables that change what kt does, or that people set for other programs and expect to. KT_ISA and its
// alias have a finding of their own.
constexpr auto kVariables = std::to_array<KnownVariable>({
    {"KT_ISA", Effect::kChanges, tr_later("forces an instruction set")},
    {"KT_KERNEL_CPU_VARIANT", Effect::kChanges, tr_later("forces an instruction set")},
    {"KT_HOME", Effect::kChanges, tr_later("kt's folder of settings")},
    {"KT_LANG", Effect::kChanges, tr_later("the language of what kt says")},
    {"KT_LOG_LEVEL", Effect::kChanges, tr_later("what is logged")},
    {"KT_DEMO_MODEL", Effect::kChanges, tr_later("the folder of the model called demo")},
    {"NO_COLOR", Effect::kChanges, tr_later("no colours")},
    {"OMP_", Effect::kNone, tr_later("no effect: kt has threads of its own, see --cpu-threads")},
    {"GOMP_", Effect::kNone, tr_later("no effect: kt has threads of its own")},
    {"KMP_", Effect::kNone, tr_later("no effect: kt has threads of its own")},
    {"MKL_", Effect::kNone, tr_later("no effect: kt has kernels of its own")},
    {"OPENBLAS_", Effect::kNone, tr_later("no effect: kt has kernels of its own")},
    {"CUDA_VISIBLE_DEVICES", Effect::kChanges, tr_later("the GPUs that programs see")},
    {"KT_CUDA_GRAPHS", Effect::kChanges, tr_later("0: answers on a GPU are launched kernel by kernel")},
    {"KT_CUDA_POST", Effect::kChanges,
     tr_later("0: a GPU's work is handed over by copies and host functions")},
    {"KT_CUDA_PTX", Effect::kChanges, tr_later("the GPU's kernels are files of this folder")},
    {"LD_PRELOAD", Effect::kChanges, tr_later("a library is loaded into kt before its own")},
    {"GLIBC_TUNABLES", Effect::kChanges, tr_later("settings of the C library")},
    {"MALLOC_ARENA_MAX", Effect::kChanges,
     tr_later("heaps of the C library; large buffers are not from there")},
    {"MALLOC_PERTURB_", Effect::kSlows,
     tr_later("every heap block is filled when it is taken and when it is freed")},
    {"MALLOC_CHECK_", Effect::kSlows, tr_later("every heap block is checked")},
    {"MALLOC_", Effect::kChanges, tr_later("settings of the C library's heap")},
});

const KnownVariable* known_variable(std::string_view name) {
  for (const KnownVariable& known : kVariables)
    if (name == known.name || (known.name.ends_with('_') && name.starts_with(known.name))) return &known;
  return nullptr;
}

}  // namespace

void look_at_port(Diagnosis& d, const Machine& machine) {
  const bool unused = can_bind(machine.port);
  d.facts["port"] = {{"number", machine.port}, {"free", unused}};
  if (unused) {
    d.findings.push_back({tr_later("port"), text(tr("{} is free for kt run"), machine.port)});
    return;
  }
  const std::string holder = holder_of(machine, listening_inode(machine, machine.port));
  d.facts["port"]["holder"] = holder;
  d.findings.push_back(
      {tr_later("port"),
       text(tr("{} is taken{}"), machine.port, holder.empty() ? "" : text(tr(" by {}"), holder)),
       Level::kWarning, tr_now("kt run does not start on its usual port"),
       text(tr("kt run --port {}; ss -ltnp shows who listens"), machine.port + 1)});
}

void look_at_files(Diagnosis& d, const Machine& machine) {
  namespace fs = std::filesystem;
  d.facts["home"] = machine.home;
  if (machine.home.empty()) {
    d.findings.push_back({tr_later("files"), tr_now("neither KT_HOME nor XDG_CONFIG_HOME nor HOME is set"),
                          Level::kWarning, tr_now("settings and names of models are not kept"),
                          "export KT_HOME=$PWD/kt-home"});
    return;
  }
  std::string good;
  bool bad = false;
  for (const char* name : {"config.yaml", "models.yaml"}) {
    const std::string path = machine.home + "/" + name;
    std::error_code error;
    if (!fs::exists(path, error)) continue;
    try {
      const Json value = read_yaml(path);
      if (!value.is_object() && !value.is_null())
        fail("{}: expected a mapping of settings, found another kind of YAML", path);
      if (name == std::string_view("config.yaml") && value.is_object()) Settings(value, path);
      if (path == registry_path()) registered_models();
      good += text("{}{}", good.empty() ? "" : ", ", name);
    } catch (const Error& problem) {
      bad = true;
      d.findings.push_back({tr_later("files"), problem.what(), Level::kBad,
                            tr_now("verbs that read it refuse to run"),
                            text(tr("correct the line, or start afresh: mv {} {}.old"), path, path)});
    }
  }
  if (!bad)
    d.findings.push_back(
        {tr_later("files"), good.empty() ? text(tr("no settings in {}: defaults are used"), machine.home)
                                         : text(tr("{} in {}"), good, machine.home)});
}

void look_at_limits(Diagnosis& d, const Machine& machine) {
  const ProcessLimits& limits = machine.limits;
  constexpr uint64_t kWanted = 1024 + 64;  // connections of the server, and what else is open
  const auto fact = [](uint64_t value) {
    return value == ProcessLimits::kUnlimited ? nlohmann::ordered_json(nullptr)
                                              : nlohmann::ordered_json(value);
  };
  d.facts["limits"] = {{"open_files", fact(limits.files)},
                       {"locked_bytes", fact(limits.locked)},
                       {"address_space_bytes", fact(limits.address_space)},
                       {"data_bytes", fact(limits.data)},
                       {"file_bytes", fact(limits.file_size)}};
  Finding files{
      tr_later("limits"),
      text(tr("{} open files, {} locked memory (kt locks none)"),
           limits.files == ProcessLimits::kUnlimited ? tr_now("unlimited") : std::to_string(limits.files),
           limit_text(limits.locked))};
  if (limits.files < kWanted) {
    files.level = Level::kWarning;
    files.cost = text(tr("the server takes up to 1024 connections; beyond about {} new ones are refused"),
                      limits.files - std::min<uint64_t>(limits.files, 64));
    files.fix = limits.files_most >= kWanted
                    ? "ulimit -n 4096"
                    : tr_now(
                          "as root: echo '* - nofile 4096' >> /etc/security/limits.conf, then log "
                          "in again");
  }
  d.findings.push_back(files);
  struct Bound {
    const char *name, *flag, *cost;
    uint64_t bytes;
  };
  for (const Bound& bound :
       {Bound{tr_later("address space"), "-v", tr_later("weights are mapped: models above it do not load"),
              limits.address_space},
        Bound{tr_later("data size"), "-d", tr_later("packed weights above it are refused"), limits.data},
        Bound{tr_later("file size"), "-f", tr_later("kt quant cannot write larger files"),
              limits.file_size}}) {
    if (bound.bytes == ProcessLimits::kUnlimited) continue;
    d.findings.push_back({tr_later("limits"),
                          text(tr("{} is limited to {}"), tr_now(bound.name), human_bytes(bound.bytes)),
                          Level::kWarning, tr_now(bound.cost), text("ulimit {} unlimited", bound.flag)});
  }
}

void look_at_environment(Diagnosis& d, const Machine& machine) {
  std::string harmless;
  d.facts["environment"] = nlohmann::ordered_json::object();
  for (const std::string& entry : machine.environment) {
    const std::string name = entry.substr(0, entry.find('='));
    const KnownVariable* known = known_variable(name);
    if (!known || machine.variable(name).empty()) continue;
    d.facts["environment"][name] = machine.variable(name);
    if (known->effect == Effect::kSlows) {
      d.findings.push_back(
          {tr_later("environment"), entry, Level::kWarning, tr_now(known->what), "unset " + name});
      continue;
    }
    harmless += text(tr("{}{} ({})"), harmless.empty() ? "" : tr_now("; "), entry, tr_now(known->what));
  }
  d.findings.push_back(
      {tr_later("environment"), harmless.empty() ? tr_now("no variable changes what kt does") : harmless});
}

}  // namespace kt::inline cli
