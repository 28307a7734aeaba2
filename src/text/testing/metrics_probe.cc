// Measures what stands on standard input, for tests/sft_metrics_test.py. A line of JSON {"predict": ..., "label": ...}
// is answered by one with the words of the prediction and the scores of the pair; the last answer is the corpus'.
#include <iostream>
#include <string>

#include "text/json.h"
#include "text/metrics/bleu.h"
#include "text/metrics/rouge.h"

namespace {

using kt::OrderedJson;

OrderedJson bleu_json(const kt::BleuCounts& counts) {
  OrderedJson out = {{"all", OrderedJson::array()}, {"effective", OrderedJson::array()}};
  for (int order = 1; order <= kt::kMostBleuOrder; ++order) {
    out["all"].push_back(kt::bleu(counts, order, kt::BleuOrders::kAll));
    out["effective"].push_back(kt::bleu(counts, order, kt::BleuOrders::kEffective));
  }
  return out;
}

OrderedJson rouge_json(const kt::TextWords& predicted, const kt::TextWords& wanted) {
  OrderedJson out;
  for (const kt::RougeScore& one :
       {kt::rouge_n(predicted, wanted, 1), kt::rouge_n(predicted, wanted, 2), kt::rouge_l(predicted, wanted)})
    out.push_back({one.precision, one.recall, one.f1});
  return out;
}

}  // namespace

int main() {
  using kt::Stemming, kt::WordSplit;
  kt::BleuCounts corpus[2];
  for (std::string line; std::getline(std::cin, line);) {
    const kt::Json pair = kt::Json::parse(line);
    const auto predicted = pair.at("predict").get<std::string>(),
               wanted = pair.at("label").get<std::string>();
    OrderedJson answer;
    for (const WordSplit split : {WordSplit::k13a, WordSplit::kZh}) {
      const kt::TextWords said = kt::split_words(predicted, split), asked = kt::split_words(wanted, split);
      const kt::BleuCounts counts = kt::bleu_counts(said, asked);
      corpus[static_cast<size_t>(split)] += counts;
      answer[std::string(name_of(split))] = {
          {"words", said}, {"bleu", bleu_json(counts)}, {"rouge", rouge_json(said, asked)}};
    }
    for (const Stemming stemming : {Stemming::kNone, Stemming::kPorter}) {
      const kt::TextWords said = kt::alphanumeric_words(predicted, stemming),
                          asked = kt::alphanumeric_words(wanted, stemming);
      answer[stemming == Stemming::kNone ? "plain" : "porter"] = {{"words", said},
                                                                  {"rouge", rouge_json(said, asked)}};
    }
    std::cout << answer.dump() << "\n";
  }
  std::cout << OrderedJson{{"13a", bleu_json(corpus[0])}, {"zh", bleu_json(corpus[1])}}.dump() << std::endl;
}
