// Logits of token sequences, for tests that compare with other programs:
//
//   model_probe MODEL [--acts f32|bf16|int8|default] [--chunk N | --cuts A,B,...] [--threads N]
//               [--weights KT_WEIGHTS] < ids
//
// ids: token ids, one sequence a line. Standard output: little-endian f32 [tokens of all sequences in order,
// vocab]. All sequences run side by side: N tokens of each in one step, or those up to the next cut (default:
// all).
#include <cstdio>
#include <cstring>
#include <iostream>
#include <optional>
#include <sstream>

#include "base/error.h"
#include "models/families.h"
#include "models/transformer.h"
#include "nn/cpu_ops.h"

namespace kt {
namespace {

struct Flags {
  std::string model, weights;
  Precision precision = Precision::kF32;
  std::vector<size_t> cuts;  // positions at which a step begins, ascending
  int chunk = 0, threads = 0;
};

std::vector<size_t> numbers(const std::string& list) {
  std::istringstream in(list);
  std::vector<size_t> out;
  for (std::string word; std::getline(in, word, ',');) out.push_back(std::stoul(word));
  return out;
}

Flags parse(int argc, char** argv) {
  Flags flags;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const auto next = [&] { return i + 1 < argc ? std::string(argv[++i]) : std::string(); };
    if (word == "--acts") {
      flags.precision = precision_named(next());
    } else if (word == "--chunk") {
      flags.chunk = std::atoi(next().c_str());
    } else if (word == "--cuts") {
      flags.cuts = numbers(next());
    } else if (word == "--threads") {
      flags.threads = std::atoi(next().c_str());
    } else if (word == "--weights") {
      flags.weights = next();
    } else {
      flags.model = word;
    }
  }
  return flags;
}

std::vector<std::vector<int32_t>> read_sequences() {
  std::vector<std::vector<int32_t>> out;
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::vector<int32_t> ids;
    for (int32_t id; words >> id;) ids.push_back(id);
    if (!ids.empty()) out.push_back(std::move(ids));
  }
  return out;
}

// Where steps begin, and the end.
std::vector<size_t> steps_of(const Flags& flags, size_t longest) {
  std::vector<size_t> out = {0};
  const size_t chunk = flags.chunk > 0 ? static_cast<size_t>(flags.chunk) : longest;
  if (flags.cuts.empty())
    for (size_t at = chunk; at < longest; at += chunk) out.push_back(at);
  for (const size_t cut : flags.cuts) {
    if (cut <= out.back()) fail("--cuts: {} after {}", cut, out.back());
    if (cut < longest) out.push_back(cut);
  }
  out.push_back(longest);
  return out;
}

void run(const Flags& flags) {
  const auto sequences = read_sequences();
  size_t longest = 0, total = 0;
  for (const auto& ids : sequences) {
    longest = std::max(longest, ids.size());
    total += ids.size();
  }
  if (total == 0) fail("no token ids on standard input");
  const std::vector<size_t> steps = steps_of(flags, longest);
  size_t widest = 0;
  for (size_t i = 0; i + 1 < steps.size(); ++i) widest = std::max(widest, steps[i + 1] - steps[i]);
  const Checkpoint checkpoint(flags.model);
  std::unique_ptr<ExpertSource> experts;
  if (!flags.weights.empty()) experts = open_kt_weights(flags.weights);
  const auto pool = std::make_shared<Pool>(PoolOptions{.threads = flags.threads});
  Transformer model(checkpoint, describe_model(checkpoint), make_cpu_ops(pool),
                    {.precision = flags.precision,
                     .kv_type = flags.precision == Precision::kF32 ? KvType::kF32 : KvType::kBf16,
                     .max_tokens = static_cast<int>(widest * sequences.size()),
                     .experts = experts.get()});
  const size_t pages = (longest + kPageTokens - 1) / kPageTokens;
  KvCache cache(model.keeps(), static_cast<int>(pages * sequences.size()));
  std::vector<std::vector<int32_t>> tables(sequences.size());
  // Pages in no particular order, because nothing may depend on it.
  for (size_t s = 0; s < sequences.size(); ++s)
    for (size_t p = 0; p < pages; ++p)
      tables[s].push_back(static_cast<int32_t>((pages - 1 - p) * sequences.size() + s));
  const auto vocab = static_cast<size_t>(model.spec().vocab);
  std::vector<std::vector<float>> logits(sequences.size());
  for (size_t step = 0; step + 1 < steps.size(); ++step) {
    const size_t at = steps[step], count = steps[step + 1] - at;
    std::vector<SequenceInput> inputs;
    std::vector<size_t> who;
    for (size_t s = 0; s < sequences.size(); ++s) {
      if (at >= sequences[s].size()) continue;
      const std::span<const int32_t> ids(sequences[s]);
      inputs.push_back({.tokens = ids.subspan(at, std::min(count, ids.size() - at)),
                        .position = static_cast<int>(at),
                        .pages = tables[s].data(),
                        .logits = SequenceInput::Logits::kAll});
      who.push_back(s);
    }
    std::vector<float> rows(static_cast<size_t>(Transformer::logit_rows(inputs)) * vocab);
    model.forward(cache, inputs, rows.data());
    size_t row = 0;
    for (size_t i = 0; i < inputs.size(); ++i) {
      const size_t size = inputs[i].tokens.size() * vocab;
      logits[who[i]].insert(logits[who[i]].end(), rows.begin() + static_cast<int64_t>(row),
                            rows.begin() + static_cast<int64_t>(row + size));
      row += size;
    }
  }
  for (const auto& rows : logits) std::fwrite(rows.data(), sizeof(float), rows.size(), stdout);
}

}  // namespace
}  // namespace kt

int main(int argc, char** argv) {
  try {
    kt::run(kt::parse(argc, argv));
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "model_probe: %s\n", error.what());
    return 2;
  }
}
