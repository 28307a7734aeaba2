#include "text/metrics/rouge.h"

#include <algorithm>
#include <unordered_map>

namespace kt::inline texts {
namespace {

RougeScore score(int64_t alike, int64_t predicted, int64_t wanted) {
  RougeScore out{
      .precision = static_cast<double>(alike) / static_cast<double>(std::max<int64_t>(predicted, 1)),
      .recall = static_cast<double>(alike) / static_cast<double>(std::max<int64_t>(wanted, 1))};
  if (alike > 0) out.f1 = 2 * out.precision * out.recall / (out.precision + out.recall);
  return out;
}

int64_t runs(const TextWords& words, size_t length) {
  return words.size() < length ? 0 : static_cast<int64_t>(words.size() - length + 1);
}

}  // namespace

RougeScore rouge_n(const TextWords& predicted, const TextWords& wanted, size_t length) {
  const auto run_at = [&](const TextWords& words, size_t at) {
    std::string run = words[at];
    for (size_t next = 1; next < length; ++next) run.append(1, ' ').append(words[at + next]);
    return run;
  };
  std::unordered_map<std::string, int64_t> left;  // of the wanted text's runs, not yet found
  for (size_t at = 0; at + length <= wanted.size(); ++at) ++left[run_at(wanted, at)];
  int64_t alike = 0;
  for (size_t at = 0; at + length <= predicted.size(); ++at)
    if (const auto found = left.find(run_at(predicted, at)); found != left.end() && found->second > 0) {
      --found->second;
      ++alike;
    }
  return score(alike, runs(predicted, length), runs(wanted, length));
}

RougeScore rouge_l(const TextWords& predicted, const TextWords& wanted) {
  std::unordered_map<std::string_view, int> known;  // words as numbers, which compare faster
  const auto numbers = [&](const TextWords& words) {
    std::vector<int> out;
    for (const std::string& word : words)
      out.push_back(known.emplace(word, static_cast<int>(known.size())).first->second);
    return out;
  };
  const std::vector<int> said = numbers(predicted), asked = numbers(wanted);
  std::vector<int64_t> longest(said.size() + 1,
                               0);  // with the wanted words so far and each beginning of the others
  for (const int word : asked) {
    int64_t diagonal = 0;
    for (size_t at = 0; at < said.size(); ++at) {
      const int64_t above = longest[at + 1];
      longest[at + 1] = word == said[at] ? diagonal + 1 : std::max(above, longest[at]);
      diagonal = above;
    }
  }
  return score(longest.back(), static_cast<int64_t>(predicted.size()), static_cast<int64_t>(wanted.size()));
}

}  // namespace kt::inline texts
