#include "cli/python_facts.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string_view>
#include <vector>

#include "base/file.h"
#include "base/text.h"
#include "text/json.h"
#include "text/shown.h"

namespace kt::inline cli {
namespace {

constexpr size_t kMostAnswer = 64 << 10;

// Answers in lines of JSON, each as soon as it is known: what comes later may hang or end the process. What modules
// print goes elsewhere. Several distributions bring one module, such as kt-kernel-cuda; a folder of PYTHONPATH has no
// distribution at all.
constexpr const char* kQuestion = R"(
import importlib, importlib.util, json, os, platform, sys
from importlib import metadata
out = os.fdopen(os.dup(1), 'w')
os.dup2(2, 1)
def say(**facts):
    print(json.dumps(facts), file=out, flush=True)
names = {'kt_kernel': ['kt-kernel', 'kt-kernel-cuda'], 'torch': ['torch'], 'transformers': ['transformers'],
         'sglang': ['sglang', 'sglang-kt'], 'peft': ['peft'], 'trl': ['trl'], 'accelerate': ['accelerate'],
         'datasets': ['datasets']}
found = {}
for key, distributions in names.items():
    for name in distributions:
        try:
            found.setdefault(key, str(metadata.version(name)))
        except metadata.PackageNotFoundError:
            pass
say(version=platform.python_version(), packages=found,
    importable=[name for name in ['kt_kernel'] if importlib.util.find_spec(name)])
def ask_kt_kernel():
    import kt_kernel
    return {'version': kt_kernel.__version__, 'isa': kt_kernel.__cpu_variant__}
def ask_torch():
    import torch
    return {'version': torch.__version__, 'cuda': torch.version.cuda or '',
            'gpus': torch.cuda.device_count() if torch.cuda.is_available() else 0}
def ask_sglang():
    name = 'sglang.srt.layers.moe.kt_ep_wrapper'
    if importlib.util.find_spec(name) is None:
        raise ImportError('this SGLang has no ' + name)
    if not getattr(importlib.import_module(name), 'KTRANSFORMERS_AVAILABLE', True):
        from kt_kernel import KTMoEWrapper
        raise ImportError(name + ' could not import kt_kernel')
    return {}
for name, ask in {'kt_kernel': ask_kt_kernel, 'torch': ask_torch, 'sglang': ask_sglang}.items():
    if 'imports' not in sys.argv or importlib.util.find_spec(name) is None:
        continue
    say(asking=name)
    try:
        say(module=name, facts={key: str(value) for key, value in ask().items()})
    except BaseException as error:
        say(module=name, problem=' '.join(f'{type(error).__name__}: {error}'.split())[:300])
say(done=True)
os._exit(0)
)";
// A process that a module started may keep the pipe open.
constexpr std::string_view kEnd = "{\"done\": true}\n";

std::string found_on_path(const std::string& path, const std::string& name) {
  for (const std::string& folder : CLI::detail::split(path, ':')) {
    if (!folder.starts_with('/')) continue;  // relative ones mean whatever lies here
    const std::string program = folder + "/" + name;
    std::error_code ignored;
    if (::access(program.c_str(), X_OK) == 0 && !std::filesystem::is_directory(program, ignored))
      return program;
  }
  return "";
}

// "" if there is none.
std::string program_of(const PythonQuestion& question) {
  if (question.program.find('/') != std::string::npos)
    return ::access(question.program.c_str(), X_OK) == 0
               ? std::filesystem::absolute(question.program).string()  // it is asked in another folder
               : "";
  if (!question.program.empty()) return found_on_path(question.path, question.program);
  const std::string usual = found_on_path(question.path, "python3");
  return usual.empty() ? found_on_path(question.path, "python") : usual;
}

// In the child: nothing but what is safe there.
[[noreturn]] void become(const char* program, const char* depth, int output) {
  const int nothing = ::open("/dev/null", O_RDWR);
  ::dup2(nothing, STDIN_FILENO);
  ::dup2(nothing, STDERR_FILENO);
  ::dup2(output, STDOUT_FILENO);
  ::setpgid(0, 0);                      // with whatever it starts, to be ended as one
  if (::chdir("/") != 0) ::_exit(127);  // "" of sys.path is the folder it starts in
  ::execl(program, program, "-c", kQuestion, depth, nullptr);
  ::_exit(127);
}

struct PythonAnswer {
  std::string output;
  bool late = false;
  int status = 0;
};

PythonAnswer ask(const std::string& program, const PythonQuestion& question) {
  PythonAnswer out;
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return {.output = {}, .late = false, .status = -1};
  const Descriptor read_end(ends[0]);
  const char* const depth = question.depth == PythonDepth::kImports ? "imports" : "versions";
  const pid_t child = ::fork();
  if (child == 0) become(program.c_str(), depth, ends[1]);
  ::close(ends[1]);
  if (child < 0) return {.output = {}, .late = false, .status = -1};
  const auto end = std::chrono::steady_clock::now() + question.patience;
  while (out.output.size() < kMostAnswer && !out.output.ends_with(kEnd)) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(end - std::chrono::steady_clock::now());
    pollfd one{ends[0], POLLIN, 0};
    out.late = left.count() <= 0 || ::poll(&one, 1, static_cast<int>(left.count())) == 0;
    if (out.late) break;
    char bytes[4096];
    const ssize_t count = ::read(ends[0], bytes, sizeof bytes);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) break;
    out.output.append(bytes, static_cast<size_t>(count));
  }
  ::kill(-child, SIGKILL);  // one that has answered has ended, or is about to
  while (::waitpid(child, &out.status, 0) < 0 && errno == EINTR) {
  }
  return out;
}

