#include "text/regex.h"

#include "base/error.h"

namespace kt::inline texts {
namespace {

constexpr size_t kMaxChoices = size_t{4} << 20;

bool word_at(std::string_view text, size_t at) { return word_set().contains(next_code_point(text, at)); }

bool at_word_edge(std::string_view text, size_t at) {
  const bool before = at > 0 && word_at(text, previous_character(text, at));
  const bool after = at < text.size() && word_at(text, at);
  return before != after;
}

}  // namespace

RegexSearch::RegexSearch(const Regex& regex, std::string_view text, size_t most_steps)
    : regex_(regex), text_(text), most_steps_(most_steps), steps_left_(most_steps) {}

std::optional<RegexMatch> RegexSearch::at_start() {
  const std::optional<size_t> end = run(0, 0);
  if (!end) return std::nullopt;
  return RegexMatch{0, *end};
}

std::optional<RegexMatch> RegexSearch::next() {
  const RegexStep& first = regex_.program().steps[0];
  const bool only_at_start =
      first.op == RegexStep::Op::kAssert && first.place == RegexStep::Place::kTextBegin;
  while (next_ <= text_.size()) {
    const size_t begin = next_;
    const std::optional<size_t> end = run(0, begin);
    if (end && (*end != begin || last_end_ != end)) {
      next_ = *end;
      last_end_ = end;
      return RegexMatch{begin, *end};
    }
    if (next_ == text_.size() || only_at_start) break;
    next_code_point(text_, next_);
  }
  next_ = text_.size() + 1;
  return std::nullopt;
}

void RegexSearch::pay(size_t steps) {
  if (steps > steps_left_)
    fail("pattern \"{}\": takes more than {} steps on a text of {} bytes", printable(regex_.pattern()),
         most_steps_, text_.size());
  steps_left_ -= steps;
}

void RegexSearch::choose(const Choice& choice) {
  if (choices_.size() >= kMaxChoices)
    fail("pattern \"{}\": more than {} open choices on a text of {} bytes", printable(regex_.pattern()),
         kMaxChoices, text_.size());
  choices_.push_back(choice);
}

// The end of a match that begins with `step` at `at`. Recursion is as deep as the pattern nests.
std::optional<size_t> RegexSearch::run(uint32_t step, size_t at) {
  const size_t base = choices_.size();
  const std::optional<size_t> end = run_choices(step, at, base);
  choices_.resize(base);  // what is matched inside is not taken back
  return end;
}

std::optional<size_t> RegexSearch::run_choices(uint32_t step, size_t at, size_t base) {
  const RegexProgram& program = regex_.program();
  while (true) {
    pay(1);
    const RegexStep& now = program.steps[step];
    bool ok = true;
    switch (now.op) {
      case RegexStep::Op::kSet:
        ok = at < text_.size() && program.sets[now.set].contains(next_code_point(text_, at));
        ++step;
        break;
      case RegexStep::Op::kLoop:
        ok = loop(step, at);
        ++step;
        break;
      case RegexStep::Op::kSplit:
        if (fails_at_once(now.target, at)) {  // most alternatives do; saves the choice, a third of the time
          step = now.other;
          break;
        }
        choose({.step = now.other, .at = at});
        step = now.target;
        break;
      case RegexStep::Op::kJump:
        step = now.target;
        break;
      case RegexStep::Op::kLook:
        ok = run(step + 1, at).has_value() != now.negative;
        step = now.target;
        break;
      case RegexStep::Op::kAtomic: {
        const std::optional<size_t> end = run(step + 1, at);
        ok = end.has_value();
        at = end.value_or(at);
        step = now.target;
        break;
      }
      case RegexStep::Op::kBehind:
      case RegexStep::Op::kAssert:
        ok = holds(now, at);
        ++step;
        break;
      case RegexStep::Op::kAccept:
        return at;
    }
    if (!ok && !retry(step, at, base)) return std::nullopt;
  }
}

bool RegexSearch::fails_at_once(uint32_t step, size_t at) const {
  const RegexStep& next = regex_.program().steps[step];
  const bool needs_one = next.op == RegexStep::Op::kSet || (next.op == RegexStep::Op::kLoop && next.min > 0);
  return needs_one &&
         (at == text_.size() || !regex_.program().sets[next.set].contains(next_code_point(text_, at)));
}

// As many (or, lazily, as few) repetitions as allowed; leaves a choice where there is one.
bool RegexSearch::loop(uint32_t step, size_t& at) {
  const RegexStep& now = regex_.program().steps[step];
  const CodeSet& set = regex_.program().sets[now.set];
  const bool lazy = now.mode == RegexStep::Mode::kLazy;
  const uint32_t most = lazy ? now.min : now.max;
  size_t low = at;
  uint32_t count = 0;
  while (count < most && at < text_.size()) {
    size_t after = at;
    if (!set.contains(next_code_point(text_, after))) break;
    at = after;
    if (++count == now.min) low = at;
  }
  pay(count);
  if (count < now.min) return false;
  if (lazy && now.max > now.min)
    choose({.step = step, .kind = Choice::Kind::kGrow, .count = now.max - now.min, .at = at});
  if (now.mode == RegexStep::Mode::kGreedy && at > low)
    choose({.step = step + 1, .kind = Choice::Kind::kShrink, .at = at, .low = low});
  return true;
}

// Takes up the last choice; false: none left above `base`.
bool RegexSearch::retry(uint32_t& step, size_t& at, size_t base) {
  while (choices_.size() > base) {
    Choice& last = choices_.back();
    step = last.step;
    at = last.at;
    if (last.kind == Choice::Kind::kGo) {
      choices_.pop_back();
      return true;
    }
    if (last.kind == Choice::Kind::kShrink) {
      at = previous_character(text_, at);
      last.at = at;
      if (at == last.low) choices_.pop_back();
      return true;
    }
    const CodeSet& set = regex_.program().sets[regex_.program().steps[step].set];
    if (last.count == 0 || at == text_.size() || !set.contains(next_code_point(text_, at))) {
      choices_.pop_back();
      continue;
    }
    last.at = at;
    if (last.count != kUnbounded) --last.count;
    ++step;
    return true;
  }
  return false;
}

bool RegexSearch::holds(const RegexStep& step, size_t at) const {
  const bool at_end = at == text_.size();
  if (step.op == RegexStep::Op::kBehind) {
    size_t before = at > 0 ? previous_character(text_, at) : 0;
    return (at > 0 && regex_.program().sets[step.set].contains(next_code_point(text_, before))) !=
           step.negative;
  }
  switch (step.place) {
    case RegexStep::Place::kTextBegin:
      return at == 0;
    case RegexStep::Place::kTextEnd:
      return at_end;
    case RegexStep::Place::kTextEndOrNewline:
      return at_end || (text_[at] == '\n' && at + 1 == text_.size());
    // Oniguruma: no line begins behind the newline that ends the text.
    case RegexStep::Place::kLineBegin:
      return at == 0 || (text_[at - 1] == '\n' && !at_end);
    case RegexStep::Place::kLineEnd:
      return at_end || text_[at] == '\n';
    case RegexStep::Place::kWordEdge:
      return at_word_edge(text_, at);
    case RegexStep::Place::kNoWordEdge:
      return !at_word_edge(text_, at);
  }
  return false;
}

}  // namespace kt::inline texts
