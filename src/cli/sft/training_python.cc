#include "cli/sft/training_python.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "base/file.h"
#include "cli/python_facts.h"
#include "cli/server_signals.h"
#include "text/shown.h"

namespace kt::inline cli {
namespace {

constexpr size_t kMostLine = 1 << 20;
constexpr int kLookMilliseconds = 200;

struct NeededPackage {
  const char* name;
  const char* requirement;  // of pip
};
constexpr NeededPackage kNeeded[] = {
    {"torch", "torch"},
    {"transformers", "transformers>=5"},
    {"peft", "peft>=0.21"},
    {"accelerate", "accelerate"},
};
constexpr NeededPackage kPreferences[] = {{"trl", "trl>=1"}, {"datasets", "datasets"}};

std::string python_beside() {
  std::error_code ignored;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", ignored);
  const std::string beside = (self.parent_path() / "python3").string();
  return !ignored && ::access(beside.c_str(), X_OK) == 0 ? beside : "";
}

// Whether "0.21.2" is at least of this series.
bool is_at_least(const std::string& version, int major, int minor) {
  int a = 0, b = 0;
  if (std::sscanf(version.c_str(), "%d.%d", &a, &b) < 1) return true;  // who knows
  return a != major ? a > major : b >= minor;
}

void require_packages(const PythonFacts& facts, const Recipe& recipe) {
  std::string lacks, command;
  const auto need = [&](const NeededPackage& package, int major, int minor) {
    const auto found = facts.packages.find(package.name);
    const bool there = found != facts.packages.end();
    if (there && is_at_least(found->second, major, minor)) return;
    lacks += text("{}{}{}", lacks.empty() ? "" : ", ", package.name,
                  there ? text(" {}.{} (it has {})", major, minor, found->second) : "");
    command += text(" '{}'", package.requirement);
  };
  for (const NeededPackage& package : kNeeded)
    need(package, std::strcmp(package.name, "transformers") == 0 ? 5 : 0,
         std::strcmp(package.name, "peft") == 0 ? 21 : 0);
  if (recipe.text("stage") != "sft")
    for (const NeededPackage& package : kPreferences)
      need(package, std::strcmp(package.name, "trl") == 0 ? 1 : 0, 0);
  if (!lacks.empty())
    fail_as(ErrorKind::kUnsupported,
            "training needs {} in {}: {} -m pip install{}; KT_PYTHON names another Python", lacks,
            facts.program, facts.program, command);
  if (!facts.importable.contains("kt_kernel"))
    fail_as(ErrorKind::kUnsupported,
            "training needs the package kt_kernel in {}: {} -m pip install . in the folder of KT's sources; "
            "KT_PYTHON names another "
            "Python",
            facts.program, facts.program);
}

Descriptor plan_file(const TrainingPlan& plan) {
  Descriptor out(::memfd_create("kt-sft-plan", 0));
  const std::string json = plan.json().dump();
  size_t done = 0;
  while (out && done < json.size()) {
    const ssize_t n = ::write(out.get(), json.data() + done, json.size() - done);
    if (n <= 0 && errno != EINTR) break;
    if (n > 0) done += static_cast<size_t>(n);
  }
  if (!out || done < json.size() || ::lseek(out.get(), 0, SEEK_SET) != 0)
    fail_as(ErrorKind::kMemory, "no memory for the plan: {}", std::strerror(errno));
  return out;
}

// In the child: nothing but what is safe there. A group of its own, so that Ctrl-C comes once, from here.
[[noreturn]] void become_python(const char* program, int plan, int events, pid_t parent) {
  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (::getppid() != parent) ::_exit(127);
  ::dup2(plan, STDIN_FILENO);
  ::dup2(events, STDOUT_FILENO);
  ::signal(SIGINT, SIG_DFL);
  ::signal(SIGTERM, SIG_DFL);
  ::execl(program, program, "-m", "kt_kernel.sft", "--plan", "-", "--events", nullptr);
  ::_exit(127);
}

ErrorKind kind_of(const std::string& name) {
  if (name == "input") return ErrorKind::kInput;
  if (name == "memory") return ErrorKind::kMemory;
  if (name == "unsupported") return ErrorKind::kUnsupported;
  return ErrorKind::kInternal;
}

class Watcher {
 public:
  Watcher(const std::string& program, const TrainingPlan& plan,
          const std::function<void(const OrderedJson&)>& on_event)
      : program_(program), output_(plan.output), on_event_(on_event) {
    // Waiting threads of torch leave the cores to the experts' workers.
    ::setenv("OMP_WAIT_POLICY", "PASSIVE", 0);
    ::setenv("TOKENIZERS_PARALLELISM", "false", 0);
    ::setenv("PYTHONSAFEPATH", "1", 1);  // a folder here that is called datasets is no package
    const Descriptor file = plan_file(plan);
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) fail_as(ErrorKind::kInternal, "pipe: {}", std::strerror(errno));
    events_ = Descriptor(ends[0]);
    const Descriptor written(ends[1]);
    const pid_t self = ::getpid();
    std::fflush(nullptr);
    child_ = ::fork();
    if (child_ == 0) become_python(program.c_str(), file.get(), written.get(), self);
    if (child_ < 0) fail_as(ErrorKind::kMemory, "no process could be started: {}", std::strerror(errno));
    ::setpgid(child_, child_);
  }

