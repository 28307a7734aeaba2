#include "cli/first_page.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>

#include "base/cpu.h"
#include "base/error.h"
#include "base/memory.h"
#include "base/topology.h"
#include "cli/doctor/doctor.h"
#include "cli/questions.h"
#include "cli/registry/model_verb.h"
#include "cli/verbs.h"
#include "kernels/table.h"
#include "terminal/language.h"
#include "terminal/report.h"
#include "terminal/terminal.h"
#include "terminal/terminal_text.h"

namespace kt::inline cli {
namespace {

constexpr size_t kMostModels = 6;

std::string cpu_text() {
  const Topology topology = Topology::discover();
  const std::string model = harmless_line(cpu().model);
  const std::string nodes =
      topology.nodes.size() > 1 ? text(tr(" on {} NUMA nodes"), topology.nodes.size()) : std::string();
  return text(tr("{}{}{}{}, {} kernels"), model, model.empty() ? "" : ", ",
              tr_counted(topology.cores(), "{} core", "{} cores"), nodes, best_kernels().name);
}

std::string gpu_text() {
  Diagnosis found;
  look_at_gpu(found, this_machine(""), GpuTest::kSkip);
  const auto cuda = found.facts.find("cuda");
  if (cuda == found.facts.end() || !cuda->is_object()) return tr_now("none: everything runs on the CPU");
  std::string out;
  for (const auto& gpu : cuda->at("gpus"))
    out += text("{}{}, {}", out.empty() ? "" : "; ", harmless_line(gpu.at("name").get<std::string>()),
                human_bytes(gpu.at("total_bytes").get<uint64_t>()));
  return out + tr_now(" (for kt --gpu and the Python package)");
}

bool runs_here(const ModelEntry& entry) {
  try {
    const auto files = try_inspect_model(entry.path);
    return files && (files->runs || files->kind == FilesKind::kCpuWeights);
  } catch (const Error&) {
    return false;
  }
}

// The registry's models that are on disk; none where its file cannot be read, which kt model list says.
std::vector<ModelEntry> models_here() {
  std::vector<ModelEntry> out;
  try {
    out.push_back(entry_of(std::string(kDemoName), inspect_model(demo_path())));
  } catch (const Error&) {
    // not installed
  }
  try {
    for (ModelEntry& entry : registered_models()) {
      std::error_code ignored;
      if (std::filesystem::exists(entry.path, ignored)) out.push_back(std::move(entry));
    }
  } catch (const Error&) {
    // as above
  }
  return out;
}

std::string model_text(const ModelEntry& entry) {
  if (entry.name == kDemoName) return text(tr("{}, comes with kt"), human_bytes(entry.size));
  return text("{}{}{}", human_bytes(entry.size), entry.architecture.empty() ? "" : ", ",
              harmless_line(entry.architecture));
}

}  // namespace

std::vector<FirstPage::Step> first_steps(const std::vector<KnownModel>& models, uint64_t memory) {
  // The largest that fits: the built-in one is the smallest there is.
  const KnownModel* best = nullptr;
  for (const KnownModel& model : models)
    if (model.bytes <= memory && (!best || model.bytes > best->bytes)) best = &model;
  const KnownModel* large = nullptr;
  for (const KnownModel& model : models)
    if (model.bytes > memory && (!large || model.bytes < large->bytes)) large = &model;
  std::vector<FirstPage::Step> out;
  if (best) {
    out.push_back({command_line({"chat", best->name}), tr_now("talk to it here")});
    out.push_back({command_line({"run", best->name}), tr_now("serve it: OpenAI's API and a web page")});
  }
  if (large)
    out.push_back({command_line({"estimate", large->name}), tr_now("what it would take of this machine")});
  const FirstPage::Step more[] = {
      {"kt doctor", tr_later("is this machine ready, and what would make it faster")},
      {"kt model scan . --add", tr_later("register models below this folder")},
      {"kt --help", tr_later("all verbs")}};
  for (const FirstPage::Step& step : more)
    if (out.size() < 3) out.push_back({step.command, tr_now(step.why)});
  return out;
}

FirstPage first_page() {
  FirstPage page{.version = version()};
  page.machine = {{tr_now("CPU"), cpu_text()},
                  {tr_now("RAM"), text(tr("{} available of {}"), human_bytes(available_memory()),
                                       human_bytes(total_memory()))},
                  {tr_now("GPU"), gpu_text()}};
  std::vector<KnownModel> known;
  for (const ModelEntry& entry : models_here()) {
    if (page.models.size() < kMostModels)
      page.models.push_back({harmless_line(entry.name), model_text(entry)});
    else
      ++page.more_models;
    if (runs_here(entry)) known.push_back({entry.name, entry.size});
  }
  page.steps = first_steps(known, available_memory());
  return page;
}

std::string shown_page(const FirstPage& page, int width) {
  constexpr int kNarrow = 60;  // below, what a command does stands under it
  std::string out =
      wrapped("", text(tr("kt {}: Mixture-of-Experts models on this machine"), page.version), width);
  out += "\n";
  int topics = 0;
  for (const FirstPage::Fact& fact : page.machine) topics = std::max(topics, text_width(fact.topic));
  for (const FirstPage::Fact& fact : page.machine)
    out += wrapped(padded_to(fact.topic, topics + 3), fact.value, width);
  out += "\n" + tr_now("Models") + "\n";
  int names = 0, commands = 0;
  for (const FirstPage::Model& model : page.models) names = std::max(names, text_width(model.name));
  for (const FirstPage::Step& step : page.steps) commands = std::max(commands, text_width(step.command));
  for (const FirstPage::Model& model : page.models)
    out += width < kNarrow ? "  " + model.name + "\n" + wrapped("      ", model.description, width)
                           : wrapped("  " + padded_to(model.name, names + 2), model.description, width);
  if (page.models.empty())
    out += wrapped("  ", tr_now("none yet; kt model --help says how they get names"), width);
  if (page.more_models > 0)
    out += wrapped("  ", text(tr("and {} more: kt model list"), page.more_models), width);
  out += "\n" + tr_now("Try") + "\n";
  for (const FirstPage::Step& step : page.steps)
    out += width < kNarrow ? "  " + step.command + "\n" + wrapped("      ", step.why, width)
                           : wrapped("  " + padded_to(step.command, commands + 2), step.why, width);
  return out + "\n" +
         wrapped("", tr_now("kt --help lists all verbs; kt VERB --help has examples of each."), width);
}

void print_first_page() { std::fputs(shown_page(first_page(), Terminal::size().width).c_str(), stdout); }

}  // namespace kt::inline cli
