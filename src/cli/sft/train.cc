// kt sft train: reads a recipe, prints the plan, and has Python train it.
#include <cstdio>
#include <memory>

#include "cli/next_step.h"
#include "cli/questions.h"
#include "cli/sft/sft.h"
#include "cli/sft/training_plan.h"
#include "cli/sft/training_python.h"
#include "terminal/amounts.h"
#include "terminal/report.h"

namespace kt::inline cli {
namespace {

constexpr int kInterruptedTraining = 130;

struct TrainFlags {
  std::string file;
  std::vector<std::string> changes;
  std::string on_nan;
  bool dry_run = false, json = false;
};

double number_of(const OrderedJson& event, const char* key, double otherwise = 0) {
  return event.contains(key) && event[key].is_number() ? event[key].get<double>() : otherwise;
}

bool has(const OrderedJson& event, const char* key) { return event.contains(key) && !event[key].is_null(); }

std::string text_in(const OrderedJson& event, const char* key) {
  return has(event, key) && event[key].is_string() ? event[key].get<std::string>() : "";
}

// "step 10/100  loss 2.345  lr 9.1e-05  norm 1.21  812 tokens/s  experts 87%  left 3m12s"
std::string step_line(const OrderedJson& event) {
  char beginning[160];
  std::snprintf(beginning, sizeof beginning, "step %.0f/%.0f  loss %.4f  lr %.2e", number_of(event, "step"),
                number_of(event, "steps"), number_of(event, "loss"), number_of(event, "learning_rate"));
  std::string out = beginning;
  const auto add = [&](const char* key, const char* before, const std::string& value) {
    if (has(event, key)) out += text("  {}{}", before, value);
  };
  add("grad_norm", "norm ", three_digits(number_of(event, "grad_norm")));
  add("margin", "margin ", three_digits(number_of(event, "margin")));
  add("tokens_per_s", "", text("{} tokens/s", three_digits(number_of(event, "tokens_per_s"))));
  add("expert_duty", "experts ", percent(number_of(event, "expert_duty")));
  if (has(event, "forward_tflops"))
    out += text("  {} + {} TFLOPS", three_digits(number_of(event, "forward_tflops")),
                three_digits(number_of(event, "backward_tflops")));
  add("left_s", "left ", duration(number_of(event, "left_s")));
  return out;
}

void print_result(const OrderedJson& event) {
  Table table({"trained", ""}, 1);
  const auto add = [&](const char* key, const char* name, const std::string& value) {
    if (has(event, key)) table.add({name, value});
  };
  add("train_loss", "mean loss", fixed(number_of(event, "train_loss"), 4));
  add("eval_loss", "loss of the evaluation rows", fixed(number_of(event, "eval_loss"), 4));
  add("seconds", "time", duration(number_of(event, "seconds")));
  add("tokens_per_s", "tokens/s", three_digits(number_of(event, "tokens_per_s")));
  add("expert_duty", "experts computing", percent(number_of(event, "expert_duty")));
  add("peak_bytes", "memory at most", human_bytes(static_cast<uint64_t>(number_of(event, "peak_bytes"))));
  std::printf("\n%s%s\n", table.str().c_str(), text_in(event, "output").c_str());
}

// One event in words; nothing for those that only programs want.
void print_event(const OrderedJson& event) {
  const std::string name = text_in(event, "event");
  if (name == "note")
    std::fprintf(stderr, "kt: note: %s\n", text_in(event, "text").c_str());
  else if (name == "step")
    std::printf("%s\n", step_line(event).c_str());
  else if (name == "evaluation")
    std::printf("step %.0f  evaluation: loss %s%s\n", number_of(event, "step"),
                fixed(number_of(event, "eval_loss"), 4).c_str(),
                has(event, "eval_accuracy")
                    ? text(", accuracy {}", percent(number_of(event, "eval_accuracy"))).c_str()
                    : "");
  else if (name == "saved")
    std::printf("saved %s\n", text_in(event, "path").c_str());
  else if (name == "ready")
    std::printf("%.0f rows, %.0f steps, %.0f trained parameters\n\n", number_of(event, "rows"),
                number_of(event, "steps"), number_of(event, "trainable"));
  else if (name == "done")
    print_result(event);
  else if (name == "interrupted")
    std::fprintf(stderr, "kt: interrupted%s%s\n", has(event, "path") ? "; saved " : "",
                 text_in(event, "path").c_str());
  std::fflush(stdout);
}

void train(const TrainFlags& flags, Invocation& run) {
  std::vector<std::string> changes = flags.changes;
  if (!flags.on_nan.empty()) changes.push_back("on_nan=" + flags.on_nan);
  const TrainingPlan plan = plan_training(Recipe(flags.file, changes));
  if (flags.json && flags.dry_run) {
    std::printf("%s\n", plan.json().dump(2).c_str());
  } else if (flags.json) {
    OrderedJson first = {{"event", "plan"}};
    first.update(plan.json());
    std::printf("%s\n", first.dump().c_str());
  } else {
    std::fputs(describe(plan).c_str(), stdout);
    std::fflush(stdout);
    for (const std::string& line : plan.notes) std::fprintf(stderr, "kt: note: %s\n", line.c_str());
  }
  check_memory(plan);
  if (flags.dry_run) return;
  const std::string python = training_python(plan.recipe);
  if (!flags.json) std::printf("\n");
  const TrainingEnd end = run_training(python, plan, [&](const OrderedJson& event) {
    if (!flags.json) return print_event(event);
    std::printf("%s\n", event.dump().c_str());
    std::fflush(stdout);
  });
  if (end.interrupted) run.status = kInterruptedTraining;
}

}  // namespace

void add_sft_train(CLI::App& sft, Invocation& run) {
  CLI::App* verb =
      sft.add_subcommand("train", "Train a model as a recipe says, the YAML that LLaMA-Factory reads");
  const auto flags = std::make_shared<TrainFlags>();
  verb->add_option("FILE", flags->file, "The recipe: a YAML file; kt sft keys says what may stand in it")
      ->required();
  verb->add_option("CHANGES", flags->changes,
                   "Values in place of the recipe's: learning_rate=1e-4 max_steps=20")
      ->type_name("KEY=VALUE");
  verb->add_option("--on-nan", flags->on_nan,
                   "A loss or gradient that is not finite: stop, or skip that step")
      ->check(CLI::IsMember({"stop", "skip"}));
  verb->add_flag("--dry-run", flags->dry_run, "Print the plan and the memory it takes, and stop");
  verb->add_flag("--json", flags->json, "Print JSON: the plan, and while it trains an object a line");
  verb->footer(
      "The recipe is checked, the plan printed and memory counted before anything is loaded; then Python "
      "trains, with\n"
      "transformers and PEFT (and TRL for dpo and kto). KT_PYTHON names the Python; else it is the one kt "
      "was installed\n"
      "with, or python3. Ctrl-C saves a checkpoint, and the same command goes on from it.\n\n"
      "Examples:\n"
      "  kt sft train demo/sft.yaml --dry-run\n"
      "  kt sft train demo/sft.yaml output_dir=saves/second learning_rate=2e-4\n"
      "  kt sft train ./deepseek3_lora_sft_kt.yaml --json");
  verb->callback([&run, flags] { run.action = [flags, &run] { train(*flags, run); }; });
}

}  // namespace kt::inline cli
