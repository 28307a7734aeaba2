// What tells one checkpoint from another of the same names and sizes, for a conversion that is resumed:
// fine-tunes of one base differ in nothing else.
#pragma once
#include <cstdint>
#include <string>

#include "weights/checkpoint.h"

namespace kt::inline weights {

struct IdentitySampling {
  uint64_t whole = uint64_t{256} << 20;  // checkpoints up to this size are read entirely
  uint64_t expert_tensors =
      16384;  // of larger ones, about as many of single experts' tensors are looked into
};

// {file name: sha256, ..., "config.json": sha256 of all of it}, for ConversionPlan::settings. Of a weight
// file larger checkpoints give: its header, the first and last 64 KiB of data, 64 pieces of 4 KiB spread
// evenly, and 4 KiB from the middle of every tensor but for the experts', of which some stand for all. Times
// and folders take no part: a copy is the same source.
Json source_contents(const Checkpoint& checkpoint, const IdentitySampling& sampling = {});

// sha256 of a whole file; "absent" where there is none.
std::string file_digest(const std::string& path);

}  // namespace kt::inline weights
