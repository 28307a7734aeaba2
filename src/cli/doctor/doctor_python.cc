// kt doctor on the Python that a shell here would start: its version, kt_kernel and its instruction set, torch and its
// CUDA, SGLang and whether the part of it that takes experts from kt_kernel can be loaded. kt itself needs none of
// them.
#include <cstdlib>

#include "base/text.h"
#include "cli/doctor/doctor.h"
#include "cli/python_facts.h"
#include "cli/verbs.h"
#include "terminal/language.h"

namespace kt::inline cli {
namespace {

constexpr int kOldestMinor = 10;  // of Python 3, as pyproject.toml has it

bool is_too_old(const std::string& version) {
  const int major = std::atoi(version.c_str());
  const size_t point = version.find('.');
  const int minor = point == std::string::npos ? 0 : std::atoi(version.c_str() + point + 1);
  return major < 3 || (major == 3 && minor < kOldestMinor);
}

// A build that knows no commit ("0.1.0", of an archive) is taken for any of its number.
bool is_same_build(const std::string& one, const std::string& other) {
  const auto number = [](const std::string& version) { return version.substr(0, version.find('+')); };
  if (number(one) != number(other)) return false;
  return one == other || one == number(one) || other == number(other);
}

std::string of(const std::map<std::string, std::string>& facts, const char* name) {
  const auto at = facts.find(name);
  return at == facts.end() ? "" : at->second;
}

const PythonModule* module_of(const PythonFacts& python, const char* name) {
  const auto at = python.modules.find(name);
  return at == python.modules.end() ? nullptr : &at->second;
}

Finding about_kernel(const PythonFacts& python) {
  const PythonModule* const module = module_of(python, "kt_kernel");
  Finding f{tr_later("kt_kernel"),
            tr_now("not installed there (pip install kt-kernel); kt itself needs none")};
  const std::string known = module ? of(module->facts, "version") : "";
  const std::string version = known.empty() ? of(python.packages, "kt_kernel") : known;
  if (module && !module->problem.empty()) {
    f.found = text(tr("{}cannot be imported: {}"), version.empty() ? "" : version + " ", module->problem);
    f.level = Level::kWarning;
    f.cost = tr_now("SGLang and transformers get no experts on the CPU from that Python");
    f.fix = text(tr("{} -m pip install --force-reinstall kt-kernel, or ./install.sh in a checkout"),
                 python.program);
    return f;
  }
  if (version.empty()) return f;
  f.found = text("{} ({})", version, module ? of(module->facts, "isa") : tr_now("not imported"));
  if (is_same_build(version, kt::version())) return f;
  f.found += text(tr("; this kt is {}"), kt::version());
  f.level = Level::kWarning;
  f.cost = tr_now("formats and options that one of them knows may be unknown to the other");
  f.fix = text(tr("{} -m pip install --upgrade kt-kernel, or ./install.sh in a checkout"), python.program);
  return f;
}

Finding about_torch(const PythonFacts& python, const Diagnosis& d) {
  const PythonModule* const module = module_of(python, "torch");
  Finding f{tr_later("torch"), tr_now("not installed there; kt_kernel's layers need it, kt does not")};
  const std::string version = of(python.packages, "torch");
  const std::string again = text("{} -m pip install --force-reinstall torch", python.program);
  if (!module) {
    if (!version.empty()) f.found = text(tr("{} (not imported)"), version);
    return f;
  }
  if (!module->problem.empty()) {
    f.found = text(tr("{}cannot be imported: {}"), version.empty() ? "" : version + " ", module->problem);
    f.level = Level::kWarning;
    f.cost = tr_now("kt_kernel's layers, SGLang and transformers do not run in that Python");
    f.fix = again;
    return f;
  }
  const std::string cuda = of(module->facts, "cuda"), gpus = of(module->facts, "gpus");
  const bool sees = !gpus.empty() && gpus != "0";
  f.found = text("{}, {}", of(module->facts, "version"),
                 cuda.empty() ? tr_now("built without CUDA") : "CUDA " + cuda);
  if (!cuda.empty())
    f.found +=
        sees ? ", " + tr_counted(std::atoi(gpus.c_str()), "{} GPU", "{} GPUs") : tr_now(", no GPU usable");
  const bool has_gpu = d.facts.contains("cuda") && !d.facts["cuda"].is_null();  // as look_at_gpu found
  if (!has_gpu || sees) return f;
  f.level = Level::kWarning;
  f.cost =
      tr_now("a GPU is here that torch does not use: SGLang does not start, transformers runs on the CPU");
  f.fix = cuda.empty() ? again + " --index-url https://download.pytorch.org/whl/cu130"
                       : text(tr("{} -c 'import torch; torch.cuda.init()' says why"), python.program);
  return f;
}

Finding about_sglang(const PythonFacts& python) {
  const PythonModule* const module = module_of(python, "sglang");
  const std::string version = of(python.packages, "sglang");
  Finding f{tr_later("sglang"),
            version.empty() ? tr_now("not installed there; kt run is a server of its own") : version};
  if (!module) {
    if (!version.empty()) f.found = text(tr("{} (not imported)"), version);
    return f;
  }
  const std::string name = version.empty() ? tr_now("of unknown version") : version;
  f.found = text(tr("{}, its kt support loads"), name);
  if (module->problem.empty()) return f;
  f.found = text(tr("{}, its kt support does not load: {}"), name, module->problem);
  f.level = Level::kWarning;
  f.cost = tr_now("sglang.launch_server with --kt-weight-path stops; kt run needs no SGLang");
  f.fix = text(tr("{} -c 'import sglang.srt.layers.moe.kt_ep_wrapper' shows where"), python.program);
  return f;
}

nlohmann::ordered_json fact_of(const PythonFacts& python, const char* name) {
  const PythonModule* const module = module_of(python, name);
  const std::string version = of(python.packages, name);
  if (!module && version.empty()) return nullptr;
  nlohmann::ordered_json out = {{"version", version}};
  if (!module) return out;
  for (const auto& [key, value] : module->facts) out[key] = value;
  out["imported"] = module->problem.empty();
  if (!module->problem.empty()) out["problem"] = module->problem;
  return out;
}

}  // namespace

void look_at_python(Diagnosis& d, const Machine& machine, PythonTest test) {
  const PythonFacts python =
      python_on_path({.path = machine.variable("PATH"),
                      .depth = test == PythonTest::kImport ? PythonDepth::kImports : PythonDepth::kVersions,
                      .patience = machine.python_patience});
  Finding f{tr_later("python"), text("{} ({})", python.version, python.program)};
  if (python.program.empty()) {
    d.facts["python"] = nullptr;
    d.findings.push_back({tr_later("python"), tr_now("none on PATH; kt itself needs none, kt_kernel does")});
    return;
  }
  d.facts["python"] = {{"program", python.program}, {"version", python.version}};
  if (!python.problem.empty()) {
    d.facts["python"]["problem"] = python.problem;
    d.findings.push_back(
        {tr_later("python"), python.problem, Level::kWarning,
         tr_now("kt_kernel, SGLang and transformers are not to be had there; kt itself needs no Python"),
         text(tr("{} --version shows what is wrong; or put another Python first on PATH"), python.program)});
    return;
  }
  for (const char* name : {"kt_kernel", "torch", "sglang"}) d.facts["python"][name] = fact_of(python, name);
  if (is_too_old(python.version)) {
    f.level = Level::kWarning;
    f.cost = text(tr("kt_kernel is for Python 3.{} and newer; kt itself needs no Python"), kOldestMinor);
    f.fix = tr_now("put a newer Python first on PATH");
  }
  d.findings.push_back(f);
  d.findings.push_back(about_kernel(python));
  d.findings.push_back(about_torch(python, d));
  d.findings.push_back(about_sglang(python));
}

}  // namespace kt::inline cli
