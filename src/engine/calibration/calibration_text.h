// The text a model is calibrated with, from a file or the local hub cache to samples of tokens.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "engine/calibration/dataset_files.h"
#include "engine/described_model.h"

namespace kt::inline engine {

struct TextRequest : DatasetRequest {
  int samples = 512;
  int max_length =
      2048;  // tokens of a sample; never more than the model's context, or what its layers can see alone
  uint64_t seed = 42;  // which samples, where there are more
};

struct CalibrationText {
  std::vector<std::vector<TokenId>> samples;
  std::vector<std::string> places;  // of each: "FILE line 3", or "FILE byte 4096" where its document begins
  DatasetFiles files;               // that were read
  int64_t tokens = 0;
  int64_t found = 0;      // samples there were to choose from
  int64_t cut = 0;        // of those taken, longer than the limit
  int64_t too_short = 0;  // passed over: fewer than two tokens
  int max_length = 0;
  std::string digest;  // sha256 of all tokens and lengths
};

// A line of .jsonl holds "text", or "messages" (role, content) or "conversations" (from, value), which go
// through the model's chat template; each is a sample. A .txt is documents between <|endoftext|>, cut into
// samples of max_length together. Several files are as one. Samples that are too short are passed over and
// others taken in their place. Which are taken depends on the seed only, and they come in the order they have
// in the files. Memory: what is taken, a line, and a piece of a file.
//
// Errors, each in a line: as find_dataset; a file that is empty or not UTF-8; a line that is no JSON, too
// long or has none of those columns (names those it has); messages without a chat template; fewer than
// kLeastTokens tokens in all.
inline constexpr int64_t kLeastTokens = 256;
CalibrationText read_calibration_text(const TextRequest& request, const DescribedModel& model);

}  // namespace kt::inline engine
