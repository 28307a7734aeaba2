#include "text/tokenizer/pretokenizer.h"

#include <span>

#include "base/error.h"

namespace kt::inline texts {
namespace {

using Sink = FunctionRef<void(std::string_view)>;

void replace_all(const ReplaceStep& step, std::string& text, const TextBudget& budget) {
  RegexSearch search(step.pattern, text);
  std::string out;
  size_t end = 0;
  while (const std::optional<RegexMatch> match = search.next()) {
    budget.fits(out.size() + (match->begin - end) + step.content.size());
    out.append(text, end, match->begin - end).append(step.content);
    end = match->end;
  }
  budget.fits(out.size() + text.size() - end);
  out.append(text, end);
  text = std::move(out);
}

void strip(const StripStep& step, std::string& text) {
  size_t begin = 0, end = text.size();
  while (step.left && begin < end) {
    size_t after = begin;
    if (!whitespace_set().contains(next_code_point(text, after))) break;
    begin = after;
  }
  while (step.right && end > begin) {
    const size_t before = previous_character(text, end);
    size_t at = before;
    if (!whitespace_set().contains(next_code_point(text, at))) break;
    end = before;
  }
  text = text.substr(begin, end - begin);
}

struct Segment {
  size_t begin = 0, end = 0;
  bool is_match = false;
};

// Joins segments that come from left to right, as the behaviour says, and passes on what is complete.
class Joiner {
 public:
  Joiner(SplitBehaviour behaviour, FunctionRef<void(size_t, size_t)> out)
      : behaviour_(behaviour), out_(out) {}

  void add(Segment next) {
    if (behaviour_ == SplitBehaviour::kRemoved && next.is_match) return;
    if (holds_ && joins(next)) {
      held_.end = next.end;
      // With the next: what a match was joined to takes no more. Else the last one decides.
      held_.is_match = next.is_match;
      return;
    }
    finish();
    held_ = next;
    holds_ = true;
  }
  void finish() {
    if (holds_ && held_.end > held_.begin) out_(held_.begin, held_.end);
    holds_ = false;
  }

 private:
  bool joins(const Segment& next) const {
    switch (behaviour_) {
      case SplitBehaviour::kContiguous:
        return next.is_match == held_.is_match;
      case SplitBehaviour::kMergedWithPrevious:
        return next.is_match && !held_.is_match;
      case SplitBehaviour::kMergedWithNext:
        return held_.is_match && !next.is_match;
      default:
        return false;
    }
  }
  SplitBehaviour behaviour_;
  FunctionRef<void(size_t, size_t)> out_;
  Segment held_;
  bool holds_ = false;
};

void cut(const SplitStep& step, std::string_view text, FunctionRef<void(size_t, size_t)> out) {
  Joiner joiner(step.behaviour, out);
  RegexSearch search(step.pattern, text);
  size_t end = 0;
  while (const std::optional<RegexMatch> match = search.next()) {
    if (match->begin > end) joiner.add({end, match->begin, step.invert});
    joiner.add({match->begin, match->end, !step.invert});
    end = match->end;
  }
  if (end < text.size()) joiner.add({end, text.size(), step.invert});
  joiner.finish();
}

void split_from(std::span<const WordStep> steps, std::string_view text, bool at_start, Sink word);

void run(const SplitStep& step, std::span<const WordStep> rest, std::string_view text, bool at_start,
         Sink word) {
  cut(step, text, [&](size_t begin, size_t end) {
    split_from(rest, text.substr(begin, end - begin), at_start && begin == 0, word);
  });
}

void run(const PrefixSpaceStep&, std::span<const WordStep> rest, std::string_view text, bool at_start,
         Sink word) {
  if (text.starts_with(' ')) return split_from(rest, text, at_start, word);
  split_from(rest, std::string(" ").append(text), at_start, word);
}

void run(const MetaspaceStep& step, std::span<const WordStep> rest, std::string_view text, bool at_start,
         Sink word) {
  std::string changed;
  for (char c : text) c == ' ' ? changed.append(step.replacement) : changed.append(1, c);
  const bool prepends = step.prepend == MetaspaceStep::Prepend::kAlways ||
                        (step.prepend == MetaspaceStep::Prepend::kFirst && at_start);
  if (prepends && !changed.starts_with(step.replacement)) changed.insert(0, step.replacement);
  if (!step.split) return split_from(rest, changed, at_start, word);
  const SplitStep split{.pattern = step.pattern, .behaviour = SplitBehaviour::kMergedWithNext};
  run(split, rest, changed, at_start, word);
}

void split_from(std::span<const WordStep> steps, std::string_view text, bool at_start, Sink word) {
  if (text.empty()) return;
  if (steps.empty()) return word(text);
  std::visit([&](const auto& step) { run(step, steps.subspan(1), text, at_start, word); }, steps[0]);
}

}  // namespace

void TextBudget::refuse() const {
  fail("{}: normalizer or decoder make more than {} bytes of a text of {}", whose_, most_, bytes_);
}

std::string replaced(std::string_view text, std::string_view from, std::string_view to,
                     const TextBudget& budget) {
  std::string out;
  size_t end = 0;
  for (size_t at = text.find(from); at != std::string::npos; at = text.find(from, end)) {
    budget.fits(out.size() + (at - end) + to.size());
    out.append(text, end, at - end).append(to);
    end = at + from.size();
  }
  budget.fits(out.size() + text.size() - end);
  return out.append(text, end);
}

std::string apply_steps(const std::vector<NormalStep>& steps, std::string_view text, TextBudget& budget) {
  std::string now(text);
  for (const NormalStep& step : steps) {
    if (const auto* form = std::get_if<NormalForm>(&step)) now = normalised(now, *form);
    if (const auto* replace = std::get_if<ReplaceStep>(&step)) replace_all(*replace, now, budget);
    if (const auto* prepend = std::get_if<PrependStep>(&step); prepend && !now.empty())
      now.insert(0, prepend->content);
    if (const auto* sides = std::get_if<StripStep>(&step)) strip(*sides, now);
    budget.fits(now.size());
  }
  budget.pay(now.size());
  return now;
}

void split_words(const std::vector<WordStep>& steps, std::string_view text, bool at_start,
                 FunctionRef<void(std::string_view)> word) {
  split_from(steps, text, at_start, word);
}

}  // namespace kt::inline texts
