// Where samples come from: rows of .jsonl files, or stretches of .txt files. Counted in a first pass over all
// files, read by number in a second; what is kept of a file is a mark here and there.
#pragma once
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/function_ref.h"
#include "engine/calibration/dataset_files.h"
#include "engine/described_model.h"

namespace kt::inline engine {

class SampleSource {
 public:
  virtual ~SampleSource() = default;
  // Samples of all files, in the order of the files.
  virtual size_t count() const = 0;
  // Calls each(number, tokens, place) for ascending numbers; the place is "FILE line 3" or "FILE byte 4096".
  // No tokens: too short to be of use.
  using Visit = FunctionRef<void(size_t number, std::vector<TokenId> tokens, const std::string& place)>;
  virtual void read(std::span<const size_t> numbers, Visit each) = 0;
};

// Rows are samples of any length; documents, one after the other, are cut into stretches of `length` tokens.
// Errors: as SampleRows and TextFile, rows' when they are read.
std::unique_ptr<SampleSource> open_samples(const DatasetFiles& files, const DescribedModel& model,
                                           int length);

// Numbers below count in an order that depends on the seed only. Keeps what was drawn.
class SampleDraw {
 public:
  SampleDraw(size_t count, uint64_t seed);
  ~SampleDraw();
  std::vector<size_t> next(size_t most);  // further ones, ascending; fewer: those that were left

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kt::inline engine
