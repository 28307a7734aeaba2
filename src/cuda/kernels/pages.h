// Where the keys and values of a token lie.
#pragma once
#include "cuda/gpu.h"
#include "cuda/kernels/args.h"
#include "formats/kv_type.h"

namespace kt::inline cuda {

// Whether a row of a step is a token's.
KT_GPU bool live(const TokenPlaces& places, int row) { return !places.step || row < places.step->tokens; }

KT_GPU uint8_t* page_of(const CachePlane& plane, const TokenPlaces& places, int token, int position) {
  const int page = places.pages[places.first_pages[token] + position / kKvBlock];
  return plane.memory + page * plane.page_bytes;
}

}  // namespace kt::inline cuda
