// kt sft eval: the answers of a recipe's model to rows whose answers are known, and what they are worth.
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <memory>

#include "base/checked.h"
#include "base/error.h"
#include "base/file.h"
#include "cli/model_flags.h"
#include "cli/sft/eval_plan.h"
#include "cli/sft/eval_scores.h"
#include "cli/sft/sft.h"
#include "terminal/amounts.h"
#include "terminal/language.h"
#include "terminal/report.h"
#include "terminal/terminal.h"
#include "terminal/terminal_text.h"

namespace kt::inline cli {
namespace {

constexpr int kInterruptedEvaluation = 130;
constexpr const char* kPredictionsFile = "generated_predictions.jsonl";

struct EvalFlags {
  std::string file, predictions, acts = "default";
  std::vector<std::string> changes;
  ScoreOptions scores;
  bool stem = false, dry_run = false, json = false;
  int preview = 0;
  const CLI::App* verb = nullptr;
};

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point then) {
  return std::chrono::duration<double>(Clock::now() - then).count();
}

std::string dumped(const OrderedJson& value, int indent = -1) {
  return value.dump(indent, ' ', false, OrderedJson::error_handler_t::replace);
}

// The flags of the verbs that run a model, as the recipe has them.
ModelFlags model_flags(const RecipeModel& model, const EvalFlags& flags) {
  ModelFlags out;
  out.verb = flags.verb;
  out.found = find_model(model.model);
  out.model = out.found.path;
  out.weights = model.weights.empty() ? "" : find_model(model.weights).path;
  if (!model.adapter.empty()) out.adapters = {"adapter=" + model.adapter};
  out.rules.file = model.rules;
  out.acts = flags.acts;
  out.threads = model.threads;
  if (model.step_tokens > 0) out.step_tokens = model.step_tokens;
  return out;
}

class CtrlC final : public OnInterrupt::Stoppable {
 public:
  void stop() noexcept override { stopped_ = true; }
  const std::atomic<bool>& stopped() const { return stopped_; }

 private:
  std::atomic<bool> stopped_ = false;
};

// The answers so far, and the file that has them.
class Answers {
 public:
  Answers(const EvalPlan& plan, const std::string& path)
      : plan_(plan), path_(path), given_(plan.cases.size()) {}

  void take(const EvaluationAnswer& answer) {
    const EvalCase& asked = plan_.cases[answer.index];
    Prediction& out = given_[answer.index].emplace(
        Prediction{.prompt = asked.prompt, .label = asked.label, .nll = answer.nll, .tokens = answer.scored});
    if (plan_.how.generate) out.predict = answer.text;
    if (answer.choice) out.choice = asked.letters.substr(*answer.choice, 1);
    ++count_;
    tokens_ += answer.tokens;
    cut_ += answer.cut;
    // A kill takes no more than this much with it.
    if (seconds_since(written_) > 60) write();
  }

  // In the order of the rows, without those that are not answered.
  std::vector<Prediction> all() const {
    std::vector<Prediction> out;
    for (const auto& one : given_)
      if (one) out.push_back(*one);
    return out;
  }

  void write() {
    AtomicFile file(path_);
    for (const Prediction& one : all()) file.append(dumped(one.json()) + "\n");
    file.commit();
    written_ = Clock::now();
  }

  size_t count() const { return count_; }
  int64_t tokens() const { return tokens_; }
  int64_t cut() const { return cut_; }

 private:
  const EvalPlan& plan_;
  std::string path_;
  std::vector<std::optional<Prediction>> given_;
  size_t count_ = 0;
  int64_t tokens_ = 0, cut_ = 0;
  Clock::time_point written_ = Clock::now();
};

void make_folder(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error || !std::filesystem::is_directory(path, error))
    fail("output_dir: {} cannot be made a folder", path);
}

// predict_results.json, and the same among what training left in all_results.json.
void write_results(const std::string& folder, const OrderedJson& scores) {
  const std::string whole = folder + "/all_results.json";
  OrderedJson all = OrderedJson::object();
  if (const auto before = read_small_file(whole)) {
    const OrderedJson found = OrderedJson::parse(*before, nullptr, false);
    if (found.is_object()) all = found;
  }
  all.update(scores);
  write_atomically(folder + "/predict_results.json", dumped(scores, 4) + "\n");
  write_atomically(whole, dumped(all, 4) + "\n");
}

