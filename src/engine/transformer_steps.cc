#include "engine/transformer_steps.h"

#include <chrono>

#include "base/error.h"
#include "base/mapped_faults.h"

namespace kt::inline engine {
namespace {

SequenceInput::Logits logits_of(const StepSequence& sequence) {
  switch (sequence.logits) {
    case StepSequence::Logits::kNone:
      return SequenceInput::Logits::kNone;
    case StepSequence::Logits::kLast:
      return SequenceInput::Logits::kLast;
    case StepSequence::Logits::kAll:
      return SequenceInput::Logits::kAll;
  }
  fail_as(ErrorKind::kInternal, "logits {} of a step", static_cast<int>(sequence.logits));
}

}  // namespace

TransformerSteps::TransformerSteps(Transformer& transformer, std::shared_ptr<Pool> pool, int pages, int slots)
    : transformer_(transformer),
      pool_(std::move(pool)),
      burst_(*pool_),
      cache_(transformer.make_cache(pages, slots)) {}

void TransformerSteps::step(std::span<const StepSequence> sequences, std::span<float> logits) {
  inputs_.clear();
  for (const StepSequence& sequence : sequences) {
    if (sequence.slot >= 0 && sequence.position == 0) cache_->clear_slot(sequence.slot);
    inputs_.push_back({.tokens = sequence.tokens,
                       .position = sequence.position,
                       .pages = sequence.pages.data(),
                       .slot = sequence.slot,
                       .logits = logits_of(sequence),
                       .adapter = sequence.adapter});
  }
  const auto rows = static_cast<size_t>(Transformer::logit_rows(inputs_));
  KT_CHECK(logits.size() == rows * static_cast<size_t>(vocabulary()), "{} logits for {} rows", logits.size(),
           rows);
  const Work before = transformer_.work();
  const auto start = std::chrono::steady_clock::now();
  transformer_.forward(*cache_, inputs_, logits.data());
  check_mapped_files();  // rows of the embedding are read from one
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  Work done = transformer_.work();
  done -= before;
  const std::lock_guard lock(mutex_);
  totals_.work += done;
  totals_.seconds += took.count();
  ++totals_.steps;
  totals_.parts = transformer_.parts();
  for (const StepSequence& sequence : sequences)
    (sequence.tokens.size() > 1 ? totals_.prefill_tokens : totals_.decode_tokens) += sequence.tokens.size();
}

void TransformerSteps::spread(size_t n, FunctionRef<void(size_t)> work) {
  const auto threads = static_cast<size_t>(pool_->threads());
  pool_->run([&](const Worker& worker) {
    for (auto i = static_cast<size_t>(worker.index); i < n; i += threads) work(i);
  });
}

StepTotals TransformerSteps::totals() const {
  const std::lock_guard lock(mutex_);
  return totals_;
}

}  // namespace kt::inline engine
