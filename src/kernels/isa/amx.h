// AMX: `many` multiplies in tiles (tiled.h: algebra and bounds), everything else is AVX-512 with VNNI and bf16.
#pragma once
#include "kernels/isa/avx512.h"
#include "kernels/isa/tile_unit_amx.h"
#include "kernels/isa/tiled.h"

namespace KT_ISA_NAMESPACE {
namespace {

struct Amx : TiledIsa<AmxUnit, Avx512Bf16> {};

}  // namespace
}  // namespace KT_ISA_NAMESPACE
