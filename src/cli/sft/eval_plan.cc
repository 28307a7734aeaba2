#include "cli/sft/eval_plan.h"

#include <algorithm>

#include "base/error.h"
#include "terminal/report.h"
#include "text/shown.h"

namespace kt::inline cli {
namespace {

constexpr int kUsualRowsAtOnce = 8, kUsualNewTokens = 1024;

// As LLaMA-Factory samples where a recipe says do_sample and no more.
constexpr double kUsualTemperature = 0.95, kUsualTopP = 0.7;
constexpr int kUsualTopK = 50;

bool turned_off(const Recipe& recipe, const char* key) { return recipe.given(key) && !recipe.flag(key); }

SamplingOptions sampling_of(const Recipe& recipe) {
  SamplingOptions out{.temperature = 0};
  out.seed = static_cast<uint64_t>(recipe.integer("seed"));
  if (!recipe.flag("do_sample")) return out;
  out.temperature = recipe.given("temperature") ? recipe.number("temperature") : kUsualTemperature;
  out.top_p = recipe.given("top_p") ? recipe.number("top_p") : kUsualTopP;
  out.top_k = recipe.given("top_k") ? static_cast<int>(recipe.integer("top_k")) : kUsualTopK;
  check_sampling(out);
  return out;
}

class EvalPlanner {
 public:
  EvalPlanner(const Recipe& recipe, const OpenedModel& opened) : recipe_(recipe), opened_(opened) {}

  EvalPlan plan() {
    out_.name = recipe_.text("model_name_or_path");
    out_.output = recipe_.text("output_dir");
    if (out_.output.empty()) recipe_.fail("output_dir", "is missing: where do the predictions go?");
    out_.notes = recipe_.notes();
    choose_how();
    make_cases(read());
    choose_use();
    return std::move(out_);
  }

 private:
  void choose_how() {
    EvaluationOptions& how = out_.how;
    how.generate = !turned_off(recipe_, "predict_with_generate") && !turned_off(recipe_, "do_predict");
    cutoff_ = static_cast<int>(std::min<int64_t>(recipe_.integer("cutoff_len"), opened_.spec().context));
    if (cutoff_ < recipe_.integer("cutoff_len"))
      out_.notes.push_back(
          text("cutoff_len: the model's context is {} tokens, and no row is longer", cutoff_));
    // What the recipe asks for is asked for; else a row with its answer stays as long as rows may be.
    const bool asked = recipe_.given("max_new_tokens");
    how.max_tokens =
        asked ? static_cast<int>(std::min<int64_t>(recipe_.integer("max_new_tokens"), opened_.spec().context))
              : kUsualNewTokens;
    how.longest = asked ? 0 : cutoff_;
    how.sampling = sampling_of(recipe_);
    how.end_tokens = opened_.end_ids();
    how.sequences = recipe_.given("per_device_eval_batch_size")
                        ? static_cast<int>(recipe_.integer("per_device_eval_batch_size"))
                        : kUsualRowsAtOnce;
  }

  std::vector<Row> read() {
    const bool own = recipe_.given("eval_dataset");
    const double held = recipe_.number("val_size");
    if (!own && !(recipe_.given("dataset") && held > 0))
      recipe_.fail(
          "eval_dataset",
          "is missing: name the rows to evaluate, such as eval_dataset=test.jsonl, or the part of `dataset` "
          "that val_size holds back, such as val_size=0.1");
    const char* const key = own ? "eval_dataset" : "dataset";
    std::vector<Row> rows;
    DroppedRows dropped;
    for (const TrainingRows& one : find_rows(recipe_, key)) {
      out_.rows_of.push_back(one.name);
      out_.notes.insert(out_.notes.end(), one.notes.begin(), one.notes.end());
      for (Row& row : read_rows(one, recipe_.integer("max_samples"), recipe_.text("default_system"), dropped))
        rows.push_back(std::move(row));
    }
    note(dropped);
    if (rows.empty()) refuse_empty(key, dropped);
    out_.held = !own;
    if (out_.held)
      rows = held_rows(std::move(rows), held, static_cast<uint32_t>(recipe_.integer("seed")),
                       recipe_.place("val_size"));
    return rows;
  }

  void note(const DroppedRows& dropped) {
    for (std::string& line : dropped.lines()) out_.notes.push_back(std::move(line));
    out_.dropped += dropped.count();
  }

  [[noreturn]] void refuse_empty(const char* key, const DroppedRows& dropped) const {
    std::string why;
    for (const std::string& line : dropped.lines()) why += text("{}{}", why.empty() ? ": " : "; ", line);
    recipe_.fail(key, "no row is left to evaluate{}", why);
  }

