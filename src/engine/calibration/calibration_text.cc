#include "engine/calibration/calibration_text.h"

#include <algorithm>
#include <span>

#include "base/error.h"
#include "base/sha256.h"
#include "engine/calibration/sample_sources.h"

namespace kt::inline engine {
namespace {

struct Sample {
  size_t number = 0;
  std::vector<TokenId> tokens;
  std::string place;
};

std::vector<Sample> drawn_samples(const TextRequest& request, SampleSource& source, CalibrationText& out) {
  const auto wanted = static_cast<size_t>(request.samples), longest = static_cast<size_t>(out.max_length);
  std::vector<Sample> samples;
  SampleDraw draw(source.count(), request.seed);
  while (samples.size() < wanted) {
    const std::vector<size_t> numbers = draw.next(wanted - samples.size());
    if (numbers.empty()) break;
    source.read(numbers, [&](size_t number, std::vector<TokenId> tokens, const std::string& place) {
      if (tokens.empty()) {
        ++out.too_short;
        return;
      }
      if (tokens.size() > longest) {
        ++out.cut;
        tokens.resize(longest);
        tokens.shrink_to_fit();
      }
      samples.push_back({number, std::move(tokens), place});
    });
  }
  std::ranges::sort(samples, {}, &Sample::number);
  return samples;
}

std::string digest_of(const CalibrationText& text_of) {
  Sha256 sum;
  for (const std::vector<TokenId>& sample : text_of.samples) {
    const uint64_t length = sample.size();
    sum.add(std::as_bytes(std::span(&length, 1)));
    sum.add(std::as_bytes(std::span(sample)));
  }
  return sum.hex();
}

}  // namespace

CalibrationText read_calibration_text(const TextRequest& request, const DescribedModel& model) {
  CalibrationText out;
  out.max_length = std::min(request.max_length, model.spec().context_of_single_layers());
  out.files = find_dataset(request);
  const std::unique_ptr<SampleSource> source = open_samples(out.files, model, out.max_length);
  out.found = static_cast<int64_t>(source->count());
  for (Sample& sample : drawn_samples(request, *source, out)) {
    out.tokens += static_cast<int64_t>(sample.tokens.size());
    out.samples.push_back(std::move(sample.tokens));
    out.places.push_back(std::move(sample.place));
  }
  if (out.tokens == 0)
    fail("`{}` {}: empty: no sample of two tokens or more", request.option, request.dataset);
  if (out.tokens < kLeastTokens)
    fail("`{}` {}: too short: {} tokens, calibration needs at least {}", request.option, request.dataset,
         out.tokens, kLeastTokens);
  out.digest = digest_of(out);
  return out;
}

}  // namespace kt::inline engine