  ~Watcher() {
    if (child_ <= 0) return;  // an exception: of writing what it said, say
    ::kill(child_, SIGTERM);
    wait();
  }

  TrainingEnd watch() {
    while (read_some()) pass_signals();
    const int status = wait();
    end_.interrupted = end_.interrupted || (asked_ && problem_.empty());
    if (end_.interrupted) return std::move(end_);
    if (!problem_.empty()) throw Error(kind_of(kind_), problem_);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return std::move(end_);
    fail_silent(status);
  }

 private:
  // False at the end of what it says.
  bool read_some() {
    pollfd one{events_.get(), POLLIN, 0};
    if (::poll(&one, 1, kLookMilliseconds) <= 0) return true;
    char bytes[4096];
    const ssize_t n = ::read(events_.get(), bytes, sizeof bytes);
    if (n < 0) return errno == EINTR;
    line_.append(bytes, static_cast<size_t>(n));
    for (size_t end = 0; (end = line_.find('\n')) != line_.npos; line_.erase(0, end + 1))
      take(line_.substr(0, end));
    if (line_.size() > kMostLine) line_.clear();
    return n > 0;
  }

  void take(const std::string& line) {
    const OrderedJson event = OrderedJson::parse(line, nullptr, false);
    if (!event.is_object() || !event.contains("event") || !event["event"].is_string()) {
      std::fprintf(stderr, "%s\n", shown(line).c_str());
      return;
    }
    const std::string name = event["event"].get<std::string>();
    if (name == "error") {
      kind_ = event.value("kind", "internal");
      problem_ = event.value("message", "Python did not say what went wrong");
      return;
    }
    end_.interrupted = end_.interrupted || name == "interrupted";
    end_.result = event;
    on_event_(event);
  }

  void pass_signals() {
    if (asked_ || !stop_.wait(0)) return;
    asked_ = true;
    std::fprintf(stderr, "kt: interrupted: saving a checkpoint; Ctrl-C again ends at once\n");
    ::kill(child_, SIGINT);
  }

  int wait() {
    int status = 0;
    while (::waitpid(child_, &status, 0) < 0 && errno == EINTR) {
    }
    child_ = -1;
    return status;
  }

  [[noreturn]] void fail_silent(int status) {
    const std::string kept = text("checkpoints in {} are whole", output_);
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL)
      fail_as(ErrorKind::kMemory, "{} was killed, as the system does when memory runs out; {}", program_,
              kept);
    if (WIFSIGNALED(status))
      fail_as(ErrorKind::kInternal, "{} ended with signal {} ({}); {}", program_, WTERMSIG(status),
              ::strsignal(WTERMSIG(status)), kept);
    fail_as(ErrorKind::kInternal, "{} ended with code {}; what it said stands above; {}", program_,
            WEXITSTATUS(status), kept);
  }

  std::string program_, output_;
  std::function<void(const OrderedJson&)> on_event_;
  StopSignals stop_;
  Descriptor events_;
  pid_t child_ = -1;
  bool asked_ = false;
  std::string line_, kind_, problem_;
  TrainingEnd end_;
};

}  // namespace

std::string training_python(const Recipe& recipe) {
  PythonQuestion question{.path = folders_of_path(), .patience = std::chrono::milliseconds(60000)};
  const char* const named = std::getenv("KT_PYTHON");
  question.program = named && *named ? named : python_beside();
  const PythonFacts facts = python_on_path(question);
  if (!facts.problem.empty())
    fail_as(ErrorKind::kUnsupported,
            "training needs Python with torch, transformers and peft: {}; KT_PYTHON names one",
            facts.problem);
  require_packages(facts, recipe);
  return facts.program;
}

TrainingEnd run_training(const std::string& python, const TrainingPlan& plan,
                         const std::function<void(const OrderedJson&)>& on_event) {
  return Watcher(python, plan, on_event).watch();
}

}  // namespace kt::inline cli
