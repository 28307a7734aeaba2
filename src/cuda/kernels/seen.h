// What a row of queries sees of the pages.
#pragma once
#include "cuda/kernels/pages.h"

namespace kt::inline cuda {

constexpr float kSawNothing = -3.0e38f;  // below every score

// What one row of queries sees. Pages are gathered in groups at places that depend on nothing else, so that a row gets
// the same whoever computes which of them.
struct Seen {
  int token, head, heads, position, oldest;  // heads from `head` on
  int first_page, pages, group;              // pages of a group

  KT_GPU int groups() const { return (pages + group - 1) / group; }
};
KT_GPU Seen seen_by(const AttendRowsArgs& args, int token, int head, int heads) {
  const int position = args.places.positions[token];
  const int oldest = args.window > 0 && position - args.window + 1 > 0 ? position - args.window + 1 : 0;
  Seen seen{
      token, head, heads, position, oldest, oldest / kKvBlock, position / kKvBlock - oldest / kKvBlock + 1,
      1};
  while (seen.group * kAttendGroups < seen.pages) seen.group *= 2;
  return seen;
}
// Of a block that is number `number` of those that share a row.
KT_GPU Seen seen_by_block(const AttendRowsArgs& args, int token, int number, int most) {
  const int sharing = args.heads / args.plane.heads, blocks = (sharing + most - 1) / most;
  const int first = number % blocks * most, left = sharing - first;
  return seen_by(args, token, number / blocks * sharing + first, left < most ? left : most);
}

}  // namespace kt::inline cuda