void print_scores(const OrderedJson& scores) {
  Table table({tr_now("measure"), tr_now("value")}, 1);
  for (const auto& [name, value] : scores.items()) {
    std::string shown_as = value.is_number_float() ? fixed(value.get<double>(), 4)
                           : value.is_string()     ? value.get<std::string>()
                                                   : value.dump();
    table.add({name.substr(name.find('_') + 1), std::move(shown_as)});
  }
  std::printf("%s", table.str().c_str());
}

void print_preview(const EvalPlan& plan, int most) {
  // What a file says must not steer a terminal.
  const auto shown_as = [terminal = ::isatty(STDOUT_FILENO) == 1](const std::string& string) {
    return terminal ? harmless(string) : string;
  };
  for (size_t i = 0; i < std::min(plan.cases.size(), static_cast<size_t>(most)); ++i) {
    const EvalCase& one = plan.cases[i];
    const std::string line = text("\n-- {} {}: prompt, {} tokens\n{}\n-- label, {} tokens\n{}\n", one.file,
                                  one.number, one.tokens.prompt.size(), shown_as(one.prompt),
                                  one.tokens.whole.size() - one.tokens.answer_begins, shown_as(one.label));
    std::fwrite(line.data(), 1, line.size(), stdout);
  }
}

OrderedJson preview_json(const EvalPlan& plan, int most) {
  OrderedJson out = OrderedJson::array();
  for (size_t i = 0; i < std::min(plan.cases.size(), static_cast<size_t>(most)); ++i) {
    const EvalCase& one = plan.cases[i];
    out.push_back({{"file", one.file},
                   {"row", one.number},
                   {"prompt", one.prompt},
                   {"label", one.label},
                   {"prompt_tokens", one.tokens.prompt.size()},
                   {"label_tokens", one.tokens.whole.size() - one.tokens.answer_begins},
                   {"letters", one.letters}});
  }
  return out;
}

void show_plan(const EvalPlan& plan, const EvalFlags& flags) {
  if (!flags.json) {
    std::fputs(describe(plan).c_str(), stdout);
    print_preview(plan, flags.preview);
    std::fflush(stdout);
    for (const std::string& line : plan.notes) std::fprintf(stderr, "kt: note: %s\n", line.c_str());
  } else if (flags.dry_run) {
    OrderedJson out = plan.json();
    out["preview"] = preview_json(plan, flags.preview);
    std::printf("%s\n", dumped(out, 2).c_str());
  }
}

void score_file(const EvalFlags& flags) {
  const std::vector<Prediction> predictions = read_predictions(flags.predictions);
  const OrderedJson scores = scores_of(predictions, flags.scores);
  if (flags.json)
    std::printf("%s\n", dumped(scores, 2).c_str());
  else
    print_scores(scores);
}

// Asks the model all of it; false: interrupted.
bool ask(LoadedModel& model, EvalPlan& plan, Answers& answers, Clock::time_point begin) {
  const auto pages = static_cast<int64_t>(plan.how.sequences) *
                     (ceil_div(static_cast<int64_t>(plan.use.context), int64_t{kPageTokens}) + 1);
  const std::unique_ptr<Runner> runner = model.make_runner(static_cast<int>(pages), plan.use);
  plan.how.step_tokens = runner->max_tokens();
  std::vector<EvaluationCase> cases;
  for (EvalCase& one : plan.cases) cases.push_back(std::move(one.tokens));
  CtrlC stop;
  const OnInterrupt listening(stop);
  StatusLine status;
  evaluate(
      *runner, model.tokenizer(), cases, plan.how,
      [&](const EvaluationAnswer& answer) {
        answers.take(answer);
        status.show(text(tr("{} of {} rows, {} tokens/s"), answers.count(), cases.size(),
                         three_digits(static_cast<double>(answers.tokens()) / seconds_since(begin))));
      },
      stop.stopped());
  return !stop.stopped();
}