// "no answer within 10 s", or how the process ended.
std::string silence(const PythonAnswer& answer, const PythonQuestion& question) {
  if (answer.late)
    return text("no answer within {} s",
                std::chrono::duration_cast<std::chrono::seconds>(question.patience).count());
  if (WIFSIGNALED(answer.status) && WTERMSIG(answer.status) != SIGKILL)
    return text("Python ended with signal {} ({})", WTERMSIG(answer.status),
                ::strsignal(WTERMSIG(answer.status)));
  return "does not work";
}

std::map<std::string, std::string> strings_in(const Json& line, const char* key) {
  std::map<std::string, std::string> out;
  if (!line.contains(key) || !line[key].is_object()) return out;
  for (const auto& [name, value] : line[key].items())
    if (value.is_string()) out[name] = shown(value.get<std::string>());
  return out;
}

std::string string_in(const Json& line, const char* key) {
  return line.contains(key) && line[key].is_string() ? shown(line[key].get<std::string>()) : "";
}

}  // namespace

std::string folders_of_path() {
  const char* const path = std::getenv("PATH");
  return path ? path : "";
}

PythonFacts python_on_path(const PythonQuestion& question) {
  PythonFacts out;
  out.program = program_of(question);
  if (out.program.empty()) {
    out.problem = question.program.empty() ? "none on PATH" : text("no program {}", question.program);
    return out;
  }
  const PythonAnswer answer = ask(out.program, question);
  std::string asking;
  for (const std::string& piece : CLI::detail::split(answer.output, '\n')) {
    const Json line = Json::parse(piece, nullptr, false);
    if (!line.is_object()) continue;
    if (line.contains("version")) {
      out.version = string_in(line, "version");
      out.packages = strings_in(line, "packages");
      for (const auto& name : line.value("importable", Json::array()))
        if (name.is_string()) out.importable.insert(name.get<std::string>());
    }
    if (const std::string name = string_in(line, "asking"); !name.empty()) asking = name;
    if (const std::string name = string_in(line, "module"); !name.empty()) {
      out.modules[name] = {.problem = string_in(line, "problem"), .facts = strings_in(line, "facts")};
      asking.clear();
    }
  }
  if (out.version.empty()) out.problem = text("{}: {}", out.program, silence(answer, question));
  if (!asking.empty()) out.modules[asking].problem = silence(answer, question);
  return out;
}

}  // namespace kt::inline cli
