#include "nn/f32_product.h"

#include "base/checked.h"
#include "base/error.h"

namespace kt {

Plan F32Product::plan(int m, int k, int blocks, int64_t b_stride, Packing& packing) const {
  packing = packing_for({.code = Code::kF32}, int64_t{blocks} * kBlockRows, k, kernels_.fragment, "product");
  packing.block_bytes = static_cast<size_t>(b_stride) * sizeof(float);
  return plan_route(kernels_, packing, Route::kManyF32, m);
}

F32Product::F32Product(int most_m, int most_k) {
  Packing packing;
  const Plan most = plan(most_m, round_up(most_k, kChunk), 1, int64_t{most_k} * kBlockRows, packing);
  memory_ = Buffer(round_up(act_bytes(most.acts), size_t{64}) + most.scratch_bytes);
}

void F32Product::run(const Args& args) {
  KT_CHECK(args.k % kChunk == 0, "a product over {} columns", args.k);
  Packing packing;
  const Plan plan = this->plan(args.m, args.k, args.blocks, args.b_stride, packing);
  const size_t acts_bytes = round_up(act_bytes(plan.acts), size_t{64});
  KT_CHECK(acts_bytes + plan.scratch_bytes <= memory_.size(), "a product of {} rows and {} columns", args.m,
           args.k);
  const Acts acts = acts_in(plan.acts, memory_.data());
  kernels_.pack_acts(
      {.source = args.a, .type = Real::kF32, .stride = args.a_stride, .m = args.m, .k = args.k, .out = acts});
  plan.multiply({.packing = &packing,
                 .blocks = reinterpret_cast<const std::byte*>(args.b),
                 .count = args.blocks,
                 .acts = acts,
                 .m = args.m,
                 .out = args.out,
                 .ld = args.out_stride,
                 .scratch = memory_.data() + acts_bytes});
}

}  // namespace kt
