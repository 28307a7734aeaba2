// Which copy of an expert a pair goes to.
#pragma once
#include "cuda/gpu.h"
#include "cuda/kernels/args.h"

namespace kt::inline cuda {

// Negative: there is none here.
KT_GPU int slot_of(const ChosenExperts& chosen, int pair) {
  const int id = chosen.ids[pair];
  return id < 0 || id >= chosen.experts ? -1 : chosen.slots[id];
}

}  // namespace kt::inline cuda