  void make_cases(const std::vector<Row>& rows) {
    const Json thinking = recipe_.value("enable_thinking");
    EvalCaseOptions options{.cutoff = cutoff_};
    if (thinking.is_boolean()) options.thinking = thinking.get<bool>();
    EvalCases cases(opened_, options);
    DroppedRows dropped;
    for (const Row& row : rows)
      if (auto one = cases.make(row, dropped)) out_.cases.push_back(std::move(*one));
    note(dropped);
    if (out_.cases.empty()) refuse_empty(recipe_.given("eval_dataset") ? "eval_dataset" : "dataset", dropped);
    for (const EvalCase& one : out_.cases) out_.choices += one.right.has_value();
    if (cases.cut() > 0)
      out_.notes.push_back(
          text("{} of {} rows are longer than cutoff_len {}: of their answers the beginning is scored",
               cases.cut(), rows.size(), cutoff_));
    if (cases.letters_unknown())
      out_.notes.push_back(
          "multiple choice is not counted: the tokenizer has no token for each of the letters");
  }

  void choose_use() {
    size_t longest = 0;
    for (const EvalCase& one : out_.cases) {
      const EvaluationCase& tokens = one.tokens;
      const size_t grown =
          tokens.prompt.size() + static_cast<size_t>(out_.how.generate ? out_.how.max_tokens : 1);
      const size_t capped =
          out_.how.longest > 0 ? std::min(grown, static_cast<size_t>(out_.how.longest) + 1) : grown;
      longest = std::max({longest, capped, tokens.whole.size() + 1});
    }
    out_.how.sequences =
        static_cast<int>(std::min<size_t>(static_cast<size_t>(out_.how.sequences), out_.cases.size()));
    out_.use = {.sequences = out_.how.sequences,
                .context = static_cast<int>(std::min(longest, static_cast<size_t>(opened_.spec().context)))};
    out_.bytes = opened_.memory_plan(out_.use).peak();
  }

  const Recipe& recipe_;
  const OpenedModel& opened_;
  EvalPlan out_;
  int cutoff_ = 0;
};

std::string sampling_text(const SamplingOptions& sampling) {
  if (sampling.temperature == 0) return "the most probable token";
  return text("temperature {}, top_p {}, top_k {}, seed {}", sampling.temperature, sampling.top_p,
              sampling.top_k, sampling.seed);
}

std::string joined(const std::vector<std::string>& names) {
  std::string out;
  for (const std::string& name : names) out += (out.empty() ? "" : ", ") + name;
  return out;
}

}  // namespace

OrderedJson EvalPlan::json() const {
  return {{"model", name},
          {"adapter", adapter.empty() ? OrderedJson() : OrderedJson(adapter)},
          {"datasets", rows_of},
          {"held_back", held},
          {"rows", cases.size()},
          {"dropped", dropped},
          {"choice_rows", choices},
          {"generate", how.generate},
          {"max_new_tokens", how.max_tokens},
          {"sampling",
           {{"temperature", how.sampling.temperature},
            {"top_p", how.sampling.top_p},
            {"top_k", how.sampling.top_k},
            {"seed", how.sampling.seed}}},
          {"rows_at_once", how.sequences},
          {"context", use.context},
          {"bytes", bytes},
          {"output", output},
          {"notes", notes}};
}

EvalPlan plan_evaluation(const Recipe& recipe, const OpenedModel& opened) {
  return EvalPlanner(recipe, opened).plan();
}

std::string describe(const EvalPlan& plan) {
  Table table({"evaluation", ""}, 2);
  table.add({"model", plan.name});
  table.add({"adapter", plan.adapter.empty() ? "none" : plan.adapter});
  table.add({"rows", text("{} of {}{}", plan.cases.size(), joined(plan.rows_of),
                          plan.held ? ", held back by val_size" : "")});
  if (plan.dropped > 0) table.add({"dropped", text("{}", plan.dropped)});
  if (plan.choices > 0) table.add({"multiple choice", text("{} rows", plan.choices)});
  table.add({"at once", text("{} rows of at most {} tokens", plan.how.sequences, plan.use.context)});
  table.add({"answers", plan.how.generate ? text("{} tokens at most, {}", plan.how.max_tokens,
                                                 sampling_text(plan.how.sampling))
                                          : "none are generated"});
  table.add({"memory", human_bytes(plan.bytes)});
  table.add({"output", plan.output});
  return table.str();
}

}  // namespace kt::inline cli
