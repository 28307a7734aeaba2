// kt doctor: looks at this machine, runs the real kernels and a bandwidth test, and says for each finding
// what it costs and the fix to type. What is looked at is in the doctor_*.cc files.
#include "cli/doctor/doctor.h"

#include <cstdio>

#include "base/error.h"
#include "base/text.h"
#include "cli/settings.h"
#include "cli/verbs.h"
#include "terminal/language.h"
#include "terminal/report.h"
#include "terminal/terminal.h"
#include "terminal/terminal_text.h"

namespace kt::inline cli {
namespace {

struct DoctorFlags {
  bool json = false, details = false, cpu = false, quick = false;
  std::string disk = ".", root;
  int port = 0;  // 0: as kt config has it
};

Diagnosis diagnose(const Machine& machine, const DoctorFlags& flags) {
  Diagnosis d;
  std::shared_ptr<Pool> pool;  // stays empty where nothing is to be measured
  if (!flags.quick) pool = std::make_shared<Pool>(PoolOptions{.topology = machine.topology});
  StatusLine status;
  look_at_cpu(d, machine);
  look_at_frequency(d, machine);
  look_at_isa(d, isa_choice(machine), pool);
  look_at_amx(d, machine);
  look_at_memory(d, machine);
  look_at_numa(d, machine);
  status.show(tr_now("measuring the read bandwidth"));
  look_at_bandwidth(d, machine, pool);
  status.show(tr_now("running the kernels"));
  look_at_kernels(d, best_kernels());
  if (flags.cpu) return d;
  status.show(tr_now("reading from the disk"));
  look_at_disk(d, machine, flags.quick ? DiskTest::kSkip : DiskTest::kRead);
  status.show(tr_now("trying the GPU"));
  look_at_gpu(d, machine, flags.quick ? GpuTest::kSkip : GpuTest::kTry);
  status.show("asking Python");
  look_at_python(d, machine, flags.quick ? PythonTest::kSkip : PythonTest::kImport);
  look_at_port(d, machine);
  look_at_files(d, machine);
  look_at_limits(d, machine);
  look_at_environment(d, machine);
  return d;
}

void print_finding(const Finding& f, int width) {
  constexpr int kNarrow = 60;  // below, what was found stands under its topic
  const Ink ink = f.level == Level::kOk ? Ink::kGood : f.level == Level::kWarning ? Ink::kWarning : Ink::kBad;
  const std::string level = tr_now(level_name(f.level));
  const std::string head =
      padded_to(tr_now(f.topic), 12) + " " + inked(ink, level) + padded_to(level, 9).substr(level.size());
  const std::string indent(width > 0 && width < kNarrow ? 4 : 22, ' ');
  const std::string found = wrapped(indent, harmless(f.found), width);
  if (indent.size() == 4)
    std::printf("%s\n%s", head.c_str(), found.c_str());
  else
    std::printf("%s%s", head.c_str(), found.c_str() + indent.size());
  if (!f.cost.empty())
    std::fputs(wrapped(indent + tr_now("cost: "), harmless(f.cost), width).c_str(), stdout);
  // One line, however long: it is there to be copied.
  if (!f.fix.empty()) std::printf("%s%s%s\n", indent.c_str(), tr_now("fix:  ").c_str(), f.fix.c_str());
}

void print(const Diagnosis& d, bool details) {
  const int width = terminal_kind().interactive ? Terminal::size().width : 0;
  for (const Finding& f : d.findings) print_finding(f, width);
  if (!details) return;
  std::printf("\n");
  Table table({"format", "route", "rows", "difference", "bound", ""}, 2);
  for (const FormatCheck& c : d.checks) {
    char difference[32], bound[32];
    std::snprintf(difference, sizeof difference, "%.1e", c.check.difference);
    std::snprintf(bound, sizeof bound, "%.1e", c.check.bound);
    table.add({std::string(c.format), c.check.route, std::to_string(c.check.rows), difference, bound,
               c.check.ok() ? "ok" : "FAIL"});
  }
  std::fputs(table.str().c_str(), stdout);
}

void print_json(const Diagnosis& d) {
  auto findings = nlohmann::ordered_json::array();
  for (const Finding& f : d.findings)
    findings.push_back({{"topic", f.topic},
                        {"level", level_name(f.level)},
                        {"found", f.found},
                        {"cost", f.cost},
                        {"fix", f.fix}});
  nlohmann::ordered_json out = {{"healthy", d.healthy()}, {"version", version()}};
  out.update(d.facts);
  out["findings"] = findings;
  // Names of files and variables may be any bytes.
  std::printf("%s\n", out.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace).c_str());
}

// Of the settings, as far as they can be read; look_at_files says what is wrong with them.
int usual_server_port() {
  constexpr int kUsual = 30000;
  try {
    const auto port = static_cast<int>(load_settings().integer("server.port"));
    return port > 0 ? port : kUsual;
  } catch (const Error&) {
    return kUsual;
  }
}

void run_doctor(const DoctorFlags& flags) {
  Machine machine = this_machine(flags.root);
  machine.folder = flags.disk;
  machine.port = flags.port > 0 ? flags.port : usual_server_port();
  const Diagnosis d = diagnose(machine, flags);
  if (flags.json)
    print_json(d);
  else
    print(d, flags.details);
  if (d.healthy()) return;
  std::string topics;
  for (const Finding& f : d.findings)
    if (f.level == Level::kBad) topics += (topics.empty() ? "" : ", ") + tr_now(f.topic);
  fail_as(ErrorKind::kUnsupported, tr("this machine does not run kt well: {}"), topics);
}

}  // namespace

void add_doctor(CLI::App& kt, Invocation& run) {
  CLI::App* verb = kt.add_subcommand("doctor", "Is this machine ready, and what would make it faster");
  const auto flags = std::make_shared<DoctorFlags>();
  verb->add_flag("--cpu", flags->cpu, "Look at the CPU, its kernels and memory only");
  verb->add_flag("--quick", flags->quick, "Measure and import nothing; the kernels are checked all the same");
  verb->add_option("--disk", flags->disk, "Folder of models, to see the disk's space and speed")
      ->capture_default_str();
  verb->add_option("--port", flags->port, "Port the server would listen on; default: as kt config has it")
      ->check(CLI::Range(1, 65535));
  verb->add_flag("-v,--verbose,--details", flags->details, "Print every kernel check");
  verb->add_flag("--json", flags->json, "Print JSON");
  verb->add_option("--root", flags->root, "Folder with another machine's /proc and /sys")->group("");
  verb->footer(
      "Takes a few seconds. Each finding is ok, warning (works, but slower or less than it could) or FAIL, "
      "with\n"
      "what it costs and the command that mends it.\n\n"
      "Exit code 0 without a FAIL, 4 with one: a kernel computes something else than the portable one, the "
      "CPU\n"
      "runs none of the vector kernels, hardly any memory is left, or kt's own files cannot be read.\n\n"
      "Examples:\n"
      "  kt doctor\n"
      "  kt doctor --disk ./models\n"
      "  kt doctor --quick --details\n"
      "  kt doctor --json | jq .read_gb_per_s");
  verb->callback([&run, flags] { run.action = [flags] { run_doctor(*flags); }; });
}

}  // namespace kt::inline cli
