#include "cuda/post_kernels.h"

namespace kt::inline cuda {

// A loop of the block's threads over %count units of UNIT bytes, from %from to %to.
#define KT_COPY(LABEL, UNIT, LOAD, STORE, NUMBERS) \
  "  mov.u32 %at, %thread;\n" LABEL                \
  ":\n"                                            \
  "  setp.ge.u32 %end, %at, %count;\n"             \
  "  @%end bra " LABEL                             \
  "_END;\n"                                        \
  "  mul.wide.u32 %offset, %at, " UNIT             \
  ";\n"                                            \
  "  add.u64 %target, %to, %offset;\n"             \
  "  add.u64 %source, %from, %offset;\n"           \
  "  " LOAD " " NUMBERS                            \
  ", [%source];\n"                                 \
  "  " STORE " [%target], " NUMBERS                \
  ";\n"                                            \
  "  add.u32 %at, %at, %threads;\n"                \
  "  bra " LABEL ";\n" LABEL "_END:\n"
#define KT_COPY_16(LABEL, LOAD) KT_COPY(LABEL, "16", LOAD, "st.v4.u32", "{%a, %b, %c, %d}")
#define KT_COPY_4(LABEL) KT_COPY(LABEL, "4", "ld.u32", "st.u32", "%a")

// One block each. What a block wrote is behind a fence of the whole system before the host can learn of it:
// every thread's own, then the block's barrier, then the message. Words that both sides change are read and
// written past the caches.
//
// kt_post(busy, large to/from/count, small to/from/count, small to/from/count, ring, mask, number, message):
// large pieces in units of 16 bytes, small ones of 4.
// kt_fetch(busy, to, from, count): in units of 16 bytes.
const char kPostKernels[] = R"(
.version 6.3
.target sm_70
.address_size 64

.global .align 4 .u32 kt_messages[16];

.visible .entry kt_post(
  .param .u64 busy,
  .param .u64 large_to, .param .u64 large_from, .param .u32 large_count,
  .param .u64 first_to, .param .u64 first_from, .param .u32 first_count,
  .param .u64 second_to, .param .u64 second_from, .param .u32 second_count,
  .param .u64 ring, .param .u32 mask, .param .u32 number, .param .u64 message)
{
  .reg .pred %other, %end;
  .reg .u32 %thread, %threads, %count, %at, %word, %a, %b, %c, %d;
  .reg .u64 %flag, %to, %from, %offset, %target, %source, %base;

  mov.u32 %thread, %tid.x;
  mov.u32 %threads, %ntid.x;
  setp.ne.u32 %other, %thread, 0;
  @%other bra READY;
  ld.param.u64 %flag, [busy];
WAIT:
  ld.acquire.sys.u32 %word, [%flag];
  setp.eq.u32 %end, %word, 0;
  @%end bra FREE;
  nanosleep.u32 100;
  bra WAIT;
FREE:
  mov.u32 %word, 1;
  st.relaxed.sys.u32 [%flag], %word;
READY:
  bar.sync 0;

  ld.param.u64 %to, [large_to];
  ld.param.u64 %from, [large_from];
  ld.param.u32 %count, [large_count];
)" KT_COPY_16("LARGE", "ld.v4.u32")
    R"(
  ld.param.u64 %to, [first_to];
  ld.param.u64 %from, [first_from];
  ld.param.u32 %count, [first_count];
)" KT_COPY_4("FIRST")
        R"(
  ld.param.u64 %to, [second_to];
  ld.param.u64 %from, [second_from];
  ld.param.u32 %count, [second_count];
)" KT_COPY_4("SECOND")
            R"(
  membar.sys;
  bar.sync 0;
  @%other bra DONE;
  ld.param.u32 %word, [number];
  mul.wide.u32 %offset, %word, 4;
  mov.u64 %base, kt_messages;
  add.u64 %base, %base, %offset;
  atom.global.add.u32 %at, [%base], 1;
  ld.param.u32 %word, [mask];
  and.b32 %at, %at, %word;
  mul.wide.u32 %offset, %at, 8;
  ld.param.u64 %target, [ring];
  add.u64 %target, %target, %offset;
  ld.param.u64 %source, [message];
  st.release.sys.u64 [%target], %source;
DONE:
  ret;
}

.visible .entry kt_fetch(.param .u64 busy, .param .u64 to, .param .u64 from, .param .u32 count)
{
  .reg .pred %other, %end;
  .reg .u32 %thread, %threads, %count, %at, %word, %a, %b, %c, %d;
  .reg .u64 %flag, %target, %source, %offset, %to, %from;

  mov.u32 %thread, %tid.x;
  mov.u32 %threads, %ntid.x;
  setp.ne.u32 %other, %thread, 0;
  @%other bra READY;
  ld.param.u64 %flag, [busy];
WAIT:
  ld.acquire.sys.u32 %word, [%flag];
  setp.eq.u32 %end, %word, 0;
  @%end bra READY;
  nanosleep.u32 100;
  bra WAIT;
READY:
  bar.sync 0;
  ld.param.u64 %to, [to];
  ld.param.u64 %from, [from];
  ld.param.u32 %count, [count];
)" KT_COPY_16("COPY", "ld.relaxed.sys.v4.u32")
                R"(  ret;
}
)";

#undef KT_COPY
#undef KT_COPY_16
#undef KT_COPY_4

}  // namespace kt::inline cuda
