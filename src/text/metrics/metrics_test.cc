// Against hand-made figures; tests/sft_metrics_test.py compares with sacrebleu and rouge-score.
#include <gtest/gtest.h>

#include <cmath>

#include "text/metrics/bleu.h"
#include "text/metrics/rouge.h"

namespace kt::inline texts {
namespace {

TEST(TextMetrics, Words) {
  EXPECT_EQ(split_words("Don't pay $1,000.50, e.g. (twice)!  ", WordSplit::k13a),
            (TextWords{"Don't", "pay", "$", "1,000.50", ",", "e", ".", "g", ".", "(", "twice", ")", "!"}));
  EXPECT_EQ(split_words("你好world，再见", WordSplit::kZh),
            (TextWords{"你", "好", "world", "，", "再", "见"}));
  EXPECT_EQ(split_words("你好world", WordSplit::k13a), (TextWords{"你好world"}));
  EXPECT_EQ(split_words(" \n", WordSplit::k13a), TextWords{});
  EXPECT_EQ(alphanumeric_words("The CAT's 2 hats, naïve"),
            (TextWords{"the", "cat", "s", "2", "hats", "na", "ve"}));
  EXPECT_EQ(alphanumeric_words("Running skies hopes agreed ties", Stemming::kPorter),
            (TextWords{"run", "sky", "hope", "agre", "tie"}));
}

TEST(TextMetrics, Bleu) {
  const TextWords wanted = {"a", "b", "c", "d", "e"}, predicted = {"a", "b", "c", "x"};
  const BleuCounts counts = bleu_counts(predicted, wanted);
  EXPECT_EQ(counts.correct, (std::array<int64_t, 4>{3, 2, 1, 0}));
  EXPECT_EQ(counts.total, (std::array<int64_t, 4>{4, 3, 2, 1}));
  const double shorter = std::exp(1 - 5.0 / 4);
  EXPECT_NEAR(bleu(counts, 1, BleuOrders::kAll), 75 * shorter, 1e-12);
  EXPECT_NEAR(bleu(counts, 3, BleuOrders::kAll), 100 * shorter * std::cbrt(3.0 / 4 * 2 / 3 * 1 / 2), 1e-12);
  // Of four words nothing is right: half a match.
  EXPECT_NEAR(bleu(counts, 4, BleuOrders::kAll), 100 * shorter * std::pow(0.25 * 0.5, 0.25), 1e-12);
  const BleuCounts two = bleu_counts({"a", "b"}, {"a", "b"});
  EXPECT_EQ(bleu(two, 4, BleuOrders::kAll), 0);
  EXPECT_NEAR(bleu(two, 4, BleuOrders::kEffective), 100, 1e-12);
  EXPECT_EQ(bleu(bleu_counts({}, wanted), 4, BleuOrders::kEffective), 0);
  EXPECT_EQ(bleu(bleu_counts({}, {}), 4, BleuOrders::kEffective), 0);
}

TEST(TextMetrics, Rouge) {
  const TextWords wanted = {"the", "cat", "sat", "on", "the", "mat"},
                  predicted = {"the", "mat", "the", "the"};
  const RougeScore one = rouge_n(predicted, wanted, 1), two = rouge_n(predicted, wanted, 2),
                   order = rouge_l(predicted, wanted);
  EXPECT_DOUBLE_EQ(one.precision, 3.0 / 4);
  EXPECT_DOUBLE_EQ(one.recall, 3.0 / 6);
  EXPECT_DOUBLE_EQ(one.f1, 0.6);
  EXPECT_DOUBLE_EQ(two.precision, 1.0 / 3);
  EXPECT_DOUBLE_EQ(order.recall, 2.0 / 6);
  for (const RougeScore& none : {rouge_n({}, wanted, 1), rouge_n(predicted, {}, 2), rouge_l({}, {})})
    EXPECT_EQ(none.f1, 0);
}

}  // namespace
}  // namespace kt::inline texts
