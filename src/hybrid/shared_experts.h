// Weights under a path, opened once for all layers that ask for it.
#pragma once
#include <memory>
#include <string>

#include "weights/experts.h"

namespace kt::inline hybrid {

// open_experts(path), shared by all who ask for the same path while one of them has it. Any thread.
std::shared_ptr<const ExpertSource> shared_experts(const std::string& path);
// The next shared_experts(path) opens it again: for who changed what is there.
void forget_experts(const std::string& path);

}  // namespace kt::inline hybrid
