// The text a model is calibrated with, from a file or the local hub cache to samples of tokens.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "engine/loaded_model.h"

namespace kt {

struct TextRequest {
  std::string dataset;             // FILE.jsonl, FILE.txt, or a name of the hub: "org/name"
  std::string flag = "--dataset";  // what messages call it
  std::string split;               // of a hub dataset: part of its files' names; empty: all
  int samples = 512;
  int max_length = 2048;  // tokens of a sample; never more than the model's context
  uint64_t seed = 42;     // which samples, where there are more
};

struct CalibrationText {
  std::vector<std::vector<TokenId>> samples;
  std::vector<std::string> files;  // that were read
  int64_t tokens = 0;
  int64_t found = 0;      // samples there were to choose from
  int64_t cut = 0;        // of those taken, longer than the limit
  int64_t too_short = 0;  // passed over: fewer than two tokens
  int max_length = 0;
  std::string digest;  // sha256 of all tokens and lengths
};

// A line of .jsonl holds "text", or "messages" (role, content) or "conversations" (from, value), which go
// through the model's chat template; each is a sample. A .txt is documents between <|endoftext|>, cut into
// samples of max_length together. Which samples are taken depends on the seed only, and they come in the
// order they have in the file.
//
// Errors, each in a line: a file that is missing, empty, of another kind; a hub name that is not in the cache
// (says where it looked and what to pass); a line that is no JSON or has none of those columns (names those
// it has); messages without a chat template; fewer than kLeastTokens tokens in all.
inline constexpr int64_t kLeastTokens = 256;
CalibrationText read_calibration_text(const TextRequest& request, const LoadedModel& model);

}  // namespace kt
