#include "cli/sft/eval_scores.h"

#include <array>
#include <cmath>

#include "base/error.h"
#include "base/file.h"
#include "text/jinja/characters.h"
#include "text/metrics/bleu.h"
#include "text/metrics/rouge.h"
#include "text/shown.h"
#include "text/unicode.h"

namespace kt::inline cli {
namespace {

std::string_view bare(std::string_view string) { return jinja::strip_space(string, jinja::Side::kBoth); }

bool has_han(std::string_view string, const CodeSet& han) {
  for (size_t at = 0; at < string.size();)
    if (han.contains(next_code_point(string, at))) return true;
  return false;
}

WordSplit split_of(std::span<const Prediction> predictions, const std::string& name) {
  if (name != "auto") return name == "zh" ? WordSplit::kZh : WordSplit::k13a;
  const CodeSet han = *property_set("Han");
  size_t with = 0;
  for (const Prediction& one : predictions) with += has_han(one.label, han);
  return with > 0 && 2 * with >= predictions.size() ? WordSplit::kZh : WordSplit::k13a;
}

// The likeness of texts, row by row and of all.
class Likeness {
 public:
  Likeness(WordSplit split, Stemming stemming) : split_(split), stemming_(stemming) {}

  void add(const std::string& predict, const std::string& label) {
    ++rows_;
    const TextWords said = split_words(predict, split_), asked = split_words(label, split_);
    const BleuCounts counts = bleu_counts(said, asked);
    all_ += counts;
    for (int order = 1; order <= kMostBleuOrder; ++order)
      bleu_[static_cast<size_t>(order - 1)] += bleu(counts, order, BleuOrders::kEffective);
    if (split_ == WordSplit::kZh)
      add_rouge(said, asked);
    else
      add_rouge(alphanumeric_words(predict, stemming_), alphanumeric_words(label, stemming_));
  }

  void write_to(OrderedJson& out) const {
    if (rows_ == 0) return;
    const auto mean = [&](double sum) { return sum / static_cast<double>(rows_); };
    for (size_t n = 0; n < bleu_.size(); ++n) out[text("predict_bleu-{}", n + 1)] = mean(bleu_[n]);
    for (int order = 1; order <= kMostBleuOrder; ++order)
      out[text("predict_corpus_bleu-{}", order)] = bleu(all_, order, BleuOrders::kAll);
    constexpr std::array<const char*, 3> kNames = {"predict_rouge-1", "predict_rouge-2", "predict_rouge-l"};
    for (size_t i = 0; i < kNames.size(); ++i) out[kNames[i]] = 100 * mean(rouge_[i]);
    out["predict_words"] = name_of(split_);
    out["predict_stemming"] = split_ == WordSplit::k13a && stemming_ == Stemming::kPorter;
  }

 private:
  void add_rouge(const TextWords& said, const TextWords& asked) {
    rouge_[0] += rouge_n(said, asked, 1).f1;
    rouge_[1] += rouge_n(said, asked, 2).f1;
    rouge_[2] += rouge_l(said, asked).f1;
  }

  WordSplit split_;
  Stemming stemming_;
  size_t rows_ = 0;
  BleuCounts all_;
  std::array<double, kMostBleuOrder> bleu_{};
  std::array<double, 3> rouge_{};
};

std::string text_column(const OrderedJson& row, const char* key, const std::string& place, bool needed) {
  const auto found = row.find(key);
  if (found == row.end() && !needed) return "";
  if (found == row.end()) fail("{}: no \"{}\"; expected rows with \"predict\" and \"label\"", place, key);
  if (!found->is_string()) fail("{}: {}: expected text, found {}", place, key, json_kind(*found));
  return found->get<std::string>();
}

}  // namespace

bool Prediction::right() const { return !choice.empty() && bare(label) == choice; }

OrderedJson Prediction::json() const {
  OrderedJson out = {{"prompt", prompt}};
  if (predict) out["predict"] = *predict;
  out["label"] = label;
  if (!choice.empty()) out["choice"] = choice;
  if (tokens > 0) out["loss"] = nll / static_cast<double>(tokens);
  return out;
}

std::vector<Prediction> read_predictions(const std::string& path) {
  const MappedFile file(path);
  std::string_view rest(reinterpret_cast<const char*>(file.bytes().data()), file.size());
  std::vector<Prediction> out;
  for (int64_t number = 1; !rest.empty(); ++number) {
    const size_t end = std::min(rest.find('\n'), rest.size());
    const std::string_view line = rest.substr(0, end);
    rest.remove_prefix(std::min(end + 1, rest.size()));
    if (bare(line).empty()) continue;
    const std::string place = text("{}: line {}", path, number);
    const OrderedJson row = parse_ordered_json(line, place);
    if (!row.is_object())
      fail("{}: expected an object with \"predict\" and \"label\", found {}", place, json_kind(row));
    out.push_back({.prompt = text_column(row, "prompt", place, false),
                   .label = text_column(row, "label", place, true),
                   .predict = text_column(row, "predict", place, true),
                   .choice = text_column(row, "choice", place, false)});
  }
  if (out.empty()) fail("{}: no predictions", path);
  return out;
}

OrderedJson scores_of(std::span<const Prediction> predictions, const ScoreOptions& options) {
  Likeness likeness(split_of(predictions, options.words), options.stemming);
  int64_t choices = 0, right = 0, tokens = 0;
  double nll = 0;
  for (const Prediction& one : predictions) {
    if (one.predict) likeness.add(*one.predict, one.label);
    choices += !one.choice.empty();
    right += one.right();
    nll += one.nll;
    tokens += one.tokens;
  }
  OrderedJson out = {{"predict_samples", predictions.size()}};
  likeness.write_to(out);
  if (choices > 0) {
    out["predict_accuracy"] = static_cast<double>(right) / static_cast<double>(choices);
    out["predict_choice_rows"] = choices;
    out["predict_choice_right"] = right;
  }
  if (tokens > 0) {
    out["predict_loss"] = nll / static_cast<double>(tokens);
    out["predict_perplexity"] = std::exp(nll / static_cast<double>(tokens));
    out["predict_label_tokens"] = tokens;
  }
  return out;
}

}  // namespace kt::inline cli
