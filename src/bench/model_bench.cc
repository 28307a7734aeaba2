#include "bench/model_bench.h"

#include <algorithm>
#include <functional>

#include "base/error.h"

namespace kt::inline bench {
namespace {

// What the model had done at the beginning or the end of a phase.
struct Mark {
  StepTotals totals;
  std::vector<uint64_t> experts;
};

// One phase over all repetitions.
class Phase {
 public:
  void add(double tokens, double seconds, const Mark& before, const Mark& after, const Rates& rates) {
    Work work = after.totals.work;
    work -= before.totals.work;
    speeds_.push_back(tokens / seconds);
    fractions_.push_back(limit_of(work, rates).seconds / seconds);
    reads_.push_back(rates.read_bytes);
    integers_.push_back(rates.integer_operations);
    floats_.push_back(rates.float_operations);
    seconds_ += seconds;
    in_steps_ += after.totals.seconds - before.totals.seconds;
    steps_ += static_cast<double>(after.totals.steps - before.totals.steps);
    for (const StepPart& part : parts_since(before.totals.parts, after.totals.parts)) add_part(part);
    if (chosen_.empty()) chosen_.resize(after.experts.size());
    for (size_t i = 0; i < chosen_.size(); ++i) chosen_[i] += after.experts[i] - before.experts[i];
  }

  PhaseFigures figures(const ExpertCounts* counts) const {
    PhaseFigures out{.tokens_per_s = median(speeds_), .fraction = median(fractions_)};
    out.rates = {.read_bytes = median(reads_),
                 .integer_operations = median(integers_),
                 .float_operations = median(floats_)};
    // Of all repetitions together: more tokens than a run has, and so more experts.
    if (counts) out.experts = expert_use(*counts, std::vector<uint64_t>(chosen_.size()), chosen_);
    out.step_seconds = seconds_ / steps_;
    double known = 0;
    for (const StepPart& part : parts_) {
      Amount amount = part.amount;
      for (double* number : {&amount.bytes, &amount.integer_operations, &amount.float_operations})
        *number /= steps_;
      out.parts.push_back({.name = part.name,
                           .calls = static_cast<double>(part.calls) / steps_,
                           .seconds = part.seconds / steps_,
                           .limit = limit_of(amount, out.rates)});
      known += part.seconds;
    }
    std::ranges::sort(out.parts, std::greater(), &PartFigures::seconds);
    const double outside = std::max(0.0, seconds_ - in_steps_);
    out.parts.push_back({.name = "between steps", .calls = 1, .seconds = outside / steps_});
    out.explained = (known + outside) / seconds_;
    return out;
  }

 private:
  void add_part(const StepPart& part) {
    auto at = std::ranges::find(parts_, part.name, &StepPart::name);
    if (at == parts_.end()) at = parts_.insert(at, {.name = part.name});
    at->calls += part.calls;
    at->seconds += part.seconds;
    at->amount += part.amount;
  }

  std::vector<double> speeds_, fractions_, reads_, integers_, floats_;
  double seconds_ = 0, in_steps_ = 0;
  double steps_ = 0;
  std::vector<StepPart> parts_;
  std::vector<uint64_t> chosen_;
};

}  // namespace

ModelFigures measure_model(LoadedModel& model, LimitWindows& limits, const BenchCase& at, int repeat) {
  const int step = model.max_tokens();
  const std::unique_ptr<Runner> runner =
      model.make_runner(bench_pages(at, step), {.sequences = bench_slots(at)});
  const ExpertCounts* counts = runner->expert_counts();
  Phase prefill, decode;
  for (int i = 0; i < repeat; ++i) {
    BenchCase once = at;
    once.seed = at.seed + static_cast<uint64_t>(i);
    std::vector<Mark> marks;
    std::vector<Rates> rates;
    const auto mark = [&] {
      limits.look_now();
      marks.push_back({runner->totals(), counts ? counts->snapshot() : std::vector<uint64_t>()});
      if (marks.size() % 2 == 0) rates.push_back(limits.take());
    };
    const BenchResult result =
        run_bench(*runner, once, step, {.mark = mark, .between = [&] { limits.look(); }});
    KT_CHECK(marks.size() == 4, "{} marks", marks.size());
    const double sequences = at.batch;
    prefill.add(sequences * at.prompt, result.prefill_seconds, marks[0], marks[1], rates[0]);
    decode.add(sequences * at.output, result.decode_seconds, marks[2], marks[3], rates[1]);
  }
  return {.at = at, .prefill = prefill.figures(counts), .decode = decode.figures(counts)};
}

}  // namespace kt::inline bench
