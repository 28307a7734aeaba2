// kt version: lines people parse, then the ISA table. Names and forms of the first five lines are a promise.
#include <dlfcn.h>
#include <sys/utsname.h>

#include <cstdio>

#include "base/text.h"
#include "cli/python_facts.h"
#include "cli/verbs.h"
#include "kernels/isas.h"
#include "kt_version.h"
#include "terminal/report.h"

namespace kt::inline cli {
namespace {

std::string platform() {
  utsname names{};
  if (::uname(&names) != 0) return "unknown";
  return text("{}-{}-{}", names.sysname, names.release, names.machine);
}

// Of the driver's library, "13.0"; "none" where there is none. Asking for it does not start CUDA.
std::string cuda_version() {
  void* const library = ::dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
  if (!library) return "none";
  const auto get = reinterpret_cast<int (*)(int*)>(::dlsym(library, "cuDriverGetVersion"));
  int number = 0;
  if (!get || get(&number) != 0 || number <= 0) return "none";
  return text("{}.{}", number / 1000, number % 1000 / 10);
}

// What Python there is takes a process to know: asked for only with --verbose.
struct VersionFlags {
  bool verbose = false;
};

void print_version(const VersionFlags& flags) {
  const Kernels& used = best_kernels();
  PythonFacts python;
  if (flags.verbose) python = python_on_path({.path = folders_of_path()});
  const auto known = [](const std::string& version) { return version.empty() ? "n/a" : version.c_str(); };
  std::printf("Python: %s\nPlatform: %s\nCUDA: %s\n", known(python.version), platform().c_str(),
              cuda_version().c_str());
  std::printf("kt-kernel: %s (%s)\nsglang: %s\n\n", KT_VERSION, used.name, known(python.packages["sglang"]));
  if (flags.verbose) {
    Table packages({"python", python.problem.empty() ? python.program : python.problem}, 2);
    const std::string absent = python.problem.empty() ? "not installed" : "n/a";
    for (const char* const name : {"kt_kernel", "torch", "transformers", "sglang"})
      packages.add({name, python.packages[name].empty() ? absent : python.packages[name]});
    std::printf("%s\n", packages.str().c_str());
  }
  Table table({"ISA", "here", ""}, 3);
  for (const KnownIsa& isa : known_isas()) {
    table.add({isa.name, isa.missing ? text("lacks {}", isa.missing) : "runs",
               isa.table == &used ? "in use"
               : !isa.table       ? "not compiled in"
                                  : ""});
  }
  std::fputs(table.str().c_str(), stdout);
}

}  // namespace

std::string version() { return KT_VERSION; }

void add_version(CLI::App& kt, Invocation& run) {
  CLI::App* verb = kt.add_subcommand("version", "Versions, and the instruction sets this build holds");
  const auto flags = std::make_shared<VersionFlags>();
  verb->add_flag("-v,--verbose", flags->verbose,
                 "Also those of kt_kernel, torch, transformers and sglang, as the Python on PATH has them");
  verb->footer(
      "Examples:\n"
      "  kt version\n"
      "  kt version --verbose\n"
      "  KT_ISA=portable kt version     the one in use is portable then");
  verb->callback([&run, flags] { run.action = [flags] { print_version(*flags); }; });
}

}  // namespace kt::inline cli