void evaluate_recipe(const EvalFlags& flags, Invocation& run) {
  const Recipe recipe(flags.file, flags.changes);
  const RecipeModel named = recipe_model(recipe);
  OpenedModel opened(model_flags(named, flags).model, model_flags(named, flags).options());
  EvalPlan plan = plan_evaluation(recipe, opened);
  plan.adapter = named.adapter;
  plan.how.adapter = named.adapter.empty() ? -1 : 0;
  show_plan(plan, flags);
  if (flags.dry_run) return;
  make_folder(plan.output);
  const std::string path = plan.output + "/" + kPredictionsFile;
  LoadedModel model = std::move(opened).load({.use = plan.use});
  if (!flags.json) std::printf("\nloaded in %s\n", duration(model.load_seconds()).c_str());
  std::fflush(stdout);
  Answers answers(plan, path);
  const auto begin = Clock::now();
  const bool whole = ask(model, plan, answers, begin);
  answers.write();
  if (!whole) {
    std::fprintf(
        stderr, "%s\n",
        text(tr("kt: interrupted; {} of {} rows are in {}"), answers.count(), plan.cases.size(), path)
            .c_str());
    run.status = kInterruptedEvaluation;
    return;
  }
  OrderedJson scores = scores_of(answers.all(), flags.scores);
  const double seconds = seconds_since(begin);
  scores["predict_runtime"] = seconds;
  scores["predict_samples_per_second"] = static_cast<double>(answers.count()) / seconds;
  if (plan.how.generate) {
    scores["predict_tokens"] = answers.tokens();
    scores["predict_cut"] = answers.cut();
  }
  write_results(plan.output, scores);
  if (flags.json) {
    scores["predictions"] = path;
    std::printf("%s\n", dumped(scores, 2).c_str());
  } else {
    std::printf("\n");
    print_scores(scores);
    std::printf("%s\n", path.c_str());
  }
}

void evaluate_or_score(const EvalFlags& given, Invocation& run) {
  EvalFlags flags = given;
  flags.scores.stemming = flags.stem ? Stemming::kPorter : Stemming::kNone;
  if (flags.predictions.empty() && flags.file.empty())
    fail(tr("FILE or --predictions is required: a recipe, or predictions that are there already"));
  if (!flags.predictions.empty() && !flags.file.empty())
    fail(tr("--predictions measures a file as it is: leave the recipe out"));
  if (flags.predictions.empty())
    evaluate_recipe(flags, run);
  else
    score_file(flags);
}

}  // namespace

void add_sft_eval(CLI::App& sft, Invocation& run) {
  CLI::App* verb = sft.add_subcommand(
      "eval", "Let a recipe's model answer rows whose answers are known: BLEU, ROUGE, accuracy, loss");
  const auto flags = std::make_shared<EvalFlags>();
  flags->verb = verb;
  verb->add_option("FILE", flags->file, "The recipe: a YAML file; kt sft keys says what may stand in it");
  verb->add_option("CHANGES", flags->changes, "Values in place of the recipe's: eval_dataset=test.jsonl")
      ->type_name("KEY=VALUE");
  verb->add_option("--predictions", flags->predictions,
                   "Measure a file of predictions that is there already, a .jsonl with predict and label; no "
                   "model runs")
      ->type_name("FILE");
  verb->add_option(
          "--words", flags->scores.words,
          "How texts are cut into words; auto: zh where half of the labels or more have Chinese characters")
      ->check(CLI::IsMember({"auto", "13a", "zh"}))
      ->capture_default_str();
  verb->add_flag("--stem", flags->stem,
                 "ROUGE counts words by their stems (Porter's), as use_stemmer of rouge-score");
  verb->add_option("--acts", flags->acts, "Precision of activations")
      ->check(CLI::IsMember({"default", "int8", "bf16", "f32"}))
      ->capture_default_str();
  verb->add_option("--preview", flags->preview, "Show so many rows as they will be asked, with their labels")
      ->check(within(0, kMostTokens))
      ->type_name("ROWS");
  verb->add_flag("--dry-run", flags->dry_run, "Print the plan and the memory it takes, and stop");
  verb->add_flag("--json", flags->json, "Print JSON");
  verb->footer(
      "The rows are those of eval_dataset, else those of dataset that val_size holds back. The adapter is "
      "that of\n"
      "adapter_name_or_path, else what output_dir holds. output_dir gets generated_predictions.jsonl, "
      "predict_results.json\n"
      "and all_results.json. Ctrl-C keeps what was predicted.\n\n"
      "Examples:\n"
      "  kt sft eval demo/sft.yaml val_size=0.05 --dry-run --preview 1\n"
      "  kt sft eval demo/sft.yaml eval_dataset=test.jsonl max_new_tokens=128\n"
      "  kt sft eval --predictions saves/pirate/generated_predictions.jsonl --stem");
  verb->callback([&run, flags] { run.action = [flags, &run] { evaluate_or_score(*flags, run); }; });
}

}  // namespace kt::inline cli
