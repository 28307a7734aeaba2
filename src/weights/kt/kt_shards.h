// What the two planners of kt weights share: names of shards, and the tensors that belong to no expert.
#pragma once
#include <string>

#include "weights/checkpoint.h"
#include "weights/experts.h"
#include "weights/plans/conversion.h"

namespace kt::inline weights {

// "model-00003-of-00059.safetensors"; counted from 1.
std::string shard_file_name(size_t number, size_t total);

// Tensors of the checkpoint that no expert owns, renamed, as copies in pieces of at most 64 MiB. None for a
// GGUF checkpoint. The checkpoint must outlive the pieces. Error if two would get one name.
ShardPlan other_tensors(const Checkpoint& checkpoint, const ExpertSource& source);

// [{"file": name, "bytes": size}, ...] of the checkpoint's files, for ConversionPlan::settings.
Json source_files(const Checkpoint& checkpoint);

// Names the shards in order once all are there.
void name_shards(ConversionPlan& plan);

}  // namespace kt::inline weights
